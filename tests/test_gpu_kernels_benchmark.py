"""The case `kernels` of `benchmarks/gpu.py`, without a GPU."""

import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton_worker import HAS_TRITON, REASON, Worker

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
TINY = ("opt-tiny", "gpt2-tiny", "llama-tiny", "llama3-tiny")


@pytest.fixture(scope="module", autouse=True)
def on_path():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def benchmark(on_path):
    """`triton_benchmark.lines` in a process that interprets kernels."""
    if not HAS_TRITON:
        pytest.skip(REASON)
    worker = Worker(interpret=True)
    yield lambda *args: worker("benchmark", *args)
    worker.close()


def operation(name, model="opt-tiny"):
    from gpu_cases import CASES
    from gpu_operations import operations

    cases = (*CASES["kernels"].kernels, *CASES["kernels"].tiny().kernels)
    (found,) = operations([case for case in cases if case.model == model], [name])
    return found


# -- bytes -----------------------------------------------------------------------------------------


# Of 2 each. Weight and bias of products; keys and values; logits; of a norm, rows of two operands
# and two results, weight and bias. OPT-1.3B has 8 rows, Llama 64, GPT-2 one.
BYTES = {
    ("qkv", "opt-1.3b"): 3 * 2048 * 2048 + 3 * 2048,
    ("out", "opt-1.3b"): 2048 * 2048 + 2048,
    ("up", "opt-1.3b"): 2048 * 8192 + 8192,
    ("down", "opt-1.3b"): 8192 * 2048 + 2048,
    ("head", "opt-1.3b"): 50272 * 2048,
    ("attention", "opt-1.3b"): 8 * (256 + 64) * 2 * 2048,
    ("add_norm", "opt-1.3b"): 8 * 4 * 2048 + 2 * 2048,
    ("draw-top-p", "opt-1.3b"): 8 * 50272,
    ("qkv", "gpt2"): 768 * 2304 + 2304,
    ("attention", "gpt2"): (128 + 16) * 2 * 768,
    ("draw-greedy", "gpt2"): 50257,
    ("qkv", "llama-7b"): 3 * 4096 * 4096,
    ("up", "llama-7b"): 2 * 11008 * 4096,
    ("down", "llama-7b"): 4096 * 11008,
    ("head", "llama-7b"): 32000 * 4096,
    ("attention", "llama-7b"): 64 * (512 + 256) * 2 * 4096,
    ("add_norm", "llama-7b"): 64 * 4 * 4096 + 4096,
    ("attention", "llama3-8b"): 64 * (512 + 256) * 2 * 8 * 128,
    ("attention", "llama3-tiny"): 4 * (6 + 2) * 2 * 2 * 16,
}


@pytest.mark.parametrize(("name", "expected"), BYTES.items(), ids=map(" ".join, BYTES))
def test_bytes_by_hand(name, expected):
    assert operation(*name).num_bytes == 2 * expected


def test_each_launch_reads_these_bytes():
    """Operands of tiny operations, as they are allocated; each copy is other memory."""
    from gpu_operations import PRODUCTS

    for model in TINY[:3]:
        for name in PRODUCTS:
            product = operation(name, model)
            copies = product.operands(CPU, 3)
            for _, *weights in copies:
                assert sum(x.nbytes for x in weights if x is not None) == product.num_bytes
            assert len({weight.data_ptr() for _, weight, _ in copies}) == 3
    attention = operation("attention", "llama3-tiny")
    copies = attention.operands(CPU, 3)
    tokens = 4 * 10 + 10  # of whole answers, and the trash page
    for _, pairs in copies:
        assert pairs.nbytes * 4 * 8 == attention.num_bytes * tokens
    assert len({pairs.data_ptr() for _, pairs in copies}) == 3
    (logits,) = operation("draw").operands(CPU, 1)[0]
    assert logits.nbytes == operation("draw").num_bytes


