"""Families whose parts are not found: transformers' module runs in the engine, and computes what a
plain forward of each sequence computes.
"""

import copy
from contextlib import closing
from itertools import cycle, product

import pytest
import torch
from captures import LateQueue, again, captured_by, steps_of, use
from families import EOS, POSITIONS, PROMPTS, assert_same, logprob_gap
from peft import LoraConfig, get_peft_model
from quick import slow, some
from tiny_models import IDS, LATENT, LINEAR, SMALL, causal_lm, ensure, randomized
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.gptj import modeling_gptj
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeRMSNorm

from dschat.chat.model import Model
from dschat.inference import EngineConfig, SamplingParams, UnsupportedModel
from dschat.inference.generators.hf_generator import HuggingFaceGenerator, module_engine
from dschat.inference.kernels import cpu
from dschat.inference.model.module_decoder import module_spec
from dschat.inference.model.states import batches_alike, num_slots
from dschat.inference.model.step_kernels import StepKernels
from dschat.inference.requests.sequence import Request
from dschat.models.cpu_matmul import VARIABLE
from dschat.models.packing.states import mixers

GAP = 5e-5
GAPS = {"qwen3_5_text": 2e-4}  # a decode sums in another order than a prefill
SIZES = IDS | SMALL | {"intermediate_size": 48, "num_key_value_heads": 1, "head_dim": 16}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_LAYERS = ["sliding_attention", "full_attention"]
FAMILIES = {
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": POSITIONS, "rotary_dim": 8},
    "gemma2": {
        "sliding_window": 6,
        "layer_types": _LAYERS,
        "query_pre_attn_scalar": 16,
        "attn_implementation": "eager",  # older releases' sdpa bounds no scores
    },
    "gemma3_text": {"sliding_window": 6, "layer_types": _LAYERS, "query_pre_attn_scalar": 16},
    "gpt_oss": {"sliding_window": 6, "layer_types": _LAYERS, **MOE},
    "qwen3_moe": {"moe_intermediate_size": 16, **MOE},
    "olmo2": {},
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "cohere2": {"sliding_window": 6, "layer_types": _LAYERS, "logit_scale": 0.25},
    "deepseek_v3": LATENT,
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": [*_LAYERS, *_LAYERS],
        "sliding_window": 6,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [48] * 4,
    },
    "llama4_text": {  # its attention is not told of chunks, and scales queries by their columns
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 6,
        "floor_scale": 4,
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": LINEAR,
    "jamba": {  # continues a state with one token only
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
}
QUICK = ("gptj", "deepseek_v3", "lfm2", "llama4_text")
STATES = ("lfm2", "qwen3_5_text", "falcon_h1", "jamba")
every_family = pytest.mark.parametrize("name", some(FAMILIES, QUICK[1:3]))
LAYOUTS = {
    "whole": {},
    "paged": {"page_size": 4, "max_num_batched_tokens": 11, "max_num_seqs": 5},
    # Filled in: room for about two of six sequences.
    "preempted": {"page_size": 4, "max_num_seqs": 6, "kv_cache_gib": 0.0},
}


def config_of(name, **options):
    return CONFIG_MAPPING[name](**SIZES | FAMILIES[name] | options)


def random_module(config):
    """A family, or a configuration: its tiny module in eval mode, the same in each call."""
    config = config_of(config) if isinstance(config, str) else config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return randomized(module).eval()


@pytest.fixture(scope="module")
def module_of():
    made = {}

    def build(name):
        if name == "gptj" and not hasattr(modeling_gptj, "ALL_ATTENTION_FUNCTIONS"):
            pytest.skip("this transformers' GPT-J does not call its attention interface")
        if name not in made:
            made[name] = random_module(name)
        return made[name]

    return build


def engine_on(module, **sizes):
    sizes = {"stop_ids": (EOS,), "max_num_seqs": 8, "max_seq_len": POSITIONS} | sizes
    return module_engine(module, EngineConfig(**sizes))


def answers(made, sampling, prompts=PROMPTS):
    with made.weights.in_use():
        return made.generate(prompts, sampling)


def sizes_of(layout, module):
    sizes = LAYOUTS[layout]
    if "kv_cache_gib" not in sizes:
        return sizes
    return sizes | {"kv_cache_gib": 34 * 4 * module_spec(module).token_bytes(1, 4) / 2**30}


@pytest.mark.parametrize(
    ("name", "layout"), some(product(FAMILIES, LAYOUTS), zip(QUICK[1:3], cycle(LAYOUTS)))
)
def test_logprobs_are_those_of_a_full_forward(name, layout, module_of):
    module = module_of(name)
    sampling = SamplingParams(max_new_tokens=16, n=2, seed=3, ignore_eos=True, temperature=0.8)
    made = engine_on(module, **sizes_of(layout, module))
    rollout = answers(made, sampling)
    assert [len(ids) for ids in rollout.token_ids] == [16] * 2 * len(PROMPTS)
    assert logprob_gap(module, PROMPTS, rollout, temperature=0.8) < GAPS.get(name, GAP)
    if name in STATES:
        assert made.cache.states.num_free == num_slots(made.max_num_seqs)


@pytest.mark.parametrize(
    ("name", "layout"),
    some(product(STATES, LAYOUTS), [("lfm2", "preempted")]),
)
@pytest.mark.parametrize(
    "options", [{}, *slow([{"ignore_eos": True}, {"temperature": 0}])], ids=str
)
def test_captured_steps_carry_the_states_of_their_rows(
    name, layout, options, module_of, monkeypatch
):
    """As late as a device may run them; rows end, wait, are preempted, and share states at first.
    A prompt of one token starts a state.
    """
    use(monkeypatch, lag=2, queue=LateQueue())
    module = module_of(name)
    sizes = sizes_of(layout, module)
    plain, graphs = engine_on(module, **sizes), captured_by(engine_on(module, **sizes), again)
    sampling = SamplingParams(max_new_tokens=16, n=3, seed=3, **options)
    assert_same(*(answers(made, sampling, [[5], *PROMPTS]) for made in (plain, graphs)))
    assert steps_of(graphs)
    assert graphs.cache.states.num_free == num_slots(graphs.max_num_seqs)


@every_family
def test_greedy_answers_with_shared_prefixes_and_streams(name, module_of):
    module = module_of(name)
    greedy = SamplingParams(max_new_tokens=14, temperature=0)
    prompts = [PROMPTS[-1] + [7], PROMPTS[-1] + [9], PROMPTS[-1] + [7]]
    plain = engine_on(module)
    paged = engine_on(module, page_size=4)
    expected = answers(plain, greedy, prompts).token_ids
    with paged.weights.in_use():
        for _ in range(2):  # then with pages of the first call
            assert paged.generate(prompts, greedy).token_ids == expected
        assert list(paged.stream(prompts[1], greedy)) == expected[1]
    with torch.no_grad():
        ids = torch.tensor([prompts[0] + expected[0]])
        best = module(input_ids=ids).logits[0, len(prompts[0]) - 1 : -1].argmax(-1)
    assert best.tolist() == expected[0]


@pytest.mark.parametrize(
    "name", ["gpt_oss", *slow(["qwen3_moe"])]
)  # transposed, with biases; neither
def test_experts_are_packed_on_a_cpu(name, module_of, monkeypatch):
    """In a rollout alone, and anew with every version of the weights."""
    monkeypatch.setenv(VARIABLE, "onednn")
    module = copy.deepcopy(module_of(name))
    experts = [m for m in module.modules() if type(m).__name__.endswith("Experts")]
    made = engine_on(module)
    for _ in range(2):
        with made.weights.in_use():
            assert all("forward" in vars(m) for m in experts)
            rollout = made.generate(PROMPTS, SamplingParams(max_new_tokens=8, seed=3))
        assert not any("forward" in vars(m) for m in experts)
        assert logprob_gap(module, PROMPTS, rollout) < GAP
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.1)
        made.weights.refresh()


