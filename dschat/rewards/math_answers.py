"""Compares two answers as mathematics, with math-verify and a time limit.

A policy in training writes answers such as ``9^{9^{9^9}}``, which keep SymPy busy forever in C code
that holds the GIL and ignores signals. So the comparison runs in a process that can be killed.
math-verify's own time limits stay off: they use signals, which fail in threads.
"""

import importlib.util
import logging
import re

from dschat.config import UserError
from dschat.user_code.processes import Killable

_DELIMITED = re.compile(r"\$|\\boxed|\\\(|\\\[")
_THOUGHT = re.compile(r"<(/?)(?i:think|thinking|thought|reasoning)>|\[(/?)THINK\]")
_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{2,}")
_comparison = Killable(f"{__name__}:Comparison")


def require_library(name: str, extra: str = "rewards") -> None:
    """Raise `UserError` where a library that rewards need is not installed."""
    if importlib.util.find_spec(name.replace("-", "_")) is None:
        raise UserError(f"needs {name}; install it with `pip install dschat[{extra}]`")


def are_equal(reference: str, answer: str, limit_s: float) -> bool:
    """Whether ``answer``, behind any thought, equals ``reference``; False if it takes over
    ``limit_s`` or kills the process; see `Killable`.
    """
    *_, last = None, *_THOUGHT.finditer(answer)
    if last:  # a thought without an end has no answer
        answer = answer[last.end() :] if last[1] or last[2] else ""
    # U+2212 is the minus sign of typesetting, which math-verify does not read everywhere.
    reference, answer = (text.replace("\u2212", "-").strip() for text in (reference, answer))
    if not reference or not answer or reference == answer:
        return bool(reference) and reference == answer
    return bool(_comparison.call(limit_s, reference, answer))


class Comparison:
    """The function of the worker process. Its constructor imports and warms up math-verify."""

    def __init__(self) -> None:
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about timeouts off
        self._compare("x^2 + 2x + 1", "(x + 1)^2")

    def __call__(self, reference: str, answer: str) -> bool:
        """Whether the two are equal; False if the comparison raises."""
        try:
            return self._compare(reference, answer)
        except Exception:  # SymPy raises nearly anything
            return False

    def _compare(self, reference: str, answer: str) -> bool:
        from math_verify import parse, verify

        expected, actual = (
            parse(_as_latex(text), parsing_timeout=None) for text in (reference, answer)
        )
        return bool(verify(expected, actual, timeout_seconds=None))


def _as_latex(text: str) -> str:
    """``text`` in dollar signs if it is a formula only: then (1, 2) is a pair, not the number 2.

    Text with words stays as it is, so that math-verify searches it for a formula. Of several boxes
    the last counts: math-verify would join ``\\boxed{1} or \\boxed{137}`` into 1137.
    """
    before, box, last = text.rpartition("\\boxed")
    if "\\boxed" in before:
        text = box + last
    if _DELIMITED.search(text) or _WORD.search(text):
        return text
    return f"${text}$"
