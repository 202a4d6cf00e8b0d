"""Plain text as blocks of tokens, for the pretraining loss."""

import json
import shutil

import datasets
import pytest
from tool_templates import tokenizer_of

from dschat.config import UserError
from dschat.data.pretraining_text import text_dataset

PLAIN = tokenizer_of(None)  # bytes


def test_text_is_joined_by_eos_and_cut_in_blocks(tmp_path):
    path = tmp_path / "text.jsonl"
    documents = ["abcd", "", "efg", "hij"]
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in documents))
    blocks = text_dataset(str(path), "body", PLAIN, block_len=4)["input_ids"][:]
    assert [PLAIN.decode(block) for block in blocks] == ["abcd", "<eot>efg", "<eot>hij"]
    (short,) = text_dataset(str(path), "body", PLAIN, block_len=99)["input_ids"]
    assert PLAIN.decode(short) == "abcd<eot>efg<eot>hij<eot>"
    with pytest.raises(UserError, match="--unsup_column 'text' is not in .*it has: body"):
        text_dataset(str(path), "text", PLAIN, block_len=4)


def test_a_table_in_memory_is_read_each_time(tmp_path, monkeypatch):
    """`datasets` gives it no files whose times would tell that its content has changed."""
    monkeypatch.setattr(datasets.config, "IN_MEMORY_MAX_SIZE", 1 << 20)
    for text in ("before", "after"):
        shutil.rmtree(tmp_path / "saved", ignore_errors=True)
        datasets.Dataset.from_dict({"text": [text]}).save_to_disk(tmp_path / "saved")
        (block,) = text_dataset(str(tmp_path / "saved"), "text", PLAIN, block_len=99)["input_ids"]
        assert PLAIN.decode(block) == f"{text}<eot>"


def test_a_text_file_is_a_document_per_paragraph(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("one\ntwo\n\nthree\n")
    (block,) = text_dataset(str(path), "text", PLAIN, block_len=99)["input_ids"]
    assert PLAIN.decode(block).replace("\n<eot>", "<eot>") == "one\ntwo<eot>three<eot>"


def test_text_without_text_is_an_error(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": " "}\n')
    with pytest.raises(UserError, match="--unsupervised_dataset_name: .* has no text"):
        text_dataset(str(path), "text", PLAIN, block_len=4)