@pytest.mark.skipif(cpu.load() is None, reason="no C compiler here")
@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe"])  # 1 + weight; weight, also of heads
def test_norms_are_a_kernel_where_it_computes_the_same(name, module_of):
    module = copy.deepcopy(module_of(name))
    norms = [m for m in module.modules() if type(m).__name__.endswith("RMSNorm")]
    odd = type("Odd", (type(norms[0]),), {"forward": lambda self, x: 1.01 * norms[1](x)})
    norms[0].__class__ = odd
    norms[0].load_state_dict(norms[1].state_dict())
    made = engine_on(module)
    for _ in range(2):
        with made.weights.in_use():
            assert ["forward" in vars(m) for m in norms] == [False] + [True] * (len(norms) - 1)
            rollout = made.generate(PROMPTS, SamplingParams(max_new_tokens=8, seed=3))
        assert logprob_gap(module, PROMPTS, rollout) < GAP
        with torch.no_grad():
            for norm in norms:
                norm.weight.add_(0.3)
        made.weights.refresh()


@pytest.mark.parametrize("part", ["norm", "product", "attention"])
def test_a_captured_step_runs_a_modules_parts_by_kernels(part, module_of):
    module = module_of("qwen3_moe")
    weights = engine_on(module).weights

    def replaced():
        kinds = {"norm": Qwen3MoeRMSNorm, "product": nn.Linear, "experts": Qwen3MoeExperts}
        return {
            kind: all("forward" in vars(m) for m in module.modules() if type(m) is cls)
            for kind, cls in kinds.items()
        }

    with weights.without_waits(StepKernels(torch.device("cpu"), frozenset([part]))):
        assert replaced() == {"norm": part == "norm", "product": part == "product", "experts": True}
    assert not any(replaced().values())


