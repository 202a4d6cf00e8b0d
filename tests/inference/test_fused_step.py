"""The fused step and the drawing kernel: which models use them, and equal results."""

import numpy as np
import pytest
import torch
from families import CONFIGS, PROMPTS, build, engine

from dschat.inference import SamplingParams, step_runner
from dschat.inference.kernels import cpu, fused_step
from dschat.inference.kernels.fused_step import FusedStep
from dschat.inference.model.architectures import model_spec
from dschat.inference.sampling import sample

CPU = torch.device("cpu")
ONE_CALL = {"opt", "gpt2", "bloom", "llama", "mistral", "qwen2", "qwen3"}


@pytest.fixture(autouse=True)
def _kernels_are_there():
    if cpu.load() is None:
        pytest.skip("switched off, or no C compiler here")


@pytest.fixture
def steps_taken(monkeypatch):
    """How many steps went through, a list of their numbers of rows."""
    taken, logits = [], FusedStep.logits

    def counted(self, tokens, *rest):
        taken.append(len(tokens))
        return logits(self, tokens, *rest)

    monkeypatch.setattr(FusedStep, "logits", counted)
    return taken


@pytest.mark.parametrize("name", ["opt", "opt_350m", "gpt2", "gpt_neox", "bloom", "llama", "qwen3"])
def test_which_families_take_their_steps_in_one_call(name, module_of, steps_taken):
    sampling = SamplingParams(max_new_tokens=6, seed=3, ignore_eos=True)
    engine(module_of(name)).generate(PROMPTS[:3], sampling)
    prefill = sum(map(len, PROMPTS[:3]))
    assert steps_taken == ([prefill] + [3] * 5 if name in ONE_CALL else [])


