"""What a file says of a chat reaches the examples and the loss, in every format; what cannot is
refused by name.
"""

import itertools
import json
from dataclasses import replace

import data_files
import pytest
from byte_tokenizers import CHATML, byte_tokenizer, trained
from data_files import put, sft_rows, step_table, trained_texts
from dialogues import REPLY, SYSTEM, USER, chat
from quick import slow, some
from tool_templates import MARKED, SCHEMAS, tokenizer_of

from dschat.config import UserError
from dschat.data.batches import prompt_columns, prompts_of
from dschat.data.segments import encode_examples, prompt_text_ids
from dschat.data.sources.adapters import Example

CHAT = byte_tokenizer("<|im_end|>", CHATML, pad_token="<|im_end|>")
# Of one list, as objects on lines are: test_readers.py has them in the quick suite.
SLOW_FORMATS = (pytest.param(form, marks=pytest.mark.slow) for form in ("json", "data.json"))
FORMATS = ("jsonl", "csv", "parquet", *SLOW_FORMATS)


def load(folder, rows, purpose="sft", form="jsonl", **knobs):
    found = data_files.load(put(folder / f"rows.{form}", rows), purpose, **knobs)
    return [replace(example, columns=None) for example in found]


THOUGHT = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "hm")
FUNCTION = {"name": "search", "arguments": {"query": "x", "limit": 2}}
CALL = {"id": "call00001", "type": "function", "function": FUNCTION}
CALLED = {**REPLY(""), "tool_calls": [CALL]}
TOLD = {"role": "tool", "content": "told", "name": "search", "tool_call_id": "call00001"}
DIALOGUE = [{**USER("u"), "name": "Ada"}, CALLED, TOLD, {**REPLY("r"), **THOUGHT}]


@pytest.mark.parametrize("form", FORMATS)
def test_a_chat_keeps_all_that_templates_show_in_every_format(tmp_path, form):
    written = [*DIALOGUE[:3], {**REPLY("r"), "thinking": "hm"}]
    rows = [{"messages": written, "tools": SCHEMAS}]
    expected = Example(DIALOGUE[:3], DIALOGUE[3:], tools=SCHEMAS)
    assert load(tmp_path, rows, form=form) == [expected]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "columns", [("prompt", "chosen", "rejected"), ("messages", "chosen", "rejected")]
)
@pytest.mark.parametrize("as_text", [False, True])
def test_pairs_of_turns_in_every_format(tmp_path, form, columns, as_text):
    """The answers as turns, or as texts to a prompt of turns."""
    answers = ["a", "b"] if as_text else [[REPLY("a")], [REPLY("b")]]
    rows = [dict(zip(columns, ([USER("u")], *answers), strict=True))]
    assert load(tmp_path, rows, "reward", form) == [chat("u", "a", "b")]


def test_a_csv_cell_that_is_json_but_no_chat_is_text(tmp_path):
    for text in ("[1, 2]", "[]", '[{"a": 1}]', "[not json"):
        rows = [{"prompt": text, "chosen": text, "rejected": "b"}]
        assert load(tmp_path, rows, "reward", "csv") == [Example(text, text, "b")]


@pytest.mark.parametrize("form", FORMATS)
def test_nulls_are_those_of_the_file(tmp_path, form):
    """A table of one schema fills them in; JSON means them."""
    functions = [{"name": "f", "arguments": {"x": None}}, {"name": "f", "arguments": {"y": 1}}]
    schema = {"type": "function", "function": {"name": "f", "strict": None}}
    rows = [
        {"messages": [USER("u"), {**REPLY(""), "tool_calls": [{"function": f}]}], "tools": [schema]}
        for f in functions
    ]
    found = load(tmp_path, rows, form=form)
    arguments = [e.chosen[0]["tool_calls"][0]["function"]["arguments"] for e in found]
    strict = [e.tools[0]["function"] for e in found]
    if form == "parquet":
        assert (arguments, strict) == ([{}, {"y": 1}], [{"name": "f"}] * 2)
    else:
        assert (arguments, strict) == ([{"x": None}, {"y": 1}], [schema["function"]] * 2)


# -- loss flags

OFF = [
    {flag: value}
    for flag in ("weight", "train", "training", "trainable", "loss", "loss_mask")
    for value in (0, False)
]
ON = [{}, {"weight": 1}, {"train": True}, {"loss_mask": 1.0}, {"weight": None}]


