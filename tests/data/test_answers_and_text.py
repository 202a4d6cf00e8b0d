"""Answers that are single turns, numbers or truths; files of other encodings; prompts as text."""

import json
import logging

import pytest
from byte_tokenizers import CHATML, byte_tokenizer
from data_files import load, put, step_table
from dialogues import REPLY, USER, chat
from quick import each_once

from dschat.config import RLHFConfig, UserError
from dschat.config.data import ShowConfig
from dschat.data.inspect import show
from dschat.data.sources.adapters import Example

SHAREGPT = [{"from": "gpt", "value": text} for text in "ab"]


@pytest.mark.parametrize(
    ("form", "prompt", "turns"),
    each_once(
        ["jsonl", "csv", "parquet"],
        ["prompt", "conversations", "messages"],
        [(REPLY("a"), REPLY("b")), SHAREGPT],
    ),
)
def test_one_message_is_an_answer(tmp_path, form, prompt, turns):
    asked = "u" if prompt == "prompt" else [USER("u")]
    rows = [{prompt: asked, "chosen": turns[0], "rejected": turns[1]}]
    (example,) = load(put(tmp_path / f"rows.{form}", rows), "reward")
    assert example == chat("u", "a", "b")


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_numbers_and_truths_are_answers(tmp_path, form):
    def rows(name, *rows):
        return put(tmp_path / f"{name}.{form}", list(rows))

    (pair,) = load(rows("pairs", {"prompt": "p", "chosen": True, "rejected": False}), "reward")
    assert (pair.chosen, pair.rejected) == ("True", "False")
    (one,) = load(rows("one", {"question": "2+2?", "answer": 4}))
    assert one == Example([USER("2+2?")], [REPLY("4")])
    ranked = {"prompt": "p", "answers": [1.5, 0], "scores": [1, 2]}
    (ranks,) = load(rows("ranks", ranked), "reward")
    assert (ranks.chosen, ranks.rejected) in (("0", "1.5"), ("0.0", "1.5"))


@pytest.mark.parametrize(
    ("encoding", "form"),
    each_once(["cp1252", "UTF-16", "latin-1", "gb18030"], ["jsonl", "json", "csv"]),
)
def test_other_encodings(tmp_path, encoding, form):
    text = "日本" if encoding == "gb18030" else "naïve „café“" if encoding == "cp1252" else "naïve"
    rows = [{"prompt": f"{text} {i}", "chosen": text * 9} for i in range(400)]
    path = tmp_path / f"rows.{form}"
    put(path, rows)
    if form != "csv":
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        path.write_text("\n".join(lines) if form == "jsonl" else f"[{','.join(lines)}]", "utf-8")
    path.write_bytes(path.read_text("utf-8").encode(encoding))
    found = load(path, encoding=encoding)
    assert [e.prompt for e in found] == [row["prompt"] for row in rows]
    assert {e.chosen for e in found} == {text * 9}
    with pytest.raises(UserError, match="not UTF-8 text; .*--encoding"):
        load(path)


def test_what_an_encoding_lacks_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    good = b'{"prompt": "p", "chosen": "c"}\n'
    path.write_bytes(good * 3 + good.replace(b"c", b"\x81", 1) + good)
    with pytest.raises(UserError, match=r"rows.jsonl:4: .*--encoding"):
        load(path, encoding="cp1252")
    assert len(load(path, encoding="cp1252", on_bad_row="skip")) == 4
    for name in ("utf-9", "base64", "a\0b"):
        with pytest.raises(UserError, match="--encoding"):
            RLHFConfig(data_path=[str(path)], encoding=name).validate_data()


PLAIN = [{"prompt": f"Why {i}?", "chosen": "So.", "rejected": "No."} for i in range(6)]
MARKED = [{**row, "prompt": f"\n\nHuman: {row['prompt']}\n\nAssistant:"} for row in PLAIN]


