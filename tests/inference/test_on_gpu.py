"""The inference engine on a CUDA device: graphs, eager steps and the CPU agree."""

import gc
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from captures import graphs_of, steps_of
from families import CONFIGS, POSITIONS, assert_same, build, reference_logprobs
from test_module_decoder import STATES, random_module

from dschat.config.rollout import VARIABLE
from dschat.inference import EngineConfig, InferenceEngine, SamplingParams
from dschat.inference.requests.cuda_graphs import CudaCapture

pytestmark = pytest.mark.gpu

PROMPTS = [[(5 * i + j) % 50 + 3 for j in range(n)] for i, n in enumerate([5, 17, 1, 30, 9, 2, 8])]
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=24, n=2, seed=5, ignore_eos=True)


def on(device, module, dtype=torch.float32, **knobs):
    knobs = {"max_num_seqs": 8, "max_seq_len": 64} | knobs
    made = InferenceEngine(module.config, dtype, torch.device(device), EngineConfig(**knobs))
    made.weights.load((n, p.detach()) for n, p in module.named_parameters())
    return made


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_graph_is_eager_is_cpu(name, page_size):
    torch.backends.cuda.matmul.allow_tf32 = False
    module = build(name)
    expected = on("cpu", module).generate(PROMPTS, GREEDY)
    for graphs in (True, False):
        made = on("cuda", module, page_size=page_size, cuda_graphs=graphs)
        answers = made.generate(PROMPTS, GREEDY)
        assert_same(answers, expected, 1e-3)
        assert made.captures == graphs
        assert not graphs or len(steps_of(made)) > 0


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_moe", "gpt_oss", *STATES])
def test_captured_steps_of_modules_are_those_of_a_cpu(name):
    """Of layers with states too; as by default, with kernels where Triton is."""
    torch.backends.cuda.matmul.allow_tf32 = False
    rollouts = []
    for device in ("cpu", "cuda"):
        module = random_module(name).to(device)
        sizes = EngineConfig(max_num_seqs=4, max_seq_len=POSITIONS, page_size=16)
        made = InferenceEngine(
            module.config, torch.float32, torch.device(device), sizes, module=module
        )
        with made.weights.in_use():
            rollouts.append(made.generate(PROMPTS, GREEDY))
    assert not graphs_of(made).failed
    assert_same(*rollouts, 1e-3)


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
SAMPLINGS = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "top-k": {"top_k": 5},
    "nucleus": {"top_p": 0.8},
    "min-p": {"min_p": 0.1, "top_k": 9},
    "late stop": {"ignore_eos": False, "min_new_tokens": 6, "stop_token_ids": (3, 17)},
}


@pytest.fixture
def kernels(monkeypatch):
    """Engines are without kernels; ``kernels()``: those made from now on have them."""
    torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setenv(VARIABLE, "0")
    return lambda: monkeypatch.delenv(VARIABLE)


def check_kernels(name, page_size, use):
    """Greedy and drawn tokens with and without kernels, which ``use`` turns on."""
    module = build(name)
    plain = on("cuda", module, page_size=page_size, cuda_graphs=True)
    use()
    made = on("cuda", module, page_size=page_size, cuda_graphs=True)
    assert plain._kernels is None
    assert made._kernels is not None
    for sampling in (GREEDY, SAMPLED):
        expected, answers = plain.generate(PROMPTS, sampling), made.generate(PROMPTS, sampling)
        assert_same(answers, expected, 1e-3)
    return made


@needs_triton
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_kernels_draw_the_tokens_of_torch(name, kernels):
    check_kernels(name, 16, kernels)


@needs_triton
@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_kernels_take_pages_of_every_size(name, page_size, kernels):
    check_kernels(name, page_size, kernels)


@needs_triton
@pytest.mark.parametrize("options", SAMPLINGS.values(), ids=SAMPLINGS)
def test_kernels_draw_by_every_sampling(options, kernels):
    module, sampling = build("llama"), replace(SAMPLED, **options)
    expected = on("cpu", module, page_size=16).generate(PROMPTS, sampling)
    kernels()
    made = on("cuda", module, page_size=16, cuda_graphs=True)
    assert made.generate(PROMPTS, sampling).token_ids == expected.token_ids