@pytest.mark.parametrize("flag", [*OFF[::3], *slow(OFF[1::3] + OFF[2::3]), *ON])
def test_a_flag_takes_an_answer_out_of_the_loss(tmp_path, flag):
    first, last = "a<|im_end|>", "b<|im_end|>"
    is_on = flag in ON
    ask = [USER("u"), {**REPLY("a"), **flag}, USER("v"), REPLY("b")]
    assert trained_texts(tmp_path, ask, CHAT) == [[first, last] if is_on else [last]]
    ask[1], ask[3] = REPLY("a"), {**REPLY("b"), **flag}
    assert trained_texts(tmp_path, ask, CHAT) == [[first, last] if is_on else [first]]
    # the ids are those of the whole dialogue, whatever is trained
    (whole,) = sft_rows(tmp_path, {"messages": ask[:3] + [REPLY("b")]}, CHAT)["input_ids"]
    ask[1], ask[3] = {**REPLY("a"), **flag}, REPLY("b")
    assert sft_rows(tmp_path, {"messages": ask}, CHAT)[0]["input_ids"] == whole


def test_metadata_is_counted(tmp_path, log):
    turn = {**REPLY("r"), "id": 3, "score": 1.5, "refusal": None, "images": []}
    rows = [{"messages": [USER(f"u{i}"), turn if i else REPLY("r")]} for i in range(3)]
    assert len(load(tmp_path, rows)) == 3
    assert "turns that change neither text nor loss: id (2 rows), score (2 rows)" in log.text


def test_an_empty_answer_amid_a_dialogue_is_not_trained_and_counted(tmp_path, log):
    ask = [USER("u"), REPLY(" "), USER("v"), REPLY("b")]
    assert trained_texts(tmp_path, ask, CHAT) == [["b<|im_end|>"]]
    assert "1 had answers without loss: empty, of weight 0" in log.text


# -- what stands beside the turns


@pytest.mark.parametrize("form", ["jsonl", *slow(["csv", "parquet", "json", "data.json"])])
@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"conversations": [USER("u"), REPLY("r")], "system": "s"}, [SYSTEM("s"), USER("u")]),
        ({"messages": [USER("u"), REPLY("r")], "system_prompt": "s"}, [SYSTEM("s"), USER("u")]),
        (
            {"conversations": [SYSTEM("own"), USER("u"), REPLY("r")], "system": "s"},
            [SYSTEM("own"), USER("u")],
        ),
        ({"instruction": "u", "input": "", "output": "r", "system": "s"}, [SYSTEM("s"), USER("u")]),
        (
            {"instruction": "u", "input": "x", "output": "r", "history": [["q", "a"], ["w", "b"]]},
            [USER("q"), REPLY("a"), USER("w"), REPLY("b"), USER("u\n\nx")],
        ),
        (
            {
                "instruction": "u",
                "input": "",
                "output": "r",
                "system": "s",
                "history": [["q", "a"]],
            },
            [SYSTEM("s"), USER("q"), REPLY("a"), USER("u")],
        ),
        ({"question": "u", "response": "r", "system_prompt": "s"}, [SYSTEM("s"), USER("u")]),
    ],
)
def test_system_and_history_of_a_row(tmp_path, row, prompt, form):
    assert load(tmp_path, [row], form=form) == [Example(prompt, [REPLY("r")])]
    assert load(tmp_path, [row], "rlhf", form)[0].prompt == prompt


def test_a_history_in_another_form_is_refused(tmp_path):
    row = {"instruction": "u", "input": "", "output": "r", "history": [["q", "a", "b"]]}
    with pytest.raises(UserError, match="a history that is no list of pairs of texts"):
        load(tmp_path, [row])


def test_legacy_function_calls_are_calls_of_tools(tmp_path):
    function = {"name": "f", "arguments": '{"x": 1}'}
    turns = [USER("u"), {"role": "assistant", "content": None, "function_call": function}]
    rows = [{"messages": turns, "functions": [{"name": "f", "parameters": {}}]}]
    (example,) = load(tmp_path, rows)
    read = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert example.chosen == [{**REPLY(""), "tool_calls": [read]}]
    assert example.tools == [{"type": "function", "function": rows[0]["functions"][0]}]


# -- turns of calls in agent data


