"""The fallback's generator against transformers' own ``generate`` and plain forwards."""

import threading
from dataclasses import replace

import peft
import pytest
import torch
from families import logprob_gap
from quick import slow, some
from tiny_models import CONFIGS, EOS, OTHERS, POSITIONS, VOCAB, causal_lm
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.generation import utils as generation_utils

from dschat.config import UserError
from dschat.inference.generators import hf_generator
from dschat.inference.generators.hf_generator import HuggingFaceGenerator
from dschat.inference.protocol import SamplingParams

# Lengths 1 and 7 side by side; two of one length, not next to each other; EOS inside a prompt.
PROMPTS = [[5], [7, 8, 9, 10, 11, 12, 13], [3, 4, 5], [40, EOS, 41, 42, 43], [20, 21, 22], [9] * 12]
IN_THE_TABLE = [name for name in CONFIGS if name not in ("opt_350m", "llama_tied")]


@pytest.fixture(scope="module")
def generator_of(tiny):
    made = {}

    def make(name):
        if name not in made:
            made[name] = AutoModelForCausalLM.from_pretrained(tiny(name)).eval()
        return HuggingFaceGenerator(made[name], (EOS,))

    return make


@torch.no_grad()
def oracle(model, prompt, max_new_tokens, eos=EOS, min_new_tokens=0):
    """Greedy answer and its log-probs by ``generate`` on one prompt, then one forward of the
    whole.
    """
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=EOS,
    )
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    whole = model.generate(ids, attention_mask=mask, generation_config=config, use_cache=True)
    logprobs = torch.log_softmax(model(whole, use_cache=False).logits[0].double(), -1)
    answer = whole[0, len(prompt) :].tolist()
    columns = range(len(prompt) - 1, whole.shape[1] - 1)
    return answer, [float(logprobs[t, a]) for t, a in zip(columns, answer, strict=True)]


@pytest.mark.parametrize("name", some(IN_THE_TABLE, ["gpt2", "llama_stops"]))
def test_greedy_is_what_generate_answers(name, generator_of):
    generator = generator_of(name)
    rollout = generator.generate(PROMPTS, SamplingParams(max_new_tokens=8, temperature=0))
    assert len(rollout) == len(PROMPTS)
    for i, prompt in enumerate(PROMPTS):
        ids, logprobs = oracle(generator.module, prompt, 8)
        assert rollout.token_ids[i] == ids
        assert rollout.logprobs[i] == pytest.approx(logprobs, abs=1e-5)
        assert rollout.finish_reasons[i] == ("stop" if ids[-1] == EOS else "length")


def test_no_answer_ends_before_min_new_tokens(generator_of):
    """Greedy against ``generate`` with the same minimum: log-probs are those of the raw logits."""
    model = generator_of("llama").module
    stop = oracle(model, PROMPTS[0], 1, eos=None)[0][0]  # what the first prompt would begin with
    # 10**6 is outside the vocabulary: it can be neither drawn nor forbidden.
    as_eos = HuggingFaceGenerator(model, (stop, 10**6))
    as_stop = HuggingFaceGenerator(model, ())
    prompts, lengths = PROMPTS[:3], set()
    for least in (0, 3, 8):
        sampling = SamplingParams(max_new_tokens=8, temperature=0, min_new_tokens=least)
        rollout = as_eos.generate(prompts, sampling)
        for i, prompt in enumerate(prompts):
            ids, logprobs = oracle(model, prompt, 8, eos=stop, min_new_tokens=least)
            assert rollout.token_ids[i] == ids
            assert stop not in ids[:least]
            assert rollout.logprobs[i] == pytest.approx(logprobs, abs=1e-5)
            assert list(as_eos.stream(prompt, sampling)) == ids
            lengths.add((least, len(ids)))
        again = as_stop.generate(prompts, replace(sampling, stop_token_ids=(stop,)))
        assert again.token_ids == rollout.token_ids
    assert (0, 1) in lengths  # it does end an answer where it may


def test_every_token_ends_an_answer_that_may_not_end(generator_of):
    generator = HuggingFaceGenerator(generator_of("llama").module, tuple(range(VOCAB)))
    with pytest.raises(UserError, match="^min_new_tokens: every token ends an answer"):
        generator.generate([[5]], SamplingParams(4, min_new_tokens=2))
    assert len(generator.generate([[5]], SamplingParams(4)).token_ids[0]) == 1


_SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
_SMALL |= {"num_hidden_layers": 2, "max_position_embeddings": POSITIONS, "initializer_range": 0.3}
# Caches that are not one layer of keys for each layer.
OWN_CACHES = {
    "minimax": {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4},
    "mamba": {"state_size": 8},
}
FAMILIES = [*OTHERS, *OWN_CACHES]


