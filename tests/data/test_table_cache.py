"""A cached table is used only if the code, the tokenizer and the template are the same."""

import shutil
from dataclasses import replace
from functools import partial
from types import FunctionType, SimpleNamespace

import pytest
from damages import DAMAGES, flip
from data_files import step_table
from dialogues import REPLY, USER

from dschat.builtin.tiny_model import tiny_tokenizer
from dschat.config.data import DataConfig
from dschat.data import tables
from dschat.data.pretraining_text import text_dataset
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
