"""A cached table is used only if the code, the tokenizer and the template are the same."""

import json
import shutil
from dataclasses import replace
from types import FunctionType

import pytest
from quick import slow

from dschat.builtin.tiny_model import tiny_tokenizer
from dschat.config import SFTConfig
from dschat.data import pretraining_text, rendering, segments, tables
from dschat.data.pretraining_text import text_dataset
from dschat.data.sources.known_datasets import ADAPTERS
from dschat.data.sources.resolve import read_source
from dschat.data.sources.splits import normalized_table
from dschat.data.tokenize import sft_dataset

XES = "{% for m in messages %}x{% endfor %}"


def dialogue_ids(folder, tokenizer):
    """The ids of one dialogue, as step 1 has them."""
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    path = folder / "chats.jsonl"
    if not path.exists():
        path.write_text(json.dumps({"messages": turns}))
    config = SFTConfig(data_path=[str(path)], data_split="1,0,0", eval_fraction=0.0)
    return sft_dataset(config, tokenizer)["input_ids"][:]


def text_ids(folder, tokenizer):
    path = folder / "book.txt"
    if not path.exists():
        path.write_text("hello")
    return text_dataset(str(path), "text", tokenizer, block_len=99)["input_ids"][:]


OTHERS = [
    (dialogue_ids, "models/chat_template.py", rendering, "default_template", lambda _: XES),
    (dialogue_ids, "models/tokenizer.py", segments, "stop_ids", lambda _: (7, 8, 9)),
    (dialogue_ids, "models/continued_text.py", segments, "continued_ids", lambda *_: [[7]]),
    (dialogue_ids, "data/sources/turns.py", rendering, "default_template", lambda _: XES),
]


@pytest.mark.parametrize(
    ("make", "file", "module", "name", "edited"),
    [
        (dialogue_ids, "data/segments.py", segments, "through_end", lambda ids, ends: [7, 7]),
        (text_ids, "data/pretraining_text.py", pretraining_text, "require_eos", lambda _: 7),
        *slow(OTHERS),
    ],
)
def test_tables_do_not_outlive_the_code_that_made_them(
    make, file, module, name, edited, tmp_path, monkeypatch
):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    first = make(tmp_path, tokenizer)
    code = tmp_path / "code"
    shutil.copytree(tables.CODE, code, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(tables, "CODE", code)
    monkeypatch.setattr(module, name, edited)
    assert make(tmp_path, tokenizer) == first  # same digest: from the cache
    with (code / file).open("r+") as source:  # the file exists
        source.seek(0, 2)
        source.write("# edited")
    assert make(tmp_path, tokenizer) != first


def test_a_table_of_rewritten_rows_is_found_by_other_processes(tmp_path):
    adapter = ADAPTERS["openai/webgpt_comparisons"]
    function = adapter.rewrite
    same_elsewhere = FunctionType(function.__code__, function.__globals__, function.__name__)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": {"full_text": "why?"}, "answer_0": "a", "score_0": 1}))
    rows = read_source(str(path), "--data_path").train
    for rewrite in (function, same_elsewhere):
        normalized_table(rows, replace(adapter, rewrite=rewrite), "rlhf")
    assert len(list((tmp_path / "cache" / "dschat").iterdir())) == 1


def test_another_chat_template_makes_another_table(tmp_path):
    tokenizer = tiny_tokenizer()
    first = dialogue_ids(tmp_path, tokenizer)
    tokenizer.chat_template = XES
    assert dialogue_ids(tmp_path, tokenizer) != first