def calls_of(*calls):
    return [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("role", "text", "calling"),
    [("from", "value", "function_call"), ("role", "content", "tool_call")],
)
def test_turns_of_calls_are_the_assistants(tmp_path, form, role, text, calling):
    """LLaMA-Factory's and ms-swift's roles, against the same dialogue in OpenAI's form."""
    one = {"name": "f", "arguments": {"x": 1}}
    two = [{"name": "g", "arguments": '{"y": [2]}'}, {"name": "h"}]
    said = [
        ("user", "u"),
        (calling, json.dumps(one)),
        ("tool_response", "1"),
        ("assistant", "I look."),
        (calling, f"<think>hm</think>\n{json.dumps(two)}"),
        (calling.upper(), json.dumps(one)),
        ("tool_response", "2"),
        ("tool_response", "3"),
        ("assistant", "r"),
    ]
    rows = [{"conversations": [{role: who, text: what} for who, what in said]}]
    first, both = calls_of(("f", {"x": 1})), calls_of(("g", {"y": [2]}), ("h", {}), ("f", {"x": 1}))
    expected = [
        USER("u"),
        {**REPLY(""), "tool_calls": first},
        {"role": "tool", "content": "1"},
        {**REPLY("I look.<think>hm</think>"), "tool_calls": both},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3"},
    ]
    assert load(tmp_path, rows, form=form) == [Example(expected, [REPLY("r")])]


def test_turns_of_calls_as_answers(tmp_path):
    call = {"role": "tool_call", "content": {"name": "f", "arguments": {"x": 1}}}
    called = {**REPLY(""), "tool_calls": calls_of(("f", {"x": 1}))}
    for answer in (call, [call], [REPLY(""), call]):
        assert load(tmp_path, [{"prompt": [USER("u")], "completion": answer}])[0].chosen == [called]
    for more in ({}, {"content": None}, {"content": "a"}):
        given = {"role": "tool_call", "tool_calls": called["tool_calls"], **more}
        (example,) = load(tmp_path, [{"prompt": [USER("u")], "completion": [given]}])
        assert example.chosen == [{**called, "content": more.get("content") or ""}]
    ask = [USER("u"), {**REPLY("a"), "weight": 0.5}, {**call, "loss": 0}, USER("v"), REPLY("b")]
    (example,) = load(tmp_path, [{"messages": ask}])
    assert example.prompt[1] == {**called, "content": "a", "weight": 0.0}


def test_answers_in_a_row_stay_apart(tmp_path):
    (example,) = load(tmp_path, [{"messages": [USER("u"), REPLY("a"), REPLY("b"), REPLY("c")]}])
    assert example.prompt == [USER("u"), REPLY("a"), REPLY("b")]


@pytest.mark.parametrize(
    "content", ["f(x)", "[1]", '{"arguments": {}}', '{"name": "f", "arguments": 3}', None]
)
def test_a_turn_of_calls_without_any_is_refused(tmp_path, content):
    turns = [USER("u"), {"role": "tool_call", "content": content}]
    with pytest.raises(UserError, match="a tool call (without a name|whose arguments)"):
        load(tmp_path, [{"messages": turns}])


# -- templates

THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n"
    "{{ m.NAME or '' }}\n</think>\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("given", "read"),
    some(itertools.product(THOUGHT, THOUGHT), itertools.pairwise([*THOUGHT, *THOUGHT][:4])),
)
def test_a_thought_is_trained_whatever_its_name(tmp_path, given, read):
    tokenizer = byte_tokenizer("<|im_end|>", THINKS.replace("NAME", read))
    asked = [USER("u"), {**REPLY("r"), given: "so <b>"}]
    texts = trained_texts(tmp_path, asked, tokenizer)
    assert texts == [["<think>\nso <b>\n</think>\nr<|im_end|>"]]


def test_a_template_sees_the_numbers_of_calls(tmp_path):
    """One as Mistral's, which refuses chats without them."""
    strict = MARKED.replace("'id': c.id", "'id': c.id if c.id else raise_exception('no id')")
    strict = strict.replace("m.tool_call_id}", "m.tool_call_id or raise_exception('no id')}")
    tokenizer = tokenizer_of(strict)
    asked = {"messages": [*DIALOGUE[:3], REPLY("r")], "tools": SCHEMAS}
    (row,) = sft_rows(tmp_path, asked, tokenizer, max_seq_len=2000)
    call, answer = trained(tokenizer, row)
    assert '"id": "call00001"' in call
    assert answer == " r<eot>"
    assert '"call_id": "call00001"' in tokenizer.decode(row["input_ids"])


