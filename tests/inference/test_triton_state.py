"""Triton kernels that read, embed and advance the rows of a step, against torch's version."""

import copy

import pytest
import torch
from triton_tensors import POISON, assert_written, drawn, exact, poisoned

from dschat.inference import SamplingParams
from dschat.inference.kernels.cuda import Field
from dschat.inference.requests.decode_state import RING, DecodeState
from dschat.inference.requests.sampler import SamplingKind

CPU = torch.device("cpu")
PAGE, TRASH = 4, 31
SIZES = [(1, 1), (5, 8), (8, 8), (24, 33)]  # rows of the step, of the state


def state_of(num_rows, seed=0):
    """Rows in the middle of answers, some dead, some at their last token."""
    generator = torch.Generator().manual_seed(seed)
    state = DecodeState(num_rows, 9, PAGE, TRASH, CPU)

    def random(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    f = state.fields
    state.table.copy_(random(0, TRASH, num_rows, 9))
    f[Field.TOKEN], f[Field.POSITION] = random(0, 50, num_rows), random(3, 36, num_rows)
    f[Field.ALIVE] = random(0, 4, num_rows) > 0
    f[Field.ORIGIN] = f[Field.POSITION] - random(0, 3, num_rows)
    f[Field.LAST] = f[Field.POSITION] + random(0, 3, num_rows)
    f[Field.YOUNGEST_STOP] = f[Field.POSITION] + random(-1, 2, num_rows)
    f[Field.PROMPT], f[Field.SAMPLE] = random(0, 10**12, num_rows), random(0, 5, num_rows)
    f[Field.ALIVE, 0] = 1
    return state


def parts_of(state):
    """What a step changes."""
    return state.fields, state.ring, state.step


@pytest.mark.parametrize(("size", "num_rows"), SIZES)
def test_rows_are_read(interpreted, size, num_rows):
    state = state_of(num_rows)
    rows = state.rows(size, 9)
    out = poisoned(6, size, dtype=torch.int64), torch.zeros(size, dtype=torch.bool)
    args = state.fields, state.table, PAGE, TRASH, *out
    *_, numbers, short = interpreted("run", "rows.plan_read", args)
    assert torch.equal(numbers[:3], torch.stack([rows.positions, rows.lengths, rows.slots]))
    assert torch.equal(numbers[3:], torch.stack(rows.key))
    assert torch.equal(short, rows.too_short)


@pytest.mark.parametrize("step", [0, RING - 1, 3 * RING + 5])
@pytest.mark.parametrize("stops", [[], [3, 7]])
@pytest.mark.parametrize(("size", "num_rows"), SIZES)
def test_rows_advance(interpreted, size, num_rows, stops, step):
    state = state_of(num_rows)
    _, ring, steps = parts_of(state)
    ring.fill_(POISON)
    steps.fill_(step)
    kind = SamplingKind(SamplingParams(), False, 16 * bool(stops), False)
    state.sampling.prepare(kind)
    for row in range(num_rows if stops else 0):  # other rows have others of them
        own = [t for t in stops if row % 2 == 0 or t != row]
        state.sampling.stops(kind)[row, : len(own)] = torch.tensor(own)
    tokens, logprobs = torch.arange(size) % 50, drawn(size)
    twin = copy.deepcopy(parts_of(state))
    state.advance(tokens, logprobs, kind)
    args = tokens, logprobs, *twin, state.sampling.stops(kind)
    got = interpreted("run", "rows.plan_advance", args)[2:5]
    for mine, expected in zip(got, parts_of(state), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [None, 0, 2])
@pytest.mark.parametrize("size", [48, 1100])
def test_embeddings(interpreted, size, offset, dtype):
    tokens, positions = torch.tensor([5, 0, 5]), torch.tensor([7, 0, 30])
    table, of_positions = drawn(9, size).to(dtype), drawn(40, size).to(dtype)
    expected = table[tokens]
    given = None, None
    if offset is not None:
        expected = expected + of_positions[positions + offset]
        given = positions, of_positions
    args = tokens, table, *given, offset or 0, poisoned(3, size, dtype=dtype)
    *_, out = interpreted("run", "rows.plan_embed", args)
    assert_written(out, exact(expected))
