"""A process of our own that calls reward functions, and is killed when one takes too long.

Recipes of functions and calls come in; values or a `Fault` go out. It must not know pools, scores
or torch. A fresh interpreter, not a fork: the parent has threads and may hold a GPU; and not
`multiprocessing`, which would import the user's main script again. It leads a process group, so
that what functions start ends with it.
"""

import contextlib
import faulthandler
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from dschat.config import UserError
from dschat.rewards.call import Fault, Value, call, raised
from dschat.rewards.loader import made

START_S = 120.0  # for the interpreter and the imports of the user's files
_GRACE_S = 5.0  # how long after a call's limit a process ends by itself that nobody killed
_LONGEST_S = 1e6  # of that limit: beyond some 1e9 the timer refuses it


class Died(Fault):
    """The process ended in the call."""


class Worker:
    """One process; it starts with the first call, and anew after each that it did not survive."""

    def __init__(self, recipes: Sequence[tuple[Any, ...]]) -> None:
        """``recipes``: of the functions, which are called by their number among them."""
        self._recipes = list(recipes)
        self._process: subprocess.Popen | None = None
        self._pipe: Connection | None = None

    def call(
        self, number: int, kwargs: Mapping[str, Any], lengths: list[int], limit_s: float
    ) -> list[Value | Fault]:
        """Call function ``number``; see `dschat.rewards.call.call`.

        Raises:
            Fault: the call failed, took longer than ``limit_s``, or (`Died`) the process ended.
        """
        self.start()
        try:
            self._pipe.send((number, dict(kwargs), lengths, limit_s))
        except OSError:
            raise self._died() from None
        except Exception as error:  # pickle raises nearly anything
            raise Fault(f"cannot get its samples in another process: it {raised(error)}") from None
        reply = self._answer(limit_s)
        if isinstance(reply, Fault):
            raise reply
        return reply

    def close(self) -> None:
        if self._process is not None:
            self._kill()
            self._pipe.close()
            self._process = self._pipe = None

    def _kill(self) -> int:
        """End the process and those that it started, and return its exit code."""
        # NOTE the process is not waited for before: that would free its id, and the group's, for
        # others. One that has ended keeps its exit code.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def _runs(self) -> bool:
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, options) is None

    def start(self) -> None:
        """Start the process, unless it is there; ``Fault`` where the functions cannot be made."""
        if self._process is not None and self._runs():
            return
        self.close()
        self._pipe, theirs = Pipe()
        end = theirs.fileno()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from dschat.rewards.worker import serve; serve({end})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=[end],
            start_new_session=True,
        )
        theirs.close()
        try:
            self._pipe.send(self._recipes)
        except OSError:
            raise self._died() from None
        problem = self._answer(START_S)
        if problem is not None:
            self.close()
            raise Fault(problem)

    def _answer(self, limit_s: float) -> Any:
        try:
            if not self._pipe.poll(limit_s):
                self.close()
                raise Fault(f"did not return within {limit_s:.3g} s", timed_out=True)
            return self._pipe.recv()
        except (EOFError, OSError):
            raise self._died() from None

    def _died(self) -> Fault:
        code = self._kill()
        self.close()
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return Died(f"ended its process ({how})")


def serve(descriptor: int) -> NoReturn:
    """The process: make the functions, then call them until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGUSR1, lambda *_: None)  # SLURM sends it to all processes of a task
    os.set_inheritable(descriptor, False)
    pipe = Connection(descriptor)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, messages), daemon=True).start()
    try:
        functions = [made(recipe) for recipe in messages.get()]
    except UserError as error:
        pipe.send(str(error))
    except (Exception, SystemExit) as error:
        pipe.send(f"cannot be made in another process: it {raised(error)}")
    else:
        pipe.send(None)
    while True:
        message = messages.get()
        try:
            if isinstance(message, Fault):
                raise message
            number, kwargs, lengths, limit_s = message
            with _ending_alone(limit_s):
                reply: Any = call(functions[number], kwargs, lengths)
        except Fault as fault:
            reply = fault
        pipe.send(reply)


@contextlib.contextmanager
def _ending_alone(limit_s: float) -> Iterator[None]:
    """A scope that ends the process where it takes longer than ``limit_s`` and a grace.

    The parent kills it before that; but one that is gone cannot, and `_listen` does not hear of it
    while a call computes in C code that keeps the interpreter's lock. This timer needs no lock.
    """
    with open(os.devnull, "w") as nowhere:
        limit_s = min(limit_s, _LONGEST_S) + _GRACE_S
        faulthandler.dump_traceback_later(limit_s, exit=True, file=nowhere)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def _listen(pipe: Connection, messages: "queue.SimpleQueue[Any]") -> None:
    """Hand over what comes; a parent that is gone ends the process, in the middle of a call too."""
    while True:
        try:
            messages.put(pipe.recv())
        except (EOFError, OSError):
            if os.getpgrp() == os.getpid():
                os.killpg(0, signal.SIGKILL)  # what functions started, and itself
            os._exit(0)
        except Exception as error:  # unpickling raises nearly anything
            messages.put(Fault(f"cannot read its samples in its process: it {raised(error)}"))
