"""Several processes write one checkpoint: here two threads with one folder."""

import re
import time

import pytest

from dschat.checkpoint import async_writer as writer_module
from dschat.checkpoint import atomic_files
from dschat.checkpoint.async_writer import Failed, Writing
from dschat.checkpoint.manifest import MANIFEST, read_manifest


class TwoWriters:
    def __init__(self, folder):
        self.target = folder / "step_000004"
        self.staging = atomic_files.staging_of(self.target)
        self.pair = [Writing(self.target, 4, {}, rank, 2) for rank in range(2)]
        self.result = self.pair[0].checkpoint

    def block(self, name):
        """A link stands in the way of the file ``name``, and is not followed."""
        self.staging.mkdir()
        (self.staging / name).symlink_to("elsewhere")

    def start(self, rank, **contents):
        self.pair[rank].start({f"{name}.json": text for name, text in contents.items()})

    def wait(self):
        """As `CheckpointManager.wait` does in two processes; the checkpoint, or the problem."""
        problems = [f"process {r}: {p}" for r, w in enumerate(self.pair) if (p := w.problem())]
        problem = problems[0] if problems else ""
        try:
            checkpoint = self.pair[0].wait(problem)
        except Failed as failure:
            checkpoint = str(failure)
        assert self.pair[1].wait(problem) is None
        return checkpoint


def test_complete_when_both_have_written_without_calls_from_training(tmp_path):
    two = TwoWriters(tmp_path)
    two.start(0, a=b"1", c=b"2")
    two.pair[0].files.result()
    time.sleep(0.1)
    assert not two.target.exists()
    two.start(1, b=b"3")
    found = two.result.result(60)
    assert found == read_manifest(two.target)
    assert sorted(found.files) == ["a.json", "b.json", "c.json"]
    assert sorted(p.name for p in two.target.iterdir()) == [*sorted(found.files), MANIFEST]
    assert two.wait() == found


@pytest.mark.parametrize("can_tell", [True, False], ids=["told", "untold"])
def test_one_cannot_write(can_tell, tmp_path):
    two = TwoWriters(tmp_path)
    if can_tell:
        two.block("b.json")
    else:
        (two.staging / "b.json").mkdir(parents=True)  # nor removed, as on a disk that turns bad
    two.start(0, a=b"1")
    two.start(1, b=b"2")
    if can_tell:
        two.result.exception(60)
    assert re.match(r"process 1: (Too many levels of symbolic links|Is a directory): ", two.wait())
    assert list(tmp_path.iterdir()) == []


def test_the_main_process_cannot_write(tmp_path):
    two = TwoWriters(tmp_path)
    two.block("a.json")
    two.start(0, a=b"1")
    assert isinstance(two.result.exception(60), Failed)
    two.start(1, b=b"2")
    assert "Too many levels of symbolic links" in two.wait()
    atomic_files.tidy(tmp_path)  # as the next `save` does
    assert list(tmp_path.iterdir()) == []


def test_disks_that_are_not_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "SHOWS_UP_S", 0.2)
    two = TwoWriters(tmp_path)
    two.pair[1] = TwoWriters(tmp_path / "other machine").pair[1]
    two.start(0, a=b"1")
    two.start(1, b=b"2")
    problem = two.wait()
    assert "process 1" in problem
    assert "shared disk" in problem
