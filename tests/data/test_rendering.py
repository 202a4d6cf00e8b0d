"""What a template leaves out of an answer, and where an answer begins behind rewritten turns."""

from pathlib import Path

import pytest
from byte_tokenizers import CHATML, byte_tokenizer
from data_files import trained_texts
from dialogues import REPLY, USER
from tool_templates import SCHEMAS, tokenizer_of

from dschat.config import UserError
from dschat.data.rendering import with_reasoning
from dschat.data.segments import encode_examples, prompt_text_ids
from dschat.data.sources.adapters import Example
from dschat.data.sources.turns import THOUGHTS

FOLDER = Path(__file__).parent / "chat_templates"
END = "<|im_end|>"
# as DeepSeek's R1: every answer without its thought
CUTS = CHATML.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")
SHOWS = CHATML.replace(
    "{{ m['content'] }}",
    "{{ '<think>' + m.thinking + '</think>' if m.thinking }}{{ m['content'] }}",
)
OPENS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
OSLO = {"name": "search", "arguments": {"query": "oslo", "limit": 3}}
ROME = {"name": "search", "arguments": {"query": "rome"}}
TOLD = {"role": "tool", "content": "COLD", "name": "search", "tool_call_id": "call00000"}


def thinking(thought, text):
    return {**REPLY(text), **dict.fromkeys(THOUGHTS, thought)}


def calling(*functions, text=""):
    calls = [
        {"type": "function", "id": f"call{i:05d}", "function": f} for i, f in enumerate(functions)
    ]
    return {**REPLY(text), "tool_calls": calls}


def texts_of(folder, turn, template, **knobs):
    return trained_texts(folder, [USER("u"), turn], byte_tokenizer(END, template), **knobs)


def encoded(tokenizer, *turns, **inputs):
    (row,) = encode_examples(tokenizer, [Example([*turns[:-1]], [turns[-1]], **inputs)])
    return row


# -- thoughts


@pytest.mark.parametrize("thought", ["4", "two and two", "answer"])
def test_a_thought_in_the_answers_text_is_lost_all_the_same(tmp_path, thought):
    with pytest.raises(UserError, match="thoughts .* does not render; see --reasoning"):
        texts_of(tmp_path, thinking(thought, "The answer is 4."), CHATML)


@pytest.mark.parametrize("thought", ["4", "think", "</think", "k>The"])
@pytest.mark.parametrize("inline", [False, True])
def test_the_whole_thought_is_trained(tmp_path, thought, inline):
    turn = thinking(thought, "The answer is 4.")
    turn = REPLY(f"<think>{thought}</think>The answer is 4.") if inline else turn
    for template in (SHOWS, CUTS) if inline else (SHOWS,):
        whole = f"<think>{thought}</think>The answer is 4.{END}"
        assert texts_of(tmp_path, turn, template) == [[whole]]


QUOTED = "For example: <think>2+2</think> 4."


@pytest.mark.parametrize(
    ("template", "reasoning", "expected"),
    [
        (CHATML, "drop", QUOTED),
        (CUTS, "drop", QUOTED),
        (CUTS, "auto", f"<think>\ntwo\n</think>\n\n{QUOTED}"),
        (SHOWS, "auto", f"<think>two</think>{QUOTED}"),
        (OPENS, "drop", f"</think>\n\n{QUOTED}"),
        (OPENS, "inline", f"two\n</think>\n\n{QUOTED}"),
    ],
)
def test_a_tag_within_the_text_is_text(tmp_path, template, reasoning, expected):
    turn = thinking("two", QUOTED)
    assert texts_of(tmp_path, turn, template, reasoning=reasoning) == [[expected + END]]
    if reasoning == "drop":
        assert texts_of(tmp_path, REPLY(QUOTED), template) == [[expected + END]]
        chat = [USER("u"), REPLY(QUOTED), USER("v"), REPLY("r")]
        texts = trained_texts(tmp_path, chat, byte_tokenizer(END, template))
        assert [text for row in texts for text in row][0] == expected + END


@pytest.mark.parametrize("reasoning", ["auto", "keep", "inline"])
@pytest.mark.parametrize("turn", [thinking("hm", "r"), REPLY("<think>\nhm\n</think>\n\nr")])
def test_a_thought_that_the_prompt_rules_out_names_the_variable(reasoning, turn):
    template = (FOLDER / "qwen3_5_nothink.jinja").read_text("utf-8")
    tokenizer = tokenizer_of(template, END, ["<|im_start|>", "<think>", "</think>"])
    chat = [USER("u"), turn]
    (row,) = encode_examples(tokenizer, [Example(chat[:1], [turn])], reasoning)
    assert "rules out" in row.problem
    assert """--chat_template_kwargs '{"enable_thinking": true}'""" in row.problem
    inputs = {"template_kwargs": {"enable_thinking": True}}
    (row,) = encode_examples(tokenizer, [Example(chat[:1], [turn], **inputs)], reasoning)
    assert tokenizer.decode(row.answers[0]) == f"hm\n</think>\n\nr{END}"
    (row,) = encode_examples(tokenizer, [Example([*chat, USER("v")], [REPLY("s")])], reasoning)
    assert tokenizer.decode(row.answers[0]) == f"s{END}"


