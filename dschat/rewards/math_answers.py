"""Compares two answers as mathematics, with math-verify and a time limit.

A policy in training writes answers such as ``9^{9^{9^9}}``, which keep SymPy busy forever in C code
that holds the GIL and ignores signals. So the comparison runs in a process that can be killed.
math-verify's own time limits stay off: they use signals, which fail in threads.
"""

import contextlib
import importlib.util
import logging
import queue
import re

from dschat.config import UserError
from dschat.rewards.call import Fault
from dschat.rewards.processes import Worker
from dschat.rewards.threads import background

_DELIMITED = re.compile(r"\$|\\boxed|\\\(|\\\[")
_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{2,}")
_idle: "queue.SimpleQueue[Worker]" = queue.SimpleQueue()


def require_library() -> None:
    """Raise `UserError` where math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise UserError("needs math-verify; install it with `pip install dschat[rewards]`")


def are_equal(reference: str, answer: str, limit_s: float) -> bool:
    """Whether ``answer`` equals ``reference``; False if it takes over ``limit_s`` or kills the
    process. The start of a process (up to `START_S`) does not count.
    """
    # U+2212 is the minus sign of typesetting, which math-verify does not read everywhere.
    reference, answer = (text.replace("\u2212", "-").strip() for text in (reference, answer))
    if not reference or not answer or reference == answer:
        return bool(reference) and reference == answer
    idle = _idle  # NOTE return the worker to the queue it came from; tests replace the global
    try:
        worker = idle.get_nowait()
    except queue.Empty:
        worker = Worker([("spec", f"{__name__}:Comparison", {})])
    worker.start()  # a failure to start raises: the answer did not cause it
    try:
        (value,) = worker.call(0, {"reference": reference, "answer": answer}, [0], limit_s)
    except Fault:  # too slow, or the process died: the comparison itself raises nothing
        # Restart it in the background; the next answer takes another worker.
        background(_restart, worker, idle)
        return False
    idle.put(worker)
    return value == 1.0


def _restart(worker: Worker, idle: "queue.SimpleQueue[Worker]") -> None:
    with contextlib.suppress(Fault):  # the next call reports it
        worker.start()
    idle.put(worker)


class Comparison:
    """The function of the worker process. Its constructor imports and warms up math-verify."""

    def __init__(self) -> None:
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about timeouts off
        self._compare("x^2 + 2x + 1", "(x + 1)^2")

    def __call__(self, reference: str, answer: str) -> list[float]:
        """[1.0] if the two are equal; [0.0] if they differ or the comparison raises."""
        try:
            return [float(self._compare(reference, answer))]
        except Exception:  # SymPy raises nearly anything
            return [0.0]

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