OPENS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
TEMPLATES = {
    "the content as it is": OPENS,
    "history without thoughts, as R1": OPENS.replace(
        "{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}"
    ),
    "opens a thought in every answer": OPENS.replace(
        "{{ m['content'] }}", "{{ '<think>\\n' if m.role == 'assistant' }}{{ m['content'] }}"
    ),
}


@pytest.mark.parametrize("begins", ["<think>\n", "<think>", "\n<think>\n", ""])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_an_answer_continues_what_the_prompt_has_begun(template, begins):
    tokenizer = byte_tokenizer("<|im_end|>", template)
    example = Example([USER("u")], [REPLY(begins + "hm</think>r")])
    (encoded,) = encode_examples(tokenizer, [example])
    assert encoded.prompt_ids == prompt_text_ids(tokenizer, [USER("u")])
    whole = tokenizer.decode(encoded.prompt_ids + encoded.answers[0])
    assert whole.partition("assistant\n")[2].rstrip("\n") == "<think>\nhm</think>r<|im_end|>"


# -- what is cut, and columns


@pytest.mark.parametrize(
    ("turns", "count"),
    [
        ([USER("u"), REPLY("yes<|im_end|>no")], 1),
        ([USER("u"), REPLY("yes<|im_end|>no"), USER("v"), REPLY("b")], 1),
        ([USER("u"), REPLY("yes<|im_end|> ")], 0),
        ([USER("u<|im_end|>u"), REPLY("yes")], 0),
    ],
)
def test_what_follows_an_end_in_an_answer_is_counted(tmp_path, turns, count, log):
    trained_texts(tmp_path, turns, CHAT)
    assert ("1 lost what follows an end token in an answer" in log.text) == bool(count)


@pytest.mark.parametrize("late", [0, 1100])
def test_a_column_of_any_row_reaches_reward_functions(tmp_path, late):
    rows = [{"prompt": f"p{i}"} | ({"reference": i} if i == late else {}) for i in range(1200)]
    table = step_table(put(tmp_path / "rows.jsonl", rows), CHAT, "rlhf")
    assert prompt_columns(table) == {"reference"}
    found = prompts_of([row for row in table if row["prompt_text"] == f"p{late}"])
    assert found.columns == {"reference": [late]}


@pytest.mark.parametrize(
    ("row", "flags", "prompt"),
    [
        (
            {"instruction": "u", "input": "x", "output": "r"},
            {"columns": ["prompt=instruction"]},
            "u\n\nx",
        ),
        (
            {"instruction": "u", "input": "x", "best": "r"},
            {"columns": ["prompt=instruction", "chosen=best"]},
            "u\n\nx",
        ),
        ({"question": "u", "answer": "r"}, {"columns": ["chosen=answer"]}, "u"),
    ],
)
def test_naming_a_usual_column_changes_nothing(tmp_path, row, flags, prompt):
    assert load(tmp_path, [row], **flags) == [chat(prompt, "r")]


# -- exports


def test_an_export_of_one_object_is_its_rows(tmp_path):
    rows = [{"prompt": f"p{i}", "chosen": "c"} for i in range(3)]
    (tmp_path / "x.json").write_text(json.dumps({"version": "1.1", "data": rows}, indent=1))
    assert data_files.load(tmp_path / "x.json") == [Example(f"p{i}", "c") for i in range(3)]
    turns = {"data": [USER("u"), REPLY("r")]}  # a chat is a row
    assert load(tmp_path, [turns], columns=["messages=data"]) == [chat("u", "r")]


@pytest.mark.parametrize("name", ["x.json", "x.jsonl", "x.csv"])
def test_advice_that_was_taken_is_not_given_again(tmp_path, name):
    (tmp_path / name).write_bytes("é".encode("latin-1"))
    for policy, has_advice in (("auto", True), ("skip", False)):
        with pytest.raises(UserError, match="not UTF-8 text; save the file as UTF-8") as caught:
            data_files.load(tmp_path / name, on_bad_row=policy)
        assert ("--on_bad_row skip" in str(caught.value)) == has_advice
