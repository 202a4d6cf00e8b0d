"""The ready-made functions, on answers such as policies write."""

import inspect
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from documentation import PAGES
from quick import slow

import dschat.distributed as dist
from dschat.config import UserError
from dschat.rewards import library, math_answers
from dschat.rewards.call import LONGEST_CALL_S
from dschat.rewards.loader import load_reward_functions
from dschat.rewards.samples import Samples
from dschat.user_code.calls import Fault
from dschat.user_code.processes import Killable

BAD = Path(__file__).with_name("bad_functions.py")


def one(function, answer, *reference):
    (score,) = function([answer], *([r] for r in reference))
    return score


# of docs/rewards.md
(GSM8K,) = re.findall(r'"exact_match.pattern=(.*?)"', PAGES["rewards.md"])


@pytest.mark.parametrize(
    ("settings", "answer", "reference", "score"),
    [
        ({}, " Paris\n", "Paris", 1),
        ({}, "paris", "Paris", 0),
        ({"ignore_case": True}, "STRASSE", "straße", 1),
        ({}, "", "Paris", 0),
        ({}, "", "", 1),
        ({}, "72", 72, 1),
        ({}, "72", 72.0, 1),  # a column of numbers with gaps holds floats
        ({}, "72.5", 72.5, 1),
        ({}, "b", ["a", "b"], 1),
        ({}, "c", ["a", "b"], 0),
        ({}, "anything", None, None),
        ({"pattern": r"#### (.+)"}, "so\n#### 72", "they are 9 times 8\n#### 72", 1),
        ({"pattern": r"#### (.+)"}, "#### 7\n#### 72", "72", 1),  # the last one counts
        ({"pattern": r"#### (.+)"}, "72", "72", 0),
        ({"pattern": r"-?\d+"}, "it is -4.", "-4", 1),
        ({"pattern": GSM8K}, "so\n#### 1,000", "1000", 1),
        ({"pattern": GSM8K}, "so\n#### $1000.", "it takes\n#### 1,000", 1),
        ({"pattern": GSM8K}, "#### -1,234,567.50", "-1234567.50", 1),
        ({"pattern": GSM8K}, "#### 1,00", "100", 0),  # no thousands
        ({}, "1,2", "12", 0),
        ({}, "(1,000)", "1000", 0),
        ({"pattern": r"a(b)?"}, "a", "x", 0),
    ],
)
def test_exact_match(settings, answer, reference, score):
    assert one(library.ExactMatch(**settings), answer, reference) == score


@pytest.mark.parametrize(
    ("reference", "answer", "score"),
    [
        ("1/2", "0.5", 1),
        ("\\frac{1}{2}", "The answer is \\boxed{0.5}.", 1),
        ("72", "So she has 72 apples.", 1),
        ("72", "72 or 73", 0),
        ("72", "\\boxed{71} or \\boxed{72}", 1),  # the last box counts
        ("71", "\\boxed{71} or \\boxed{72}", 0),
        ("1137", "\\boxed{1} or \\boxed{137}", 0),
        ("137", "$\\boxed{1}$, no: $x = \\boxed{137}$.", 1),
        ("(1, 2)", "\\boxed{3}, \\boxed{(1, 2)}", 1),
        ("(1, 2)", "(1,2)", 1),
        ("(1, 2)", "2", 0),
        ("x^2 + 2x + 1", "$(x+1)^2$", 1),
        ("\\{1, 2\\}", "\\boxed{\\{2, 1\\}}", 1),
        ("1,000", "1000", 1),
        (12, "12", 1),
        ("Monday", "Monday", 1),
        ("Monday", "Tuesday", 0),
        ("7", "", 0),
        ("", "7", 0),
        (None, "7", None),
        ("0.5", "the result is .5", 1),
        ("0.75", "the result is $.75", 1),
        ("-3", "the result is \u22123", 1),  # the minus sign of typesetting
        ("\u22123", "the result is -3", 1),
        ("3", "the result is \u22123", 0),
        ("42", "<think>Maybe 42", 0),
        ("42", "<think>Maybe 42</think> It is 42.", 1),
        ("42", "Maybe 42</think> I do not know.", 0),
        ("42", "<think>41</think> No, <think>\\boxed{42}", 0),
        ("42", "[THINK]42[/THINK]41", 0),
        ("42", "[THINK]41[/THINK]42", 1),
        ("42", "[Reasoning] 40 and 2. [Answer] \\boxed{42}", 1),  # a heading
    ],
)
def test_math_equal(reference, answer, score):
    assert one(library.MathEqual(), answer, reference) == score


@pytest.mark.slow
def test_an_endless_comparison_is_wrong_and_blocks_no_other_thread():
    """A tower of powers keeps SymPy in C code; called from a thread, as a pool does."""
    scores = []

    def work():
        scores.extend(library.MathEqual(limit_s=1.0)(["$9^{9^{9^9}}+1$", "0.5"], ["3", "1/2"]))

    library.MathEqual()(["1/2"], ["0.5"])  # starts the process
    started = time.monotonic()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert scores == [0, 1]
    assert time.monotonic() - started < 60


