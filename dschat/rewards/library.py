"""The ready-made reward functions: ``--reward_fn exact_match``, with ``--reward_args``.

Each is a class whose constructor checks its arguments. A score is 1 for right and 0 for wrong
unless the class says otherwise, and None for a row without a reference. No answer raises: one that
cannot be parsed, or takes too long, scores 0.
"""

import functools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import regex

from dschat.builtin.reasoning_gym import Tasks
from dschat.config import UserError
from dschat.config.errors import require
from dschat.config.fields import require_valid
from dschat.rewards.call import LONGEST_CALL_S
from dschat.rewards.code_tests import NOT_ISOLATED, isolation, read_tests, share_passed
from dschat.rewards.endpoint import Http
from dschat.rewards.judge import Judge, JudgeGroup, JudgeReference
from dschat.rewards.math_answers import are_equal, require_library
from dschat.user_code.processes import START_S, Killable

logger = logging.getLogger("dschat")

_PATTERN_S = 2.0  # limit of one regular expression search
_LONGEST_ANSWER_S = 180.0
_GYM_S = 20.0  # of a task of reasoning-gym, which may read its files first
_BUDGET_S = LONGEST_CALL_S - _LONGEST_ANSWER_S - START_S  # after it, a call starts no other answer
_THOUSANDS = regex.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


@dataclass
class ExactMatch:
    """Whether the answer equals the reference, ignoring space at both ends, and the commas of a
    number with thousands separators.

    A list as reference holds alternatives. ``pattern`` selects the text to compare: its last match,
    or the first group of it. A reference without a match is compared as a whole.
    """

    pattern: str = ""
    ignore_case: bool = False
    limit_per_answer_s = 2 * _PATTERN_S

    def __post_init__(self) -> None:
        require_valid(self, "--reward_args exact_match.")
        self._pattern = _compiled(self.pattern, "exact_match") if self.pattern else None

    def __call__(self, answers: list[str], reference: list[Any]) -> list[float | None]:
        return _in_time(self._score, answers, reference)

    def _score(self, answer: str, reference: Any) -> float | None:
        if reference is None:
            return None
        alternatives = reference if isinstance(reference, (list, tuple)) else [reference]
        selected = self._select(answer)
        if selected is None:
            return 0.0
        texts = [as_text(alternative) for alternative in alternatives]
        return float(any(self._same(selected, self._select(text) or text) for text in texts))

    def _select(self, text: str) -> str | None:
        """The part of ``text`` to compare; None if the pattern does not match."""
        if self._pattern is None:
            return text
        last = None
        try:
            for match in self._pattern.finditer(text, timeout=_PATTERN_S):
                last = match
        except TimeoutError:
            return _too_slow("exact_match")
        return last and (last[1 if self._pattern.groups else 0] or "")

    def _same(self, a: str, b: str) -> bool:
        texts = a.strip(), b.strip()
        a, b = (t.replace(",", "") if _THOUSANDS.fullmatch(t) else t for t in texts)
        return a.casefold() == b.casefold() if self.ignore_case else a == b


@dataclass
class MathEqual:
    """Whether the answer equals the reference as mathematics: 1/2, 0.5 and \\boxed{\\frac12} agree.

    math-verify compares the last formula or number of each text: its last box, if it has one. An
    answer that takes longer than ``limit_s`` is wrong.
    """

    limit_s: float = 3.0

    def __post_init__(self) -> None:
        require_valid(self, "--reward_args math_equal.")
        require(
            0 < self.limit_s <= _LONGEST_ANSWER_S,
            f"--reward_args math_equal.limit_s={self.limit_s} must be above 0, and at most "
            f"{_LONGEST_ANSWER_S:g}",
        )
        require_library("math-verify")
        self.limit_per_answer_s = self.limit_s + START_S  # of the process

    def __call__(self, answers: list[str], reference: list[Any]) -> list[float | None]:
        return _in_time(self._score, answers, reference)

    def _score(self, answer: str, reference: Any) -> float | None:
        if reference is None:
            return None
        return float(are_equal(as_text(reference), answer, self.limit_s))


@dataclass
class RegexMatch:
    """Whether ``pattern`` matches somewhere in the answer, or with ``full`` all of it.

    A dot matches any character except a newline.
    """

    pattern: str = ""
    full: bool = False
    limit_per_answer_s = _PATTERN_S

    def __post_init__(self) -> None:
        require_valid(self, "--reward_args regex_match.")
        require(bool(self.pattern), "is missing its pattern: --reward_args regex_match.pattern=...")
        self._pattern = _compiled(self.pattern, "regex_match")

    def __call__(self, answers: list[str]) -> list[float | None]:
        return _in_time(self._score, answers)

    def _score(self, answer: str) -> float:
        search = self._pattern.fullmatch if self.full else self._pattern.search
        try:
            match = search(answer, timeout=_PATTERN_S)
        except TimeoutError:
            match = _too_slow("regex_match")
        return float(match is not None)


@dataclass
class Length:
    """Scores the length n of the answer in tokens.

    ``target``: 1 - |n - target| / target, at least 0. ``max``: 0 up to max tokens, then
    -(n - max) / max, at least -1.
    """

    target: int = 0
    max: int = 0

    def __post_init__(self) -> None:
        require_valid(self, "--reward_args length.")
        require(
            (self.target > 0) != (self.max > 0) and min(self.target, self.max) >= 0,
            "takes either target or max, above 0: --reward_args length.target=64",
        )

    def __call__(self, answer_ids: list[list[int]]) -> list[float]:
        return [self._score(len(ids)) for ids in answer_ids]

    def _score(self, n: int) -> float:
        if self.target:
            return max(0.0, 1 - abs(n - self.target) / self.target)
        return max(-1.0, min(0.0, (self.max - n) / self.max))