def test_copies_exceed_the_cache_twice(monkeypatch):
    from gpu_kernels import _copies

    card = SimpleNamespace(L2_cache_size=50 * 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    for name, expected in (
        (("out", "opt-1.3b"), 13),  # of 8.39 MB, for 104.9 MB
        (("head", "opt-1.3b"), 2),
        (("attention", "gpt2"), 238),  # of 0.442 MB
        (("draw", "opt-1.3b"), 1),
        (("add_norm", "llama-7b"), 1),
    ):
        assert _copies(operation(*name), torch.device("cuda")) == expected
    assert _copies(operation("out"), torch.device("cuda")) == 512


# -- the command -----------------------------------------------------------------------------------


def test_the_dry_lines(monkeypatch, capsys):
    import gpu

    command = ["gpu.py", "--dry", "--cases", "kernels", "--kernels", "attention", "up"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as exited:
        gpu.main()
    assert exited.value.code == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    models = ["opt-1.3b", "gpt2", "llama-7b"]
    expected = [(kernel, model) for model in models for kernel in ("up", "attention")]
    expected.append(("attention", "llama3-8b"))
    assert [(x["kernel"], x["model"]) for x in lines] == expected
    line = lines[4]  # Llama's gate and up
    assert line["case"] == "kernels"
    assert line["shape"] == {"rows": 64, "outputs": 2 * 11008, "inputs": 4096}
    assert line["bytes"] == 2 * 2 * 11008 * 4096
    assert line["floor_us_h100"] == pytest.approx(line["bytes"] / 3.0e6, rel=1e-3)
    assert line["floor_us_h200"] == pytest.approx(line["bytes"] / 4.3e6, rel=1e-3)


def test_failed_kernels_are_an_error(monkeypatch, capsys):
    """The lines of the others are printed, and the exit code is 1."""
    import gpu
    import gpu_kernels
    from gpu_floor import Rates

    def measure(*_):
        yield {"kernel": "qkv"}
        raise gpu_kernels.Failed("up of gpt2 (triton)")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "environment", lambda _: {})
    monkeypatch.setattr(gpu, "card_rates", lambda _: Rates(1e12))
    monkeypatch.setattr(gpu_kernels, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--cases", "kernels"])
    with pytest.raises(SystemExit) as exited:
        gpu.main()
    assert exited.value.code == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["kernel"] == "qkv"
    assert "kernels: failed: up of gpt2 (triton)" in printed.err


# -- sides, with stand-ins for Triton --------------------------------------------------------------


def norm(h, added, weight, bias, eps, dependent=False):
    h += added
    return torch.layer_norm(h, weight.shape, weight, bias, eps)


def norm_of_the_sum_unstored(h, added, weight, bias, eps, dependent=False):
    return torch.layer_norm(h + added, weight.shape, weight, bias, eps)


def norm_of_nothing(h, added, weight, bias, eps, dependent=False):
    h += added
    return torch.full_like(h, math.nan)


def norm_that_stores_nothing(h, added, weight, bias, eps, dependent=False):
    y = norm(h, added, weight, bias, eps)
    h.fill_(math.nan)
    return y


def measured(monkeypatch, kernel, name="add_norm"):
    """A line of a tiny operation whose kernel is ``kernel``, and what failed."""
    from triton_benchmark import lines

    from dschat.inference.kernels.cuda import operators

    monkeypatch.setattr(operators, name, kernel)
    found, failure = lines(["opt-tiny"], [name], ["torch", "triton"])
    return (found[0] if found else None), failure


def test_a_line(monkeypatch):
    line, failure = measured(monkeypatch, norm)
    assert failure == ""
    assert line["difference"] == {"triton": 0.0}
    assert line["copies"] == 1
    assert set(line["us"]) == {"torch", "triton"}
    for side, us in line["us"].items():
        assert line["tb_per_s"][side] == pytest.approx(line["bytes"] / us["median"] / 1e6, rel=2e-3)
        # of a copy of 1 GB/s
        assert line["share_of_copy"][side] == pytest.approx(1e3 * line["tb_per_s"][side], rel=2e-3)
    assert line["fastest"] == min(line["us"], key=lambda side: line["us"][side]["median"])


@pytest.mark.parametrize(
    "kernel", [norm_of_the_sum_unstored, norm_of_nothing, norm_that_stores_nothing]
)
def test_a_wrong_kernel_is_not_timed(monkeypatch, capsys, kernel):
    """An operand that must change, and NaN."""
    line, failure = measured(monkeypatch, kernel)
    assert failure == "add_norm of opt-tiny (triton)"
    assert set(line["us"]) == {"torch"}
    assert line["fastest"] == "torch"
    difference = line["difference"]["triton"]
    assert difference > 0.1 if kernel is norm_of_the_sum_unstored else difference is None
    assert "add_norm of opt-tiny: triton left out: WrongResults" in capsys.readouterr().err


def test_a_wrong_draw_is_found(monkeypatch):
    """The likeliest token of every row, with its right log-prob."""

    def likeliest(logits, *rest):
        logprobs, ids = logits.float().log_softmax(-1).max(-1)
        return ids, logprobs

    line, failure = measured(monkeypatch, likeliest, "draw")
    assert failure == "draw of opt-tiny (triton)"
    assert line["difference"]["triton"] > 0.125  # the share of rows with other tokens


def test_a_side_that_fails_leaves_the_others(monkeypatch, capsys):
    def fails(*_, **options):
        raise torch.OutOfMemoryError("of registers")

    line, failure = measured(monkeypatch, fails)
    assert failure == "add_norm of opt-tiny (triton)"
    assert set(line["us"]) == {"torch"}
    assert "triton left out: OutOfMemoryError: of registers" in capsys.readouterr().err


def test_an_operation_that_torch_cannot_compute_leaves_the_others(monkeypatch, capsys):
    import triton_benchmark
    from gpu_operations import AddNorm

    monkeypatch.setattr(AddNorm, "operands", lambda *_: 1 / 0)
    found, failure = triton_benchmark.lines(["opt-tiny"], ["add_norm", "draw"], ["torch"])
    assert failure == "add_norm of opt-tiny"
    assert [line["kernel"] for line in found] == ["draw"]
    assert "add_norm of opt-tiny: failed: ZeroDivisionError" in capsys.readouterr().err


def test_captured_launches_take_turns_over_the_copies(monkeypatch):
    """At least 48 launches a graph, and ten replays of it."""
    import gpu_kernels

    launched, recorded = [], []

    def capture(step):
        step()
        recorded.extend(launched)
        launched.clear()
        return step

    span = SimpleNamespace(stop=lambda: SimpleNamespace(seconds=lambda: 0.5))
    monkeypatch.setattr(gpu_kernels, "DeviceSpan", lambda _: span)
    operands = [(copy,) for copy in range(5)]
    timed = gpu_kernels._Timed(launched.append, operands, CPU, capture)
    assert recorded == [*range(5)] * 10
    assert timed.run(1) == {"us": pytest.approx(1000.0)}  # of 10 x 50 launches
    assert launched == [*range(5)] * 100


# The operators that a launch by Triton consists of.
OURS = {
    "attention": {"paged_decode": 1},
    "add_norm": {"add_norm": 1},
    **dict.fromkeys(("draw", "draw-greedy", "draw-top-p"), {"draw": 1}),
}


def test_launches_on_a_fake_device():
    """All operands are on the device, and a launch neither reads nor copies from it: it can be
    captured. Launches by Triton run nothing else.
    """
    import fake_cuda
    from gpu_cases import CASES
    from gpu_operations import operations

    from dschat.inference.kernels.cuda.dispatch import StepKernels

    for operation in operations(CASES["kernels"].tiny().kernels):
        for by_triton in (False, True):
            with fake_cuda.fake_cuda() as watch, torch.no_grad():
                decoder = operation.decoder(fake_cuda.DEVICE)
                kernels = StepKernels(fake_cuda.DEVICE) if by_triton else None
                launch = operation.launch(decoder, kernels)
                first, second = operation.operands(fake_cuda.DEVICE, 2)
                launch(*first)
                watch.counts.clear()
                outputs = launch(*second)
                counts = {name: count for (_, name), count in watch.counts.items()}
            assert all(x.device == fake_cuda.DEVICE for x in outputs)
            assert not counts.keys() & {*fake_cuda.WAITS}, (operation.label, counts)
            if by_triton:
                assert counts == OURS.get(operation.name, {"skinny_linear": 1}), operation.label
            else:
                assert counts
                assert not counts.keys() & {"skinny_linear", "paged_decode", "add_norm", "draw"}


# -- Triton, interpreted ---------------------------------------------------------------------------


@pytest.mark.slow
def test_every_kernel(benchmark):
    from gpu_operations import OPERATIONS

    lines, failure = benchmark(TINY, (), ("torch", "triton"))
    assert failure == ""
    expected = [(name, model) for model in TINY[:3] for name in OPERATIONS]
    expected.append(("attention", "llama3-tiny"))
    assert [(line["kernel"], line["model"]) for line in lines] == expected
    for line in lines:
        assert set(line["us"]) == {"torch", "triton"}, line
        assert line["difference"]["triton"] < 1.6e-2


FAULTS = {
    "up": ("skinny_linear", "y = _activated(acc, ACTIVATION) * second", "y = acc * second"),
    "attention": ("paged_decode", "cached = (key < position)", "cached = (key < position - 1)"),
    "add_norm": ("add_norm", "tl.rsqrt(", "tl.sqrt("),
    "draw": ("draw", "* tl.sum(mass, axis=0)", "* tl.sum(mass, axis=0) * 0.5"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "fault"), FAULTS.items(), ids=FAULTS)
def test_faults_are_found(benchmark, kernel, fault):
    (line,), failure = benchmark(["llama-tiny"], [kernel], ("torch", "triton"), fault)
    assert failure == f"{kernel} of llama-tiny (triton)"
    assert set(line["us"]) == {"torch"}


@pytest.mark.slow
def test_inductor_compiles_every_kind(benchmark):
    if shutil.which("g++") is None:
        pytest.skip("inductor needs g++")
    kernels = ["qkv", "up", "attention", "add_norm", "draw-top-p"]
    lines, failure = benchmark(["llama-tiny"], kernels, ("torch", "inductor"))
    assert failure == ""
    assert [line["kernel"] for line in lines] == kernels
    for line in lines:
        assert set(line["us"]) == {"torch", "inductor"}, line
