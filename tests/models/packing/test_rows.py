"""Packed rows: every row can be rebuilt from the stream; columns, targets and positions by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dschat.models.packing import Segments, pack

# Three ids, so that prompts are often equal; 0 is also the padding.
ROW = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@st.composite
def packed_input(draw):
    """Rows, the columns read of each (any order, repeated, none) and the lengths of prompts."""
    rows = draw(st.lists(ROW, max_size=7))
    reads = [draw(st.lists(st.integers(0, len(row) - 1), max_size=5)) for row in rows]
    prefixes = [draw(st.integers(0, len(row))) for row in rows]
    return rows, reads, draw(st.sampled_from([None, prefixes]))


def rebuilt(packed):
    """Token ids and positions of every row of the stream, in the stream's order."""
    ids, positions, start = packed.input_ids.tolist(), packed.position_ids.tolist(), 0
    rows = []
    for prefix, answers in packed.segments.groups:
        end = start + prefix
        for length in answers or [0]:
            here = [*range(start, start + prefix), *range(end, end + length)]
            rows.append((here, [ids[i] for i in here], [positions[i] for i in here]))
            end += length
        start = end
    assert start == len(ids)
    return rows


@given(packed_input())
def test_every_row_can_be_rebuilt(case):
    rows, reads, prefixes = case
    packed = pack(rows, reads, prefixes)
    stream = rebuilt(packed)
    for _, ids, positions in stream:
        assert positions == list(range(len(ids)))
    if rows:
        assert sorted(ids for _, ids, _ in stream) == sorted(rows)
    longest = max(map(len, rows), default=1)
    assert packed.segments.longest == longest
    assert packed.num_tokens == len(packed.input_ids) <= max(1, sum(map(len, rows)))


@given(packed_input())
def test_columns_are_those_of_their_rows_and_keep_their_order(case):
    rows, reads, prefixes = case
    packed = pack(rows, reads, prefixes)
    by_tokens = {}  # a column of the stream -> the rows' beginnings that end there
    for here, ids, _ in rebuilt(packed):
        for count, column in enumerate(here, 1):
            by_tokens.setdefault(column, ids[:count])
            assert by_tokens[column] == ids[:count]  # whatever row it is read for
    expected = [
        (i, row, c) for i, (row, cs) in enumerate(zip(rows, reads, strict=True)) for c in cs
    ]
    assert packed.row_of.tolist() == [i for i, _, _ in expected]
    for column, target, (_, row, c) in zip(
        packed.columns.tolist(), packed.targets.tolist(), expected, strict=True
    ):
        assert by_tokens[column] == row[: c + 1]
        assert target == (row[c + 1] if c + 1 < len(row) else 0)


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
    tokens, seen = 0, {}
    for row, prefix in zip(rows, prefixes or [0] * len(rows), strict=True):
        shares = 0 < prefix < len(row)
        tokens += len(row) - (prefix if shares and tuple(row[:prefix]) in seen else 0)
        if shares:
            seen[tuple(row[:prefix])] = True
    assert pack(rows, reads, prefixes).num_tokens == (tokens if rows else 1)


@given(packed_input())
def test_segments_cover_the_stream(case):
    segments = pack(*case).segments
    lengths = [n for prefix, answers in segments.groups for n in (prefix, *answers)]
    assert min(lengths) > 0  # kernels take no empty segment
    assert [end - start for start, end in segments.pieces] == lengths
    assert [start for start, _ in segments.pieces] == [0, *np.cumsum(lengths)[:-1]]
    groups = [(prefix, sum(answers)) for prefix, answers in segments.groups if answers]
    shared = [bounds for group in segments.shared for bounds in group]
    assert [(b - a, d - c) for (a, b), (c, d) in shared] == groups
    assert all(b == c for (_, b), (c, _) in shared)


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
    assert packed.segments.shared == [[((0, 2), (2, 7))]]
    assert packed.segments.longest == 4


def test_prompts_of_one_row_or_of_whole_rows_are_not_shared():
    alone = pack([[1, 2, 3], [1, 3, 3]], [[0], [0]], [2, 2])
    whole = pack([[1, 2], [1, 2]], [[0], [0]], [2, 2])
    empty = pack([[1, 2], [1, 2]], [[0], [0]], [0, 0])
    assert alone.segments.groups == ((3, ()), (3, ()))
    assert whole.segments.groups == empty.segments.groups == ((2, ()), (2, ()))


