"""A checkpoint is complete or absent: killed at every operation on the disk, or without space."""

import builtins
import multiprocessing
import os
import re
import shutil
import signal
import time
from pickle import PicklingError

import forked
import pytest
from fakes import FakeEngine, names, save, state_at, step_loaded

from dschat.checkpoint import atomic_files
from dschat.checkpoint.manager import CheckpointManager
from dschat.checkpoint.manifest import MANIFEST, newest

OWN_PROCESS = "DSCHAT_TESTS_MAY_FORK"

OPERATIONS = ("mkdir", "rename", "unlink", "rmdir", "fsync")


# -- Killed


class Killer:
    """Kills this process at its ``limit``-th operation on the disk; a write is then half done."""

    def __init__(self, limit):
        self.left = limit
        for name in OPERATIONS:
            setattr(os, name, self.counted(getattr(os, name)))
        builtins.open = self.counted(builtins.open)
        atomic_files.write_file = self.counted(atomic_files.write_file, write_half)

    def counted(self, function, at_the_end=lambda *_: None):
        def call(*args, **kwargs):
            self.left -= 1
            if self.left == 0:
                at_the_end(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call


def write_half(path, _):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"half")


def save_and_be_killed(operation, folder, step, limit):
    Killer(operation)
    save(CheckpointManager(folder, {}, limit), step)


def killed_at(*args):
    """Whether a forked process that saves ``step`` was killed at that operation on the disk."""
    process = multiprocessing.get_context("fork").Process(target=save_and_be_killed, args=args)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


@pytest.mark.slow
def test_kills_in_a_process_of_their_own():
    """A worker that has run other tests may be too large to fork."""
    result = forked.run(
        *("-m", "pytest", "-q", __file__, "-k", "killed_at_every_operation"),
        variables={OWN_PROCESS: "1"},
    )
    assert result.code == 0, result.stdout[-3000:]
    assert "2 passed" in result.stdout


@pytest.mark.skipif(OWN_PROCESS not in os.environ, reason="run by the test above")
@pytest.mark.parametrize(("step", "limit"), [(3, 1), (2, 2)], ids=["new", "once more"])
def test_killed_at_every_operation(step, limit, tmp_path):
    """Two checkpoints, which are pruned for a third; or the newer is written again."""
    save(CheckpointManager(tmp_path / "start", {}), 1, 2)
    seen, operation, killed = set(), 1, True
    while killed:
        folder = tmp_path / str(operation)
        shutil.copytree(tmp_path / "start", folder)
        killed = killed_at(operation, folder, step, limit)
        checkpoints = CheckpointManager(folder, {}, 2)
        seen.add(step_loaded(checkpoints))
        assert not [name for name in names(folder) if name.startswith(".")]
        if operation % 5 == 0:  # and it resumes
            save(checkpoints, 4)
            assert step_loaded(checkpoints) == 4
        shutil.rmtree(folder)
        operation += 1
    assert operation > 35
    assert seen == {2, step}


def test_files_are_on_disk_before_their_folder_has_its_name(tmp_path, monkeypatch):
    calls, fsync, rename = [], os.fsync, os.rename

    def synced(handle):
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def renamed(old, new):
        calls.append(("rename", os.path.basename(new)))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    save(CheckpointManager(tmp_path, {}), 5)
    calls = [c for c in calls if not str(c).startswith("..done")]  # a rank's note
    content = ["mp_rank_00_model_states.pt"] * 2 + ["rank_00000.safetensors", "values.json"]
    assert calls[:4] == content
    assert set(calls[4:-2]) == {".step_000005.saving", "actor", "critic", MANIFEST}
    assert calls.index(MANIFEST) < len(calls) - 1 - calls[::-1].index(".step_000005.saving")
    assert calls[-2:] == [("rename", "step_000005"), "checkpoints"]


# -- What cannot be written


@pytest.mark.parametrize("room", [0, 1000, 3000, 6000, 9000, 15_000])
def test_a_full_disk_is_logged_once_and_keeps_good_checkpoints(room, tmp_path, disk, caplog):
    caplog.set_level("INFO", "dschat")
    checkpoints = CheckpointManager(tmp_path, {}, 1)
    save(checkpoints, 1)
    for step in (2, 3):
        disk.room = room
        save(checkpoints, step)
        assert names(tmp_path) == ["step_000001"]
    assert caplog.text.count("No space left on device") == 1
    assert re.search(r"latest checkpoint: \S+step_000001", caplog.text)
    assert checkpoints.last == tmp_path / "checkpoints/step_000001"
    disk.room = 10**9
    save(checkpoints, 4)
    assert "written again" in caplog.text
    assert names(tmp_path) == ["step_000004"]
    assert step_loaded(checkpoints) == 4


def test_the_result_is_logged_once_at_the_next_step(tmp_path, caplog):
    caplog.set_level("INFO", "dschat")
    checkpoints = CheckpointManager(tmp_path, {})
    checkpoints.save(1, state_at(1))
    while newest(tmp_path) is None:
        time.sleep(0.01)
    assert (checkpoints.last, "step_000001 (" in caplog.text) == (None, False)
    while checkpoints.last is None:  # the writing thread removes old ones, and ends
        checkpoints.poll()
    for call in (checkpoints.poll, checkpoints.wait):
        call()
        assert checkpoints.last == tmp_path / "checkpoints/step_000001"
        assert caplog.text.count("step_000001 (") == 1


def test_folders_removed_underneath(tmp_path, monkeypatch, caplog):
    checkpoints, sync, victims = CheckpointManager(tmp_path, {}, 1), atomic_files.sync_folders, []

    def removing(folder):
        for path in [folder / name for name in victims]:
            path.unlink() if path.is_file() else shutil.rmtree(path)
        sync(folder)

    monkeypatch.setattr(atomic_files, "sync_folders", removing)
    save(checkpoints, 1)
    for number, victim in enumerate(("values.json", "actor", "."), 2):
        victims[:] = [victim]
        save(checkpoints, number)
        assert names(tmp_path) == ["step_000001"]
    assert caplog.text.count("could not be written") == 1
    victims.clear()
    shutil.rmtree(tmp_path / "checkpoints")  # all of them: a new one is all the better
    save(checkpoints, 9)
    assert step_loaded(checkpoints) == 9
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("in the way")
    caplog.clear()
    save(checkpoints, 10)
    assert "could not be written" in caplog.text


def test_a_bug_is_no_full_disk(tmp_path):
    checkpoints, state = CheckpointManager(tmp_path, {}), state_at(1)
    state.engines["actor"].config = FakeEngine.config | {"hook": lambda: None}  # no pickle
    checkpoints.save(1, state)
    with pytest.raises((AttributeError, PicklingError)):
        checkpoints.wait()


# -- What is kept


@pytest.mark.parametrize(("limit", "kept"), [(None, 5), (1, 1), (3, 3)])
def test_the_newest_are_kept(limit, kept, tmp_path):
    checkpoints = CheckpointManager(tmp_path, {}, limit)
    save(checkpoints, 2, 4, 6, 8, 1_000_000)
    expected = ["step_000002", "step_000004", "step_000006", "step_000008", "step_1000000"]
    assert names(tmp_path) == expected[5 - kept :]
    assert newest(tmp_path).step == 1_000_000
