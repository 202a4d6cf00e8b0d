"""Labelled answers: every form of data with one answer, the values that are labels, and others."""

from dataclasses import replace

import data_files
import pytest
from byte_tokenizers import CHATML, byte_tokenizer
from data_files import put, step_table
from dialogues import HH, REPLY, USER, chat
from quick import slow, some

from dschat.config import UserError
from dschat.data.sources.adapters import Example
from dschat.data.sources.known_datasets import GENERIC, ColumnAdapter, checked_label

FORMATS = ("jsonl", "csv", "parquet", *slow(["json", "data.json"]))
CHAT = byte_tokenizer("<|im_end|>", CHATML)


def load(folder, rows, purpose="sft", form="jsonl", **knobs):
    found = data_files.load(put(folder / f"rows.{form}", rows), purpose, **knobs)
    return [replace(example, columns=None) for example in found]


def sides(folder, rows, form="jsonl", **knobs):
    """Step 2's rows: whether each has a chosen, and a rejected, answer."""
    path = put(folder / f"rows.{form}", rows)
    names = ("chosen_ids", "rejected_ids")
    table = step_table(path, CHAT, "reward", loss="kto", **knobs)
    return [tuple(len(row[name]) > row["prompt_length"] for name in names) for row in table]


LABELLED = [{"prompt": f"p{i}", "completion": f"c{i}", "label": i % 3 > 0} for i in range(6)]


@pytest.mark.parametrize("form", FORMATS)
def test_labelled_answers(tmp_path, form):
    good, bad = ([row for row in LABELLED if row["label"] == is_good] for is_good in (True, False))
    assert load(tmp_path, LABELLED, form=form) == [
        Example(r["prompt"], r["completion"]) for r in good
    ]
    assert len(load(tmp_path, LABELLED, "rlhf", form)) == 6
    with pytest.raises(UserError, match="labels single answers, .* add --loss kto"):
        load(tmp_path, LABELLED, "reward", form)


@pytest.mark.parametrize("label", [None, "math", 3])
def test_a_label_that_is_none_is_refused(tmp_path, label):
    row = {"prompt": "p", "completion": "c", "label": label}
    with pytest.raises(UserError, match="neither true nor false; see --columns chosen"):
        load(tmp_path, [row])
    assert load(tmp_path, [row], columns=["chosen=completion"]) == [Example("p", "c")]


# Each generic form in which a row has one answer.
FORMS = [
    adapter
    for adapter in GENERIC
    if (adapter.chosen or adapter.messages) and not (adapter.rejected or adapter.answers)
]


def row_of(adapter, text):
    """A row in the layout of ``adapter``; its question and its answer are ``text``."""
    if adapter.messages == "text":
        return {"text": f"{HH} {text}\n\nHuman: {text}\n\nAssistant: {text}"}
    if adapter.messages:
        return {adapter.messages: [USER(text), REPLY("earlier"), USER("more"), REPLY(text)]}
    column, is_list, _ = adapter.chosen.partition(".")
    return {adapter.prompt: text, column: [text] if is_list else text}


COLUMNS = [("label", "jsonl"), ("kto_tag", "parquet"), ("Label", "csv")]
QUICK = [(adapter, *COLUMNS[i % 2]) for i, adapter in enumerate(FORMS) if i % 4 == 0]


@pytest.mark.parametrize(
    ("adapter", "column", "form"), some(((a, *c) for a in FORMS for c in COLUMNS), QUICK)
)
def test_every_form_with_one_answer_may_have_labels(tmp_path, adapter, column, form):
    plain = [row_of(adapter, f"t{i}") for i in range(4)]
    if form == "csv" and any(isinstance(value, list) for value in plain[0].values()):
        form = "json"  # of a list in a cell, a chat alone is read
    whole = load(tmp_path, plain, form=form)
    rows = [{**row, column: i % 2 == 0} for i, row in enumerate(plain)]
    assert load(tmp_path, rows, form=form) == whole[::2]
    assert len(load(tmp_path, rows, "rlhf", form)) == 4
    assert sides(tmp_path, rows, form) == [(True, False), (False, True)] * 2
    table = step_table(tmp_path / f"rows.{form}", CHAT, "reward", loss="kto")
    for row, example in zip(table, whole, strict=True):
        answered = max(row["chosen_ids"], row["rejected_ids"], key=len)
        said = example.chosen if isinstance(example.chosen, str) else example.chosen[0]["content"]
        assert CHAT.decode(answered[row["prompt_length"] :]).rstrip("\n") == f"{said}<|im_end|>"


@pytest.mark.parametrize(
    ("good", "bad"), [(True, False), (1, 0), (1.0, 0.0), ("good", "bad"), ("True", "FALSE")]
)
def test_values_that_are_labels(tmp_path, good, bad):
    rows = [{"question": f"q{i}", "answer": "a", "label": (bad, good)[i % 2]} for i in range(4)]
    assert load(tmp_path, rows) == [chat("q1", "a"), chat("q3", "a")]
    assert sides(tmp_path, rows) == [(False, True), (True, False)] * 2


@pytest.mark.parametrize("value", [2, -1, "math", 0.5])
def test_a_column_with_other_values_is_no_label(tmp_path, value, log):
    """A class, or a topic, though its first rows look like labels."""
    rows = [{"question": f"q{i}", "answer": "a", "label": i % 2} for i in range(4)]
    rows[3]["label"] = value
    path, whole = tmp_path / "rows.jsonl", [chat(f"q{i}", "a") for i in range(4)]
    assert load(tmp_path, rows) == whole
    assert log.text.count("its column label has the value") == 1
    with pytest.raises(UserError, match="has no rejected answers, which step 2 needs"):
        step_table(path, CHAT, "reward", loss="kto")


def test_rows_without_a_label(tmp_path, caplog):
    rows = [{"question": f"q{i}", "answer": "a", "label": None} for i in range(3)]
    assert len(load(tmp_path, rows)) == 3
    rows[2]["label"] = "good"
    assert load(tmp_path, rows) == [chat("q2", "a")]
    assert (
        "2 with an answer that is empty, unreadable or of weight 0 (a label that is" in caplog.text
    )


def test_columns_override_labels(tmp_path):
    rows = [{"messages": [USER("u"), REPLY("r")], "label": False}]
    assert load(tmp_path, rows, columns=["messages=messages"]) == [chat("u", "r")]
    rows = [{"question": "u", "answer": "r", "label": False}]
    assert load(tmp_path, rows, columns=["chosen=answer"]) == [chat("u", "r")]
    with pytest.raises(UserError, match="its label is false"):
        load(tmp_path, rows, columns=["prompt=question"])


def test_only_single_answers_have_labels(tmp_path):
    rows = [{"prompt": f"p{i}", "chosen": "c", "rejected": "r", "label": i % 2} for i in range(4)]
    assert len(load(tmp_path, rows, "reward")) == 4


@pytest.mark.parametrize(
    "adapter", [ColumnAdapter("p", "a"), ColumnAdapter("p", "completion", label="label")]
)
def test_rows_are_read_for_labels_that_are_not_known_alone(adapter):
    unread = (1 / 0 for _ in "a")
    assert checked_label("data", adapter, unread) is adapter
