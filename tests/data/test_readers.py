"""Files of every format, folders, globs, saved data sets and hub names; and their faults."""

import gzip
import json
import os
import tracemalloc
from types import SimpleNamespace

import data_files
import pytest
from data_files import pairs, put
from datasets import Dataset, DatasetDict
from quick import slow

from dschat.config import UserError
from dschat.data.sources import readers
from dschat.data.sources.adapters import Example
from dschat.data.sources.readers import read_lines


@pytest.fixture
def limits(monkeypatch):
    """Sets the characters that a file is read by, and the longest line."""

    def set_limits(chunk, line=1 << 28):
        monkeypatch.setattr(readers, "_CHUNK", chunk)
        monkeypatch.setattr(readers, "_MAX_LINE", line)

    return set_limits


def load(path, purpose="reward", split="train", **knobs):
    return data_files.load(path, purpose, split, **knobs)


def prompts(*args, **knobs):
    return [example.prompt for example in load(*args, **knobs)]


AWKWARD = [
    {"prompt": 'a "quoted", text', "chosen": "two\nlines\n\nand; a \ttab", "rejected": "NA"},
    {"prompt": "007", "chosen": "日本 é 🙂", "rejected": "null"},
    {"prompt": " None", "chosen": "True", "rejected": "1e5"},
]
KINDS = ["x.jsonl", "x.json", "x.csv", "x.tsv", "x.parquet", "X.JSONL", "x.jsonl.gz", "x.csv.gz"]
KINDS.append("a folder/data[1]:x*.json")


@pytest.mark.parametrize("name", KINDS)
def test_each_format_holds_any_text(tmp_path, name):
    expected = [Example(row["prompt"], row["chosen"], row["rejected"]) for row in AWKWARD]
    assert load(put(tmp_path / name, AWKWARD)) == expected


def test_columns_may_change_their_type_or_be_absent(tmp_path):
    rows = [{**row, "id": i if i % 2 else str(i)} for i, row in enumerate(pairs(3))]
    del rows[1]["id"]
    assert prompts(put(tmp_path / "x.jsonl", rows)) == ["p0", "p1", "p2"]


