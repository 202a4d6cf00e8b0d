"""Buffers that processes share: contents, alternation, files left behind."""

import pytest
import torch
from rank_threads import on_ranks

from dschat.distributed.collectives import AlternatingBuffers


@pytest.fixture
def on_buffers(tmp_path):
    """``on_buffers(size, job)``: ``job(member, buffers)`` on threads in the place of processes,
    each of which maps the file by itself; the results. No file stays.
    """

    def run(size, job, folder=tmp_path):
        def work(member):
            buffers = AlternatingBuffers(member.rank == 0, member.gather_objects, str(folder))
            return job(member, buffers)

        results = on_ranks(size, work)
        assert list(tmp_path.iterdir()) == []
        return results

    return run


def test_what_one_writes_all_read(on_buffers, tmp_path):
    def job(member, buffers):
        seen, first = [], 10 * member.rank
        for turn in range(5):
            part = buffers.next(30).view(torch.int8)
            part[first : first + 10] = 10 * turn + member.rank
            member.gather_objects(None)
            assert list(tmp_path.iterdir()) == []  # gone from the folder while still mapped
            seen.append(part.view(3, 10)[:, 0].tolist())
        return seen

    expected = [[10 * turn + rank for rank in range(3)] for turn in range(5)]
    assert on_buffers(3, job) == [expected] * 3


def test_one_buffer_stays_while_the_next_is_written(on_buffers):
    def job(member, buffers):
        first = buffers.next(100)
        first.fill_(1)
        buffers.next(100).fill_(2)
        kept = first.tolist() == [1] * 100
        buffers.next(100).fill_(3)
        return kept, first.tolist() == [3] * 100

    assert on_buffers(1, job) == [(True, True)]


def test_they_grow(on_buffers):
    def job(member, buffers):
        return [buffers.next(n).numel() for n in (10, 100_000, 20)]

    assert on_buffers(2, job) == [[10, 100_000, 20]] * 2


def test_no_room_is_no_buffer_for_all(on_buffers):
    """Not for smaller ones later either."""
    assert on_buffers(2, lambda _, buffers: [buffers.next(2**60), buffers.next(10)]) == (
        [[None, None]] * 2
    )


def test_a_rank_elsewhere_leaves_all_without(on_buffers, tmp_path):
    """As on two hosts: what rank 0 made is not to be found by the others."""

    def job(member, buffers):
        gather = member.gather_objects
        if member.rank == 1:
            there = str(tmp_path / "there")
            buffers = AlternatingBuffers(False, lambda value: [there, *gather(value)[1:]])
        return buffers.next(10)

    assert on_buffers(2, job) == [None, None]


def test_no_such_folder(on_buffers, tmp_path):
    assert on_buffers(2, lambda _, buffers: buffers.next(10), tmp_path / "none") == [None, None]