def test_adapters_of_experts_act_in_their_forward(module_of, monkeypatch):
    monkeypatch.setenv(VARIABLE, "onednn")
    names = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    lora = LoraConfig(r=2, target_modules=[], target_parameters=names, init_lora_weights=False)
    module = get_peft_model(copy.deepcopy(module_of("qwen3_moe")), lora)
    made = engine_on(module)
    rollout = answers(made, SamplingParams(max_new_tokens=8, seed=3))
    assert logprob_gap(module, PROMPTS, rollout) < GAP


def test_the_module_trains_on_as_it_was(module_of):
    module = module_of("gemma2").train()
    name = module.config._attn_implementation
    answers(engine_on(module), SamplingParams(max_new_tokens=4), PROMPTS[:2])
    assert module.training
    assert module.config._attn_implementation == name
    module(input_ids=torch.tensor([[2, 3, 4]])).logits.sum().backward()
    module.eval()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt_neo", "cannot be followed"),
        ("recurrent_gemma", "differ by|not in transformers' cache"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(name, reason):
    module = causal_lm(name)
    with pytest.raises(UnsupportedModel, match=f"{type(module).__name__}.*({reason})"):
        engine_on(module)


def test_wrong_log_probs_are_found_before_the_first_rollout():
    """A layer's window that attention is not told."""
    module = random_module("gemma3_text")
    for layer in module.model.layers:
        layer.self_attn.sliding_window = None
    with pytest.raises(UnsupportedModel, match="log-probs differ by"):
        engine_on(module)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemotron_h", "falcon_h1"])
def test_a_step_bounds_dt_as_the_scan_does(name, module_of):
    """In the engine and in the fallback; a model without bounds beside it keeps none."""
    module = causal_lm(name) if name == "nemotron_h" else random_module(config_of(name))
    for layer in module.modules():
        if hasattr(layer, "time_step_limit"):
            layer.time_step_limit = 0.6, 0.9
    sampling = SamplingParams(max_new_tokens=12, n=2, seed=1, ignore_eos=True)
    rollouts = [HuggingFaceGenerator(module, (EOS,)).generate(PROMPTS, sampling)]
    rollouts.append(answers(engine_on(module), sampling))
    for rollout in rollouts:
        assert logprob_gap(module, PROMPTS, rollout) < GAP
    free = module_of("falcon_h1")
    rollout = answers(engine_on(free), sampling, PROMPTS[:2])
    assert logprob_gap(free, PROMPTS[:2], rollout) < GAP


def test_moved_weights_are_another_version(module_of):
    """Captured steps hold addresses."""
    module = module_of("olmo2")
    weights = engine_on(module).weights
    with weights.in_use():
        before = weights.version
    with weights.in_use():
        assert weights.version == before
    first = next(module.parameters())
    first.data = first.data.clone()
    with weights.in_use():
        assert weights.version == before + 1


def test_chat_generate_and_serve_run_it(tmp_path):
    model = Model.find(str(ensure(tmp_path, "phi")), "fp32")
    made = model.engine(max_num_seqs=2)
    greedy = SamplingParams(max_new_tokens=5, temperature=0, ignore_eos=True)
    (answer,) = made.generate([[5, 6, 7]], greedy).token_ids
    assert list(made.stream([5, 6, 7], greedy)) == answer
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "phi")
    with torch.no_grad():
        best = plain(torch.tensor([[5, 6, 7, *answer]])).logits[0, 2:-1].argmax(-1)
    assert best.tolist() == answer


