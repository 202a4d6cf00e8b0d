"""A checkpoint is complete or absent: killed at every operation on the disk, or without space."""

import builtins
import errno
import os
import re
import shutil

import forked
import pytest
import safetensors.torch
from fakes import names, save, state_at, step_loaded
from safetensors import SafetensorError

from dschat.checkpoint import atomic_files
from dschat.checkpoint.manager import CheckpointManager
from dschat.checkpoint.manifest import MANIFEST, newest

OWN_PROCESS = "DSCHAT_TESTS_MAY_FORK"

OPERATIONS = ("mkdir", "rename", "unlink", "rmdir", "fsync")


# -- Killed


class Killer:
    """Ends this process at its ``limit``-th operation on the disk; a write is half done by then."""

    def __init__(self, limit):
        self.left = limit
        for name in OPERATIONS:
            setattr(os, name, self.counted(getattr(os, name)))
        builtins.open = self.counted(builtins.open)
        write = atomic_files.write_file

        def half(path, content):
            if self.left == 1:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"half")
                os._exit(9)
            self.left -= 1
            return write(path, content)

        atomic_files.write_file = half

    def counted(self, function):
        def call(*args, **kwargs):
            self.left -= 1
            if self.left == 0:
                os._exit(9)
            return function(*args, **kwargs)

        return call


def killed_at(operation, folder, step):
    """Whether a forked process that saves ``step`` ended at that operation on the disk."""
    child = os.fork()
    if child == 0:
        Killer(operation)
        save(CheckpointManager(folder, {}, 2), step)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


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
@pytest.mark.parametrize("step", [3, 2], ids=["new", "once more"])
def test_killed_at_every_operation(step, tmp_path):
    """Two checkpoints, of which the older is pruned for a third; or the newer is written again."""
    save(CheckpointManager(tmp_path / "start", {}, 2), 1, 2)
    seen, operation, killed = set(), 1, True
    while killed:
        folder = tmp_path / str(operation)
        shutil.copytree(tmp_path / "start", folder)
        killed = killed_at(operation, folder, step)
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


class FullDisk:
    """A disk that takes ``room`` bytes more in this process."""

    def __init__(self, monkeypatch, room):
        self.room = room
        monkeypatch.setattr(atomic_files, "open", self.open, raising=False)
        monkeypatch.setattr(atomic_files, "save_file", self.save_file)

    def save_file(self, tensors, path, **options):
        self.room -= sum(tensor.nbytes for tensor in tensors.values())
        if self.room < 0:
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        safetensors.torch.save_file(tensors, path, **options)

    def open(self, path, mode, **options):
        file = builtins.open(path, mode, **options)  # noqa: SIM115
        return file if "+" in mode else FullFile(self, file)


class FullFile:
    def __init__(self, disk, file):
        self.disk, self.file = disk, file

    def write(self, data):
        self.disk.room -= len(data)
        if self.disk.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 1000, 3000, 6000, 9000])
def test_a_full_disk_is_logged_once_and_keeps_good_checkpoints(room, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "dschat")
    checkpoints = CheckpointManager(tmp_path, {}, 1)
    save(checkpoints, 1)
    disk = FullDisk(monkeypatch, room)
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
    checkpoints._writing.checkpoint.result(60)
    assert (checkpoints.last, "step_000001 (" in caplog.text) == (None, False)
    for call in (checkpoints.poll, checkpoints.poll, checkpoints.wait):
        call()
        assert checkpoints.last == tmp_path / "checkpoints/step_000001"
        assert caplog.text.count("step_000001 (") == 1


def test_folders_removed_underneath(tmp_path, monkeypatch, caplog):
    checkpoints = CheckpointManager(tmp_path, {}, 2)
    save(checkpoints, 1)
    sync = atomic_files.sync_folders
    for number, victim in enumerate(("values.json", "actor", "."), 2):

        def removing(folder, victim=victim):
            path = folder / victim
            path.unlink() if path.is_file() else shutil.rmtree(path)
            sync(folder)

        monkeypatch.setattr(atomic_files, "sync_folders", removing)
        save(checkpoints, number)
        assert names(tmp_path) == ["step_000001"]
    assert caplog.text.count("could not be written") == 1
    monkeypatch.setattr(atomic_files, "sync_folders", sync)
    shutil.rmtree(tmp_path / "checkpoints")  # all of them: a new one is all the better
    save(checkpoints, 9)
    assert step_loaded(checkpoints) == 9
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("in the way")
    caplog.clear()
    save(checkpoints, 10)
    assert "could not be written" in caplog.text


def test_a_bug_is_no_full_disk(tmp_path, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(atomic_files, "write_file", broken)
    checkpoints = CheckpointManager(tmp_path, {})
    checkpoints.save(1, state_at(1))
    with pytest.raises(ZeroDivisionError):
        checkpoints.wait()


# -- What is kept


@pytest.mark.parametrize(("limit", "kept"), [(None, 5), (1, 1), (3, 3)])
def test_the_newest_are_kept(limit, kept, tmp_path):
    checkpoints = CheckpointManager(tmp_path, {}, limit)
    save(checkpoints, 2, 4, 6, 8, 1_000_000)
    expected = ["step_000002", "step_000004", "step_000006", "step_000008", "step_1000000"]
    assert names(tmp_path) == expected[5 - kept :]
    assert newest(tmp_path).step == 1_000_000


def test_old_checkpoints_are_removed_after_the_new_one_is_complete(tmp_path, monkeypatch):
    checkpoints, seen, remove = CheckpointManager(tmp_path, {}, 1), [], atomic_files.remove

    def removing(folder):
        seen.append((folder.name, newest(tmp_path).step))
        remove(folder)

    monkeypatch.setattr(atomic_files, "remove", removing)
    save(checkpoints, 1, 2, 3)
    assert seen == [("step_000001", 2), ("step_000002", 3)]