@pytest.mark.parametrize("purpose", ["sft", "reward", "rlhf"])
def test_plain_text_is_told_of_and_may_be_a_chat(tmp_path, purpose, caplog):
    caplog.set_level(logging.WARNING, "dschat")  # another test's may be lower
    path = put(tmp_path / "rows.jsonl", PLAIN[:4] + MARKED[:2])
    raw = load(path, purpose)
    assert "4 of 6 prompts are text without a chat's marks" in caplog.text
    caplog.clear()
    assert load(path, purpose, text_as="raw") == raw
    chats = load(path, purpose, text_as="chat")
    load(put(tmp_path / "marked.jsonl", MARKED), purpose)
    load(put(tmp_path / "questions.jsonl", [{"question": "u", "answer": "r"}]), "sft")
    assert caplog.text == ""
    questions = [e.prompt.removeprefix("\n\nHuman: ").split("\n\n")[0] for e in raw]
    assert [e.prompt for e in chats] == [[USER(question)] for question in questions]
    if purpose != "rlhf":
        assert [e.chosen for e in chats] == [[REPLY(e.chosen)] for e in raw]


WRITTEN = "\n\nHuman: Hi:\nHuman: x\n\nAssistant: Yes?\n\n Human: no\n\nHuman: Why?\n\nAssistant:"
TURNS = [USER("Hi:\nHuman: x"), REPLY("Yes?\n\n Human: no"), USER("Why?")]
LAST = {"chosen": " So.", "rejected": "\nNo. "}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": WRITTEN, **LAST},
        {name: WRITTEN + answer for name, answer in LAST.items()},
        {"prompt": WRITTEN, **{name: WRITTEN + answer for name, answer in LAST.items()}},
    ],
)
def test_a_dialogue_that_is_one_text_becomes_turns_by_the_flag(tmp_path, row):
    """hh-rlhf, for a model with a chat template of its own."""
    path = put(tmp_path / "rows.jsonl", [row])
    (example,) = load(path, "reward", text_as="chat")
    assert example == Example(TURNS, [REPLY("So.")], [REPLY("No.")])
    (example,) = load(path, "reward")
    assert example.prompt == WRITTEN
    for text in (
        "Human: and Assistant: are words",
        "x\n\nHuman: a\n\nAssistant: b",
        "\n\nHuman: a",
    ):
        questions = put(tmp_path / "questions.jsonl", [{"question": text, "answer": "Human: b"}])
        assert load(questions) == [chat(text, "Human: b")]


def test_a_text_column_of_dialogues_becomes_turns_by_the_flag(tmp_path):
    path = put(tmp_path / "rows.jsonl", [{"text": WRITTEN + " So."}, {"text": WRITTEN}])
    whole, cut = load(path, "sft", text_as="chat")
    assert whole == Example(TURNS, [REPLY("So.")])
    assert cut == Example(TURNS[:1], TURNS[1:2])
    assert [e.prompt for e in load(path, "rlhf", text_as="chat")] == [TURNS] * 2


def test_columns_of_any_name_become_chats_by_the_flag(tmp_path):
    path = put(tmp_path / "rows.csv", [{"q": "u", "a": "r", "context": "c"}])
    knobs = {"columns": ["prompt=q", "chosen=a"]}
    assert load(path, text_as="chat", **knobs) == [chat("u", "r")]
    assert load(path, text_as="raw", **knobs) == [Example("u", "r")]
    alpaca = put(tmp_path / "alpaca.jsonl", [{"instruction": "u", "input": "c", "output": "r"}])
    assert load(alpaca, text_as="raw") == [Example("u\n\nc", "r")]
    tokenizer = byte_tokenizer("<|im_end|>", CHATML)
    (row,) = step_table(path, tokenizer, "rlhf", text_as="chat", **knobs)
    assert tokenizer.decode(row["prompt_ids"]).startswith("<|im_start|>user\nu")
    shown = ShowConfig(data_path=[path], eval_fraction=0.0, text_as="chat", step="1", **knobs)
    assert "(as a chat)" in "\n".join(show(shown, tokenizer))
