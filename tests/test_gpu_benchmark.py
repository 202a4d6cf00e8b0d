"""Floors, counts and sides of `benchmarks/gpu.py`, without a GPU."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def on_path():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield
    sys.path.remove(str(ROOT / "benchmarks"))


# opt-tiny, counted by hand. A layer: q, k, v and output 4 x (32 x 32 + 32), the MLP 2 x 32 x 64 +
# 64 + 32, two norms of 2 x 32. Besides: the last norm, and the tied head of 256 tokens.
LAYER = 4 * (32 * 32 + 32) + 2 * 32 * 64 + 64 + 32 + 2 * 2 * 32
MATRICES = 2 * LAYER + 2 * 32 + 256 * 32
STEP_BYTES = 2 * (MATRICES + 4 * 2 * 32)  # and of both embeddings a row for each of 4 tokens
ALL_BYTES = 2 * (MATRICES + (64 + 2) * 32)
KV_BYTES = 2 * 2 * 32 * 2  # of a token: keys and values of 2 layers


def tiny(name="opt-1.3b"):
    from gpu_cases import CASES

    return CASES[name].tiny()


# -- floors ----------------------------------------------------------------------------------------


def test_bytes_of_a_step_by_hand():
    from gpu_floor import kv_bytes_per_token, weight_bytes
    from rollout_workloads import MODELS

    config = MODELS["opt-tiny"]()
    assert weight_bytes(config, 4, BF16) == STEP_BYTES
    assert kv_bytes_per_token(config, BF16) == KV_BYTES


# The sizes that the models were published with, without the tables that a step reads rows of:
# Llama's embedding (its head is another matrix), OPT's positions.
@pytest.mark.parametrize(
    ("name", "rows", "expected", "per_token"),
    [
        ("llama-7b", 64, 2 * (6_738_415_616 - 32_000 * 4096 + 64 * 4096), 512 * 1024),
        ("opt-1.3b", 8, 2 * (1_315_758_080 - 2050 * 2048 + 8 * 2 * 2048), 2 * 24 * 2048 * 2),
        ("gpt2", 1, 2 * (124_439_808 - 1024 * 768 + 2 * 768), 2 * 12 * 768 * 2),
    ],
)
def test_bytes_of_published_models(name, rows, expected, per_token):
    from gpu_floor import kv_bytes_per_token, weight_bytes
    from rollout_workloads import MODELS

    config = MODELS[name]()
    assert weight_bytes(config, rows, BF16) == expected
    assert kv_bytes_per_token(config, BF16) == per_token


def test_a_floor_by_hand():
    from gpu_floor import Rates, floor_ms
    from rollout_workloads import MODELS

    case = tiny().rollout
    assert (case.prompts, case.prompt_tokens, case.new_tokens) == (4, 6, 4)
    decode = 3 * STEP_BYTES + 4 * (7 + 8 + 9) * KV_BYTES
    config = MODELS["opt-tiny"]()
    floor = floor_ms(config, case, BF16, Rates(1e9))
    assert floor["prefill"] == pytest.approx(STEP_BYTES / 1e6)
    assert floor["step"] == pytest.approx(decode / 3 / 1e6)
    assert floor["rollout"] == pytest.approx((STEP_BYTES + decode) / 1e6)
    # FLOPs of a prompt: two per weight of the layers' matrices and token, the head once, and two
    # products of 6 x 7 / 2 pairs and 32 columns in each layer
    matrices, pairs = 2 * (4 * 32 * 32 + 2 * 32 * 64), 6 * 7 // 2
    flops = 4 * 2 * (6 * matrices + 256 * 32 + 2 * 2 * pairs * 32)
    slow = floor_ms(config, case, BF16, Rates(1e9, 1e6))
    assert slow["prefill"] == pytest.approx(1e3 * flops / 1e6)


# -- counts on a fake device -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "kv_tokens", "refresh"),
    [
        ("A", 9, ALL_BYTES),
        ("G", 10, 0),
        pytest.param("C", 10, ALL_BYTES, marks=pytest.mark.slow),
    ],
)
def test_counted_bytes_by_hand(side, kv_tokens, refresh):
    """The fourth token: an eager step reads 9 keys of a sequence, a captured one its whole page."""
    import gpu_dry
    from gpu_cases import SIDES

    kernels_off = dataclasses.replace(SIDES[side], kernels=())
    counted = gpu_dry.count("opt", tiny(), kernels_off)
    assert counted["step_weights_bytes"] == STEP_BYTES
    assert counted["step_kv_bytes"] == 4 * kv_tokens * KV_BYTES
    assert counted["refresh_bytes"] == refresh
    assert (counted["operators_captured"] > 0) == (side != "A")
    assert (counted["host_reads"] + counted["blocking_copies"] > 0) == (side == "A")


@pytest.mark.slow
def test_adapters_are_counted_by_themselves():
    """Factors of rank 2: A of q, k and v stacked and B block-diagonal, in both layers."""
    import gpu_dry
    from gpu_cases import SIDES

    counted = gpu_dry.count("lora", tiny("opt-13b-lora"), SIDES["C"])
    fused, square, mlp = 3 * 2 * (32 + 3 * 32), 2 * (32 + 32), 2 * 2 * (32 + 64)
    assert counted["step_adapters_bytes"] == 2 * 2 * (fused + square + mlp)
    assert counted["step_weights_bytes"] == STEP_BYTES


def test_a_wrong_byte_count_is_an_error(monkeypatch):
    import gpu_dry
    from gpu_cases import SIDES

    monkeypatch.setattr(gpu_dry, "weight_bytes", lambda *_: STEP_BYTES - 2 * 256 * 32)  # no head
    with pytest.raises(RuntimeError, match=f"reads {STEP_BYTES} bytes of weights"):
        gpu_dry.count("opt", tiny(), SIDES["A"])


@pytest.mark.slow
def test_a_weight_read_twice_is_an_error(monkeypatch):
    import gpu_dry
    from gpu_cases import SIDES

    from dschat.inference.model.decoder import Decoder

    logits = Decoder.logits

    def read_twice(self, *args):
        logits(self, *args)
        return logits(self, *args)

    monkeypatch.setattr(Decoder, "logits", read_twice)
    twice = STEP_BYTES + 2 * 256 * 32
    with pytest.raises(RuntimeError, match=f"reads {twice} bytes of weights"):
        gpu_dry.count("opt", tiny(), SIDES["C"])


# -- the command -----------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    import gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu.py"])
    with pytest.raises(SystemExit) as exited:
        gpu.main()
    assert exited.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


def test_workloads_are_of_models():
    from rollout_workloads import CASES, MODELS, Case

    assert all(isinstance(case, Case) for case in CASES.values())
    assert {case.model for case in CASES.values()} <= MODELS.keys()


def test_sides_are_parsed():
    from gpu_cases import SIDES, Side, parse_side

    assert parse_side("E") is SIDES["E"]
    assert parse_side("graphs=off,kernels=norm+dependent,layout=zero_copy,lag=2") == Side(
        False, ("norm", "dependent"), "zero_copy", 2
    )
    assert parse_side("kernels=all").kernels == SIDES["G"].kernels
    assert parse_side("kernels=none") == Side()
    for wrong in ("H", "graphs=1", "layout=auto", "lag=x", "kernels=", "kernels=norm+x", ""):
        with pytest.raises(ValueError, match="neither a side"):
            parse_side(wrong)


def test_a_side_ends_with_its_scope(monkeypatch):
    import os

    from gpu_cases import Side

    from dschat.config.cuda_kernels import VARIABLE, cuda_kernels
    from dschat.inference.captured_core import CapturedCore

    monkeypatch.delenv(VARIABLE, raising=False)
    before = CapturedCore.lag
    with Side(kernels=("norm", "draw"), lag=3).active():
        assert cuda_kernels() == {"norm", "draw"}
        assert CapturedCore.lag == 3
    assert VARIABLE not in os.environ
    assert CapturedCore.lag == before


def test_bytes_moved_by_zero_copy_are_an_error():
    from gpu_cases import Side
    from gpu_sides import _check_refresh

    rounds = [{"refresh_bytes": 0}, {"refresh_bytes": 2}]
    _check_refresh("x", Side(layout="copy"), rounds)
    _check_refresh("x", Side(layout="zero_copy"), rounds[:1])
    with pytest.raises(RuntimeError, match="moved 2 bytes"):
        _check_refresh("x", Side(layout="zero_copy"), rounds)


@pytest.mark.slow
def test_wrong_log_probs_are_an_error(monkeypatch):
    """As those of a kernel that is wrong: those of a warm-up's answers are off by a fifth."""
    import gpu_sides
    from gpu_cases import Side
    from gpu_floor import Rates

    from dschat.inference.core import Core

    append = Core._append
    monkeypatch.setattr(Core, "_append", lambda self, s, t, p: append(self, s, t, p + 0.2))
    with pytest.raises(RuntimeError, match=r"log-probs .* differ by 0.2"):
        list(gpu_sides.measure("opt", tiny(), {"A": Side(graphs=False)}, False, 1, Rates(1e9, 1e9)))


