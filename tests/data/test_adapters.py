"""Dialogues as examples: what SFT learns of them and what PPO answers."""

import pytest
from dialogues import REPLY, SYSTEM, USER

from dschat.data.sources.adapters import Example, normalize
from dschat.data.sources.known_datasets import ColumnAdapter
from dschat.data.sources.turns import from_cell

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def calls(function, content=""):
    """An assistant's turn that calls a tool."""
    return {"role": "assistant", "content": content, "tool_calls": [{"function": function}]}


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
        ([USER("u"), {"role": "assistant", "tool_calls": [{}]}], "call without a name"),
        ([USER("u"), {"role": "user", "content": "", "tool_calls": [CALL]}], "the role 'user'"),
        ([USER("u"), {"role": "assistant", "tool_calls": 3}], "tool calls that are a number"),
        ([USER("u"), calls({"name": "f", "arguments": "{"})], "arguments are not JSON"),
        ([USER("u"), calls({"name": "f", "arguments": [1]})], "arguments are a list"),
        ([USER("u"), {"role": "critic", "content": "4"}, REPLY("r")], "a turn of the role"),
        (["u", "r"], "a turn that is a bare text"),
        ([{"content": "u"}], "a turn without role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a part of the type 'image_url'"),
        # what would change text or loss
        *(
            ([USER("u"), {**REPLY("r"), "weight": w}], f"weight {w}, which is not a number")
            for w in (1.5, -1, "no")
        ),
        ([USER("u"), {**REPLY("r"), "train": [1]}], "train [1], which is not a number"),
        *(
            ([USER("u"), {**REPLY("r"), key: "x"}], f"a turn with '{key}'")
            for key in ("refusal", "prefix", "images", "audio")
        ),
        ([USER("u"), {**REPLY("r"), "thinking": ["a"]}], "a turn whose thinking is a list"),
        (
            [USER("u"), {**REPLY("r"), "function_call": {"arguments": "{}"}}],
            "a tool call without a name",
        ),
    ],
)
def test_values_that_are_not_dialogues_have_no_prompt_and_say_why(value, why):
    row = normalize({"messages": value}, ColumnAdapter(messages="messages"), "rlhf")
    assert row["key"] == ""
    assert row["problem"].startswith("no usable prompt")
    assert why in row["problem"]


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}', {"x": 1, "other": None}])
def test_calls_of_tools(arguments):
    """OpenAI's form, with arguments as an object or as its text; tables fill in nulls."""
    dialogue = [USER("u"), calls({"name": "f", "arguments": arguments}, None)]
    dialogue += [{"role": "tool", "content": "2", "name": "f"}, REPLY("r")]
    tools = [{"type": "function", "function": {"name": "f", "strict": None}}]
    row = {"messages": dialogue, "tools": tools}
    made = normalize(row, ColumnAdapter(messages="messages"), "sft", "arrow")
    example = Example.from_row(made)
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert example.prompt == [USER("u"), called, {"role": "tool", "content": "2", "name": "f"}]
    assert example.chosen == [REPLY("r")]
    assert example.tools == [{"type": "function", "function": {"name": "f"}}]


def test_an_answer_of_several_turns_is_no_part_of_the_prompt_to_answer():
    turns = [calls(CALL["function"]), {"role": "tool", "content": "2"}, REPLY("r")]
    row = {"prompt": "u", "completion": turns}
    adapter = ColumnAdapter("prompt", "completion", as_chat=True)
    learned = Example.from_row(normalize(row, adapter, "sft"))
    assert learned.prompt == [USER("u"), {**turns[0], "tool_calls": [CALL]}, turns[1]]
    assert Example.from_row(normalize(row, adapter, "rlhf")).prompt == [USER("u")]


@pytest.mark.parametrize("as_chat", [False, True])
@pytest.mark.parametrize("blank", [None, "", " ", "\n\t"])
def test_a_blank_text_is_no_answer(blank, as_chat):
    adapter = ColumnAdapter("prompt", "chosen", "rejected", as_chat=as_chat)
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}
    for column, purposes in {"chosen": ("sft", "reward"), "rejected": ("reward",)}.items():
        for purpose in purposes:
            made = normalize(row | {column: blank}, adapter, purpose)
            assert "that is empty" in made["problem"] or "an empty" in made["problem"]


def test_tools_that_are_none():
    row = {"messages": [USER("u"), REPLY("r")], "tools": ["search"]}
    got = normalize(row, ColumnAdapter(messages="messages"), "sft")
    assert "tools that are no list of JSON schemas" in got["problem"]


@pytest.mark.parametrize("text", ["12", "null", "true", '"a"', "[1", ""])
def test_a_cell_that_is_no_list_or_object_is_text(text):
    assert from_cell(text) == text
    assert from_cell(' [{"role": "user"}]') == [{"role": "user"}]
