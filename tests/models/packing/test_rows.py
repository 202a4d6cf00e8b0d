"""Packed rows: columns, targets and positions by hand; a batch moves to a device in one copy."""

from dataclasses import dataclass, is_dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dschat.models.packing import PackedRows, Segments, pack, varlen

# Three ids, so that prompts are often equal; 0 is also the padding.
ROW = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@st.composite
def packed_input(draw):
    """Rows, the columns read of each (any order, repeated, none) and the lengths of prompts."""
    rows = draw(st.lists(ROW, max_size=7))
    reads = [draw(st.lists(st.integers(0, len(row) - 1), max_size=5)) for row in rows]
    prefixes = [draw(st.integers(0, len(row))) for row in rows]
    return rows, reads, draw(st.sampled_from([None, prefixes]))


def tokens_before(segments):
    """Of each token of the stream, the places of its row before it: from the definition."""
    before, end = [], 0
    for prefix, answers in segments.groups:
        start = end
        for read, length in ((0, prefix), *((prefix, length) for length in answers)):
            shared = [*range(start, start + read)]
            before += [shared + [*range(end, end + i)] for i in range(length)]
            end += length
    return before


def check_columns(rows, packed):
    """``packed`` reads every column of ``rows``: after the tokens of its row, at its position,
    whatever else is in the stream.
    """
    ids, positions = packed.input_ids, packed.position_ids
    before, columns = tokens_before(packed.segments), iter(packed.columns.tolist())
    assert len(before) == len(ids) == packed.num_tokens
    assert len(packed.columns) == sum(map(len, rows))
    for row in rows:
        for i, column in zip(range(len(row)), columns, strict=False):
            assert [*ids[before[column]].tolist(), int(ids[column])] == row[: i + 1]
            assert positions[column] == i
    assert packed.segments.longest == max(map(len, rows), default=1)
    return before


@given(packed_input())
def test_columns_are_those_of_their_rows_and_keep_their_order(case):
    rows, reads, prefixes = case
    packed = pack(rows, reads, prefixes)
    whole = pack(rows, [range(len(row)) for row in rows], prefixes)
    check_columns(rows, whole)
    assert torch.equal(packed.input_ids, whole.input_ids)
    starts = np.cumsum([0, *map(len, rows)])
    places = [starts[i] + c for i, columns in enumerate(reads) for c in columns]
    assert packed.columns.tolist() == whole.columns[places].tolist()
    assert packed.row_of.tolist() == [i for i, columns in enumerate(reads) for _ in columns]
    after = [[*row[1:], 0][c] for row, columns in zip(rows, reads, strict=True) for c in columns]
    assert packed.targets.tolist() == after


@given(packed_input())
def test_padded_rows_are_the_same_rows(case):
    rows, reads, prefixes = case
    packed = pack(rows, reads, prefixes)
    width = max(map(len, rows), default=1)
    padded = [row + [0] * (width - len(row)) for row in rows] or [[0]]
    assert packed.padded_ids.tolist() == padded
    flat = packed.padded_columns.tolist()
    assert flat == [i * width + c for i, columns in enumerate(reads) for c in columns]


@given(packed_input())
def test_prompts_are_shared_where_they_can_be(case):
    """As many tokens as there are distinct prompts and answers; nothing else is left out."""
    rows, reads, prefixes = case
    tokens, seen = 0, set()
    for row, prefix in zip(rows, prefixes or [0] * len(rows), strict=True):
        prompt = tuple(row[:prefix]) if prefix < len(row) else ()
        tokens += len(row) - (prefix if prompt in seen else 0)
        seen |= {prompt} - {()}
    assert pack(rows, reads, prefixes).num_tokens == (tokens if rows else 1)


@given(packed_input())
def test_segments_cover_the_stream(case):
    segments = pack(*case).segments
    lengths = [n for prefix, answers in segments.groups for n in (prefix, *answers)]
    assert min(lengths) > 0  # kernels take no empty segment
    assert [end - start for start, end in segments.pieces] == lengths
    assert [start for start, _ in segments.pieces] == [0, *np.cumsum(lengths)[:-1]]
    groups = [(prefix, sum(answers)) for prefix, answers in segments.groups if answers]
    assert [(b - a, d - c) for (a, b), (c, d) in segments.shared] == groups
    assert all(b == c for (_, b), (c, _) in segments.shared)


def test_a_group_by_hand():
    rows = [[5, 6, 7, 8], [9], [5, 6, 4], [5, 6, 7, 8]]
    packed = pack(rows, [[1, 2], [0], [0, 1, 2], [3]], [2, 0, 2, 2])
    assert packed.segments == Segments(((2, (2, 1, 2)), (1, ())))
    assert packed.input_ids.tolist() == [5, 6, 7, 8, 4, 7, 8, 9]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 2, 2, 3, 0]
    assert packed.columns.tolist() == [1, 2, 7, 0, 1, 4, 6]
    assert packed.targets.tolist() == [7, 8, 0, 6, 4, 0, 0]
    assert packed.row_of.tolist() == [0, 0, 1, 2, 2, 2, 3]
    assert packed.segments.pieces == [(0, 2), (2, 4), (4, 5), (5, 7), (7, 8)]
    assert packed.segments.shared == [((0, 2), (2, 7))]
    assert packed.segments.longest == 4


