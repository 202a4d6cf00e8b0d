"""Dialogues as examples: what SFT learns of them and what PPO answers."""

import pytest
from dialogues import REPLY, SYSTEM, USER

from dschat.data.sources.adapters import Example, normalize
from dschat.data.sources.known_datasets import ColumnAdapter


@pytest.mark.parametrize(
    ("dialogue", "sft", "asked"),
    [
        (
            [SYSTEM("s"), USER("u"), REPLY("r")],
            ([SYSTEM("s"), USER("u")], "r"),
            [SYSTEM("s"), USER("u")],
        ),
        (
            [USER("u"), REPLY("r"), USER("v"), REPLY("w")],
            ([USER("u"), REPLY("r"), USER("v")], "w"),
            [USER("u"), REPLY("r"), USER("v")],
        ),
        # one that ends with the user's turn: SFT learns up to the last answer, PPO answers it
        (
            [USER("u"), REPLY("r"), USER("v")],
            ([USER("u")], "r"),
            [USER("u"), REPLY("r"), USER("v")],
        ),
        ([REPLY("hi"), USER("u"), REPLY("r")], ([REPLY("hi"), USER("u")], "r"), None),
        ([USER("u")], None, [USER("u")]),
    ],
)
def test_messages(dialogue, sft, asked):
    adapter, row = ColumnAdapter(messages="messages"), {"messages": dialogue}
    learned = normalize(row, adapter, "sft")
    assert bool(learned["problem"]) == (sft is None)
    if sft:
        assert Example.from_row(learned) == Example(sft[0], [REPLY(sft[1])])
    prompt = normalize(row, adapter, "rlhf")
    assert not prompt["problem"]
    assert Example.from_row(prompt).prompt == (asked or dialogue[:-1])
    assert prompt["key"] == learned["key"] != ""


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, ""),
        ([], ""),
        ([REPLY("r")], ""),
        ("text", "no assistant speaks"),
        (3, "a number"),
        ([{"role": "user"}], "a turn without content"),
        ([USER("u"), {"role": "assistant", "content": None}], "a turn without content"),
        ([USER("u"), {"role": "assistant", "tool_calls": [{}]}], "a tool call"),
        ([USER("u"), {"role": "tool", "content": "4"}, REPLY("r")], "a turn of the role 'tool'"),
        (["u", "r"], "a turn that is a bare text"),
        ([{"content": "u"}], "a turn without role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a part of the type 'image_url'"),
    ],
)
def test_values_that_are_not_dialogues_have_no_prompt_and_say_why(value, why):
    row = normalize({"messages": value}, ColumnAdapter(messages="messages"), "rlhf")
    assert row["key"] == ""
    assert row["problem"].startswith("no usable prompt")
    assert why in row["problem"]
