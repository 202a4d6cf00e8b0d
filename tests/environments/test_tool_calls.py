"""Calls of tools: read in the form in which the chat template writes them, or told to the model."""

import json
import re
from os.path import commonprefix

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_templates import FORMS, HERMES, REAL, SCHEMAS, opening, tokenizer_of

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


def written(tokenizer, turn, tools=SCHEMAS):
    """The answer that the template makes of ``turn``, without its EOS."""
    asked = render_chat(tokenizer, ASKED, add_generation_prompt=True, tools=tools)
    answered = render_chat(tokenizer, [*ASKED, turn], tools=tools)
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


@pytest.mark.parametrize("form", ["hermes", "json", "tags"])
@pytest.mark.parametrize("by_prompt", [False, True])
def test_a_call_in_a_thought_is_none(form, by_prompt):
    tokenizer = tokenizer_of(FORMS[form])
    thought, real = (written(tokenizer, called({"query": q})) for q in ("thought", "</think> real"))
    if by_prompt:
        tokenizer = tokenizer_of(opening(FORMS[form]))
    parse, opened = CallParser(tokenizer, SCHEMAS), "" if by_prompt else "<think>"
    (call,) = parse(f"{opened}{thought}</think>\n{real}")
    assert call.arguments == {"query": "</think> real"}
    assert parse(f"{opened}I could: {thought}, but no.</think>It is 4.") == []
    assert parse(f"{opened}I could: {thought}") == []
    assert parse(f"{opened}{thought}</think> <think>{thought}</think>{real}") == [call]
    assert by_prompt or parse(real) == [call]
    text = f"{opened}{thought}</think>\n{real}"
    before, calls = parse.split(tokenizer.encode(text) + [tokenizer.eos_token_id])
    assert (before, calls) == (f"{opened}{thought}</think>".strip(), [call])
    assert parse.split(tokenizer.encode(text.removesuffix(real))) is None


@pytest.mark.parametrize("tag", ["seed:think", "THINK"])
def test_other_tags_of_thoughts(tag):
    (a, z) = "[]" if tag == "THINK" else "<>"
    parse = CallParser(tokenizer_of(HERMES), SCHEMAS)
    call = '<tool_call>{"name": "search", "arguments": {"query": "q"}}</tool_call>'
    assert len(parse(f"{a}{tag}{z}{call}{a}/{tag}{z}{call}")) == 1


def test_a_thought_that_the_template_closes_opens_none():
    """By a variable, or in a template that writes an empty one before calls."""
    call = '{"name": "search", "arguments": {"query": "q"}}'
    closed = opening(HERMES).replace(
        "<think>\\n", "<think>' + ('</think>' if quick else '') + '\\n"
    )
    tokenizer = tokenizer_of(closed)
    marked = f"<tool_call>{call}</tool_call>"
    assert CallParser(tokenizer, SCHEMAS, quick=False)(marked) == []
    assert len(CallParser(tokenizer, SCHEMAS, quick=True)(marked)) == 1
    empty = FORMS["json"].replace("'<im>assistant\\n' + {", "'<im>assistant\\n<think></think>' + {")
    parse = CallParser(tokenizer_of(empty), SCHEMAS)
    assert parse("<think>a</think>Hello.") == []
    assert len(parse(f"<think>a</think>{call}")) == 1


CALL = '{"name": "search", "parameters": {"query": "q"}}'


