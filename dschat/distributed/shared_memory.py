"""Byte tensors in memory that the processes of one host share.

There are none for processes on several hosts, or in a container whose /dev/shm is small.
"""

import logging
import mmap
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("dschat")


class AlternatingBuffers:
    """Two buffers that all processes have mapped, used in turn.

    With two buffers one collective per use is enough: before a process writes into a buffer again,
    it has been in a collective with all others, which had finished reading that buffer by then.
    """

    def __init__(
        self, is_first: bool, gather: Callable[[Any], list[Any]], folder: str = "/dev/shm"
    ) -> None:
        """``is_first``: whether this is rank 0. ``gather``: `gather_objects`. ``folder``: in
        memory.
        """
        self._is_first, self._gather, self._folder = is_first, gather, folder
        self._buffer_bytes = 0  # of one
        self._turn = 0
        self._region: Tensor | None = None
        self._works = True

    def next(self, num_bytes: int) -> Tensor | None:
        """The next buffer, (num_bytes,) uint8; None on all ranks without shared memory.

        Collective where the buffers must grow. The other buffer stays readable.
        """
        if self._works and num_bytes > self._buffer_bytes:
            self._grow(num_bytes)
        if self._region is None:
            return None
        self._turn ^= 1
        return self._region[self._turn * self._buffer_bytes :][:num_bytes]

    @property
    def num_bytes(self) -> int:
        """Of both buffers; all processes share them."""
        return 0 if self._region is None else self._region.numel()

    def _grow(self, num_bytes: int) -> None:
        self._region = None  # unmap before more is allocated
        self._buffer_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size = 2 * self._buffer_bytes
        path = self._gather(_created(size, self._folder) if self._is_first else None)[0]
        region = _attached(path, size)
        self._works = all(self._gather(region is not None))
        if self._is_first and path is not None:
            os.unlink(path)  # the memory stays as long as it is mapped
        if self._works:
            self._region = region
        else:
            logger.debug("no shared memory of %d bytes for all processes", size)


def _created(size: int, folder: str) -> str | None:
    """Path of a new file in ``folder`` with ``size`` allocated bytes; None where they are not
    available.

    Writing to bytes that a container does not have would kill the process.
    """
    try:
        handle, path = tempfile.mkstemp(prefix="dschat-", dir=folder)
    except OSError:
        return None
    try:
        os.posix_fallocate(handle, 0, size)
        return path
    except (OSError, AttributeError):  # no such call on this system
        os.unlink(path)
        return None
    finally:
        os.close(handle)


def _attached(path: str | None, size: int) -> Tensor | None:
    if path is None:
        return None
    try:
        with open(path, "r+b") as file:
            mapped = mmap.mmap(file.fileno(), size)
    except (OSError, ValueError):  # a file of another host, perhaps of the same name
        return None
    return torch.frombuffer(mapped, dtype=torch.uint8)
