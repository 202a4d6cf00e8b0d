"""Runs the steps of a generator under a lock, so that threads share what the steps use."""

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

T = TypeVar("T")


def locked(steps: Generator[T, None, None], lock: AbstractContextManager[object]) -> Iterator[T]:
    """Yields what ``steps`` yields. It runs, and is closed, only while ``lock`` is held."""
    try:
        while True:
            with lock:
                try:
                    item = next(steps)
                except StopIteration:
                    return
            yield item
    finally:
        with lock:
            steps.close()