@pytest.mark.parametrize("name", some(FAMILIES, ("phi",)))
def test_families_outside_the_table_draw_from_what_training_computes(name):
    """Ragged prompts, three samples, rows that end at any length; another rollout after that."""
    if name in OTHERS:
        model = causal_lm(name)
    else:
        torch.manual_seed(0)
        config = AutoConfig.for_model(name, **_SMALL | OWN_CACHES[name])
        model = AutoModelForCausalLM.from_config(config).eval()
    stops = (EOS, *range(2, VOCAB, 5))
    generator = HuggingFaceGenerator(model, stops, self_check=True)
    for seed in range(2 if name == "recurrent_gemma" else 1):
        sampling = SamplingParams(max_new_tokens=8, n=3, seed=seed)
        rollout = generator.generate(PROMPTS, sampling)
        assert logprob_gap(model, PROMPTS, rollout) < 1e-4
        again = generator.generate(PROMPTS[3:], sampling, [3, 4, 5])
        assert again.token_ids == rollout.token_ids[9:]
        assert len({len(answer) for answer in rollout.token_ids}) > 3


SAMPLED = SamplingParams(max_new_tokens=6, seed=3, n=3, top_p=0.9, temperature=1.3)


@pytest.mark.parametrize("name", ["llama", *slow(["bloom", "gpt2", "mistral"])])
def test_samples_do_not_depend_on_the_batch(name, generator_of, monkeypatch):
    generator = generator_of(name)
    whole = generator.generate(PROMPTS, SAMPLED)
    assert len({tuple(ids) for ids in whole.token_ids}) > len(PROMPTS)  # the samples differ
    monkeypatch.setattr(hf_generator, "MAX_ROWS", 2)
    order = [4, 0, 5, 2, 1, 3]
    shuffled = generator.generate([PROMPTS[i] for i in order], SAMPLED, order)
    for place, i in enumerate(order):
        ours, theirs = (r.part(n * 3, n * 3 + 3) for r, n in ((shuffled, place), (whole, i)))
        assert ours.token_ids == theirs.token_ids
        assert ours.finish_reasons == theirs.finish_reasons
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert a == pytest.approx(b, abs=1e-5)


def test_training_mode_comes_back(generator_of):
    generator = generator_of("opt")  # has dropout
    generator.module.train()
    try:
        sampling = SamplingParams(max_new_tokens=3, temperature=0)
        first, second = (generator.generate(PROMPTS, sampling).logprobs for _ in range(2))
        assert first == second
        assert generator.module.training
    finally:
        generator.module.eval()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "prompt 1 is empty"), ([3] * (POSITIONS - 3), "exceeds the model's 64")],
)
def test_prompts_that_cannot_be_answered(prompt, message, generator_of):
    with pytest.raises(UserError, match=message):
        generator_of("llama").generate([[4], prompt], SamplingParams(max_new_tokens=4))


def test_the_last_position_is_used(generator_of):
    sampling = SamplingParams(max_new_tokens=4, ignore_eos=True)
    for name in ("llama", "opt", "gpt2"):
        rollout = generator_of(name).generate([[3] * (POSITIONS - 4)], sampling)
        assert len(rollout.token_ids[0]) == 4


def test_a_model_without_a_cache_is_refused():
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("rwkv", **sizes)).eval()
    with pytest.raises(
        UserError, match=r"^RwkvForCausalLM cannot generate here: it has no cache .* another model$"
    ):
        HuggingFaceGenerator(model, (EOS,)).generate([[5]], SamplingParams(max_new_tokens=4))


# -- batches ---------------------------------------------------------------------------------------


def noted_batches(generator, monkeypatch):
    """The shape of ``generate``'s ids, and the steps that it takes, for each of its calls."""
    calls, own = [], generator.module.generate
    count = [0]
    generator.module.lm_head.register_forward_hook(lambda *_: count.__setitem__(0, count[0] + 1))

    def generate(ids, **options):
        count[0] = 0
        whole = own(ids, **options)
        calls.append((tuple(ids.shape), count[0]))
        return whole

    monkeypatch.setattr(generator.module, "generate", generate)
    return calls


def test_prompts_of_one_length_decode_together_without_padding(monkeypatch):
    generator = HuggingFaceGenerator(causal_lm("phi"), ())
    calls = noted_batches(generator, monkeypatch)
    reports = []
    prompts = [[5, 6], [7, 8, 9], [10, 11], [12, 13]]
    sampling = SamplingParams(max_new_tokens=4, n=2)
    whole = generator.generate(prompts, sampling, answered=lambda *report: reports.append(report))
    assert calls == [((6, 2), 4), ((2, 3), 4)]
    assert [number for number, _ in reports] == [0, 2, 3, 1]
    monkeypatch.setattr(hf_generator, "MAX_ROWS", 3)
    calls.clear()
    reports.clear()
    parts = generator.generate(prompts, sampling, answered=lambda *report: reports.append(report))
    assert [shape for shape, _ in calls] == [(3, 2), (3, 2), (2, 3)]
    assert parts.token_ids == whole.token_ids
    assert [number for number, _ in reports] == [0, 2, 3, 1]  # 2 needs both batches
    assert all(answers == parts.part(2 * i, 2 * i + 2) for i, answers in reports)