def test_long_prompts_are_the_decoders(module_of, steps_taken, monkeypatch):
    monkeypatch.setattr(step_runner, "MAX_PROMPT", 20)
    made = engine(module_of("llama"), max_num_batched_tokens=8, max_num_seqs=1)
    made.generate([list(range(2, 32))], SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert steps_taken == [8, 8, 1, 1]  # the first 16 tokens of 30, then two new ones


@pytest.mark.parametrize("name", sorted(ONE_CALL))
def test_the_same_answers_as_call_by_call(name, module_of, monkeypatch):
    sampling = SamplingParams(max_new_tokens=20, n=2, seed=3)
    one_call = engine(module_of(name), page_size=8).generate(PROMPTS, sampling)
    monkeypatch.setattr(fused_step, "MAX_PARAMETERS", 0)
    many_calls = engine(module_of(name), page_size=8).generate(PROMPTS, sampling)
    assert one_call.token_ids == many_calls.token_ids
    for a, b in zip(one_call.logprobs, many_calls.logprobs, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


@pytest.mark.parametrize("page_size", [None, 8])
@pytest.mark.parametrize("chunk", [None, 7])
def test_threads_share_a_step(module_of, monkeypatch, page_size, chunk):
    """To the bit: whole prompts and pieces of them, sequences whose rows are several."""
    options = {"page_size": page_size, "max_num_batched_tokens": chunk, "speculate": "history"}
    sampling = SamplingParams(max_new_tokens=20, n=2, seed=3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = engine(module_of("llama"), **options)
    expected = [alone.generate(PROMPTS, sampling) for _ in range(2)]
    calls, call = [], FusedStep._call
    monkeypatch.setattr(FusedStep, "_call", lambda *args: calls.append(call(*args)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(fused_step, "_THREAD_WORK", 1)
    shared = engine(module_of("llama"), **options)
    assert [shared.generate(PROMPTS, sampling) for _ in range(2)] == expected
    steps = shared.stats.prefill_steps + shared.stats.decode_steps
    assert len(calls) > 2 * steps


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([1] * 6, [0, 2, 4, 6]),
        ([9], [0, 9]),
        ([1, 9], [0, 10]),
        ([9, 1], [0, 9, 10]),
        ([2, 2, 2, 3], [0, 4, 6, 9]),
    ],
)
def test_a_sequence_is_one_threads(module_of, monkeypatch, counts, expected):
    made = engine(module_of("llama"))
    made.generate(PROMPTS[:1], SamplingParams(max_new_tokens=2))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(fused_step, "_THREAD_WORK", 1)
    assert made.step_runner()._fused_step()._bounds(counts) == expected


def test_only_small_fp32_models_on_one_cpu():
    spec = model_spec(CONFIGS["llama"]())
    assert fused_step.applies(spec, torch.float32, CPU, 1)
    assert not fused_step.applies(spec, torch.bfloat16, CPU, 1)
    assert not fused_step.applies(spec, torch.float32, torch.device("cuda"), 1)
    assert not fused_step.applies(spec, torch.float32, CPU, 2)
    config = CONFIGS["llama"]()
    config.hidden_size, config.intermediate_size = 1024, 4096
    assert not fused_step.applies(model_spec(config), torch.float32, CPU, 1)


def test_new_weights_are_the_next_answers(steps_taken):
    """A refresh writes in place; weights that were dropped come back elsewhere."""
    old, new = build("llama"), build("llama")
    with torch.no_grad():
        for p in new.parameters():
            p.mul_(1.1)
    sampling = SamplingParams(max_new_tokens=8, seed=3, ignore_eos=True)
    made, expected = engine(old), engine(new).generate(PROMPTS, sampling)
    assert made.generate(PROMPTS, sampling) != expected
    made.weights.load(new.state_dict().items())
    assert made.generate(PROMPTS, sampling) == expected
    made.release_weights()
    made.release_cache()
    made.weights.load(new.state_dict().items())
    assert made.generate(PROMPTS, sampling) == expected
    assert len(steps_taken) > 3 * 7


# -- drawing ---------------------------------------------------------------------------------------


def logits_of(rows, size, scale=3.0, seed=0):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("size", [1, 5, 16, 127, 128, 129, 2048, 5003])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_draws_are_the_inverse_cdf(size, temperature):
    logits = logits_of(200, size)
    uniform = torch.rand(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    uniform[:2] = torch.tensor([0.0, 1 - 2**-53])
    ids, logprobs = cpu.load().draw(logits, temperature, uniform)
    scores = logits.double().numpy() / temperature
    masses = np.exp(scores - scores.max(-1, keepdims=True))
    cdf = masses.cumsum(-1) / masses.sum(-1, keepdims=True)
    rows = np.arange(200)
    after = cdf[rows, ids.numpy()]
    before = after - masses[rows, ids.numpy()] / masses.sum(-1)
    u = uniform.numpy()  # fp32 masses are 2e-7 off, and so is the border between two tokens
    assert ((before <= u + 1e-6) & (u - 1e-6 <= after)).all()
    exact = scores[rows, ids.numpy()] - np.log(np.exp(scores).sum(-1))
    assert np.abs(logprobs.numpy() - exact).max() < 2e-6


def test_draws_are_those_of_torch():
    logits = logits_of(500, 3000)
    uniform = torch.rand(500, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected_ids, expected = sample(logits, SamplingParams(max_new_tokens=1), uniform)
    ids, logprobs = cpu.load().draw(logits, 1.0, uniform)
    assert torch.equal(ids, expected_ids)
    assert torch.allclose(logprobs, expected, atol=2e-6)


def test_what_has_no_mass_is_never_drawn():
    logits = torch.full((3, 300), -torch.inf)
    logits[:, 200] = 1.0
    logits[1, 7] = logits[1, 299] = 1.0
    uniform = torch.tensor([0.0, 0.0, 1 - 2**-53], dtype=torch.float64)
    ids, logprobs = cpu.load().draw(logits, 1.0, uniform)
    assert ids.tolist() == [200, 7, 200]
    assert logprobs.tolist() == pytest.approx([0.0, -np.log(3), 0.0], abs=1e-6)


def test_a_row_of_nan_stays_in_the_vocabulary():
    logits = logits_of(3, 300)
    logits[1] = torch.nan
    uniform = torch.full((3,), 0.5, dtype=torch.float64)
    ids, logprobs = cpu.load().draw(logits, 1.0, uniform)
    assert ids[1] == 299
    assert logprobs[1].isnan()
    assert not logprobs[[0, 2]].isnan().any()


@pytest.mark.parametrize("size", [30, 300, 1000])
def test_rows_beyond_the_tokenizer_are_counted_but_not_drawn(size):
    """By the kernel and by torch: the distribution is that of the first tokens, the log-probs are
    those of all."""
    logits, known = logits_of(400, size), size - 13
    uniform = torch.rand(400, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    uniform[:2] = torch.tensor([0.0, 1 - 2**-53])
    ids, logprobs = cpu.load().draw(logits, 0.7, uniform, known)
    expected_ids, _ = cpu.load().draw(logits[:, :known].contiguous(), 0.7, uniform)
    assert torch.equal(ids, expected_ids)
    exact = (logits.double() / 0.7).log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1)
    assert torch.allclose(logprobs.double(), exact, atol=2e-6)
    sampling = SamplingParams(max_new_tokens=1, temperature=0.7)
    torch_ids, torch_logprobs = sample(logits, sampling, uniform, num_tokens=known)
    assert torch.equal(torch_ids, expected_ids)
    assert torch.allclose(torch_logprobs.double(), exact, atol=2e-6)
    greedy = SamplingParams(max_new_tokens=1, temperature=0)
    best, _ = sample(logits, greedy, None, num_tokens=known)
    assert torch.equal(best, logits[:, :known].argmax(-1))


def test_the_engine_draws_what_the_tokenizer_has(module_of):
    sampling = SamplingParams(max_new_tokens=30, n=4, seed=3, ignore_eos=True, temperature=3.0)
    free = engine(module_of("llama")).generate(PROMPTS, sampling)
    bound = engine(module_of("llama"), num_tokens=50).generate(PROMPTS, sampling)
    assert max(max(ids) for ids in free.token_ids) > 50
    assert max(max(ids) for ids in bound.token_ids) < 50