@dataclass
class FormatTags:
    """Whether the answer is <think>...</think><answer>...</answer>.

    Every tag of ``tags`` occurs once, in this order, with content, and only space is outside.
    """

    tags: list[str] = field(default_factory=lambda: ["think", "answer"])

    def __post_init__(self) -> None:
        require_valid(self, "--reward_args format_tags.")
        self._marks = [f"<{slash}{tag}>" for tag in self.tags for slash in ("", "/")]
        self._mark = regex.compile("|".join(map(regex.escape, self._marks)))

    def __call__(self, answers: list[str]) -> list[float]:
        return [float(self._fits(answer)) for answer in answers]

    def _fits(self, answer: str) -> bool:
        if self._mark.findall(answer) != self._marks:
            return False
        # Alternating: the text before an opening tag is outside, before a closing tag inside.
        texts = [text.strip() for text in self._mark.split(answer)]
        return all(texts[1::2]) and not any(texts[::2])


@dataclass
class PythonTests:
    """The share of ``tests`` that the answer's last fenced block of Python passes.

    ``timeout_s`` is the limit of a test, ``limit_s`` of an answer: tests that are left then fail.
    """

    timeout_s: float = 5.0
    limit_s: float = 60.0
    memory_mib: int = 1024
    unsafe: bool = False

    def __post_init__(self) -> None:
        require_valid(self, "--reward_args python_tests.")
        require(
            min(self.timeout_s, self.limit_s) > 0 and self.memory_mib >= 64,
            "takes limits of time above 0, and memory_mib of at least 64",
        )
        require(self.limit_s <= 60, "takes a limit_s of at most 60")
        self.limit_per_answer_s = _LONGEST_ANSWER_S
        mode = isolation()
        require(
            mode != "none" or self.unsafe,
            "cannot isolate answers: the kernel has no namespaces for this user, and there is no "
            "bwrap; install it, be root in a container, or, if answers may do what you may do, "
            "pass --reward_args python_tests.unsafe=true",
        )
        if open_to_them := NOT_ISOLATED[mode]:
            logger.warning("python_tests does not isolate answers from %s", open_to_them)
        self._settings = mode, self.timeout_s, self.limit_s, self.memory_mib

    def __call__(
        self,
        answers: list[str],
        tests: list[Any],
        setup: list[Any] | None = None,
        entry_point: list[Any] | None = None,
    ) -> list[float | None]:
        none = [None] * len(answers)
        return _in_time(self._score, answers, tests, setup or none, entry_point or none)

    def _score(self, answer: str, *row: Any) -> float | None:
        tests = read_tests(*row)
        return share_passed(answer, tests, *self._settings) if tests else None


@dataclass
class ReasoningGym:
    """The score of the row's task for the answer, in <tag> if it has that; see `Tasks`."""

    tag: str = "answer"
    limit_per_answer_s = _GYM_S + START_S

    def __post_init__(self) -> None:
        require_valid(self, "--reward_args reasoning_gym.")
        require_library("reasoning-gym", "reasoning-gym")
        self._tasks = Killable(f"{Tasks.__module__}:Tasks")

    def __reduce__(self) -> tuple[Any, ...]:
        return ReasoningGym, (self.tag,)  # processes cannot be pickled

    def __call__(
        self, answers: list[str], task: list[Any], settings: list[Any], entry: list[Any]
    ) -> list[float | None]:
        return _in_time(self._score, answers, task, settings, entry)

    def _score(self, answer: str, task: str, settings: str, entry: str) -> float | None:
        if entry is None:
            return None
        begun = answer.rpartition(f"<{self.tag}>")[2]
        text = begun.partition(f"</{self.tag}>")[0].strip()
        return self._tasks.call(_GYM_S, task, settings, text, entry) or 0.0


READY_MADE: dict[str, Callable[..., Any]] = {
    "exact_match": ExactMatch,
    "math_equal": MathEqual,
    "regex_match": RegexMatch,
    "length": Length,
    "format_tags": FormatTags,
    "python_tests": PythonTests,
    "reasoning_gym": ReasoningGym,
    "http": Http,
    "judge": Judge,
    "judge_group": JudgeGroup,
    "judge_reference": JudgeReference,
}


def _in_time(score: Callable[..., float | None], *columns: Iterable[Any]) -> list[float | None]:
    """The score of each row; None for the rows left after `_BUDGET_S`."""
    end = time.monotonic() + _BUDGET_S
    rows = zip(*columns, strict=True)
    return [score(*row) if time.monotonic() < end else None for row in rows]


@functools.cache  # logged once
def _too_slow(name: str) -> None:
    logger.warning(
        "%s takes longer than %g s on some answers and counts as no match; simplify it",
        name,
        _PATTERN_S,
    )


def _compiled(pattern: str, name: str) -> regex.Pattern:
    """``pattern`` compiled by `regex`, whose searches take a timeout."""
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise UserError(
            f"--reward_args {name}.pattern={pattern}: invalid regular expression: {error}"
        ) from None


def as_text(value: Any) -> str:
    """A value of the data as text: 72.0, from a column of floats, is 72."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