def test_prompts_of_one_row_or_of_whole_rows_are_not_shared():
    alone = pack([[1, 2, 3], [1, 3, 3]], [[0], [0]], [2, 2])
    whole = pack([[1, 2], [1, 2]], [[0], [0]], [2, 2])
    empty = pack([[1, 2], [1, 2]], [[0], [0]], [0, 0])
    assert alone.segments.groups == ((3, ()), (3, ()))
    assert whole.segments.groups == empty.segments.groups == ((2, ()), (2, ()))


def check_row_table(segments, before):
    """Each token is read from a row that begins with the tokens ``before`` it."""
    for alike in (True, False):
        table = segments.rows_on(torch.device("cpu"), alike)
        rows = [row.tolist() for batch in table.batches for row in batch]
        starts = np.cumsum([0, *map(len, rows)])
        for token, place in enumerate(table.places.tolist()):
            row = int(np.searchsorted(starts, place, side="right")) - 1
            assert rows[row][: place - starts[row] + 1] == [*before[token], token]
        assert alike or len(table.batches) == 1


@given(packed_input())
def test_row_tables_have_each_token_behind_its_row(case):
    rows, _, prefixes = case
    packed = pack(rows, [range(len(row)) for row in rows], prefixes)
    check_row_table(packed.segments, tokens_before(packed.segments))


@pytest.mark.parametrize("prefixes", [None, []])
def test_no_rows_are_one_token_of_which_nothing_is_read(prefixes):
    packed = pack([], [], prefixes)
    assert packed.input_ids.tolist() == [0]
    assert packed.padded_ids.tolist() == [[0]]
    assert packed.segments.groups == ((1, ()),)
    for tensor in (packed.columns, packed.targets, packed.row_of, packed.padded_columns):
        assert tensor.tolist() == []
        assert tensor.dtype == torch.int64


@pytest.mark.parametrize("made", [list, np.array, lambda row: torch.tensor(row, dtype=torch.int32)])
def test_rows_of_any_kind(made):
    packed = pack([made([3, 4, 5]), made([3, 4])], [range(2), np.array([1])], [1, 1])
    assert packed.input_ids.tolist() == [3, 4, 5, 4]
    assert packed.targets.tolist() == [4, 5, 0]
    tensors = [v for v in vars(packed).values() if isinstance(v, torch.Tensor)]
    assert {tensor.dtype for tensor in tensors} == {torch.int64}


@dataclass
class Batch:
    rows: PackedRows
    scores: torch.Tensor
    mask: torch.Tensor
    nothing: torch.Tensor | None = None
    name: str = "batch"


def batch():
    rows = pack([[1, 2, 3], [1, 2], [4]], [[0, 1], [], [0]], [1, 1, 0])
    return Batch(rows, torch.rand(3, 5)[:, 1:4], torch.tensor([True, False, True]))


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = (
        value if isinstance(value, tuple) else vars(value).values() if is_dataclass(value) else ()
    )
    return [tensor for part in parts for tensor in tensors_of(part)]


def test_a_batch_moves_in_one_copy(monkeypatch):
    monkeypatch.setattr(varlen, "_is_on", lambda tensor, device: False)
    original = batch()
    expected = tensors_of(original)
    moved = varlen.to_device(original, "cpu")
    parts = tensors_of(moved)
    assert len(parts) == 7 + 2 + 4 + 2  # rows, table of pieces and of shared prompts, the batch's
    for part, tensor in zip(parts, expected, strict=True):
        assert part.dtype == tensor.dtype
        assert torch.equal(part, tensor)
        assert part.data_ptr() % 16 == 0
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert (moved.nothing, moved.name) == (None, "batch")
    assert moved.rows.segments == original.rows.segments
    assert moved.rows.num_rows == 3


def test_what_is_there_already_is_not_copied():
    original = batch()
    assert varlen.to_device(original, torch.device("cpu")) is original
    on_meta = varlen.to_device(original, "meta")
    assert all(tensor.is_meta for tensor in tensors_of(on_meta))
    assert not any(tensor.is_meta for tensor in tensors_of(original))
    assert varlen.to_device(on_meta, "meta") is on_meta


@given(
    st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(1, 20), max_size=6)), max_size=12),
    st.sampled_from([0, 10, 500, 5000]),
)
def test_batches_hold_every_sequence_once(groups, most):
    """Each with its own keys, in batches of at most ``most`` tokens."""
    segments = Segments(tuple((prefix, tuple(answers)) for prefix, answers in groups))
    found = {True: [], False: []}
    for batch in segments.batches(most):
        if isinstance(batch.queries, slice):
            bounds = [(x.start, x.stop) for x in (batch.queries, batch.keys)]
            found[batch.is_causal].append(tuple(bounds))
            continue
        assert batch.queries.numel() <= most
        for places in zip(batch.queries.tolist(), batch.keys.tolist(), strict=True):
            assert all(x == [*range(x[0], x[-1] + 1)] for x in places)
            found[batch.is_causal].append(tuple((x[0], x[-1] + 1) for x in places))
    assert sorted(found[True]) == [(piece, piece) for piece in segments.pieces]
    assert sorted(found[False]) == [(answers, prefix) for prefix, answers in segments.shared]


def test_short_sequences_of_equal_length_are_one_batch():
    segments = Segments(((10, (6, 7, 7, 8, 6, 6, 7, 8)),) * 32)
    kinds = [batch.queries.shape for batch in segments.batches(1 << 13) if batch.is_causal]
    assert kinds == [(32, 10), (96, 6), (96, 7), (64, 8)]
    assert len(segments.batches(0)) == 32 * 9 + 32
