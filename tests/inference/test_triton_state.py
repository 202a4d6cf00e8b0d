"""Triton kernels that read, embed and advance the rows of a step, against torch's version."""

import copy

import pytest
import torch
from triton_tensors import POISON, assert_written, drawn, exact, poisoned

from dschat.inference import SamplingParams
from dschat.inference.decode_state import RING, DecodeState
from dschat.inference.kernels.cuda.operands import Field
from dschat.inference.sampler import SamplingKind

CPU = torch.device("cpu")
PAGE, TRASH = 4, 31
SIZES = [(1, 1), (5, 8), (8, 8), (24, 33)]  # rows of the step, of the state


def state_of(num_rows, seed=0):
    """Rows in the middle of answers, some dead, some at their last token."""
    generator = torch.Generator().manual_seed(seed)
    state = DecodeState(num_rows, 9, PAGE, TRASH, CPU)

    def random(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    state._table.copy_(random(0, TRASH, num_rows, 9))
    f = state._fields
    f[Field.TOKEN], f[Field.POSITION] = random(0, 50, num_rows), random(3, 36, num_rows)
    f[Field.ALIVE] = random(0, 4, num_rows) > 0
    f[Field.ORIGIN] = f[Field.POSITION] - random(0, 3, num_rows)
    f[Field.LAST] = f[Field.POSITION] + random(0, 3, num_rows)
    f[Field.YOUNGEST_STOP] = f[Field.POSITION] + random(-1, 2, num_rows)
    f[Field.PROMPT], f[Field.SAMPLE] = random(0, 10**12, num_rows), random(0, 5, num_rows)
    f[Field.ALIVE, 0] = 1
    return state


def check_read(interpreted, size, num_rows, fault=None):
    state = state_of(num_rows)
    rows = state.rows(size, 9, None)
    out = poisoned(6, size, dtype=torch.int64), torch.zeros(size, dtype=torch.bool)
    args = state._fields, state._table, PAGE, TRASH, *out
    *_, numbers, short = interpreted("run", "read_rows", args, fault)
    assert torch.equal(numbers[:3], torch.stack([rows.positions, rows.lengths, rows.slots]))
    assert torch.equal(numbers[3:], torch.stack(rows.key))
    assert torch.equal(short, rows.too_short)


@pytest.mark.parametrize(("size", "num_rows"), SIZES)
def test_rows_are_read(interpreted, size, num_rows):
    check_read(interpreted, size, num_rows)


READ_FAULTS = {
    "dead rows write to their pages": ("inside & (alive != 0)", "inside"),
    "dead rows have keys": ("position = drawn_at * alive", "position = drawn_at"),
    "another draw": ("drawn_at - origin", "position - origin"),
    "stops too early": ("drawn_at < youngest", "drawn_at <= youngest"),
    "another sample": ("_SAMPLE * stride", "_PROMPT * stride"),
}


@pytest.mark.parametrize("fault", READ_FAULTS.values(), ids=READ_FAULTS)
def test_faults_in_reading_are_found(interpreted, fault):
    with pytest.raises(AssertionError):
        check_read(interpreted, 24, 33, fault)


def check_advance(interpreted, size, num_rows, stops, step, fault=None):
    state = state_of(num_rows)
    state._ring.fill_(POISON)
    state._step.fill_(step)
    kind = SamplingKind(SamplingParams(), False, 16 * bool(stops), False)
    if stops:  # other rows have others of them
        of_rows = torch.full((num_rows, 16), -1)
        for row in range(num_rows):
            own = [t for t in stops if row % 2 == 0 or t != row]
            of_rows[row, : len(own)] = torch.tensor(own)
        state._sampling._stops[16] = of_rows
    tokens, logprobs = torch.arange(size) % 50, drawn(size)
    twin = copy.deepcopy([state._fields, state._ring, state._step])
    state.advance(tokens, logprobs, kind)
    args = tokens, logprobs, *twin, state._sampling.stops(kind)
    got = interpreted("run", "advance_rows", args, fault)[2:5]
    for mine, expected in zip(got, (state._fields, state._ring, state._step), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("step", [0, RING - 1, 3 * RING + 5])
@pytest.mark.parametrize("stops", [[], [3, 7]])
@pytest.mark.parametrize(("size", "num_rows"), SIZES)
def test_rows_advance(interpreted, size, num_rows, stops, step):
    check_advance(interpreted, size, num_rows, stops, step)


ADVANCE_FAULTS = {
    "one token too many": ("position < last", "position <= last"),
    "stops go on": ("tl.where(token == stop, 0, alive)", "alive"),
    "stops of the first row": ("row * NUM_STOPS + i", "row * 0 + i"),
    "ring turns early": ("(step % STEPS)", "(step % 64)"),
    "all rows move": ("position + alive", "position + 1"),
    "steps are not counted": ("step + 1", "step"),
}


@pytest.mark.parametrize("fault", ADVANCE_FAULTS.values(), ids=ADVANCE_FAULTS)
def test_faults_in_advancing_are_found(interpreted, fault):
    with pytest.raises(AssertionError):
        check_advance(interpreted, 24, 33, list(range(12)), RING + 70, fault)


def check_embed(interpreted, size, offset, dtype, fault=None):
    tokens, positions = torch.tensor([5, 0, 5]), torch.tensor([7, 0, 30])
    table, of_positions = drawn(9, size).to(dtype), drawn(40, size).to(dtype)
    expected = table[tokens]
    given = None, None
    if offset is not None:
        expected = expected + of_positions[positions + offset]
        given = positions, of_positions
    args = tokens, table, *given, offset or 0, poisoned(3, size, dtype=dtype)
    *_, out = interpreted("run", "embed", args, fault)
    assert_written(out, exact(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [None, 0, 2])
@pytest.mark.parametrize("size", [48, 1100])
def test_embeddings(interpreted, size, offset, dtype):
    check_embed(interpreted, size, offset, dtype)


EMBED_FAULTS = {
    "offset forgotten": ("+ OFFSET", ""),
    "first block only": ("tl.program_id(1) * BLOCK + ", ""),
    "tokens for positions": ("tl.load(positions_ptr + row)", "tl.load(tokens_ptr + row)"),
}


@pytest.mark.parametrize("fault", EMBED_FAULTS.values(), ids=EMBED_FAULTS)
def test_faults_in_embeddings_are_found(interpreted, fault):
    with pytest.raises(AssertionError):
        check_embed(interpreted, 1100, 2, torch.float32, fault)