@pytest.mark.slow
def test_the_dry_command():
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--dry", "--tiny"]
    sides = ["A", "C", "layout=zero_copy"]  # kernels need Triton
    command += ["--sides", *sides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    operations = [line for line in lines if line["case"] == "kernels"]
    assert len(operations) == 3 * 10 + 1
    assert operations == lines[-len(operations) :]
    del lines[-len(operations) :]
    rollouts = ["opt-1.3b", "gpt2", "llama-7b", "refresh-7b", "opt-13b-lora"]
    assert [(x["case"], x["side"]) for x in lines] == [(n, s) for n in rollouts for s in sides]
    assert "train-1b: skipped" in done.stderr
    for line in lines:
        assert line["step_weights_bytes"] == line["floor_step_weights_bytes"] > 0
        assert (line["refresh_bytes"] == 0) == (line["side"] == sides[2])
        assert line["commit"]
        assert "--dry --tiny" in line["command"]
    assert lines[0]["step_weights_bytes"] == STEP_BYTES


@pytest.mark.slow
def test_a_measurement(capsys):
    """On a CPU, whose times mean nothing: the fields, what moves in a refresh, what is skipped."""
    import gpu_sides
    from gpu_cases import parse_side
    from gpu_floor import card_rates

    texts = ["graphs=off", "graphs=off,layout=zero_copy", "lag=0"]
    sides = {text: parse_side(text) for text in texts}
    rates = card_rates(torch.device("cpu"), 2**20, (64,))
    lines = list(gpu_sides.measure("opt", tiny(), sides, True, 1, rates))
    assert [(x["zero_stage"], x["side"]) for x in lines] == [
        *((2, side) for side in [*texts, "generate"]),
        *((3, side) for side in texts),
    ]
    skipped = re.findall(r"(ZeRO-\d): ([\w-]+) skipped", capsys.readouterr().err)
    absent = ["hybrid-engine", "hybrid-engine-graphs", "vllm"]
    assert skipped == [("ZeRO-2", x) for x in absent] + [
        ("ZeRO-3", x) for x in ("generate", *absent)
    ]
    for line in lines:
        floor, median = line["floor_ms"]["rollout"], line["rollout_ms"]["median"]
        assert line["share_of_floor"]["rollout"] == pytest.approx(floor / median, rel=1e-3)
        if line["side"] != "generate":
            moves = "zero_copy" not in line["side"]
            assert (line["refresh_bytes"]["median"] > 0) == moves
            assert line["iteration_ms"]["median"] > line["rollout_ms"]["median"]
            assert 0 < line["logprob_gap"] < 1e-4


# -- docs/gpu.md -----------------------------------------------------------------------------------


def test_the_floors_of_the_page():
    """The last three cells of a row: bytes of weights a step, floors at 4.3 and at 3.0 TB/s."""
    from gpu_cases import CASES
    from gpu_floor import Rates, floor_ms, weight_bytes
    from rollout_workloads import MODELS

    page = (ROOT / "docs" / "gpu.md").read_text()
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in page.splitlines()]
    floors = {row[0].strip("`"): row[-3:] for row in rows if re.fullmatch(r"[\d.,]+ ms", row[-1])}
    assert set(floors) == {"opt-1.3b", "gpt2", "llama-7b"}
    for name, (gigabytes, *cells) in floors.items():
        case = CASES[name].rollout
        config = MODELS[case.model]()
        assert gigabytes == f"{weight_bytes(config, case.prompts, BF16) / 1e9:.3g} GB"
        for cell, bandwidth in zip(cells, (4.3e12, 3.0e12), strict=True):
            floor = floor_ms(config, case, BF16, Rates(bandwidth))["rollout"]
            assert float(re.sub("[, ms]", "", cell)) == pytest.approx(floor, rel=5e-3)


OTHERS = {"DSCHAT_LAUNCHED_BY", "DSCHAT_API_KEYS"}  # of the launcher, and of `dschat serve`


def test_the_variables_of_the_page():
    """Those of the code, but for the launcher's own."""
    named = set(re.findall(r"^\| (DSCHAT_\w+)", (ROOT / "docs" / "gpu.md").read_text(), re.M))
    code = "".join(path.read_text() for path in (ROOT / "dschat").rglob("*.py"))
    assert named == set(re.findall(r"DSCHAT_[A-Z_]+", code)) - OTHERS
