"""Files under known names: whole, with the usual permissions, never through somebody's link."""

import os
import stat

import pytest

from dschat.startup.files import discard, no_link, replace_file


def test_a_link_is_replaced_not_followed(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("kept")
    (tmp_path / "page").symlink_to(theirs)
    replace_file(tmp_path / "page", "new", modified=1e9)
    assert theirs.read_text() == "kept"
    page = tmp_path / "page"
    assert (page.is_symlink(), page.read_text(), page.stat().st_mtime) == (False, "new", 1e9)
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(page.stat().st_mode) == 0o666 & ~umask
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page", "theirs"]


def test_what_fails_leaves_the_old_file_and_names_it(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as problem:
        replace_file(tmp_path / "folder", b"new")
    assert problem.value.filename == str(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
def test_a_pipe_is_refused_at_once(flags, tmp_path):
    """Opening it would wait for its other end."""
    os.mkfifo(tmp_path / "log")
    with pytest.raises(OSError, match="not a file|No such device"):
        no_link(str(tmp_path / "log"), flags)


def test_whatever_has_a_name_is_discarded(tmp_path):
    """Not what a link names."""
    (tmp_path / "folder/inner").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "kept").mkdir()
    for name in ("folder", "file", "link", "dangling", "nothing"):
        discard(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
