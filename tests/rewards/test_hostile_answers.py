"""No answer, however hostile, makes a ready-made function raise or score out of its range."""

import contextlib
import json
import socket
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dschat.rewards import library as ready
from dschat.rewards.math_answers import Comparison
from dschat.user_code.calls import Fault

TREE = {"$id": "urn:tree", "type": "array", "items": {"$ref": "#"}, "uniqueItems": True}
SCHEMAS = [
    {"properties": {"x": {"multipleOf": 0.5}}, "additionalProperties": {"multipleOf": 3}},
    {"anyOf": [{"multipleOf": 0.1}, {"minimum": 1, "maximum": 1e300}, {"maxLength": 3}]},
    {"not": TREE},
    {"type": ["array", "object"], "uniqueItems": True, "minItems": 2, "contains": {"const": 1.0}},
    {"enum": [0, False, [], {}, 1e308]},
    TREE,
]
FUNCTIONS = [
    ready.ExactMatch(pattern=r"#### (.+)"),
    ready.ExactMatch(ignore_case=True),
    ready.RegexMatch(pattern=r"(\w+)\s*=\s*\1"),
    ready.RegexMatch(pattern=r"(?:a|b)*", full=True),
    ready.FormatTags(),
    *map(ready.JsonSchema, SCHEMAS),
]
PIECES = ["1e999", "-1e999", "1" * 400, "9" * 5000, "NaN", "null", '"', "\\", "\\ud800", "\ud800"]
PIECES += [*"[]{},:\0", "[" * 300, "]" * 300, '{"x":', '{"a":' * 400, "#### ", "```json\n", "\n```"]
PIECES += ["<think>", "</think>", "<answer>", "</answer>", "a = a", "ß", "x^2"]
PIECES += ["\\frac{1}{0}", "\\boxed{", "$", "\\sqrt", "=", "oo", "\\infty", "(1,2)", "%", "0.1"]

numbers = st.one_of(st.integers(), st.floats(), st.sampled_from([10**400, -(10**400)]))
leaves = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=5))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["x", "a", ""]), inner, max_size=3),
    ),
    max_leaves=8,
)
nested = st.integers(0, 600).map(lambda depth: "[" * depth + "]" * depth)
pieces = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
documents = values.map(json.dumps).map(lambda text: text.replace("Infinity", "1e999"))
answers = st.one_of(
    st.text(max_size=40),
    pieces,
    documents,
    st.tuples(nested, nested).map(lambda pair: f"[{pair[0]}, {pair[1]}]"),
)


@pytest.mark.parametrize("count", [4, pytest.param(500, marks=pytest.mark.slow)])
def test_no_answer_makes_a_function_fail(count):
    @settings(max_examples=count, deadline=None, derandomize=True)
    @given(answers, answers)
    def judged(answer, reference):
        for function in FUNCTIONS:
            both = isinstance(function, ready.ExactMatch)
            (score,) = function([answer], *([[reference]] if both else []))
            assert score in (0, 1), function

    judged()


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        (SCHEMAS[0], '{"x": 1e999}'),
        (SCHEMAS[1], "1" + "0" * 400),
        (TREE, "[" * 300 + "]" * 300),
        (TREE, f"[{'[' * 300 + ']' * 300}, {'[' * 300 + ']' * 300}]"),
    ],
)
def test_json_that_its_schema_cannot_judge_does_not_fit(schema, answer):
    assert ready.JsonSchema(schema)([answer]) == [0]


def test_a_dangling_reference_in_the_schema_raises():
    with pytest.raises(Fault, match="PointerToNowhere.*none"):
        ready.JsonSchema({"$ref": "#/$defs/none"})(["1"])


def test_an_answer_that_cannot_be_compared_is_wrong(monkeypatch):
    def fails(*_, **__):
        raise ValueError("no such thing")

    library = SimpleNamespace(parse=lambda text, **_: text, verify=lambda *_, **__: True)
    monkeypatch.setitem(sys.modules, "math_verify", library)
    comparison = Comparison()
    assert comparison("1/2", "0.5") is True
    library.verify = fails
    assert comparison("1/2", "0.5") is False
    with pytest.raises(ValueError, match="no such thing"):
        Comparison()  # a broken math-verify raises; it does not score 0


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(answers)
def test_no_answer_makes_math_equal_fail(answer):
    """In worker processes; slow answers cost a second each."""
    (score,) = ready.MathEqual(limit_s=1.0)([answer], ["7"])
    assert score in (0, 1)


def test_a_schema_reads_no_other_files_or_hosts(tmp_path):
    (tmp_path / "other.json").write_text("true")
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        server.settimeout(0.2)
        for reference in (f"file://{tmp_path}/other.json", f"http://127.0.0.1:{port}/other.json"):
            schema = ready.JsonSchema({"$ref": reference})
            with pytest.raises(Fault, match="Unresolvable"):
                schema(["1"])
        with contextlib.suppress(TimeoutError):
            asked.append(server.accept())
    assert asked == []
    draft = ready.JsonSchema({"$ref": "https://json-schema.org/draft/2020-12/schema"})
    assert draft(['{"type": "object"}', '{"type": 1}']) == [1, 0]


MANY_REFERENCES = {
    "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
    | {"d30": True},
    "if": {"type": "string"},
    "then": {"$ref": "#/$defs/d0"},
}
UNEQUAL = json.dumps([{"a": i} for i in range(9000)])


@pytest.mark.parametrize(
    ("schema", "slow", "quick"),
    [
        (
            {"additionalProperties": False, "patternProperties": {"^(a|a)*$": {}}},
            f'{{"{"a" * 40}!": 1}}',
            '{"aa": 1}',
        ),
        ({"uniqueItems": True}, UNEQUAL, "[{}, 1]"),
        (MANY_REFERENCES, '"a"', "1"),
    ],
    ids=["patterns", "unique", "references"],
)
@pytest.mark.slow
def test_a_schema_has_a_time_limit(schema, slow, quick):
    """For the answer as a whole, whatever its schema computes."""
    fits = ready.JsonSchema(schema)
    assert fits([quick]) == [1]  # starts the process
    started = time.monotonic()
    assert fits([slow, quick]) == [0, 1]
    assert time.monotonic() - started < 30
