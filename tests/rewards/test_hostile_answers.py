"""No answer, however hostile, makes a ready-made function raise or score out of its range."""

import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dschat.rewards import library as ready
from dschat.rewards.math_answers import Comparison

FUNCTIONS = [
    ready.ExactMatch(pattern=r"#### (.+)"),
    ready.ExactMatch(ignore_case=True),
    ready.RegexMatch(pattern=r"(\w+)\s*=\s*\1"),
    ready.RegexMatch(pattern=r"(?:a|b)*", full=True),
    ready.FormatTags(),
]
PIECES = ["1e999", "-1e999", "1" * 400, "9" * 5000, "NaN", "null", '"', "\\", "\\ud800", "\ud800"]
PIECES += [*"[]{},:\0", "[" * 300, "]" * 300, '{"x":', '{"a":' * 400, "#### ", "```json\n", "\n```"]
PIECES += ["<think>", "</think>", "<answer>", "</answer>", "a = a", "ß", "x^2"]
PIECES += ["\\frac{1}{0}", "\\boxed{", "$", "\\sqrt", "=", "oo", "\\infty", "(1,2)", "%", "0.1"]

pieces = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
answers = st.one_of(st.text(max_size=40), pieces)


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
