"""Several processes write one checkpoint: here two threads with one folder."""

import errno
import threading
import time

import pytest

from dschat.checkpoint import async_writer as writer_module
from dschat.checkpoint import atomic_files
from dschat.checkpoint.async_writer import Writing
from dschat.checkpoint.manifest import MANIFEST, read_manifest


class TwoWriters:
    def __init__(self, folder):
        self.told = []
        self.target = folder / "step_000004"
        self.pair = [
            Writing(self.target, 4, {}, rank, 2, lambda *what: self.told.append(what))
            for rank in range(2)
        ]

    def start(self, rank, **contents):
        self.pair[rank].start({f"{name}.json": text for name, text in contents.items()}, True)

    def join(self):
        """As `Checkpoints.wait` does in two processes."""
        for writing in self.pair:
            writing.join_own()
        problems = [f"process {r}: {w.problem}" for r, w in enumerate(self.pair) if w.problem]
        for writing in self.pair:
            writing.join(problems[0] if problems else "")


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_complete_when_both_have_written_without_calls_from_training(tmp_path):
    two = TwoWriters(tmp_path)
    two.start(0, a=b"1", c=b"2")
    two.pair[0].join_own()
    time.sleep(0.1)
    assert not two.target.exists()
    two.start(1, b=b"3")
    until(lambda: two.told)
    found = read_manifest(two.target)
    assert (two.told, sorted(found.files)) == ([(found, "")], ["a.json", "b.json", "c.json"])
    assert sorted(p.name for p in two.target.iterdir()) == [*sorted(found.files), MANIFEST]
    two.join()
    assert len(two.told) == 1


@pytest.mark.parametrize("can_tell", [True, False], ids=["told", "untold"])
def test_one_cannot_write(can_tell, tmp_path, monkeypatch):
    two, write = TwoWriters(tmp_path), atomic_files.write_file

    def failing(path, content):
        if path.name == "b.json":
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return write(path, content)

    monkeypatch.setattr(atomic_files, "write_file", failing)
    if not can_tell:
        monkeypatch.setattr(two.pair[1], "_write_note", failing_tell)
    two.start(0, a=b"1")
    two.start(1, b=b"2")
    if can_tell:
        until(lambda: two.told)
    two.join()
    ((found, problem),) = two.told
    assert found is None
    assert problem.startswith("process 1: Read-only file system: ")
    assert list(tmp_path.iterdir()) == []


def failing_tell(*_):
    raise OSError(errno.EROFS, "Read-only file system")


def test_the_main_process_cannot_write(tmp_path, monkeypatch):
    two, write = TwoWriters(tmp_path), atomic_files.write_file
    gate = threading.Event()

    def failing(path, content):
        if path.name == "a.json":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        gate.wait()
        return write(path, content)

    monkeypatch.setattr(atomic_files, "write_file", failing)
    two.start(0, a=b"1")
    two.start(1, b=b"2")
    until(lambda: two.told)
    gate.set()
    two.join()
    assert [found for found, _ in two.told] == [None]
    atomic_files.tidy(tmp_path)  # as the next `save` does
    assert list(tmp_path.iterdir()) == []


def test_disks_that_are_not_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "SHOWS_UP_S", 0.2)
    two = TwoWriters(tmp_path)
    two.pair[1] = TwoWriters(tmp_path / "other machine").pair[1]
    two.start(0, a=b"1")
    two.start(1, b=b"2")
    two.join()
    ((found, problem),) = two.told
    assert found is None
    assert "process 1" in problem
    assert "shared disk" in problem
