"""Buffers that processes share: contents, alternation, files left behind."""

import threading
from pathlib import Path

import pytest
import torch

from dschat.distributed import collectives
from dschat.distributed.collectives import AlternatingBuffers


class Ranks:
    """Threads in the place of processes: each maps the file by itself."""

    def __init__(self, count):
        self.barrier = threading.Barrier(count)
        self.values = [None] * count

    def gather(self, rank):
        def collective(value):
            self.values[rank] = value
            self.barrier.wait(10)
            values = list(self.values)
            self.barrier.wait(10)
            return values

        return collective

    def run(self, job):
        """``job(rank, buffers)`` on every rank; their results."""
        results = [None] * len(self.values)

        def work(rank):
            results[rank] = job(rank, AlternatingBuffers(rank == 0, self.gather(rank)))

        threads = [threading.Thread(target=work, args=(r,)) for r in range(len(self.values))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return results


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(collectives, "FOLDER", str(tmp_path))
    return tmp_path


def test_what_one_writes_all_read(folder):
    ranks = Ranks(3)

    def job(rank, buffers):
        seen = []
        for turn in range(5):
            part = buffers.next(30).view(torch.int8)
            part[rank * 10 : rank * 10 + 10] = 10 * turn + rank
            ranks.barrier.wait(10)
            seen.append(part.view(3, 10)[:, 0].tolist())
        return seen

    expected = [[10 * turn + rank for rank in range(3)] for turn in range(5)]
    assert ranks.run(job) == [expected] * 3
    assert list(folder.iterdir()) == []  # gone from the folder while still mapped


def test_one_buffer_stays_while_the_next_is_written(folder):
    def job(rank, buffers):
        first = buffers.next(100)
        first.fill_(1)
        buffers.next(100).fill_(2)
        kept = first.tolist() == [1] * 100
        buffers.next(100).fill_(3)
        return kept, first.tolist() == [3] * 100

    assert Ranks(1).run(job) == [(True, True)]


def test_they_grow(folder):
    def job(rank, buffers):
        return [buffers.next(n).numel() for n in (10, 100_000, 20)]

    assert Ranks(2).run(job) == [[10, 100_000, 20]] * 2
    assert list(folder.iterdir()) == []


def test_no_room_is_no_buffer_for_all(folder, monkeypatch):
    def full(handle, start, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(collectives.os, "posix_fallocate", full)
    assert Ranks(2).run(lambda rank, buffers: [buffers.next(10), buffers.next(10)]) == (
        [[None, None]] * 2
    )
    assert list(folder.iterdir()) == []


def test_a_rank_elsewhere_leaves_all_without(folder, monkeypatch):
    """As on two hosts: what rank 0 made is not to be found by the others."""
    attached = collectives._attached

    def not_everywhere(path, size):
        here = threading.current_thread() is first
        return attached(path, size) if here else None

    ranks, threads = Ranks(2), []

    def job(rank, buffers):
        if rank == 0:
            threads.append(threading.current_thread())
        ranks.barrier.wait(10)
        nonlocal first
        first = threads[0]
        return buffers.next(10)

    first = None
    monkeypatch.setattr(collectives, "_attached", not_everywhere)
    assert ranks.run(job) == [None, None]
    assert list(folder.iterdir()) == []


def test_no_such_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(collectives, "FOLDER", str(Path(tmp_path) / "none"))
    assert Ranks(2).run(lambda rank, buffers: buffers.next(10)) == [None, None]
