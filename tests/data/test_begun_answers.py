"""Prompts whose last turn is the beginning of the answer, against transformers' own rendering."""

import json

import pytest
from byte_tokenizers import CHATML, byte_tokenizer, trained
from data_files import put, sft_rows, step_table
from dialogues import REPLY, SYSTEM, USER
from quick import slow

from dschat.config import UserError
from dschat.data.segments import encode_examples, prompt_text_ids
from dschat.data.sources.adapters import Example
from dschat.data.sources.turns import BEGINS, begun, weight_of

END = "<|im_end|>"
OPENS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
PARSES = CHATML.replace(  # as Qwen3
    "{{ m['content'] }}",
    "{% if '</think>' in m.content %}<think>\n{{ m.content.split('</think>')[0].split('<think>')"
    "[-1] | trim }}\n</think>\n\n{% endif %}{{ m.content.split('</think>')[-1] | trim }}",
)
TEMPLATES = {
    "plain": CHATML,
    "trims": CHATML.replace("m['content']", "m['content'] | trim"),
    "opens a thought": OPENS,
    "parses thoughts": PARSES,
}
every_template = pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
ASKED = [SYSTEM("s"), USER("2+2?")]
BEGINNINGS = ["Let me think step by step.\n<think>", "So ", "<think>\nWell", "Hmm"]


def rendered(tokenizer, prompt):
    text = tokenizer.apply_chat_template(prompt, continue_final_message=True, tokenize=False)
    return text, tokenizer(text, add_special_tokens=False).input_ids


@every_template
@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("asked", [ASKED, *slow([[USER("hi"), REPLY("oh"), *ASKED[1:]]])])
def test_a_prompt_that_begins_the_answer_is_continued(tmp_path, template, beginning, asked):
    tokenizer, prompt = byte_tokenizer(END, template), [*asked, REPLY(beginning)]
    text, ids = rendered(tokenizer, prompt)
    for purpose in ("rlhf", "sft"):
        rest = " 2+2=4.</think>4" if "<think>" in beginning else "it is 4."
        row = {"prompt": prompt, "completion": [REPLY(rest)]}
        (made,) = step_table(put(tmp_path / "r.jsonl", [row]), tokenizer, purpose, reasoning="keep")
        if purpose == "rlhf":
            assert made["prompt_ids"] == ids
            continue
        # the whole turn as the template renders it, unless that changes the beginning
        joined = tokenizer.apply_chat_template(
            [*asked, REPLY(beginning + rest)], tokenize=False
        ).rstrip("\n")
        whole = joined if joined.startswith(text) else text + rest + END
        assert tokenizer.decode(made["input_ids"]) == whole
        assert trained(tokenizer, made) == [whole.removeprefix(text)]
        assert made["input_ids"][: len(ids)] == ids


def test_every_step_continues_it(tmp_path):
    tokenizer, prompt = byte_tokenizer(END, CHATML), [*ASKED, REPLY("It is")]
    _, ids = rendered(tokenizer, prompt)
    for answer in (REPLY(" 4"), [REPLY(" 4")], " 4"):
        row = {"prompt": prompt, "chosen": answer, "rejected": " 5"}
        path = put(tmp_path / "rows.jsonl", [row])
        (pair,) = step_table(path, tokenizer, "reward")
        found = [
            tokenizer.decode(pair[side][len(ids) :]) for side in ("chosen_ids", "rejected_ids")
        ]
        assert found == [f" 4{END}", f" 5{END}"]
        assert pair["prompt_length"] == len(ids)
        assert pair["chosen_ids"][: len(ids)] == ids
        (row,) = step_table(path, tokenizer, "sft")
        assert trained(tokenizer, row) == [f" 4{END}"]


def test_chats_lose_their_last_answer(tmp_path):
    tokenizer = byte_tokenizer(END, CHATML)
    for last in ([REPLY("It is")], [REPLY("It is"), REPLY("4")]):
        path = put(tmp_path / "rows.jsonl", [{"messages": [*ASKED, *last]}])
        (row,) = step_table(path, tokenizer, "rlhf")
        text = tokenizer.apply_chat_template(
            [*ASKED, *last[:-1]], add_generation_prompt=True, tokenize=False
        )
        assert tokenizer.decode(row["prompt_ids"]) == text


