"""Triton's norm, product and draw, interpreted, against float64 and today's sampling."""

from math import erf

import numpy as np
import pytest
import torch
from triton_tensors import POISON, assert_written, drawn, exact, poisoned

from dschat.inference import SamplingParams
from dschat.inference.kernels.cuda import workspace
from dschat.inference.sampling import sample, uniforms

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CPU = torch.device("cpu")


# -- sum and norm ----------------------------------------------------------------------------------


def check_norm(interpreted, size, dtype, with_added=True, layer_norm=True, offset=0.0):
    h = poisoned(5, size, dtype=dtype)
    h.copy_(drawn(5, size) + 0.5)
    added = drawn(5, size, seed=1, dtype=dtype) if with_added else None
    weight = drawn(size, seed=2, dtype=dtype) + 1
    bias = drawn(size, seed=3, dtype=dtype) + 2 if layer_norm else None
    total = exact(h) + (exact(added) if with_added else 0)
    centred = total - total.mean(-1, keepdims=True) if layer_norm else total
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-2)
    expected *= exact(weight) + offset
    expected += exact(bias) if layer_norm else 0
    args = (h, added, weight, bias, 1e-2, poisoned(5, size, dtype=dtype), offset)
    stored, *_, out, _ = interpreted("run", "add_norm", args)
    assert_written(stored, total)
    assert_written(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 100, 768])
def test_norms(interpreted, size, dtype):
    check_norm(interpreted, size, dtype)
    check_norm(interpreted, size, dtype, with_added=False, layer_norm=False, offset=1.0)


# -- products --------------------------------------------------------------------------------------

ACTIVATIONS = {
    "": lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "silu": lambda z: z / (1 + np.exp(-z)),
    "gelu": lambda z: z * (1 + np.vectorize(erf)(z / np.sqrt(2))) / 2,
    "gelu_new": lambda z: z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))) / 2,
}


def check_product(interpreted, rows, outputs, inputs, activation, tiles, **options):
    dtype = options.get("dtype", torch.float32)
    gated = options.get("gated", False)
    height = 2 * outputs if gated else outputs
    x, weight = drawn(rows, inputs, dtype=dtype), drawn(height, inputs, seed=1, dtype=dtype)
    if options.get("transposed"):
        weight = weight.T.contiguous().T
    bias = drawn(height, seed=2, dtype=dtype) if options.get("bias", True) else None
    z = exact(x) @ exact(weight).T + (0 if bias is None else exact(bias))
    side, rank = None, options.get("rank", 0)
    if rank:
        side = drawn(rows, rank, seed=3, dtype=dtype), drawn(height, rank, seed=4, dtype=dtype)
        z += exact(side[0]) @ exact(side[1]).T
    gate_first = options.get("gate_first", True)
    halves = (z[:, :outputs], z[:, outputs:])[:: 1 if gate_first else -1]
    expected = (
        ACTIVATIONS[activation](halves[0]) * halves[1] if gated else ACTIVATIONS[activation](z)
    )
    space = workspace(CPU, 1 << 16)
    y = poisoned(rows, outputs, dtype=dtype)
    tiles = interpreted("attribute", "skinny_linear", "Config", *tiles)
    args = (x, weight, bias, activation, gated, y, space, tiles, gate_first, side)
    *_, y, space, _, _, _ = interpreted("run", "skinny_linear", args)
    assert_written(y, expected)
    assert not space.counters.any()
    return y