@pytest.mark.parametrize(
    ("answer", "count", "before"),
    [
        ('{"name": "Alice", "age": 30}', 0, None),
        ('[{"name": "Alice"}, {"name": "Bob"}]', 0, None),
        ('Mine:\n```json\n{"name":"my-app","version":"1.0.0"}\n```', 0, None),
        ('{"name": "search"}', 0, None),
        ('{"function": {"name": "search"}}', 0, None),
        ('{"name": "search", "parameters": null}', 1, ""),
        ('{"type": "function", "name": "search", "parameters": {"query": "q"}}', 1, ""),
        ('{"function": {"name": "search", "arguments": {"query": "q"}}}', 1, ""),
        ('{"name": "nobody", "parameters": {}}', 1, ""),
        (f'{CALL}; {{"name": "Alice"}}', 1, ""),
        (f'[{CALL}, {{"name": "Alice"}}]', 0, None),
        (f"<|python_tag|>{CALL}", 1, ""),
        (f"Let me look.\n```json\n{CALL}\n```", 1, "Let me look."),
        (
            f'```json\n{{"name": "a"}}\n```\nThen\n```\n{CALL}\n```',
            1,
            '```json\n{"name": "a"}\n```\nThen',
        ),
        ('{"name": "search", "parameters": {"query": "```json\\n{}\\n```"}}', 1, ""),
    ],
)
def test_json_without_a_mark(answer, count, before):
    tokenizer = tokenizer_of(FORMS["json"])
    parse = CallParser(tokenizer, SCHEMAS)
    assert len(parse(answer)) == count
    found = parse.split(tokenizer.encode(answer))
    assert (found and found[0]) == before
    marked = CallParser(tokenizer_of(HERMES), SCHEMAS)
    assert marked('<tool_call>{"name": "search"}</tool_call>') == [Call("search")]


def tool_of(properties, **more):
    parameters = {"type": "object", "properties": properties, **more}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
CHOICES = {"type": ["integer", "string"], "enum": [1, "a", "2", None]}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        *[
            ({"type": "boolean"}, text, text in ("True", "true"))
            for text in ("True", "False", "true")
        ],
        ({"type": "integer"}, "None", None),
        ({"type": "integer"}, "oslo", "oslo"),
        ({"type": "number"}, "NaN", "NaN"),
        *[(NULLABLE, text, text) for text in ("12345", "true", "False", "[1]", "")],
        *[(NULLABLE, text, None) for text in ("null", "None")],
        ({"type": ["string", "null"]}, "12345", "12345"),
        ({"type": "string", "nullable": True}, "None", None),
        ({"type": "string", "nullable": False}, "None", "None"),
        *[
            ({"type": "string"}, text, text)
            for text in ("None", "</parameter> a", "</function>", "<parameter=y>")
        ],
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": ["1", "2"]}, "3", "3"),
        ({"enum": [1, 2]}, "1", 1),
        *[(CHOICES, str(choice), choice) for choice in CHOICES["enum"]],
        ({"oneOf": [{"$ref": "#/$defs/Level"}, {"type": "null"}]}, "1", "1"),
        ({"$ref": "#/$defs/Self"}, "1", 1),
        ({"type": ["array", "string"]}, "['a', 'b']", ["a", "b"]),
        ({"type": ["array", "string"]}, "{'a': 1}", "{'a': 1}"),
        ({"type": "object"}, "{'a': True, 'b': (1,)}", {"a": True, "b": [1]}),
        ({"type": "array"}, "['a', 'b']", ["a", "b"]),
        *[
            ({}, text, text)
            for text in ('"q"', "'q'", "1_000", "1, 2", "[open('f')]", "{1, 2}", "[1e999]")
        ],
        ({}, "[" * 5000, "[" * 5000),
        ({}, "[" + "-" * 90_000 + "1]", "[" + "-" * 90_000 + "1]"),
        *[
            ({"type": 5, "enum": 3, "anyOf": 7, "$ref": []}, text, value)
            for text, value in [("5", 5), ("a", "a")]
        ],
    ],
)
def test_an_argument_in_tags(schema, text, expected):
    level = {"type": "string", "enum": ["1", "b"]}
    tool = tool_of({"x": schema}, **{"$defs": {"Level": level, "Self": {"$ref": "#/$defs/Self"}}})
    parse = CallParser(tokenizer_of(FORMS["tags"]), [tool])
    (call,) = parse(f"<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>")
    assert type(call.arguments["x"]) is type(expected)
    assert call.arguments == {"x": expected}


