"""Copies tensors to the device on a stream of their own, beside computation.

NOTE: what reads the copies calls `wait_for_copies` before: optimizer steps and checkpoints do.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

import dschat.distributed as dist

_stream: torch.cuda.Stream | None = None


@contextmanager
def on_copy_stream() -> Iterator[None]:
    """A scope whose work follows what the current stream has queued so far, and runs beside what it
    queues later. Without CUDA, work is done at once.
    """
    global _stream
    if not dist.has_gpu():
        yield
        return
    if _stream is None:
        _stream = torch.cuda.Stream()
    _stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(_stream):
        yield


def wait_for_copies() -> None:
    """Work that the current stream queues from now on follows the copies."""
    if _stream is not None:
        torch.cuda.current_stream().wait_stream(_stream)


def finish_copies() -> None:
    """Wait, on the host, until the copies are done."""
    if _stream is not None:
        _stream.synchronize()
