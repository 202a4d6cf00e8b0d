"""The cache folder, and where it is if the user's is not writable."""

from dschat.distributed import machine


def test_a_cache_that_cannot_be_written_moves_to_a_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert machine.writable_cache() == machine.user_cache() == tmp_path / "cache" / "dschat"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # not a folder
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert machine.writable_cache().parent == tmp_path
