"""Ranks as threads of one process, with collectives that wait for all of them."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

_here = threading.local()


class Member:
    """One thread's side of a group, with the methods of `dschat.distributed.RankGroup`."""

    def __init__(self, size, rank, barrier, slots):
        self.size, self.rank, self._barrier, self._slots = size, rank, barrier, slots

    def gather_objects(self, value):
        """As between processes, a rank gets copies of what the others have."""
        return list(map(pickle.loads, self._gather(pickle.dumps(value))))

    def _gather(self, value):
        self._slots[self.rank] = value
        self._barrier.wait(timeout=30)  # a rank that hangs breaks it for all
        values = list(self._slots)
        self._barrier.wait(timeout=30)
        return values

    def all_gather(self, tensor):
        return torch.stack(self._gather(tensor.clone()))

    def all_reduce_sum(self, tensor):
        return tensor.copy_(self.all_gather(tensor).sum(0))

    def broadcast(self, tensor):
        return tensor.copy_(self.all_gather(tensor)[0])


def on_ranks(size, work):
    """``work(member)`` in one thread a rank; the results in rank order."""
    barrier, slots = threading.Barrier(size), [None] * size

    def on_rank(rank):
        _here.member = Member(size, rank, barrier, slots)
        return work(_here.member)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(on_rank, range(size)))


def this_rank():
    """The member that this thread is, for stand-ins of `dschat.distributed`'s functions."""
    return _here.member
