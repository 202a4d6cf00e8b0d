"""A cached table is used only if the code, the tokenizer and the template are the same."""

import copy
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest
import torch
from damages import DAMAGES, flip
from data_files import step_table
from datasets import Dataset, DatasetDict
from dialogues import REPLY, USER
from pandas import DataFrame, MultiIndex

from dschat.builtin.tiny_model import tiny_tokenizer
from dschat.config import UserError
from dschat.config.data import DataConfig
from dschat.data.pretraining_text import text_dataset
from dschat.data.sources import tables
from dschat.data.sources.known_datasets import ADAPTERS
from dschat.data.sources.resolve import read_source
from dschat.data.sources.splits import normalized_table

MADE_BY = [
    "data/segments.py",
    "data/pretraining_text.py",
    "data/sources/turns.py",
    "models/chat_template.py",
    "models/continued_text.py",
    "models/tokenizer.py",
]


@pytest.fixture
def dialogue(write):
    return write([{"messages": [USER("hi"), REPLY("hello")]}], "chats.jsonl")


@pytest.fixture
def tables_on_disk(tmp_path):
    """The names of the tables in the cache."""
    return lambda: {file.name for file in tmp_path.glob("cache/dschat/*")}


def test_tables_do_not_outlive_the_code_that_made_them(
    write, dialogue, tables_on_disk, tmp_path, monkeypatch
):
    code, tokenizer, book = tmp_path / "code", tiny_tokenizer(), write("hello", "book.txt")
    shutil.copytree(tables.CODE, code, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(tables, "CODE", code)
    for make, num_tables in (
        (partial(step_table, dialogue, tokenizer), 2),  # normalized, tokenized
        (partial(text_dataset, book, "text", tokenizer, block_len=99), 1),
    ):
        make()
        for file in MADE_BY:
            before = tables_on_disk()
            make()
            assert tables_on_disk() == before
            with (code / file).open("r+") as source:  # the file exists
                source.seek(0, 2)
                source.write("# edited")
            make()
            assert len(tables_on_disk() - before) == num_tables


def test_a_table_of_rewritten_rows_is_found_by_other_processes(write, tables_on_disk):
    adapter = ADAPTERS["openai/webgpt_comparisons"]
    function = adapter.rewrite
    same_elsewhere = FunctionType(function.__code__, function.__globals__, function.__name__)
    path = write([{"question": {"full_text": "why?"}, "answer_0": "a", "score_0": 1}])
    rows = read_source(path, "--data_path", DataConfig()).train
    for rewrite in (function, same_elsewhere):
        normalized_table(rows, replace(adapter, rewrite=rewrite), "rlhf")
    assert len(tables_on_disk()) == 1


def test_another_chat_template_makes_another_table(dialogue):
    tokenizer = tiny_tokenizer()
    first = step_table(dialogue, tokenizer)["input_ids"][:]
    tokenizer.chat_template = "{% for m in messages %}x{% endfor %}"
    assert step_table(dialogue, tokenizer)["input_ids"][:] != first


@pytest.mark.parametrize("damage", [*DAMAGES, "a byte of the last row"])
def test_a_damaged_table_is_made_again(damage, dialogue, tmp_path, caplog):
    """A flipped byte would else be other tokens, without a word."""
    tokenizer = tiny_tokenizer()
    whole = step_table(dialogue, tokenizer)[:]
    before = {file.name: file.read_bytes() for file in tmp_path.glob("cache/dschat/*")}
    # The tokenized one first: it is made again with the table that it is made from.
    for name, content in sorted(before.items(), key=lambda file: b"input_ids" not in file[1]):
        path = tmp_path / "cache/dschat" / name
        flip_last = partial(flip, share=content.rindex(whole["input_ids"][0][-1]) / len(content))
        DAMAGES.get(damage, flip_last)(path)
        caplog.clear()
        assert step_table(dialogue, tokenizer)[:] == whole
        assert f"{path} is damaged: the rows are read again" in caplog.text
        assert path.read_bytes() == content


def test_a_table_is_on_disk_before_it_has_its_name(dialogue, tmp_path, monkeypatch):
    """A power cut must not leave the name of a table without its rows."""
    order = []

    def replace(made, path):
        order.append(("named", made))
        shutil.move(made, path)

    monkeypatch.setattr(tables, "sync_file", lambda path: order.append(("synced", path)))
    monkeypatch.setattr(tables, "os", SimpleNamespace(replace=replace))
    step_table(dialogue, tiny_tokenizer())
    assert [what for what, _ in order] == ["synced", "named", "synced"] * 2
    assert order[0][1] == order[1][1]
    assert order[2][1] == tmp_path / "cache/dschat"


ROWS = [
    {"prompt": "why?", "chosen": [REPLY("so")], "n": 1, "when": None},
    {"prompt": [USER("why not?")], "chosen": "never", "more": {"k": [1.5]}, "when": "now"},
]
TABLE = [{"messages": [USER(f"{i}?"), REPLY("yes")], "n": i} for i in range(5)]


def rows_of(name):
    return [line.row for line in read_source(name, "--data_path", DataConfig()).train]


def test_rows_of_python_code_are_read_as_those_of_a_file(write):
    (name,) = tables.data_names(ROWS, "data")
    assert rows_of(name) == rows_of(write(ROWS, "rows.jsonl")) == ROWS

    table = Dataset.from_list(TABLE)
    (name,) = tables.data_names(table.select([3, 1]), "data")
    assert rows_of(name) == rows_of(write([TABLE[3], TABLE[1]], "rows.parquet"))

    frame = DataFrame({"prompt": ["a", None], "n": [1.5, float("nan")], "chat": [[{}], [{"a": 1}]]})
    (name,) = tables.data_names(frame, "data")
    missing = {"prompt": None, "n": None, "chat": [{"a": 1}]}
    assert rows_of(name) == [{"prompt": "a", "n": 1.5, "chat": [{}]}, missing]

    odd = {"n": np.int64(3), "v": torch.tensor([1, 2]), "d": datetime(2020, 1, 2), "s": "\ud800"}
    (name,) = tables.data_names([odd], "data")
    plain = {"n": 3, "v": [1, 2], "d": "2020-01-02 00:00:00"}
    assert rows_of(name) == [plain | {"s": "\ud800"}]


def test_equal_rows_are_one_file_with_one_time(tables_on_disk):
    """So that a resumed run finds its data, and its tables, again."""
    table = Dataset.from_list(TABLE)
    others = Dataset.from_list([{"messages": [], "n": 9}, *TABLE]).select(range(1, 6))
    for given in ((ROWS, tuple(ROWS), copy.deepcopy(ROWS)), (table, others)):
        found = set()
        for rows in given:
            (name,) = tables.data_names(rows, "data")
            found.add((name, Path(name).stat().st_mtime_ns))
        assert len(found) == 1
    assert tables.data_names(ROWS[:1], "data") != tables.data_names(ROWS, "data")
    assert len(tables_on_disk()) == 3


def test_names_stay_and_kinds_mix():
    rows = tables.data_names(ROWS, "data")
    assert tables.data_names("a.jsonl:0.5", "data") == ["a.jsonl:0.5"]
    assert tables.data_names(Path("a"), "data") == ["a"]
    given = ["a", Path("b:2"), ROWS, ("c", ROWS)]
    assert tables.data_names(given, "data") == ["a", "b:2", *rows, "c", *rows]


IN_ITSELF: dict = {}
IN_ITSELF["row"] = IN_ITSELF


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (DatasetDict(train=Dataset.from_list(TABLE)), "data of type DatasetDict: .* .one split"),
        (Dataset.from_list(TABLE).to_iterable_dataset(), "IterableDataset: .* or names"),
        ({"prompt": ["a"]}, "data of type dict: give a list of dicts"),
        (len, "data of type builtin_function_or_method"),
        ([DatasetDict(train=Dataset.from_list(TABLE))], "data of type DatasetDict: .* .one split"),
        (
            [{"a": Dataset.from_list(TABLE).to_iterable_dataset()}],
            "data of type dict: .* .one split",
        ),
        ([{("a", 1): "x"}], "data has a row that JSON cannot hold: keys must be str.* not tuple"),
        (DataFrame([["x"]], columns=MultiIndex.from_tuples([("a", 1)])), "JSON .* not tuple"),
        ([IN_ITSELF], "data has a row that JSON cannot hold: Circular reference"),
        (["a", 3], "data of type int"),
        (["Hi", "What is 2+2?"], r"data 'What is 2\+2\?' is no file .* rows, as .{.prompt"),
        ("Write a poem.", "data 'Write a poem.' is no file or data set; texts are rows"),
        (["one line\nanother:2"], r"data 'one line\\nanother:2' is no file"),
        (["no folder:2"], "data 'no folder:2' is no file"),
        (["x " * 999], f"data '{'x ' * 30}' is no file"),
        ([], "data is empty"),
        (DataFrame(), "data is empty"),
        (Dataset.from_list(TABLE).select([]), "data is empty"),
    ],
)
def test_other_data_is_refused(data, words, tables_on_disk):
    with pytest.raises(UserError, match=words):
        tables.data_names(data, "data")
    assert not tables_on_disk()