def test_csv_as_spreadsheets_write_it(tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes('\ufeffprompt;chosen;rejected\r\nq;"a\r\nb";c\r\n\r\nr;d;e\r\n'.encode())
    assert load(path) == [Example("q", "a\r\nb", "c"), Example("r", "d", "e")]


def test_json_over_several_lines_and_in_one_long_list(tmp_path, limits):
    limits(chunk=64)  # chunks end in the middle of values
    rows = [{**row, "note": "x" * (17 * i)} for i, row in enumerate(pairs(20))]
    expected = [row["prompt"] for row in rows]
    path = tmp_path / "x.json"
    for text in (json.dumps(rows), "\n".join(json.dumps(row, indent=2) for row in rows)):
        path.write_text(text)
        assert prompts(path) == expected
        assert [line.row for line in read_lines(str(path))] == rows
        path.unlink()


def test_a_list_with_a_fault_says_where(tmp_path, limits):
    limits(chunk=64)
    text = json.dumps(pairs(20), indent=1).replace('"a 11"', "oops")
    path = tmp_path / "x.json"
    path.write_text(text)
    line = 1 + text[: text.index("oops")].count("\n")
    with pytest.raises(UserError, match=rf"x.json:{line}: broken JSON \(Expecting value"):
        load(path)
    path.write_text("[1, " + "9" * 5000 + "]")
    with pytest.raises(UserError, match="x.json: item 1 of its list: not a JSON object"):
        load(path)


# -- folders, globs, saved sets, the hub


def test_a_folder_of_train_and_eval_files(tmp_path):
    put(tmp_path / "d" / "train-00000-of-00002.jsonl", pairs(2, "a"))
    put(tmp_path / "d" / "train-00001-of-00002.csv", pairs(2, "b"))
    put(tmp_path / "d" / "validation.parquet", pairs(1, "e"))
    (tmp_path / "d" / "README.md").write_text("no data")
    assert prompts(tmp_path / "d") == ["a0", "a1", "b0", "b1"]
    assert prompts(tmp_path / "d", split="eval") == ["e0"]


@pytest.mark.parametrize("inside", ["", "data/"])
def test_a_folder_of_folders_or_shards(tmp_path, inside):
    put(tmp_path / "d" / f"{inside}train" / "x.jsonl", pairs(1, "a"))
    put(tmp_path / "d" / f"{inside}train" / "y.jsonl", pairs(1, "b"))
    put(tmp_path / "d" / f"{inside}dev" / "x.jsonl", pairs(1, "e"))
    assert prompts(tmp_path / "d") == ["a0", "b0"]
    assert prompts(tmp_path / "d", split="eval") == ["e0"]
    put(tmp_path / "shards" / "part2.jsonl", pairs(1, "b"))
    put(tmp_path / "shards" / "part1.jsonl", pairs(1, "a"))
    assert prompts(tmp_path / "shards") == ["a0", "b0"]
    assert prompts(tmp_path / "shards", split="eval") == []


@pytest.mark.parametrize("suffix", [".jsonl", *slow([".csv", ".txt"])])
def test_a_line_that_a_small_file_unpacks_to_is_refused(suffix, tmp_path, limits):
    """Without reading all of it: ten times the limit."""
    limits(chunk=1 << 20, line=1 << 22)
    path = tmp_path / f"x{suffix}.gz"
    starts = {".jsonl": '{"prompt": "a"}\n{"prompt": "'}
    with gzip.open(path, "wt") as file:
        file.write(starts.get(suffix, "prompt\n"))
        for _ in range(40):
            file.write("a" * (1 << 20))
    tracemalloc.start()
    *_, last = read_lines(str(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert last.row is None
    assert last.where == f"{path}:2"
    assert last.fault == "longer than 4 MiB; put each row on a line of its own"
    assert peak < 40 << 20


def test_a_list_on_one_line_may_be_longer_than_a_line(tmp_path, limits):
    limits(chunk=100, line=1000)
    (tmp_path / "x.json").write_text(json.dumps(pairs(200)))
    assert prompts(tmp_path / "x.json") == [f"p{i}" for i in range(200)]


def test_a_glob_is_one_source(tmp_path):
    put(tmp_path / "a" / "1.jsonl", pairs(1, "a"))
    put(tmp_path / "b" / "2.jsonl", pairs(1, "b"))
    put(tmp_path / "b" / "2.txt", pairs(1, "c"))
    assert prompts(f"{tmp_path}/*/*") == ["a0", "b0"]
    assert prompts(f"{tmp_path}/**/2.jsonl:2") == ["b0", "b0"]


def test_saved_to_disk(tmp_path, monkeypatch):
    train, held = Dataset.from_list(pairs(2)), Dataset.from_list(pairs(1, "e"))
    train.save_to_disk(tmp_path / "one")
    DatasetDict(train=train, test=held).save_to_disk(tmp_path / "two")
    assert prompts(tmp_path / "one") == prompts(tmp_path / "two") == ["p0", "p1"]
    assert prompts(f"{os.path.relpath(tmp_path)}/two/../one/") == ["p0", "p1"]
    assert prompts(tmp_path / "two", split="eval") == ["e0"]
    monkeypatch.chdir(tmp_path / "two")
    (tmp_path / "link").symlink_to(tmp_path / "one")
    assert prompts("../one") == prompts("../link") == ["p0", "p1"]
    (tmp_path / "one" / "state.json").write_text("{")
    with pytest.raises(UserError, match="save_to_disk, but cannot be read .*; save it again"):
        load(tmp_path / "one")


def test_a_saved_folder_that_names_files_outside_of_it_is_refused(tmp_path):
    train = Dataset.from_list(pairs(2))
    train.save_to_disk(tmp_path / "theirs")
    train.save_to_disk(tmp_path / "one")
    DatasetDict(train=train).save_to_disk(tmp_path / "two")
    state = json.loads((tmp_path / "one" / "state.json").read_text())
    (file,) = (tmp_path / "theirs").glob("*.arrow")
    for name in (str(file), f"../theirs/{file.name}"):
        state["_data_files"] = [{"filename": name}]
        (tmp_path / "one" / "state.json").write_text(json.dumps(state))
        with pytest.raises(UserError, match=f"one looks.*names .*{file.name}, which is not in it"):
            load(tmp_path / "one")
    (tmp_path / "two" / "dataset_dict.json").write_text('{"splits": ["train", "../theirs"]}')
    with pytest.raises(UserError, match="which is not in it"):
        load(tmp_path / "two")


def test_rows_replaced_in_a_saved_folder_are_read_again(tmp_path):
    """Its state.json has a fingerprint, which does not tell."""
    for name in ("one", "two"):
        Dataset.from_list(pairs(2, name)).save_to_disk(tmp_path / name)
    assert prompts(tmp_path / "one") == ["one0", "one1"]
    (new,) = (tmp_path / "two").glob("*.arrow")
    new.replace(tmp_path / "one" / new.name)
    assert prompts(tmp_path / "one") == ["two0", "two1"]


def test_a_hub_name_with_a_configuration_and_a_weight(hub):
    hub.splits = {"train": pairs(2)}
    assert prompts("owner/name:en:2") == ["p0", "p1"] * 2
    assert prompts("owner/name:0.5") in (["p0"], ["p1"])
    assert hub.calls == [("owner/name", "en", None), ("owner/name", None, None)]


def test_data_sets_that_were_scripts_come_from_the_hubs_parquet_copy(hub):
    hub.splits, hub.has_script = {"train": pairs(1)}, True
    assert prompts("owner/name") == ["p0"]
    assert hub.calls[-1] == ("owner/name", None, "refs/convert/parquet")


@pytest.mark.parametrize(
    ("splits", "train", "held_out"),
    [
        (("train", "validation"), "train", "validation"),
        (("train_prefs", "train_sft", "test_prefs", "test_sft"), "train_prefs", "test_prefs"),
        (("train_sft", "test"), "train_sft", "test"),
        (("test",), "test", None),
    ],
)
def test_which_splits_train_and_are_held_out(hub, splits, train, held_out):
    hub.splits = {name: pairs(1, name) for name in splits}
    assert prompts("owner/name") == [train + "0"]
    assert prompts("owner/name", split="eval") == ([held_out + "0"] if held_out else [])


def test_a_hub_data_set_without_a_train_split_lists_its_splits(hub):
    hub.splits = {"en": pairs(1), "de": pairs(1)}
    with pytest.raises(UserError, match="no rows in a train split; its splits: en, de"):
        load("owner/name")


# -- bad files and bad rows

GOOD = '{"prompt": "p", "chosen": "c"}\n'


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.csv", "prompt,chosen\nq,a\nq,a,b\n", ["x.csv:3", "3 fields", "2 columns"]),
        ("x.csv", 'prompt,chosen\nq,"a"b\n', ["x.csv:2", "broken CSV", "quotation marks"]),
        ("x.csv", 'prompt,chosen\nq,a\nr,"b\nc\n', ["x.csv:3", "broken CSV"]),
        ("x.csv", "prompt,prompt\nq,a\n", ["x.csv:1", "name every column"]),
        ("x.csv", b"prompt,chosen\nq,a\n\xff,b\n", ["x.csv:3", "UTF-8"]),
        ("x.csv", b"\xff\xfep\x00,\x00", ["x.csv:1", "UTF-8"]),
        ("x.csv", "", ["x.csv is empty"]),
        ("x.csv", "prompt,chosen\n", ["x.csv is empty"]),
        ("x.jsonl", "", ["x.jsonl is empty"]),
        ("x.jsonl", " \n\n", ["x.jsonl is empty"]),
        ("x.json", "[]", ["x.json is empty"]),
        ("x.jsonl", GOOD * 3 + '{"prompt": oops}\n', ["x.jsonl:4", "broken JSON", "column 12"]),
        ("x.jsonl", GOOD + "\n" + '{"prompt": "p", "cho', ["x.jsonl:3", "broken JSON"]),
        ("x.json", GOOD + "{]", ["x.json:2", "broken JSON"]),
        ("x.jsonl", GOOD.encode() + '{"prompt": "é"}\n'.encode("latin-1"), ["x.jsonl:2", "UTF-8"]),
        ("x.doc", "prompt,chosen\n", ["x.doc is not one of .json, .jsonl, .csv"]),
        ("x.jsonl", '{"foo": "p", "bar": "c"}\n', ["foo, bar", "--columns prompt="]),
        ("x.jsonl", '{"prompt": "p", "note": "c"}\n', ["--columns chosen=COLUMN", "prompt, note"]),
        ("x.jsonl", '{"prompt": "p", "chosen": ""}\n', ["no usable row", "empty", "x.jsonl:1"]),
        ("x.jsonl", GOOD + '{"prompt": ' + "9" * 5000 + "}", ["x.jsonl:2", "broken JSON"]),
        ("x.jsonl", GOOD + '{"prompt": ' + "[" * 99999, ["x.jsonl:2", "broken JSON"]),
        ("x.jsonl", GOOD + "\n\nnull\n", ["x.jsonl:4", "not a JSON object"]),
        ("x.json", '[{"prompt": "p", "chosen": "c"}', ["x.json:1", "Expecting ']'"]),
        ("x.json", b'[{"prompt": "p"},\n"\xff"]', ["x.json:2", "UTF-8"]),
        ("x.parquet", b"PAR1 no", ["x.parquet", "damaged Parquet"]),
        ("x.jsonl.gz", b"no gzip", ["x.jsonl.gz", "damaged gzip"]),
        ("d/x.md", "no data", ["the folder", "no data files", "train.*"]),
        ("d/test.jsonl", GOOD, ["the folder", "no training files", "train.*"]),
    ],
)
def test_a_fault_is_a_one_line_error_with_its_place(tmp_path, name, content, words):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        load(path.parent if "/" in name else path, "sft")
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in ("--data_path", *words)), message


