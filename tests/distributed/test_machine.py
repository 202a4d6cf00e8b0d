"""The cache folder, and where it is if the user's is not writable."""

import pytest

from dschat.distributed import machine


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder of temporary files, and a cache that cannot be written."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # not a folder
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_cache_that_cannot_be_written_moves_to_a_temporary_folder(temporary, monkeypatch):
    first = machine.writable_cache()
    assert machine.writable_cache() == first
    assert first.parent == temporary
    monkeypatch.setenv("XDG_CACHE_HOME", str(temporary / "cache"))
    assert machine.writable_cache() == machine.user_cache() == temporary / "cache" / "dschat"


def test_another_users_cache_folder_is_not_used(temporary, monkeypatch):
    (temporary / "theirs").mkdir()
    first = machine.writable_cache()
    first.rmdir()
    first.symlink_to(temporary / "theirs")
    assert machine.writable_cache().resolve() != (temporary / "theirs")
    first.unlink()
    first.mkdir()
    monkeypatch.setattr(machine.os, "getuid", lambda: first.stat().st_uid + 1)
    theirs = temporary / f"dschat-{first.stat().st_uid + 1}"
    theirs.mkdir()
    assert machine.writable_cache() not in (first, theirs)