@pytest.fixture
def compared_by(monkeypatch):
    """``compared_by(spec)``: by this class instead of math-verify."""
    return lambda spec: monkeypatch.setattr(math_answers, "_comparison", Killable(spec))


@pytest.mark.parametrize("pool", ["thread", *slow(["none"])])
def test_slow_and_deadly_answers_score_zero(pool, rewards, samples, compared_by):
    """Each answer has its own limit, so many of them may exceed the limit of the call."""
    compared_by(f"{BAD}:Mathematician")
    limits = {"reward_args": ["math_equal.limit_s=0.5"], "reward_timeout_s": 0.6}
    given = samples(6, reference=["0.5"] * 6)
    given.answers = ["slow", "deadly", "1", "slow", "0", "1"]
    asked = rewards(["math_equal"], reward_pool=pool, **limits)
    (source,) = asked.score(given).result()
    assert source.scores.tolist() == [0, 0, 1, 0, 0, 1]


def test_a_comparison_that_cannot_start_raises(compared_by):
    compared_by("nowhere.py:Comparison")
    with pytest.raises(Fault, match="not found"):
        library.MathEqual()(["1"], ["0.5"])


@pytest.mark.parametrize(
    ("settings", "answer", "score"),
    [
        ({"pattern": r"\d"}, "a1", 1),
        ({"pattern": r"\d"}, "a", 0),
        ({"pattern": r"\d", "full": True}, "a1", 0),
        ({"pattern": r"(?s).*end", "full": True}, "a\nend", 1),
    ],
)
def test_regex_match(settings, answer, score):
    assert one(library.RegexMatch(**settings), answer) == score


def test_a_search_that_times_out_does_not_match(monkeypatch, caplog):
    monkeypatch.setattr(library, "_PATTERN_S", 0.05)
    library._too_slow.cache_clear()
    wild, answer = r"(a|aa|aaa)+(b|bb)+(a|aa|aaa)+c$", "a" * 5000 + "b" + "a" * 5000
    assert library.RegexMatch(pattern=wild)([answer, "abac", answer]) == [0, 1, 0]
    assert library.ExactMatch(pattern=wild)([answer, "aabac"], ["x", "aabac"]) == [0, 1]
    assert caplog.text.count("regex_match takes longer than 0.05 s") == 1


def test_a_call_over_its_budget_returns_none_for_the_rest(monkeypatch):
    """None, not 0; and the limit of the call leaves room for the answer in progress."""
    clock = iter([0, 1, library._BUDGET_S - 1, library._BUDGET_S, library._BUDGET_S + 1])
    monkeypatch.setattr(library, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    slowest = library.MathEqual(limit_s=library._LONGEST_ANSWER_S)
    assert slowest(["1"] * 4, ["1"] * 4) == [1, 1, None, None]
    assert library._BUDGET_S + slowest.limit_per_answer_s <= LONGEST_CALL_S
    # Also after one retry, the other ranks have waited less than their timeout.
    wait_min = inspect.signature(dist.init).parameters["timeout_minutes"].default
    assert 60 * wait_min >= 2 * LONGEST_CALL_S
    with pytest.raises(UserError, match="math_equal.limit_s=181 must be above 0, and at most 180"):
        library.MathEqual(limit_s=181)


def test_the_limit_of_a_call_has_an_end(monkeypatch):
    limits = []

    def run(kwargs, lengths, limit_s):
        limits.append(limit_s)
        return [1.0] * len(lengths)

    (reward,) = load_reward_functions(["math_equal"], [], [], [])
    reward.run = run
    for number in (1, 2, 1000):
        texts = ["1"] * number
        ids = [[1]] * number
        given = Samples(texts, texts, ids, ids, ["stop"] * number, {"reference": texts})
        reward.call(given, 60.0)
    assert limits == [123, 246, 1800]


def test_length():
    ids = [[0] * n for n in (0, 4, 8, 12, 16, 40)]
    assert library.Length(target=8)(ids) == [0, 0.5, 1, 0.5, 0, 0]
    assert library.Length(max=8)(ids) == [0, 0, 0, -0.5, -1, -1]


@pytest.mark.parametrize(
    ("settings", "answer", "score"),
    [
        ({}, "<think>so</think><answer>4</answer>", 1),
        ({}, "\n<think>\nso\n</think>\n<answer>4</answer>\n", 1),
        ({}, "<think>so</think> it is <answer>4</answer>", 0),
        ({}, "<think>so</think><answer>4</answer> done", 0),
        ({}, "Well <think>so</think><answer>4</answer>", 0),
        ({}, "<think>so</think><answer></answer>", 0),
        ({}, "<think> </think><answer>4</answer>", 0),
        ({}, "<answer>4</answer><think>so</think>", 0),
        ({}, "<think>so<answer>4</answer></think>", 0),
        ({}, "<think>a</think><think>b</think><answer>4</answer>", 0),
        ({}, "<think>so</think><answer>4", 0),
        ({}, "4", 0),
        ({"tags": ["a"]}, "<a>x</a>", 1),
    ],
)
def test_format_tags(settings, answer, score):
    assert one(library.FormatTags(**settings), answer) == score


def test_a_missing_dependency_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match=r"pip install dschat\[rewards\]"):
        library.MathEqual()