def test_long_rows_decode_in_smaller_batches(monkeypatch):
    generator = HuggingFaceGenerator(causal_lm("phi"), ())
    calls = noted_batches(generator, monkeypatch)
    monkeypatch.setattr(hf_generator, "_MAX_TOKENS", 21)
    generator.generate([[5] * 6, [6] * 30, [7]], SamplingParams(max_new_tokens=4, n=3))
    assert [shape for shape, _ in calls] == [(2, 6), (1, 6), (1, 30), (1, 30), (1, 30), (3, 1)]


def test_a_batch_ends_with_its_longest_answer(monkeypatch):
    generator = HuggingFaceGenerator(causal_lm("phi"), tuple(range(2, VOCAB, 5)))
    calls = noted_batches(generator, monkeypatch)
    rollout = generator.generate([[5, 6], [7, 8]], SamplingParams(max_new_tokens=40, n=2))
    longest = max(map(len, rollout.token_ids))
    assert calls == [((4, 2), longest)]
    assert min(map(len, rollout.token_ids)) < longest < 40


# -- what `generate` must not add ------------------------------------------------------------------


def test_settings_of_the_model_change_nothing(caplog):
    """Its generation_config.json, and what else `generate` knows."""
    model = causal_lm("phi")
    generator = HuggingFaceGenerator(model, (EOS,))
    expected = [generator.generate(PROMPTS, s) for s in (SAMPLED, replace(SAMPLED, temperature=0))]
    model.generation_config = own = GenerationConfig(
        do_sample=True,
        temperature=0.3,
        top_k=2,
        repetition_penalty=9.0,
        no_repeat_ngram_size=1,
        suppress_tokens=list(range(2, 60)),
        bad_words_ids=[[5]],
        forced_bos_token_id=61,
        forced_eos_token_id=62,
        num_beams=3,
        num_return_sequences=2,
        max_length=3,
        min_length=9,
        max_time=1e-9,
        eos_token_id=list(range(VOCAB)),
        pad_token_id=5,
        use_cache=False,
        cache_implementation="static",
        return_dict_in_generate=True,
        output_scores=True,
        some_setting=1,
    )
    caplog.clear()
    for sampling, rollout in zip((SAMPLED, replace(SAMPLED, temperature=0)), expected, strict=True):
        assert generator.generate(PROMPTS, sampling) == rollout
    assert model.generation_config is own
    assert caplog.records == []


def test_a_rank_takes_steps_of_its_own_under_zero_3(monkeypatch):
    """`generate` would wait in a collective for ranks with longer answers."""
    monkeypatch.setattr(generation_utils, "is_deepspeed_zero3_enabled", lambda: True)
    monkeypatch.setattr(generation_utils, "_get_torch_distributed_world_size", lambda: 2)
    generator = HuggingFaceGenerator(causal_lm("phi"), (EOS,))
    assert len(generator.generate([[5, 6]], SamplingParams(max_new_tokens=3))) == 1


def test_adapters_generate_too():
    plain = HuggingFaceGenerator(causal_lm("phi"), (EOS,)).generate(PROMPTS, SAMPLED)
    settings = peft.LoraConfig(target_modules=["q_proj", "fc1"], init_lora_weights=False)
    model = peft.get_peft_model(causal_lm("phi"), settings)
    rollout = HuggingFaceGenerator(model, (EOS,), self_check=True).generate(PROMPTS, SAMPLED)
    assert logprob_gap(model, PROMPTS, rollout, SAMPLED.temperature) < 1e-4
    assert rollout.token_ids != plain.token_ids


# -- streams ---------------------------------------------------------------------------------------


def test_a_stream_yields_while_it_decodes_and_ends_when_it_is_closed():
    model = causal_lm("phi").train()
    generator = HuggingFaceGenerator(model, ())
    (whole,) = generator.generate([[5, 6]], SamplingParams(max_new_tokens=40)).token_ids
    gate, steps = threading.Semaphore(0), []

    def wait(*_):
        steps.append(None)
        assert gate.acquire(timeout=60)

    model.lm_head.register_forward_hook(wait)
    others = set(threading.enumerate())  # of other tests in this process
    stream = generator.stream([5, 6], SamplingParams(max_new_tokens=40))
    for count in range(1, 4):
        gate.release()
        assert next(stream) == whole[count - 1]
        assert len(steps) <= count + 1  # the thread is at most in the next one
    gate.release(60)
    stream.close()
    assert len(steps) < 40
    assert model.training
    assert set(threading.enumerate()) <= others


def test_an_error_in_a_stream_reaches_its_reader():
    model = causal_lm("phi")
    generator, count = HuggingFaceGenerator(model, ()), []

    def fail(*_):
        count.append(None)
        if len(count) == 3:
            raise RuntimeError("no memory")

    model.lm_head.register_forward_hook(fail)
    stream = generator.stream([5, 6], SamplingParams(max_new_tokens=9))
    assert [next(stream), next(stream)]
    with pytest.raises(RuntimeError, match="^no memory$"):
        next(stream)
