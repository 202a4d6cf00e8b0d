"""Memory that the processes of one host share: what one writes the others read, uncopied.

Comes in: how many bytes, and how a process speaks to the others. Goes out: byte tensors, or None
where there is no such memory (processes on several hosts, a container whose /dev/shm is small).
It must not know what is written, nor torch.distributed: dist.py hands in its collective.
"""

import logging
import mmap
import os
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("dschat")

FOLDER = "/dev/shm"


class AlternatingBuffers:
    """Two buffers that all processes have mapped, handed out in turn.

    Two, because then one collective per use is enough: who writes into a buffer again has met all
    others since, who had finished reading it when they went on to the buffer after.
    """

    def __init__(self, is_first: bool, gather: Callable[[Any], list[Any]]) -> None:
        """``is_first``: of rank 0. ``gather``: a collective, every process's value by rank."""
        self._is_first, self._gather = is_first, gather
        self._half = 0  # bytes of a buffer
        self._turn = 0
        self._region: torch.Tensor | None = None
        self._works = True

    def next(self, num_bytes: int) -> "torch.Tensor | None":
        """The buffer whose turn it is, (num_bytes,) uint8; None, for all processes, without any.

        Collective where it must grow. What the buffer before holds may still be read; what it held
        before that is gone.
        """
        if self._works and num_bytes > self._half:
            self._grow(num_bytes)
        if self._region is None:
            return None
        self._turn ^= 1
        return self._region[self._turn * self._half :][:num_bytes]

    @property
    def num_bytes(self) -> int:
        """Of both, held by all processes together."""
        return 0 if self._region is None else self._region.numel()

    def _grow(self, num_bytes: int) -> None:
        self._region = None  # what is mapped goes before more is asked for
        self._half = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size = 2 * self._half
        path = self._gather(_created(size) if self._is_first else None)[0]
        region = _attached(path, size)
        self._works = all(self._gather(region is not None))
        if self._is_first and path is not None:
            os.unlink(path)  # it lives as long as it is mapped: nothing is left behind
        if self._works:
            self._region = region
        else:
            logger.debug("no shared memory of %d bytes for all processes", size)


def _created(size: int) -> str | None:
    """A file of ``size`` bytes that are really there: writing beyond what a container has would
    kill the process."""
    try:
        handle, path = tempfile.mkstemp(prefix="dschat-", dir=FOLDER)
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


def _attached(path: str | None, size: int) -> "torch.Tensor | None":
    import torch

    if path is None:
        return None
    try:
        with open(path, "r+b") as file:
            mapped = mmap.mmap(file.fileno(), size)
    except (OSError, ValueError):  # another host's, or one of the same name
        return None
    return torch.frombuffer(mapped, dtype=torch.uint8)
