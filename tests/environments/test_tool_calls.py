"""Calls of tools: read in the form in which the chat template writes them, or told to the model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_templates import FORMS, HERMES, SCHEMAS, tokenizer_of

from dschat.config import UserError
from dschat.data.rendering import render_chat
from dschat.data.segments import prompt_text_ids
from dschat.environments.contract import Observation, ToolResult
from dschat.environments.template_text import Call, CallParser, ObservationTokens

ASKED = [{"role": "user", "content": "where?"}]
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=20)


def called(*arguments, name="search"):
    """An assistant's turn."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "id": f"call{i:05d}", "function": {"name": name, "arguments": a}}
            for i, a in enumerate(arguments)
        ],
    }


def written(tokenizer, turn):
    """The answer that the template makes of ``turn``, without its EOS."""
    asked = render_chat(tokenizer, ASKED, add_generation_prompt=True, tools=SCHEMAS)
    answered = render_chat(tokenizer, [*ASKED, turn], tools=SCHEMAS)
    assert answered.startswith(asked)
    return answered[len(asked) :].removesuffix("\n").removesuffix(tokenizer.eos_token)


@pytest.mark.parametrize("form", FORMS)
def test_what_the_template_writes_is_read(form):
    tokenizer = tokenizer_of(FORMS[form])
    parse = CallParser(tokenizer, SCHEMAS)

    @settings(max_examples=60, deadline=None)
    @given(TEXTS, st.integers(), st.integers(1, 1 if form == "json" else 3))
    def check(query, limit, count):
        if form == "tags":
            query = query.strip("\n").replace("</parameter>", "")
        arguments = {"query": query, "limit": limit}
        answer = written(tokenizer, called(*[arguments] * count))
        assert parse(answer) == [Call("search", arguments)] * count

    check()


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_without_a_call(form):
    parse = CallParser(tokenizer_of(FORMS[form]), SCHEMAS)
    for answer in ("", "It is in Rome.", "[1] says so", '{"a": 1}', "1234", "{not JSON"):
        assert parse(answer) == []


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("<tool_call>", "is not JSON"),
        ('<tool_call>{"name": "search", "arguments": {', "is not JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'has no "name"'),
        ('<tool_call>{"name": 3}</tool_call>', 'has no "name"'),
        ("<tool_call>7</tool_call>", 'has no "name"'),
        ('<tool_call>{"name": "search", "arguments": [1]}</tool_call>', "are no object"),
        ('<tool_call>{"name": "search", "arguments": "{"}</tool_call>', "are not JSON"),
        ("<tool_call>" + "[" * 100_000, "is not JSON"),
    ],
)
def test_a_call_that_cannot_be_read(answer, problem):
    (call,) = CallParser(tokenizer_of(HERMES), SCHEMAS)(answer)
    assert problem in call.problem
    assert len(call.problem) < 250
    assert "\n" not in call.problem


def test_json_in_a_fence_and_arguments_as_text():
    parse = CallParser(tokenizer_of(FORMS["json"]), SCHEMAS)
    call = '{"name": "search", "parameters": "{\\"query\\": \\"a\\"}"}'
    assert parse(f"Let me look.\n```json\n{call}\n```") == [Call("search", {"query": "a"})]


def test_a_tokenizer_that_reads_answers_itself():
    template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<im>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close": "<eot>", "content": "text"},
        },
    }
    tokenizer = tokenizer_of(HERMES, response_template=template)
    parse = CallParser(tokenizer, SCHEMAS)
    answer = '<tool_call>{"name": "search", "arguments": {"query": "a"}}</tool_call>'
    assert parse(answer) == [Call("search", {"query": "a"})]
    assert parse("Rome.") == []
    (unread,) = parse('<tool_call>{"name": </tool_call>')
    assert "cannot be read" in unread.problem
    broken = tokenizer_of(HERMES, response_template={"fields": 3})
    with pytest.raises(UserError, match="--tools: the tokenizer's response_template fails"):
        CallParser(broken, SCHEMAS)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{% for m in messages %}{{ m.role + m.content }}{% endfor %}",
            "does not show tools to the model",
        ),
        ("{{ raise_exception('never') }}", "never"),
        (
            HERMES.replace("c.function | tojson", "c.function.name + '!'"),
            "a form of its own; give the tokenizer a response_template",
        ),
    ],
)
def test_templates_without_tools(template, said):
    with pytest.raises(UserError, match=f"--tools: .*{said}"):
        CallParser(tokenizer_of(template), SCHEMAS)


@pytest.mark.parametrize("form", FORMS)
def test_an_episode_is_the_rendered_chat(form):
    """Prompt, a call with its EOS, results, in tokens, are the chat that waits for an answer."""
    tokenizer = tokenizer_of(FORMS[form])
    observations = ObservationTokens(tokenizer, is_chat=True)
    observations.require_tools()

    @settings(max_examples=40, deadline=None)
    @given(st.lists(TEXTS.filter(lambda text: "<" not in text), min_size=1, max_size=3))
    def check(texts):
        texts = texts[:1] if form == "json" else texts
        results = tuple(ToolResult("search", text) for text in texts)
        turn = called(*[{"query": "a"}] * len(texts))
        ids = prompt_text_ids(tokenizer, ASKED, tools=SCHEMAS)
        ids += tokenizer.encode(written(tokenizer, turn)) + [tokenizer.eos_token_id]
        ids += observations(Observation(results=results))
        turns = [
            {"role": "tool", "name": "search", "content": text, "tool_call_id": f"call{i:05d}"}
            for i, text in enumerate(texts)
        ]
        whole = render_chat(
            tokenizer, [*ASKED, turn, *turns], add_generation_prompt=True, tools=SCHEMAS
        )
        assert tokenizer.decode(ids) == whole

    check()


def test_a_template_without_a_place_for_results():
    template = HERMES.replace("{% if m.role == 'tool' %}", "{% if false %}")
    template = template.replace(
        "'\\n' + m.content", "'\\n' + (m.content if m.role != 'tool' else '')"
    )
    with pytest.raises(UserError, match="--tools: the chat template does not render a tool's resu"):
        ObservationTokens(tokenizer_of(template), is_chat=True).require_tools()


@pytest.mark.parametrize("form", FORMS)
def test_whatever_a_model_writes_is_read(form):
    """Deep nesting, thousands of calls: a call, a problem told to the model, or an answer."""
    tokenizer = tokenizer_of(FORMS[form])
    parse = CallParser(tokenizer, SCHEMAS)
    one = written(tokenizer, called({"query": "q", "limit": 1}))
    deep = "[" * 20_000
    string = written(tokenizer, called({"query": "NESTED", "limit": 1}))
    for answer in (
        one.replace('"q"', deep),
        string.replace('{"query": "NESTED", "limit": 1}', '"' + deep + '"'),
        deep,
        '{"name": "search", "arguments": "' + deep + '"}',
    ):
        assert all(call.problem or call.name == "search" for call in parse(answer))
    many = parse(one * 3000)
    assert {call.name for call in many if not call.problem} <= {"search"}


def test_calls_in_a_row_are_all_read():
    parse = CallParser(tokenizer_of(FORMS["json"]), SCHEMAS)
    one = '{"name": "search", "arguments": {"query": "q", "limit": 1}}'
    assert len(parse("; ".join([one] * 3000))) == 3000