PRODUCTS = {
    "one row": (1, 64, 256, "", (32, 128, 1, 4), {}),
    "ragged": (8, 40, 72, "relu", (32, 64, 1, 4), {}),
    "split": (15, 33, 200, "gelu", (32, 32, 4, 4), {}),
    "gated": (3, 40, 96, "silu", (32, 64, 2, 4), {"gated": True}),
    "transposed": (2, 40, 72, "gelu_new", (32, 64, 2, 4), {"transposed": True}),
    "gated, transposed": (
        *(3, 40, 96, "silu", (32, 64, 1, 4)),
        {"gated": True, "transposed": True},
    ),
    "gate second": (3, 40, 96, "silu", (32, 64, 2, 4), {"gated": True, "gate_first": False}),
    "17 rows": (17, 40, 72, "relu", (32, 64, 2, 4), {}),
    "32 rows, gated": (32, 40, 96, "silu", (32, 64, 1, 4), {"gated": True}),
    "adapter": (3, 40, 96, "", (32, 64, 2, 4), {"rank": 5}),
    "adapter, gated": (20, 40, 96, "silu", (32, 64, 1, 4), {"gated": True, "rank": 70}),
    "half": (16, 64, 128, "gelu_new", (64, 128, 1, 4), {"dtype": torch.float16, "bias": False}),
    "bf16": (16, 70, 128, "silu", (32, 64, 2, 4), {"dtype": torch.bfloat16, "gated": True}),
}


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_new"])
@pytest.mark.parametrize(("gate_first", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_gates(interpreted, activation, gate_first, dtype):
    inner, out = drawn(3, 2 * 70, dtype=dtype), poisoned(3, 70, dtype=dtype)
    gate, up = np.split(exact(inner), 2, axis=1)[:: 1 if gate_first else -1]
    _, out, *_ = interpreted("run", "skinny_linear.plan_gate", (inner, out, activation, gate_first))
    assert_written(out, ACTIVATIONS[activation](gate) * up)


@pytest.mark.parametrize("case", PRODUCTS.values(), ids=PRODUCTS)
def test_products(interpreted, case):
    *shape, options = case
    check_product(interpreted, *shape, **options)


@pytest.mark.parametrize("shape", [(2048, 2048), (2048, 8192), (6144, 2048), (4096, 11008)])
def test_every_multiprocessor_has_work(interpreted, shape):
    outputs, inputs = shape
    sizes = outputs, inputs, False, 2, 227 * 1024
    tile, _, splits, _ = interpreted("attribute", "skinny_linear", "config", *sizes)
    assert 96 <= -(-outputs // tile) * splits <= 264  # of an H200's 132: two on each at most


# -- draws -----------------------------------------------------------------------------------------


def draw(interpreted, logits, samplings, forbidden, num_tokens):
    """Ids and log-probs of rows of ``samplings``, and those of `sample` for each row alone.

    ``forbidden``: rows (R,), and ids of each (R, K).
    """
    rows, vocab = logits.shape
    index = torch.arange(rows)
    counters = torch.stack([7 * index, index % 2, index + 3])
    numbers = [
        (s.logprob_temperature, s.top_p if s.top_p < 1 else np.inf, s.min_p) for s in samplings
    ]
    integers = [(s.seed, s.temperature == 0, s.top_k or 1 << 30) for s in samplings]
    columns = torch.tensor(numbers, dtype=torch.float64), torch.tensor(integers)
    args = (
        *(logits, *(column.T.contiguous() for column in columns), counters),
        *(any(s.temperature == 0 for s in samplings), any(s.temperature > 0 for s in samplings)),
        *(any(s.top_k > 0 for s in samplings), any(s.top_p < 1 for s in samplings)),
        *(any(s.min_p > 0 for s in samplings), *(forbidden or (None, None)), num_tokens),
        torch.full((rows, 4, -(-vocab // 2048)), POISON),
        poisoned(rows, 2, dtype=torch.int64),
        *(poisoned(rows, dtype=torch.int64), poisoned(rows)),
    )
    *_, ids, logprobs = interpreted("run", "draw", args)
    expected = []
    for row, sampling in enumerate(samplings):
        uniform = uniforms(sampling.seed, *counters[:, row : row + 1])
        banned = forbidden and (forbidden[0][row : row + 1], forbidden[1][row])
        expected.append(sample(logits[row : row + 1], sampling, uniform, banned, num_tokens))
    return ids, logprobs, *map(torch.cat, zip(*expected, strict=True))


def check_draw(*args):
    ids, logprobs, expected_ids, expected = draw(*args)
    assert_written(ids, exact(expected_ids), torch.float32)
    assert torch.equal(ids, expected_ids)
    assert_written(logprobs, exact(expected), torch.float32)
    return ids


DRAWS = [
    (50, 50, 1.0, False, torch.float32),
    (2049, 2049, 0.7, True, torch.bfloat16),
    (4096, 2048, 1.0, True, torch.float16),  # the last block is padding
    (4100, 2060, 0.0, True, torch.float32),
]


@pytest.mark.parametrize(("vocab", "num_tokens", "temperature", "forbids", "dtype"), DRAWS)
def test_draws(interpreted, vocab, num_tokens, temperature, forbids, dtype):
    logits = 3 * drawn(6, vocab)
    logits[:, num_tokens:] += 30  # padding of the head would win
    forbidden = None
    if forbids:
        logits[:, 5] += 30
        forbidden = torch.arange(6) % 2 == 0, torch.tensor([[5, 9, -1]] * 6)
    params = SamplingParams(temperature=temperature, seed=-(1 << 40) - 17)
    ids = check_draw(interpreted, logits.to(dtype), [params] * 6, forbidden, num_tokens)
    assert not temperature or len(set(ids.tolist())) > 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("vocab", [50257, 152064])
def test_draws_from_whole_vocabularies(interpreted, vocab, seed):
    logits = 3 * drawn(4, vocab, seed=seed)
    check_draw(interpreted, logits, [SamplingParams(seed=seed)] * 4, None, vocab - 7)


SAMPLINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 1.7, "top_k": 3},
    {"top_p": 0.4},
    {"temperature": 0.6, "min_p": 0.2},
    {"top_k": 40, "top_p": 0.6, "min_p": 0.02},
]


def test_rows_of_different_sampling(interpreted):
    """Rows of different sampling in one draw: those of each alone. The stop ids differ, too."""
    order = torch.randperm(2100, generator=torch.Generator().manual_seed(3))
    logits = (order.expand(12, 2100) / 250 - 4).clone()
    samplings = [SamplingParams(seed=10 + i, **SAMPLINGS[i % 6]) for i in range(12)]
    stops = logits.topk(12).indices[torch.arange(12), torch.arange(12)].unsqueeze(1)
    check_draw(interpreted, logits, samplings, (torch.arange(12) % 4 > 0, stops), 2098)


def test_ties_and_rows_without_choice(interpreted):
    logits = torch.full((3, 3000), -torch.inf)
    logits[0, 2500] = 1.0  # alone, past the first block
    logits[1, [7, 2100]] = 4.0  # equal
    logits[2] = 0.5
    for temperature in (0.0, 1.0):
        params = [SamplingParams(temperature=temperature)] * 3
        ids, logprobs, expected, _ = draw(interpreted, logits, params, None, 3000)
        assert torch.equal(ids, expected)
        assert ids[0] == 2500
        np.testing.assert_allclose(logprobs, -np.log([1, 2, 3000]), rtol=1e-6, atol=1e-7)
        assert temperature or ids[1] == 7


ALL = {"top_k": 700, "top_p": 0.6, "min_p": 0.1, "temperature": 1.5}


@pytest.mark.parametrize(
    ("vocab", "dtype", "options"),
    [
        (60, torch.float32, {"top_k": 5}),
        (2100, torch.float16, {"top_p": 0.3}),
        (2100, torch.float32, {"min_p": 0.4, "temperature": 0.7}),
        (2100, torch.float16, ALL),
        (60, torch.bfloat16, {"top_k": 1000, "top_p": 0.9, "temperature": 4.0}),
    ],
    ids=str,
)
def test_draws_with_truncation(interpreted, vocab, dtype, options):
    """From logits that are all different."""
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(vocab))
    logits = (order.expand(4, vocab) / (vocab / 8) - 4).to(dtype)
    assert len(logits[0].unique()) == vocab
    forbidden = torch.arange(4) % 2 == 0, logits.topk(3).indices
    check_draw(interpreted, logits, [SamplingParams(seed=5, **options)] * 4, forbidden, vocab - 2)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 4}, {1, 4, 0, 2}),  # the first two of the four equal ones
        ({"top_p": 0.5}, {1, 4}),
        ({"top_p": 0.68, "top_k": 5}, {1, 4, 0}),  # 2.04 of 3
        ({"min_p": 0.3}, {1, 4, 0, 2, 3, 5}),
        ({"min_p": 0.4}, {1, 4}),
    ],
    ids=str,
)
def test_of_equal_logits_the_first_are_kept(interpreted, options, kept):
    """Two weights of 1 and four of a third; the last token is padding."""
    logits = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 3.0]) * np.log(3)
    logits = logits.expand(32, 7).bfloat16().contiguous()
    ids = draw(interpreted, logits, [SamplingParams(seed=2, **options)] * 32, None, 6)[0]
    assert set(ids.tolist()) == kept


