"""A changed file changes the fingerprint, in every way that a flag can name it."""

import os
import shutil

import pytest

from dschat.checkpoint.compatibility import fingerprint

BLOCK = 1 << 16  # bytes


@pytest.fixture
def folder(tmp_path):
    """A file, a folder of shards, one as ``save_to_disk`` leaves it, and a clone of a hub's."""
    base = tmp_path / "here"
    texts = {
        "rows.jsonl": "rows",
        "shards/a.csv": "rows",
        "saved/train/data-00000-of-00001.arrow": "rows",
        "clone/data/train-0.parquet": "rows",
        "score.py": "def score(answers): ...",
    }
    for name, text in texts.items():
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return base


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("rows.jsonl", "rows.jsonl"),
        ("rows.jsonl:0.5", "rows.jsonl"),
        ("score.py:score", "score.py"),
        ("score.py:score:2", "score.py"),
        ("shards", "shards/a.csv"),
        ("shards/:3", "shards/a.csv"),
        ("shards/*.csv", "shards/a.csv"),
        ("shards/*.csv:0.5", "shards/a.csv"),
        ("sh*/**", "shards/a.csv"),
        ("saved", "saved/train/data-00000-of-00001.arrow"),
        ("clone", "clone/data/train-0.parquet"),
    ],
)
def test_an_edit_is_seen_and_a_move_is_not(folder, monkeypatch, name, file):
    monkeypatch.chdir(folder)
    before = fingerprint([name])
    assert len(before) == 16
    moved = folder.with_name("moved")
    shutil.copytree(folder, moved)
    os.utime(moved / file, (0, 0))
    monkeypatch.chdir(moved)
    assert fingerprint([name]) == before
    (moved / file).write_text((moved / file).read_text().swapcase())  # as large as before
    assert fingerprint([name]) != before


@pytest.mark.parametrize("name", ["builtin/chat", "org/data:config", "exact_match:2", "", ":", "~"])
def test_what_is_no_file_has_none(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fingerprint([name]) is None


@pytest.mark.parametrize("name", ["shards", "shards/*"])
def test_what_is_no_data_does_not_count(folder, name):
    before = fingerprint([str(folder / name)])
    for other in ("README.md", "cache-8a1f.arrow", "x.lock", ".hidden.csv"):
        (folder / "shards" / other).write_text("new")
    (folder / "shards" / "a.csv.d").mkdir()
    assert fingerprint([str(folder / name)]) == before
    (folder / "shards" / "b.csv").write_text("")
    assert fingerprint([str(folder / name)]) != before


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
def test_of_a_small_file_every_byte_counts(tmp_path, size):
    path = tmp_path / "rows.txt"
    data = bytearray(os.urandom(size))
    prints = set()
    path.write_bytes(data)
    prints.add(fingerprint([str(path)]))
    at = sorted({*range(0, size, 997), *range(max(0, size - 9), size)})
    for place in at:
        data[place] ^= 1
        path.write_bytes(data)
        prints.add(fingerprint([str(path)]))
        data[place] ^= 1
    path.write_bytes(data + b"\0")
    prints.add(fingerprint([str(path)]))
    assert len(prints) == len(at) + 2


def test_of_many_large_files_it_reads_little(tmp_path):
    """Of 4 files 64 blocks each, the first and the last among them."""
    size = 200 * BLOCK
    for name in "abcd":
        with (tmp_path / f"{name}.csv").open("wb") as file:
            file.truncate(size)
    second = -(-(size - BLOCK) // 63)
    prints = [fingerprint([str(tmp_path)])]
    for place in (BLOCK, second - 1, 0, second, size - 1):
        with (tmp_path / "c.csv").open("rb+") as file:
            file.seek(place)
            file.write(b"x")
        prints.append(fingerprint([str(tmp_path)]))
    assert prints[0] == prints[1] == prints[2]
    assert len(set(prints)) == 4


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="no file that root cannot read")
def test_a_file_that_cannot_be_read_is_left_to_who_needs_it(tmp_path):
    (tmp_path / "mem").touch()  # as large
    assert fingerprint(["/proc/self/mem"]) not in (None, fingerprint([str(tmp_path / "mem")]))