def test_what_begins_no_answer(tmp_path):
    """Calls of tools are a whole turn; an empty text begins nothing."""
    call = {**REPLY(""), "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    for last in (USER("x"), REPLY(" "), {**call, "content": "I look."}):
        assert begun([*ASKED, last]) == [*ASKED, last]
    assert begun([REPLY("a")]) == [REPLY("a")]


def test_what_cannot_be_continued_is_a_bad_row(tmp_path):
    tokenizer = byte_tokenizer(END, CHATML)
    turns = [REPLY("a"), USER("u"), REPLY("b")]
    with pytest.raises(UserError, match="several turns behind a prompt that begins the answer"):
        sft_rows(tmp_path, {"prompt": [*ASKED, REPLY("So")], "completion": turns}, tokenizer)
    path = put(tmp_path / "r.jsonl", [{"prompt": [*ASKED, REPLY("So")], "completion": turns}])
    (row,) = step_table(path, tokenizer, "rlhf")
    assert row["prompt_ids"] == rendered(tokenizer, [*ASKED, REPLY("So")])[1]
    hides = byte_tokenizer(
        END, CHATML.replace("{{ m['content'] }}", "{{ m.content if m.role == 'user' }}")
    )
    with pytest.raises(UserError, match="beginning of an answer, which the chat template does not"):
        prompt_text_ids(hides, begun([*ASKED, REPLY("It is so")]))
    called = {**REPLY(""), "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    (encoded,) = encode_examples(
        byte_tokenizer(END, PARSES),
        [Example(begun([*ASKED, REPLY("x <think>")]), [{**called, "content": "</think>"}])],
    )
    assert "calls or thoughts in an answer that its prompt begins" in encoded.problem


CALLS = CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}{{ m.tool_calls or '' }}")


@pytest.mark.parametrize(
    ("template", "more"),
    [
        (CHATML, {"reasoning_content": "hm"}),
        (CHATML, {"tool_calls": [{"function": {"name": "It", "arguments": {}}}]}),
        (CALLS, {"tool_calls": [{"function": {"name": "It", "arguments": {"is": 4}}}]}),
    ],
)
def test_the_thought_and_calls_of_a_rest_must_be_rendered(tmp_path, template, more):
    row = {"prompt": [*ASKED, REPLY("It is")], "completion": [{**REPLY(" 4"), **more}]}
    if template == CHATML:
        with pytest.raises(UserError, match="calls or thoughts in an answer that its prompt"):
            sft_rows(tmp_path, row, byte_tokenizer(END, template))
    else:
        (made,) = sft_rows(tmp_path, row, byte_tokenizer(END, template))
        (text,) = trained(byte_tokenizer(END, template), made)
        assert text.startswith(" 4[{")
        assert "{'is': 4}" in text


def test_a_prompt_is_written_and_read_alike(tmp_path):
    """As `dschat generate` writes it."""
    tokenizer, prompt = byte_tokenizer(END, CHATML), begun([*ASKED, REPLY("It is")])
    row = {"prompt": json.loads(json.dumps(prompt)), "answer": " 4"}
    (made,) = sft_rows(tmp_path, row, tokenizer)
    assert trained(tokenizer, made) == [f" 4{END}"]


@pytest.mark.parametrize(
    ("turns", "is_marked"),
    [
        ([USER("q"), REPLY("Well,")], True),
        ([USER("q"), REPLY(" ")], False),
        ([USER("q"), {**REPLY("I look."), "tool_calls": []}], False),
        ([REPLY("Welcome.")], False),
        ([REPLY("Welcome."), USER("q")], False),
    ],
)
def test_what_begins_an_answer(turns, is_marked):
    *before, last = begun(turns)
    assert [*before, last] == [*turns[:-1], turns[-1] | ({BEGINS: True} if is_marked else {})]
    assert weight_of(last) == (last["role"] == "assistant" and not is_marked)
