"""The compiled kernels against NumPy in float64, and the fallback if they cannot be compiled."""

import ctypes
import logging
import os
import platform
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from families import PROMPTS, engine
from quick import slow
from soft_graph import operators_only

from dschat.inference import SamplingParams
from dschat.inference.kernels import cpu
from dschat.inference.model.positions import alibi_slopes

HEAD_SIZES = [4, 12, 20, 32, 64, 80, 128]
WIDTHS = [1, 5, 16, 20, 33, 128, 344]


@pytest.fixture(scope="module", params=["native", pytest.param("x86-64", marks=pytest.mark.slow)])
def kernels(request, tmp_path_factory):
    """The kernels, for this processor's vectors and for those that every x86 has."""
    if cpu.load() is None:
        pytest.skip("switched off, or no C compiler here")
    if request.param == "native":
        return cpu.load()
    if platform.machine() != "x86_64":
        pytest.skip("not an x86")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(cpu, "_FLAGS", for_processor(request.param))
        cpu.load.cache_clear()
        loaded = cpu.load()
    cpu.load.cache_clear()
    return loaded


def for_processor(name):
    return tuple(flag.replace("native", name) for flag in cpu._FLAGS)


@pytest.fixture
def fresh_load(monkeypatch, tmp_path):
    """`load`, as in a process and a cache folder that never compiled anything."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DSCHAT_CPU_KERNELS", raising=False)
    cpu.load.cache_clear()
    yield cpu.load
    cpu.load.cache_clear()


def drawn(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def exact(x):
    return x.numpy().astype(np.float64)


def assert_close(got, expected, tolerance=1e-6):
    """To ``tolerance`` of the largest number of each row."""
    largest = np.abs(expected).max(axis=-1, keepdims=True)
    assert (np.abs(exact(got) - expected) <= tolerance * largest).all()


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("with_added", [False, True])
@pytest.mark.parametrize(("layer_norm", "offset"), [(False, 0.0), (False, 1.0), (True, 1.0)])
def test_norms(kernels, size, with_added, layer_norm, offset):
    x, added = drawn(5, size) + 0.5, drawn(5, size, seed=1) if with_added else None
    weight, bias = drawn(size, seed=2) + 1, drawn(size, seed=3) + 2 if layer_norm else None
    total = exact(x) + (exact(added) if with_added else 0)
    centred = total - total.mean(-1, keepdims=True) if layer_norm else total
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-2)
    expected *= exact(weight) + offset
    got = kernels.add_norm(x, added, weight, bias, 1e-2, offset)
    assert_close(got, expected + (exact(bias) if layer_norm else 0), 2e-6)
    assert_close(x, total, 1e-7)


@pytest.mark.parametrize("size", WIDTHS)
def test_silu_mul(kernels, size):
    gate_up = drawn(3, 2 * size, scale=5.0)
    gate, up = np.split(exact(gate_up), 2, axis=1)
    expected = gate / (1 + np.exp(-gate)) * up
    got = exact(kernels.silu_mul(gate_up))
    assert (np.abs(got - expected) <= 2e-6 * np.abs(expected)).all()


def test_silu_at_the_ends(kernels):
    gate = torch.tensor([0.0, -0.0, 80.0, -80.0, 3e38, -3e38, float("inf"), float("nan")])
    got = kernels.silu_mul(torch.cat([gate, torch.ones(8)]).unsqueeze(0))[0]
    assert got[:3].tolist() == [0.0, 0.0, 80.0]
    assert got[3].item() == pytest.approx(-80 * np.exp(-80.0), rel=1e-5)
    assert got[4] == gate[4]
    assert -10 < got[5] <= 0
    assert got[6] == float("inf")
    assert got[7].isnan()


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize(
    ("part", "with_norms"), [(1.0, False), (0.5, False), (1.0, True), (0, True)]
)
def test_turned_heads(kernels, head_size, part, with_norms):
    num_heads, num_kv_heads, dim = 4, 2, int(head_size * part)
    heads = drawn(3, num_heads + 2 * num_kv_heads, head_size)
    positions = torch.tensor([7, 0, 3])
    angles = np.outer(np.arange(8), 0.3 ** np.arange(dim // 2))
    cos, sin = np.cos(angles), np.sin(angles)
    tables = (
        torch.tensor(np.concatenate([cos, cos], 1), dtype=torch.float32),
        torch.tensor(np.concatenate([-sin, sin], 1), dtype=torch.float32),
    )
    weights = (drawn(head_size, seed=1), drawn(head_size, seed=2))
    expected = exact(heads)
    if with_norms:
        for part_of, weight in ((slice(0, 4), weights[0]), (slice(4, 6), weights[1])):
            x = expected[:, part_of]
            norm = np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3)
            expected[:, part_of] = x / norm * (exact(weight) + 1)
    if dim:  # as complex numbers: the first half of the rotated part is real, the second imaginary
        x = expected[:, :6]
        turned = x[..., : dim // 2] + 1j * x[..., dim // 2 : dim]
        turned *= np.exp(1j * angles)[positions.numpy()][:, None]
        x[..., :dim] = np.concatenate([turned.real, turned.imag], axis=-1)
    kernels.norm_and_rotate(
        heads,
        num_heads,
        num_kv_heads,
        (*weights, 1e-3, 1.0) if with_norms else None,
        (positions, *tables) if dim else None,
    )
    assert_close(heads, expected)


# -- attention -------------------------------------------------------------------------------------


def expected_attention(q, keys, values, scale, window, slopes):
    """One row: q (H, D), keys and values (L, K, D), all float64 -> (H * D,)."""
    group = q.shape[0] // keys.shape[1]
    keys, values = (np.repeat(x, group, axis=1) for x in (keys, values))
    scores = np.einsum("hd,lhd->hl", q, keys) * scale
    distance = np.arange(len(keys)) - (len(keys) - 1)
    if slopes is not None:
        scores += exact(slopes)[:, None] * distance
    if window is not None:
        scores[:, distance <= -window] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hl,lhd->hd", weights, values).reshape(-1)


class Case:
    """A cache with history, and heads of the newest tokens, laid out on pages of any size."""

    def __init__(self, head_size, num_heads, num_kv_heads, lengths, page_size=None, rows=None):
        self.lengths = [lengths[r] for r in rows] if rows else lengths
        size = page_size or 200
        self.page_size, count = size, len(self.lengths)
        per_row = -(-200 // size)
        pages = torch.randperm(count * per_row, generator=torch.Generator().manual_seed(1))
        self.table = pages.view(count, per_row) if page_size else None
        self.cache = torch.zeros(count * per_row * size, 2 * num_kv_heads, head_size)
        history = drawn(len(lengths), 200, 2 * num_kv_heads, head_size, seed=2)
        heads = drawn(len(lengths), num_heads + 2 * num_kv_heads, head_size, seed=3, scale=2.0)
        self.history = history[rows] if rows else history
        self.heads = (heads[rows] if rows else heads).contiguous()
        for row, length in enumerate(self.lengths):
            for t in range(length - 1):
                self.cache[self.place(row, t)] = self.history[row, t]
            self.history[row, length - 1] = self.heads[row, num_heads:]
        self.slot_mapping = torch.tensor([self.place(r, n - 1) for r, n in enumerate(self.lengths)])

    def place(self, row, t):
        if self.table is None:
            return row * self.page_size + t
        page = int(self.table[row, t // self.page_size])
        return page * self.page_size + t % self.page_size

    def attend(self, kernels, window=None, slopes=None, scale=0.3):
        lengths = torch.tensor(self.lengths)
        run = cpu.DecodeAttention(
            kernels, lengths, self.slot_mapping, self.table, self.page_size, slopes
        )
        return run(self.heads, self.cache, window, scale)

    def expected(self, window=None, slopes=None, scale=0.3):
        num_kv_heads = self.cache.shape[1] // 2
        rows = []
        for row, length in enumerate(self.lengths):
            known = exact(self.history[row, :length])
            q = exact(self.heads[row, : self.heads.shape[1] - 2 * num_kv_heads])
            keys, values = known[:, :num_kv_heads], known[:, num_kv_heads:]
            rows.append(expected_attention(q, keys, values, scale, window, slopes))
        return np.stack(rows)


LENGTHS = [1, 2, 31, 32, 33, 64, 100, 197]


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_decode_attention(kernels, head_size, num_heads, num_kv_heads):
    case = Case(head_size, num_heads, num_kv_heads, LENGTHS)
    assert_close(case.attend(kernels), case.expected(), 2e-6)
    stored = case.cache[case.slot_mapping]
    assert torch.equal(stored, case.heads[:, num_heads:])


@pytest.mark.parametrize("page_size", [None, 1, 7, 16])
@pytest.mark.parametrize("window", [1, 5, 32, 33, 1000])
def test_windows_and_alibi(kernels, page_size, window):
    case = Case(20, 6, 3, LENGTHS, page_size)
    slopes = alibi_slopes(6)
    for chosen in (None, slopes):
        got = case.attend(kernels, window, chosen)
        assert_close(got, case.expected(window, chosen), 2e-6)


def test_scores_far_apart(kernels):
    """The newest key, the first one, or a middle one has all the weight."""
    case = Case(32, 4, 4, LENGTHS)
    for scale in (30.0, -30.0):
        # fp32 scores of this size are 1e-4 off themselves
        assert_close(case.attend(kernels, scale=scale), case.expected(scale=scale), 1e-3)


def test_a_row_does_not_depend_on_its_neighbours_nor_on_pages(kernels):
    whole = Case(80, 4, 2, LENGTHS).attend(kernels)
    for page_size in (1, 7, 16):
        assert torch.equal(Case(80, 4, 2, LENGTHS, page_size).attend(kernels), whole)
    for row in range(len(LENGTHS)):
        assert torch.equal(Case(80, 4, 2, LENGTHS, rows=[row]).attend(kernels)[0], whole[row])


def test_rows_of_one_sequence_on_several_threads(kernels, threads):
    """All of them are written before any thread reads."""
    rows, length = 40, 400
    heads, cache = drawn(rows, 12, 64), drawn(length, 8, 64, seed=1)
    lengths = torch.arange(length - rows + 1, length + 1)
    table = torch.zeros(rows, 1, dtype=torch.int64)
    results = []
    for count in (1, 2, 3):
        threads(count)
        own = cache.clone()
        attend = cpu.DecodeAttention(kernels, lengths, lengths - 1, table, length, None)
        results.append((attend(heads, own, None, 0.3), own))
    for out, own in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(own, results[0][1])


def test_table_with_wide_rows(kernels):
    case = Case(32, 2, 2, LENGTHS, page_size=16)
    whole = case.attend(kernels)
    wide = torch.full((len(LENGTHS), 50), -1)
    wide[:, : case.table.shape[1]] = case.table
    case.table = wide[:, : case.table.shape[1]]
    assert torch.equal(case.attend(kernels), whole)


# -- draws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.0])
@pytest.mark.parametrize("height", [-np.inf, -3.0, 2.0, 60.0, 300.0, 1e4])
@pytest.mark.parametrize(("known", "size"), [(1, 2), (50, 64), (1000, 1300), (130, 130)])
def test_rows_behind_the_tokenizer_ids_change_no_draw(kernels, known, size, height, temperature):
    """Whatever their logits, which count in the log-probs alone."""
    logits = drawn(40, size, scale=2.0)
    logits[:, known:] += height
    uniform = torch.linspace(0, 1 - 1e-9, len(logits)).double()
    ids, logprobs = kernels.draw(logits, temperature, uniform, known)
    scaled = exact(logits) / temperature
    best = scaled[:, :known].max(1, keepdims=True)
    cdf = np.exp(scaled[:, :known] - best).cumsum(1)
    place = exact(uniform)[:, None] * cdf[:, -1:]
    # Where a boundary is within a rounding of the number, either side of it is right.
    least, most = ((cdf <= place * (1 + side * 1e-5) - 1e-30).sum(1) for side in (-1, 1))
    assert ((least <= ids.numpy()) & (ids.numpy() <= most)).all()
    chosen = np.take_along_axis(scaled, ids.numpy()[:, None], 1)
    expected = chosen - np.logaddexp.reduce(scaled, 1, keepdims=True)
    np.testing.assert_allclose(logprobs.numpy(), expected[:, 0], rtol=3e-7, atol=2e-6)


# -- in the engine ---------------------------------------------------------------------------------


def test_attention_lets_other_threads_run(kernels):
    """Threads of a server work during a call; this one gives way nowhere else."""
    lengths, slots = torch.full((64,), 256), torch.arange(64) * 256
    attend = cpu.DecodeAttention(kernels, lengths, slots, None, 256, None)
    step, function = attend._step, attend._function
    step.num_heads, step.num_kv_heads, step.head_size = 4, 4, 64
    tensors = drawn(64, 12, 64), drawn(64 * 256, 8, 64), torch.empty(64, 256)
    args = ctypes.addressof(step), *(tensor.data_ptr() for tensor in tensors), 0, 0.1, 1
    may_run, ran = threading.Event(), []
    thread = threading.Thread(target=lambda: (may_run.wait(), ran.append(True)))
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # seconds
    try:
        may_run.set()
        for _ in range(2000):
            function(*args)
            if ran:
                break
        assert ran
    finally:
        sys.setswitchinterval(interval)
        thread.join()


@pytest.mark.parametrize(
    "name", ["bloom", "qwen3", *slow(["llama", "mistral", "gpt_neox", "opt_350m"])]
)
def test_engine_answers_as_without(kernels, module_of, name):
    sampling = SamplingParams(max_new_tokens=20, n=2, seed=3)
    with_kernels = engine(module_of(name)).generate(PROMPTS, sampling)
    with operators_only():
        without = engine(module_of(name)).generate(PROMPTS, sampling)
    assert with_kernels.token_ids == without.token_ids
    assert with_kernels.logprobs != without.logprobs  # they did run
    for a, b in zip(with_kernels.logprobs, without.logprobs, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


# -- compiling -------------------------------------------------------------------------------------


def libraries(folder):
    return sorted(p.name for p in (folder / "dschat").iterdir())


def test_switched_off(fresh_load, monkeypatch):
    monkeypatch.setenv("DSCHAT_CPU_KERNELS", "0")
    assert fresh_load() is None


def test_without_a_compiler(fresh_load, monkeypatch, module_of, caplog):
    monkeypatch.setenv("PATH", "")
    with caplog.at_level(logging.INFO, logger="dschat"):
        assert fresh_load() is None
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        "no C compiler (gcc or clang)"
    ]
    rollout = engine(module_of("llama")).generate([[5, 6]], SamplingParams(max_new_tokens=3))
    assert len(rollout.token_ids) == 1


def test_compiler_that_fails(fresh_load, monkeypatch, tmp_path, caplog):
    broken = tmp_path / "bin" / "cc"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\n[ $1 = --version ] || { echo no such option >&2; exit 1; }\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(broken.parent))
    assert fresh_load() is None
    assert libraries(tmp_path) == []
    assert warning(caplog) == (
        f"the C kernels cannot be used ({broken}: no such option): decoding on the CPU is slower"
    )


def warning(caplog):
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    return record.getMessage()


def test_cache_folder_that_cannot_be_written(fresh_load, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert fresh_load() is None
    assert "file" in warning(caplog)


@pytest.mark.slow
def test_compiled_once(kernels, fresh_load, monkeypatch, tmp_path):
    assert fresh_load() is not None
    (name,) = libraries(tmp_path)
    before = (tmp_path / "dschat" / name).stat().st_mtime_ns
    fresh_load.cache_clear()
    assert fresh_load() is not None
    assert (tmp_path / "dschat" / name).stat().st_mtime_ns == before


@pytest.mark.parametrize("damage", ["cut", "empty", "changed"])
@pytest.mark.slow
def test_damaged_library_is_compiled_again(kernels, fresh_load, tmp_path, damage):
    assert fresh_load() is not None
    (name,) = libraries(tmp_path)
    path = tmp_path / "dschat" / name
    data = path.read_bytes()
    bad = {"cut": data[:5000], "empty": b"", "changed": data[:5000] + b"x" + data[5001:]}[damage]
    path.unlink()  # NOTE: this process has the old one mapped
    path.write_bytes(bad)
    fresh_load.cache_clear()
    again = fresh_load()
    assert again.silu_mul(torch.tensor([[1.0, 2.0]])).item() == pytest.approx(2 / (1 + np.exp(-1)))
    assert libraries(tmp_path) == [name]


@pytest.mark.slow
def test_two_processes_at_once(kernels, tmp_path):
    code = "from dschat.inference.kernels import cpu as c; assert c.load() is not None"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    environment.pop("DSCHAT_CPU_KERNELS", None)
    both = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert len(libraries(tmp_path)) == 1