@needs_triton
@pytest.mark.parametrize("name", ["llama", "bloom", "opt"])
def test_kernels_in_bf16_are_close_to_torch(name, kernels):
    """Log-probs that the module has for the tokens drawn: as close as those of torch."""
    module = build(name).cuda().bfloat16()
    gaps = []
    for wanted in (False, True):
        if wanted:
            kernels()
        answers = on("cuda", module, torch.bfloat16, page_size=16, cuda_graphs=True).generate(
            PROMPTS, SAMPLED
        )
        gaps.append(mean_gap(module, answers))
    assert gaps[0] < 5e-2
    assert gaps[1] < max(1.5 * gaps[0], 1e-3)


def test_a_failed_capture_leaves_the_device_usable():
    capture, x, out = CudaCapture(required=False), *torch.ones(2, 4, device="cuda")
    earlier = capture(lambda: torch.add(x, 1, out=out))
    with pytest.raises(RuntimeError):
        capture(lambda: x * torch.rand(4, device="cuda").sum().item())  # it cannot wait
    later = capture(lambda: torch.mul(x, 2, out=out))
    x.fill_(3.0)
    for replay, expected in ((later, 6.0), (earlier, 4.0)):
        replay()
        assert out.tolist() == [expected] * 4
    assert torch.rand(1000, device="cuda").unique().numel() > 900
    assert (x + 1).tolist() == [4.0] * 4


def test_a_failed_capture_is_followed_by_eager_steps(monkeypatch):
    """In the middle of a call, with a prompt and steps of other sizes already captured. Where a
    step by kernels fails, one without them would be captured.
    """
    monkeypatch.setenv(VARIABLE, "0")
    module, recorded = build("llama"), []
    expected = on("cpu", module).generate(PROMPTS, GREEDY)
    record = CudaCapture._record

    def others_fail(self, step):
        recorded.append(step)
        return record(self, step if len(recorded) <= 2 else lambda: torch.ones(1).cuda().item())

    monkeypatch.setattr(CudaCapture, "_record", others_fail)
    made = on("cuda", module)
    torch.backends.cuda.matmul.allow_tf32 = False
    made.generate(PROMPTS[:1], GREEDY)
    assert not graphs_of(made).failed
    for _ in range(2):
        assert made.generate(PROMPTS, GREEDY).token_ids == expected.token_ids
    assert len(recorded) == 4
    assert graphs_of(made).failed


def test_a_released_cache_is_free_at_once():
    made = on("cuda", build("llama"))
    made.generate(PROMPTS, SAMPLED)
    size = made.cache.pairs.nbytes
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        made.release_cache()
        assert before - torch.cuda.memory_allocated() >= size
    finally:
        gc.enable()


def test_a_hundred_releases_take_no_more_memory():
    """Rollouts that allocate the cache and capture their steps again, with training in between."""
    made = on("cuda", build("llama"))
    reserved = []
    for _ in range(100):
        made.generate(PROMPTS, SAMPLED)
        made.release_cache()
        torch.ones(2**26, device="cuda").add_(1)  # 256 MiB
        reserved.append(torch.cuda.memory_reserved())
    assert max(reserved[10:]) <= max(reserved[:10])


def test_graphs_survive_a_refresh_in_place():
    module = build("llama").cuda()
    made = on("cuda", module)
    made.generate(PROMPTS, SAMPLED)
    captured = len(steps_of(made))
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.05 * torch.randn_like(p))
    made.weights.load((n, p.detach()) for n, p in module.named_parameters())
    answers = made.generate(PROMPTS, SAMPLED)
    assert len(steps_of(made)) == captured
    assert answers.token_ids == on("cuda", module).generate(PROMPTS, SAMPLED).token_ids


def mean_gap(module, answers):
    """Mean difference of the answers' log-probs from those that ``module`` computes."""
    gaps = []
    for i, (ids, logprobs) in enumerate(zip(answers.token_ids, answers.logprobs, strict=True)):
        expected = reference_logprobs(module, PROMPTS[i // 2], ids)
        gaps.append((expected - torch.tensor(logprobs)).abs())
    return torch.cat(gaps).mean().item()


def test_bf16_logprobs_are_close_to_the_module():
    module = build("llama").cuda().bfloat16()
    answers = on("cuda", module, torch.bfloat16).generate(PROMPTS, SAMPLED)
    assert mean_gap(module, answers) < 5e-2
