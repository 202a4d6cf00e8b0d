"""Whether two answers are equal as mathematics, decided by math-verify within a time limit.

Two texts come in, a bool goes out. It must not know samples or scores.

An answer is what a policy under training wrote: ``9^{9^{9^9}}`` keeps SymPy busy for ever, in C
code that no signal interrupts and no other thread runs beside. So it is asked in a process that can
be killed, which also frees it from math-verify's own limits: signals, which fail in threads.
"""

import contextlib
import importlib.util
import logging
import queue
import re
import threading

from dschat.config import UserError
from dschat.rewards.call import Fault
from dschat.rewards.worker import Died, Worker

_DELIMITED = re.compile(r"\$|\\boxed|\\\(|\\\[")
_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{2,}")
_idle: "queue.SimpleQueue[Worker]" = queue.SimpleQueue()


def require_library() -> None:
    """Raise `UserError` where math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise UserError("needs math-verify; install it with `pip install dschat[rewards]`")


def are_equal(reference: str, answer: str, limit_s: float) -> bool:
    """Whether ``answer`` says what ``reference`` does; an answer that takes longer than ``limit_s``
    or too much memory does not. A process that has to start first (`START_S`) counts apart.
    """
    reference, answer = reference.strip(), answer.strip()
    if not reference or not answer or reference == answer:
        return bool(reference) and reference == answer
    idle = _idle  # what takes from a queue gives back to the same
    try:
        worker = idle.get_nowait()
    except queue.Empty:
        worker = Worker([("spec", f"{__name__}:Comparison", {})])
    worker.start()  # what keeps it from starting is no answer's fault
    try:
        (value,) = worker.call(0, {"reference": reference, "answer": answer}, [0], limit_s)
    except Fault as fault:
        # It starts again, if it must, while the next answer is asked of another.
        threading.Thread(target=_restart, args=(worker, idle), daemon=True).start()
        if fault.timed_out or isinstance(fault, Died):
            return False
        raise
    idle.put(worker)
    return value == 1.0


def _restart(worker: Worker, idle: "queue.SimpleQueue[Worker]") -> None:
    with contextlib.suppress(Fault):  # the next call will say it
        worker.start()
    idle.put(worker)


class Comparison:
    """What the process runs. Making one loads what comparing needs: no call waits for that."""

    def __init__(self) -> None:
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that we set no limit
        self._compare("x^2 + 2x + 1", "(x + 1)^2")

    def __call__(self, reference: str, answer: str) -> list[float]:
        """[1.0] where the two are equal, else [0.0]; so where comparing fails."""
        try:
            return [float(self._compare(reference, answer))]
        except Exception:  # SymPy raises nearly anything
            return [0.0]

    def _compare(self, reference: str, answer: str) -> bool:
        from math_verify import parse, verify

        expected, found = (
            parse(_as_latex(text), parsing_timeout=None) for text in (reference, answer)
        )
        return bool(verify(expected, found, timeout_seconds=None))


def _as_latex(text: str) -> str:
    """``text``, in dollars where it is a formula alone: (1, 2) is a pair then, not its last number.

    Text with words stays as it is, so that the formula is looked for in it.
    """
    if _DELIMITED.search(text) or _WORD.search(text):
        return text
    return f"${text}$"