def test_forced_tokens_move_the_states_on(module_of):
    module, forced = module_of("lfm2"), [(5 * i) % 60 + 2 for i in range(9)]
    made = engine_on(module)
    sampling = SamplingParams(max_new_tokens=6, n=2, seed=1, ignore_eos=True)
    asked = Request(PROMPTS[1], sampling, forced=forced), Request(PROMPTS[3], sampling, 1)
    with made.weights.in_use(), closing(made.core()) as core:
        core.add_all(list(asked), None)
        list(core.events())
    rollouts = [request.rollout() for request in asked]
    assert all(ids[:9] == forced for ids in rollouts[0].token_ids)
    for rollout, prompt in zip(rollouts, (PROMPTS[1], PROMPTS[3]), strict=True):
        assert logprob_gap(module, [prompt], rollout) < GAP


def num_forwards(module, watched, prompts, **sizes):
    """Calls of ``watched``, a part of the module, for ``prompts``, whose log-probs are right."""
    made, forwards = engine_on(module, **sizes), []
    with made.weights.in_use():
        made.step_runner()  # finds out how the module reads rows
        handle = watched.register_forward_pre_hook(lambda *args: forwards.append(args))
        rollout = made.generate(prompts, SamplingParams(max_new_tokens=1, seed=2, ignore_eos=True))
        handle.remove()
    assert logprob_gap(module, prompts, rollout) < GAPS.get(module.config.model_type, GAP)
    return len(forwards)


@pytest.mark.parametrize(
    ("name", "knows_padding"),
    some(product(STATES, [True, False]), [("lfm2", True), ("jamba", False)]),
)
def test_layers_with_states_read_prompts_of_a_step_together(name, knows_padding):
    """One forward computes them all, unless padding changes the state of a layer, which does not
    know which tokens it is.
    """
    module = random_module(name)
    for _, mixer in mixers(module) if not knows_padding else ():
        own = mixer.forward
        mixer.forward = lambda attention_mask=None, own=own, **given: own(**given)
    lengths = {len(prompt) for prompt in PROMPTS}
    assert num_forwards(module, module, PROMPTS) == (1 if knows_padding else len(lengths))


@pytest.mark.parametrize("name", some(STATES, ["lfm2", "jamba"]))
def test_a_state_is_continued_with_several_tokens(name, module_of):
    """In the second step of two. But Jamba's with one."""
    module, prompt = module_of(name), list(range(2, 32))
    _, mixer = mixers(module)[0]
    linear = next(part for part in mixer.children() if isinstance(part, torch.nn.Linear))
    calls = num_forwards(module, linear, [prompt], page_size=4, max_num_batched_tokens=16)
    assert calls == (1 + 14 if name == "jamba" else 2)


def test_rows_that_layers_with_states_read_together():
    """New rows of like length, others of equal ones, and not too many tokens."""
    new = batches_alike([5, 3, 5, 9, 1], [True] * 5)
    assert new == [[3, 0, 2], [1], [4]]
    mixed = batches_alike([2000, 2000, 1500, 900, 2100, 1, 1], [True] * 5 + [False] * 2)
    assert mixed == [[5, 6], [4], [0, 1], [2, 3]]
    assert batches_alike([5000, 4000], [True] * 2) == [[0], [1]]


def test_an_engine_may_be_made_and_used_in_inference_mode(module_of):
    module = module_of("olmo2")
    with torch.inference_mode():
        sampling = SamplingParams(max_new_tokens=4, ignore_eos=True)
        rollout = answers(engine_on(module), sampling, PROMPTS[:3])
    assert logprob_gap(module, PROMPTS[:3], rollout) < GAP
