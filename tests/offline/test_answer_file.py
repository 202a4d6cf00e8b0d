"""A killed command's file is continued; another command's is refused."""

import json

import pytest

from dschat.config import UserError
from dschat.offline.rows import AnswerFile

LINES = [json.dumps({"n": n, "text": "äö\n"}, ensure_ascii=False) for n in range(3)]


@pytest.fixture
def whole(tmp_path):
    file = AnswerFile(str(tmp_path / "whole.jsonl"), {"--n": 1})
    file.append(LINES)
    file.finish()
    return (tmp_path / "whole.jsonl").read_bytes()


def test_continues_after_the_last_complete_line(tmp_path, whole):
    """Whatever the byte at which the file was cut."""
    for size in range(len(whole) + 1):
        path = tmp_path / f"cut{size}.jsonl"
        file = AnswerFile(str(path), {"--n": 1})
        file.close()
        path.with_name(f"{path.name}.partial").write_bytes(whole[:size])
        file = AnswerFile(str(path), {"--n": 1})
        assert file.num_lines == whole[:size].count(b"\n")
        file.append(LINES[file.num_lines :])
        assert not path.exists()
        file.finish()
        assert path.read_bytes() == whole
        assert not path.with_name(f"{path.name}.partial").exists()


def test_lost_blocks_are_cut(tmp_path, whole):
    """After a power cut a file may have zeros in place of its last lines."""
    path = tmp_path / "out.jsonl"
    AnswerFile(str(path), {}).close()
    first = whole.index(b"\n") + 1
    (tmp_path / "out.jsonl.partial").write_bytes(whole[:first] + b"\0" * 9 + b"\n" + whole[first:])
    assert AnswerFile(str(path), {}).num_lines == 1


def test_a_complete_file_is_left_alone(tmp_path, whole):
    assert AnswerFile(str(tmp_path / "whole.jsonl"), {"--n": 1}).is_complete


def test_other_settings_are_refused(tmp_path, whole):
    path = str(tmp_path / "whole.jsonl")
    with pytest.raises(UserError, match="--n was 1 and is 2; name another file, or replace"):
        AnswerFile(path, {"--n": 2})
    file = AnswerFile(path, {"--n": 2}, overwrite=True)
    assert (file.num_lines, file.is_complete) == (0, False)
    assert not (tmp_path / "whole.jsonl").exists()


def test_the_settings_of_a_removed_file_bind_nobody(tmp_path, whole):
    (tmp_path / "whole.jsonl").unlink()
    AnswerFile(str(tmp_path / "whole.jsonl"), {"--n": 2}).close()
    file = AnswerFile(str(tmp_path / "whole.jsonl"), {"--n": 2})
    file.append(LINES)
    file.close()
    with pytest.raises(UserError, match="--n was 2 and is 3"):
        AnswerFile(str(tmp_path / "whole.jsonl"), {"--n": 3})


def test_one_command_at_a_time(tmp_path):
    path = str(tmp_path / "out.jsonl")
    first = AnswerFile(path, {})
    with pytest.raises(UserError, match="another command is writing it"):
        AnswerFile(path, {})
    first.close()
    AnswerFile(path, {}).close()


def test_a_kill_before_the_settings_are_written(tmp_path):
    path = tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.partial").touch()
    file = AnswerFile(str(path), {"--n": 1})
    file.append(LINES)
    file.close()
    (tmp_path / "out.jsonl.settings.json").unlink()
    with pytest.raises(UserError, match="this command did not write it"):
        AnswerFile(str(path), {"--n": 1})