def test_arguments_of_a_tool_without_a_schema():
    tool = {"type": "function", "function": {"name": "f"}}
    answer = "<function=f><parameter=x>1</parameter></function>"
    for properties in ({}, {"parameters": None}, {"parameters": {"properties": [1]}}):
        parse = CallParser(
            tokenizer_of(FORMS["tags"]), [tool | {"function": {"name": "f", **properties}}]
        )
        assert parse(answer) == [Call("f", {"x": 1})]


@pytest.mark.parametrize(
    "body",
    ["x: 1</function>", "<parameter=x>1</function>", "<parameter=x>1</parameter><parameter=y>2"],
)
def test_tags_that_are_not_closed_are_told(body):
    answer = f"<function=search>{body}"
    calls = CallParser(tokenizer_of(FORMS["tags"]), SCHEMAS)(answer + answer)
    assert [bool(call.problem) for call in calls] == [True]


ODD = st.sampled_from(
    ["12345", "True", "true", "null", "1.5", "[1]", "['a']", '{"a": 1}', "", " a ", "\n", "a\n\nb"]
    + [
        "</parameter> a",
        "</function>",
        "<parameter=y>",
        "<tool_call>",
        "</think>",
        "<think>",
        "'q'",
    ]
)
STRINGS = ODD | TEXTS
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
KINDS = {
    "string": STRINGS,
    "integer": st.integers(),
    "number": PLAIN.filter(lambda value: type(value) in (int, float)),
    "boolean": st.booleans(),
    "array": st.lists(PLAIN | STRINGS, max_size=3),
    "object": st.dictionaries(TEXTS, PLAIN | STRINGS | st.lists(PLAIN), max_size=2),
}


@st.composite
def arguments_of_schemas(draw):
    """Properties, and arguments whose text is that of no other value that the schema allows."""
    properties, arguments = {}, {}
    for name in draw(st.lists(st.sampled_from("abc"), min_size=1, unique=True)):
        kind = draw(st.sampled_from([*KINDS]))
        values, form = KINDS[kind], draw(st.integers(0, 5))
        schema = {"type": kind}
        if form in (1, 2, 3):
            null = [{"type": [kind, "null"]}, {"type": kind, "nullable": True}]
            schema = [*null, {"oneOf": [{"type": kind}, {"type": "null"}]}][form - 1]
            values = st.none() | values.filter(lambda v: v not in ("None", "null"))
        elif form == 4:
            schema = draw(
                st.sampled_from([{"enum": ["1", "true", "None"]}, {"enum": [1, True, "a"]}])
            )
            values = st.sampled_from(schema["enum"])
        elif form == 5:
            schema, values = {}, PLAIN | st.lists(PLAIN) | st.sampled_from(["oslo", "'q'", " a "])
        properties[name], arguments[name] = schema, draw(values)
    return properties, arguments


@pytest.mark.parametrize("name", ["tags", "qwen3_5_think", "qwen3_5_nothink", "llama3_1"])
def test_arguments_survive_the_template(name):
    path = REAL / f"{name}.jinja"
    tokenizer = tokenizer_of(path.read_text() if path.exists() else FORMS[name], bos_token="<eot>")

    @settings(max_examples=60, deadline=None)
    @given(arguments_of_schemas())
    def check(drawn):
        properties, arguments = drawn
        tools = [tool_of(properties)]
        prompt = render_chat(tokenizer, ASKED, add_generation_prompt=True, tools=tools)
        whole = render_chat(tokenizer, [*ASKED, called(arguments, name="f")], tools=tools)
        answer = re.sub(
            "(<.im_end.>\n|<.eot_id.>|<eot>\n)$", "", whole[len(commonprefix([prompt, whole])) :]
        )
        (call,) = CallParser(tokenizer, tools)(answer)
        assert not call.problem
        assert json.dumps(call.arguments) == json.dumps(arguments)

    check()