def test_rows_of_a_dialogue_by_hand():
    """Each leaves the longest prefix at its own place; one is a part of it."""
    rows = [[5, 6, 1], [9, 9], [5, 6, 7, 8, 3], [5, 6, 7, 8, 4, 4], [5, 6, 7], [5, 2]]
    reads = [[1, 2], [0], [3, 4], [0, 4], [2], [1]]
    packed = pack(rows, reads, [2, 0, 4, 4, 3, 1], dialogues=[0, 1, 0, 0, 0, 2])
    assert packed.segments == Segments(((4, (1, 1, 2)), (2, ()), (2, ())), ((2, 4, 4), (), ()))
    assert packed.input_ids.tolist() == [5, 6, 7, 8, 1, 3, 4, 4, 9, 9, 5, 2]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 2, 4, 4, 5, 0, 1, 0, 1]
    assert packed.columns.tolist() == [1, 4, 8, 3, 5, 0, 6, 2, 11]
    assert packed.targets.tolist() == [1, 0, 9, 3, 0, 6, 4, 0, 0]
    assert packed.segments.shared == [[((0, 2), (4, 5))], [((0, 4), (5, 8))]]
    assert packed.segments.longest == 6


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


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), ROW, st.booleans()), max_size=7))
def test_dialogues_are_read_as_their_rows_are(drawn):
    """Each column reads the tokens of its row up to there, whatever else is in the stream."""
    trunks = [[i, *range(3, 11)] for i in range(3)]
    numbers = [number for number, *_ in drawn]
    ends = [end for _, end, *_ in drawn]
    rows = [trunks[n][:end] + (own if adds or not end else []) for n, end, own, adds in drawn]
    packed = pack(rows, [range(len(row)) for row in rows], ends, dialogues=numbers)
    ids, positions = packed.input_ids, packed.position_ids
    before, end = [], 0  # of each token of the stream, the places of its row before it
    for (prefix, answers), leaves in zip(
        packed.segments.groups, packed.segments.leaves, strict=True
    ):
        assert list(leaves) == sorted(leaves)
        start = end
        for leave, length in ((0, prefix), *zip(leaves, answers, strict=True)):
            assert length > 0
            shared = [*range(start, start + leave)]
            before += [shared + [*range(end, end + i)] for i in range(length)]
            end += length
    assert end == len(ids)
    columns = packed.columns.tolist()
    for row in rows:
        for i in range(len(row)):
            column = columns.pop(0)
            assert [*ids[before[column]].tolist(), int(ids[column])] == row[: i + 1]
            assert positions[column] == i
    check_row_table(packed.segments, before)
    assert packed.segments.longest == max(map(len, rows), default=1)
    shared = {n: e for n, e in sorted(zip(numbers, ends, strict=True))}  # the longest prefixes
    own = sum(len(row) - end for row, end in zip(rows, ends, strict=True))
    assert len(ids) == max(1, own + sum(shared.values()))


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


def test_to_moves_every_tensor_and_keeps_the_lengths():
    packed = pack([[1, 2]], [[0]])
    moved = packed.to("meta")
    tensors = {name for name, value in vars(packed).items() if isinstance(value, torch.Tensor)}
    assert len(tensors) == 7
    assert all(getattr(moved, name).is_meta for name in tensors)
    assert moved.segments == packed.segments
    assert moved.segments.table.pieces.queries.is_meta
    assert not packed.input_ids.is_meta


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
    shared = [bounds for group in segments.shared for bounds in group]
    assert sorted(found[False]) == [(answers, prefix) for prefix, answers in shared]


def test_short_sequences_of_equal_length_are_one_batch():
    segments = Segments(((10, (6, 7, 7, 8, 6, 6, 7, 8)),) * 32)
    kinds = [batch.queries.shape for batch in segments.batches(1 << 13) if batch.is_causal]
    assert kinds == [(32, 10), (96, 6), (96, 7), (64, 8)]
    assert len(segments.batches(0)) == 32 * 9 + 32