def test_names_may_have_spaces(tmp_path, monkeypatch):
    """Files that are there, or that could be; hub names have none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my rows").mkdir()
    (tmp_path / "[1] file").touch()
    names = ["my rows", "my rows:2.5", "m* row?", "~/my rows", "[1] file", "none here.JSONL.gz:2"]
    names += ["a/b c.txt", "owner/name:part"]
    assert tables.data_names(names, "data") == names


RSS = """
import sys
from dschat.config import SFTConfig
from dschat.data.sources.splits import load_examples

def resident():  # MiB of anonymous memory, without mapped files
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("RssAnon"))

before = resident()
load_examples(SFTConfig(data_path=sys.argv[1:], data_split="1,0,0"), "sft")
print(resident() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path):
    """A file of 200 MB, read completely: memory grows by less than its texts take."""
    path = tmp_path / "big.jsonl"
    answer = "word " * 200
    with path.open("w") as file:
        for i in range(190_000):
            file.write(json.dumps({"prompt": f"question {i}", "chosen": answer}) + "\n")
    assert path.stat().st_size > 190e6
    environment = {"HF_DATASETS_CACHE": str(tmp_path / "kept"), "PATH": ""}
    command = [sys.executable, "-c", RSS, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 100, f"{done.stdout} MiB"
