"""The engine computes what transformers computes: log-probs, greedy tokens, sampled answers.

The oracles: one full forward without a cache, and the Hugging Face generator, which shares the
random numbers but none of the arithmetic, and is compared with transformers' own ``generate``.
"""

import copy
from itertools import product

import pytest
import torch
from families import (
    CONFIGS,
    EOS,
    FEW,
    GAPS,
    POSITIONS,
    PROMPTS,
    VOCAB,
    assert_same,
    empty_engine,
    engine,
    logprob_gap,
    longrope,
)
from quick import slow, some
from tiny_models import randomized
from transformers import AutoModelForCausalLM, GenerationConfig

from dschat.inference import InferenceEngine, SamplingParams
from dschat.inference.generators.hf_generator import HuggingFaceGenerator
from dschat.inference.model.architectures import model_spec

GAP = 5e-5  # in fp32, of values that reach 10 and more


LAYOUTS = {
    "whole": {},
    "paged": {"page_size": 4, "max_num_batched_tokens": 11, "max_num_seqs": 5},
}
# Projections, interleaved heads, ALiBi, experts, windows, sinks.
CASES = [(n, "paged") for n in ("opt_350m", "gpt_neox", "bloom", "qwen3_moe", "gemma3", "gpt_oss")]
CASES += [(n, "whole") for n in FEW]


@pytest.mark.parametrize(("name", "layout"), some(product(CONFIGS, LAYOUTS), CASES))
def test_logprobs_are_those_of_a_full_forward(name, layout, module_of):
    module = module_of(name)
    sampling = SamplingParams(max_new_tokens=16, n=2, seed=3, ignore_eos=True, temperature=0.8)
    rollout = engine(module, **LAYOUTS[layout]).generate(PROMPTS, sampling)
    assert [len(ids) for ids in rollout.token_ids] == [16] * 2 * len(PROMPTS)
    assert logprob_gap(module, PROMPTS, rollout, temperature=0.8) < GAPS.get(name, GAP)


@pytest.mark.parametrize("name", ["opt", "gpt2", "bloom"])
def test_families_without_grouped_queries_read_none(name, module_of):
    """transformers keeps any key of a config.json, and their modules read neither of these."""
    config = copy.deepcopy(module_of(name).config)
    expected = model_spec(config)
    config.num_key_value_heads, config.head_dim = 1, 2
    assert repr(model_spec(config)) == repr(expected)


@pytest.mark.parametrize("name", some(CONFIGS, ["bloom"]))
def test_answers_are_those_of_the_hugging_face_generator(name, module_of):
    module = module_of(name)
    oracle = HuggingFaceGenerator(module, (EOS,))
    ours = engine(module, page_size=8)
    for sampling in (
        SamplingParams(max_new_tokens=14, temperature=0),
        SamplingParams(max_new_tokens=14, n=3, seed=11, temperature=1.1, top_p=0.95, top_k=40),
    ):
        expected = oracle.generate(PROMPTS, sampling)
        got = ours.generate(PROMPTS, sampling)
        assert_same(got, expected, GAPS.get(name, GAP))


@pytest.mark.parametrize("name", ["mixtral", *slow(["gpt_neox", "qwen3_moe"])])
def test_a_checkpoint_on_disk_gives_the_engine_of_its_module(name, module_of, tmp_path):
    """Stop tokens come from the generation config, sizes from the config, weights from shards, in
    which each expert's tensors are apart.
    """
    module = module_of(name)
    module.save_pretrained(tmp_path, max_shard_size="20KB")
    sampling = SamplingParams(max_new_tokens=20, n=4, seed=5)
    expected = engine(module).generate(PROMPTS, sampling)
    got = InferenceEngine.from_pretrained(tmp_path, max_num_seqs=8).generate(PROMPTS, sampling)
    assert got == expected
    GenerationConfig(eos_token_id=[EOS, 17]).save_pretrained(tmp_path)
    got = InferenceEngine.from_pretrained(tmp_path, max_num_seqs=8).generate(PROMPTS, sampling)
    assert "stop" in got.finish_reasons
    shortened = [cut_after(17, ids) for ids in expected.token_ids]
    assert got.token_ids == shortened


def cut_after(token, ids):
    return ids[: ids.index(token) + 1] if token in ids else ids


@pytest.mark.parametrize("place", ["inside", "beside"])
def test_scaled_positions_that_depend_on_the_length_bound_it(place):
    """Beyond its original length LongRoPE takes other frequencies for the whole sequence.

    Phi-3 writes that length beside rope_parameters; no module has put it where it belongs here.
    """
    original = {"original_max_position_embeddings": POSITIONS}
    config = longrope(original) if place == "inside" else longrope({}, **original)
    assert config.max_position_embeddings > POSITIONS
    assert empty_engine(config, max_seq_len=None).max_seq_len == POSITIONS


def test_the_last_position_is_as_good_as_the_first(module_of):
    """Prompt + answer of exactly the model's positions."""
    for name in ("opt", "gpt2", "llama", "bloom"):
        module = module_of(name)
        prompts = [[i % VOCAB for i in range(length)] for length in (POSITIONS - 1, 1)]
        sampling = SamplingParams(max_new_tokens=POSITIONS - 1, ignore_eos=True)
        rollout = engine(module, page_size=16).generate(prompts, sampling, max_new_tokens=[1, 63])
        assert [len(ids) for ids in rollout.token_ids] == [1, POSITIONS - 1]
        assert logprob_gap(module, prompts, rollout) < GAP


@pytest.mark.parametrize("name", ["gemma3", *slow(["llama", "olmo3", "laguna", "lfm2"])])
def test_bf16_draws_near_the_fp32_log_probs(name, module_of):
    """The same random numbers on rounded weights: log-probs agree to bf16's eight bits."""
    module = module_of(name)
    sampling = SamplingParams(max_new_tokens=8, seed=1)
    rollout = engine(module, dtype=torch.bfloat16).generate(PROMPTS, sampling)
    assert logprob_gap(module, PROMPTS, rollout) < 0.5
    exact = engine(module).generate(PROMPTS, sampling)
    same = sum(a[0] == b[0] for a, b in zip(rollout.token_ids, exact.token_ids, strict=True))
    assert same >= len(PROMPTS) - 2


def test_a_single_pair_of_a_head_rotates():
    """Two elements of eight."""
    config = CONFIGS["gpt_neox"]()
    config.rope_parameters["partial_rotary_factor"] = 0.25
    module = randomized(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    rollout = engine(module).generate(PROMPTS, SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert logprob_gap(module, PROMPTS, rollout) < 1e-4