@pytest.mark.parametrize("seed", [0, 17, -4, 2**31 * 1_000_003 + 5])
def test_random_numbers_are_the_same(interpreted, seed):
    counters = torch.tensor([[0, 3, 10**9, 3], [0, 1, 2, 0], [0, 4, 77, 2**20]])
    assert torch.equal(
        interpreted("triton_uniforms.uniforms", seed, counters), uniforms(seed, *counters)
    )


# -- operators -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_operators_state_what_they_change(interpreted):
    space = workspace(CPU, 1 << 14)
    scratch = space.partials, space.counters
    x, ones = drawn(4, 32), torch.ones(32)
    one = torch.ones(1, dtype=torch.float64)
    integers, fields = (torch.ones(n, 4, dtype=torch.int64) for n in (3, 8))
    rows = torch.arange(4)
    kv = drawn(8, 2, 16), integers[0], rows, rows.view(4, 1), 2, None, None, None, 0.25, None, one
    norms = None, None, 0.0, 0.0, None, None, False, None
    operands = {
        "add_norm": (x, x + 1, ones, ones, 1e-5),
        "gate": (x, "silu", True),
        "choose_experts": (x, 3, True),
        "experts": (
            *(x, integers[:2].T.contiguous(), drawn(4, 2), drawn(2, 12, 32), None),
            *(drawn(2, 32, 6), None, "halves", "silu", 0.0, 0.0),
        ),
        "skinny_linear": (
            *(x, drawn(6, 32), None, "silu", True, False, *scratch, drawn(2, 32), drawn(6, 2)),
        ),
        "draw": (
            *(x, one.expand(3, 4).contiguous() / 2, integers, integers),
            *(True, True, True, True, True, None, None, 30),
        ),
        "read_rows": (fields, fields.T.contiguous(), 3, 4, 9),
        "embed": (integers[0, :3], drawn(5, 32), integers[0, :3], drawn(5, 32), 2),
        "advance_rows": (
            *(integers[0, :3].clone(), drawn(3), fields, drawn(4, 2, 1, 4).double()),
            *(integers[0, :1].clone(), integers.T.contiguous()),
        ),
        "paged_decode": (drawn(4, 3, 16), [0, 1, 2, 1], *kv, *norms, *scratch),
    }
    for name, args in operands.items():
        checks = interpreted("check_operator", name, args)
        assert set(checks.values()) == {"SUCCESS"}, (name, checks)