# -- an answer behind turns that the template rewrites

HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"]
FINAL = "<|channel|>final<|message|>Cold.<|return|>"


@pytest.mark.parametrize("said", [thinking("HMM", ""), REPLY("Let me see.")])
@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (REPLY("Cold."), FINAL),
        (
            thinking("AHA", "Cold."),
            f"<|channel|>analysis<|message|>AHA<|end|><|start|>assistant{FINAL}",
        ),
    ],
)
def test_a_harmony_answer_has_its_header(said, last, expected):
    template = (FOLDER / "gptoss.jinja").read_text("utf-8")
    tokenizer = tokenizer_of(template, "<|return|>", HARMONY)
    chat = [USER("AA?"), {**said, "tool_calls": calling(OSLO)["tool_calls"]}, TOLD]
    row = encoded(tokenizer, *chat, last, tools=SCHEMAS)
    assert row.prompt_ids == prompt_text_ids(tokenizer, chat, tools=SCHEMAS)
    assert tokenizer.decode(row.prompt_ids).endswith("<|start|>assistant")
    assert tokenizer.decode(row.answers[0]) == expected


# -- calls that the rendering lacks

LOST = "calls of tools, which the chat template does not render"


def chatml(shown):
    """ChatML with ``shown`` of an answer's calls."""
    return CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}" + shown)


CALLS = "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function | tojson }}{% endfor %}"
FIRST = "{% if m.tool_calls %}{{ '<call>' + m.tool_calls[0].function | tojson }}{% endif %}"
NAMES = "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name }}{% endfor %}"
VALUES = (
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + ' '"
    " + c.function.arguments.values() | join(' ') }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("shown", "turn", "problem"),
    [
        (CALLS, calling(OSLO, ROME, text="I use search now."), ""),
        ("", calling(OSLO, text="I use search now."), LOST),
        ("", calling(OSLO, text="<think>search</think>"), LOST),
        (FIRST, calling(OSLO), ""),
        (FIRST, calling(OSLO, ROME), LOST),
        (NAMES, calling({"name": "search", "arguments": {}}), ""),
        (NAMES, calling(OSLO), LOST),
        (VALUES, calling(OSLO, text="the query, the limit"), LOST),
    ],
)
def test_calls_are_counted_with_their_arguments(shown, turn, problem):
    tokenizer = byte_tokenizer(END, chatml(shown))
    assert encoded(tokenizer, USER("u"), turn).problem == problem
    row = encoded(tokenizer, USER("u"), turn, TOLD, REPLY("r"))
    assert row.problem == problem


def test_text_beside_calls_must_be_there_too():
    only = CALLS + "{% if not m.tool_calls %}{{ m['content'] }}{% endif %}"
    tokenizer = byte_tokenizer(END, CHATML.replace("{{ m['content'] }}", only))
    assert encoded(tokenizer, USER("u"), calling(OSLO)).problem == ""
    beside = calling(OSLO, text="I look.")
    assert encoded(tokenizer, USER("u"), beside).problem.startswith("text beside calls of tools")
    # a prompt is what the template makes of it
    row = encoded(tokenizer, USER("u"), beside, TOLD, REPLY("r"))
    assert tokenizer.decode(row.answers[0]) == f"r{END}"
    assert set(row.prompt_weights) == {None}


def test_calls_of_a_template_that_writes_them_for_null():
    template = (FOLDER / "deepseek_r1_distill.jinja").read_text("utf-8")
    end = "<｜end▁of▁sentence｜>"
    tokenizer = tokenizer_of(template, end, ["<｜User｜>", "<｜Assistant｜>"], bos_token="<s>")
    row = encoded(tokenizer, USER("u"), calling(OSLO, ROME))
    answer = tokenizer.decode(row.answers[0])
    assert answer.count("search\n```json\n") == 2
    assert '{"query": "oslo", "limit": 3}' in answer
    assert answer.endswith(f"<｜tool▁calls▁end｜>{end}")
    assert encoded(tokenizer, USER("u"), calling(OSLO, text="I look.")).problem == LOST


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("hi </think> there </think> you", "you"),
        ("<think>a</think>\n<think>b</think>c", "c"),
        ("<think>a</think>Write <think>b</think>.", "Write <think>b</think>."),
    ],
)
def test_all_thoughts_in_front_of_an_answer_are_dropped(content, said):
    (answer,) = with_reasoning([{"role": "assistant", "content": content}], "drop")
    assert answer["content"] == said


def test_as_a_field_the_first_thought_is_one():
    content = "hi </think> there </think> you"
    (answer,) = with_reasoning([{"role": "assistant", "content": content}], "field")
    assert (answer["thinking"], answer["content"]) == ("hi", "there </think> you")
    turn = {"role": "assistant", "content": f"a </think> {content}", **dict.fromkeys(THOUGHTS, "t")}
    (answer,) = with_reasoning([turn], "inline")
    assert answer["content"] == f"<think>\nt\n</think>\n\n{content}"