def test_patterns_and_paths_without_files_are_refused(tmp_path):
    for name, words in (("*.jsonl", "matches no file"), ("no/", "no such data file")):
        with pytest.raises(UserError, match=words):
            load(f"{tmp_path}/{name}")
    with pytest.raises(UserError, match="neither a file nor a valid hub name"):
        load("what is this")


@pytest.mark.parametrize(
    ("name", "lines", "bad"),
    [
        (
            "x.jsonl",
            [GOOD.encode()] * 2 + [b"{oops\n", GOOD.encode(), b"\xff\n", b"[]\n", GOOD.encode()],
            (3, 5, 6),
        ),
        (
            "x.csv",
            [b"prompt,chosen\n", b"p,c\n", b"p,c,d\n", b'"p\n', b'p",c\n', b"\xff,c\n", b"p,c\n"],
            (3, 6),
        ),
    ],
)
def test_skip_reads_past_broken_lines_and_lists_them(tmp_path, log, name, lines, bad):
    path = tmp_path / name
    path.write_bytes(b"".join(lines))
    found = load(path, "sft", on_bad_row="skip")
    assert len(found) == {"x.jsonl": 4, "x.csv": 3}[name]
    (message,) = (text for text in log.messages if ": dropped " in text)
    assert f"dropped {len(bad)} of {len(bad) + len(found)} rows" in message
    for number in bad:
        assert f"{path}:{number}: " in message
    for policy in ("auto", "error"):
        with pytest.raises(UserError, match=rf"{name}:{bad[0]}: .*--on_bad_row skip"):
            load(path, "sft", on_bad_row=policy)


def test_unusable_rows_are_dropped_or_the_first_is_an_error(tmp_path, caplog):
    rows = pairs(6)
    rows[1]["chosen"], rows[3]["chosen"], rows[4]["prompt"] = "  \n", None, ""
    lines, path = [json.dumps(row) for row in rows], tmp_path / "x.jsonl"
    path.write_text(lines[0] + "\n\n" + "\n".join(lines[1:]) + "\n")
    assert prompts(path, "sft") == ["p0", "p2", "p5"]
    (message,) = (text for text in caplog.messages if ": dropped " in text)
    assert "dropped 3 of 6 rows" in message
    assert f"{path}:3" in message  # row 2 stands on line 3: a blank line is above
    assert prompts(path, "sft", on_bad_row="skip") == ["p0", "p2", "p5"]
    with pytest.raises(UserError, match=r"x.jsonl:3: an answer that is empty, .*; fix it, or"):
        load(path, "sft", on_bad_row="error")
    assert len(load(path, "rlhf")) == 5  # PPO needs no answer


def test_the_log_lists_ten_bad_rows_and_counts_all(tmp_path, caplog):
    path = put(tmp_path / "x.jsonl", [*pairs(30), *[{"prompt": "", "chosen": "x"}] * 15])
    load(path)
    assert "dropped 15 of 45 rows (15 with no usable prompt); the first ten: " in caplog.text
    assert f"{path}:40: " in caplog.text
    assert f"{path}:41: " not in caplog.text


def test_rows_are_cached_until_the_file_changes(tmp_path):
    """One with the size and the time of the first is taken for it, and not read."""
    path = tmp_path / "x.jsonl"
    put(path, pairs(3))
    before = path.stat()
    first = prompts(path)
    put(path, pairs(3, "q"))
    assert prompts(path) == ["q0", "q1", "q2"]
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert prompts(path) == first


def test_a_cache_that_cannot_be_written_is_a_user_error(tmp_path):
    (tmp_path / "cache").write_text("")  # a file, where the folder would be
    with pytest.raises(UserError, match="HF_DATASETS_CACHE"):
        load(put(tmp_path / "x.jsonl", pairs(3)))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_paragraphs_of_a_text_file(tmp_path, end):
    """Their line ends are the same, whoever wrote them; other files keep theirs."""
    lines = ["", "one", "two", "", " ", "three", "", "", "four \t", ""]
    (tmp_path / "book.txt").write_bytes(end.join(lines).encode())
    found = [
        (line.where.rpartition(":")[2], line.row) for line in read_lines(str(tmp_path / "book.txt"))
    ]
    texts = [("2", "one\ntwo"), ("6", "three"), ("9", "four \t")]
    assert found == [(number, {"text": text}) for number, text in texts]


class Piece(str):
    """A line that refuses to be appended to the text before it, which copies all of that."""

    def __radd__(self, text):
        raise AssertionError("quadratic in the number of lines")


def test_a_text_without_blank_lines_is_not_copied_for_each_line(tmp_path):
    pieces = iter([*map(Piece, ["a line\n"] * 1000), ""])
    file = SimpleNamespace(readline=lambda size: next(pieces))
    (line,) = readers._paragraphs(file, "book.txt")
    assert line.row == {"text": ("a line\n" * 1000).rstrip()}
