"""Calls reward functions in a process that is killed when a call takes too long.

The process is a fresh interpreter. A fork is unsafe: the parent has threads and may hold a GPU.
`multiprocessing` would import the user's main script again. It leads a process group, so that
processes started by functions die with it. No torch here, so that it starts fast.
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
from dschat.rewards.loader import rebuild

START_S = 120.0  # for the interpreter and the imports of the user's files
_GRACE_S = 5.0  # after a call's limit, before an orphaned process exits by itself
_LONGEST_S = 1e6  # of that limit: faulthandler's timer rejects more than some 1e9


class Died(Fault):
    """The process exited during the call."""


class Worker:
    """One process, started by the first call and restarted after each call that killed it."""

    def __init__(self, recipes: Sequence[tuple[Any, ...]]) -> None:
        """``recipes``: of the functions, see `dschat.rewards.loader.portable`."""
        self._recipes = list(recipes)
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def call(
        self, number: int, kwargs: Mapping[str, Any], lengths: list[int], limit_s: float
    ) -> list[Value | Fault]:
        """Call function ``number``; see `dschat.rewards.call.call`.

        Raises:
            Fault: the call failed or took longer than ``limit_s``; `Died`: the process exited.
        """
        pipe = self.start()
        try:
            pipe.send((number, dict(kwargs), lengths, limit_s))
        except OSError:
            raise self._died() from None
        except Exception as error:  # pickle raises nearly anything
            raise Fault(f"cannot send its samples to another process: it {raised(error)}") from None
        reply = self._answer(pipe, limit_s)
        if isinstance(reply, Fault):
            raise reply
        return reply

    def close(self) -> None:
        if self._process is not None:
            self._kill()
            assert self._pipe is not None
            self._pipe.close()
            self._process = self._pipe = None

    def _kill(self) -> int:
        """Kill the process group and return the exit code of the process."""
        # NOTE no wait() before killpg: it would free the process and group id for reuse. The exit
        # code of a dead process stays available.
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def start(self) -> Connection:
        """Start the process unless it runs; the pipe to it.

        Raises:
            Fault: the functions cannot be rebuilt there.
        """
        if self._process is not None and self._pipe is not None and _runs(self._process):
            return self._pipe
        self.close()
        self._pipe, child_end = Pipe()
        descriptor = child_end.fileno()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from dschat.rewards.worker import serve; serve({descriptor})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=[descriptor],
            start_new_session=True,
        )
        child_end.close()
        try:
            self._pipe.send(self._recipes)
        except OSError:
            raise self._died() from None
        problem = self._answer(self._pipe, START_S)
        if problem is not None:
            self.close()
            raise Fault(problem)
        return self._pipe

    def _answer(self, pipe: Connection, limit_s: float) -> Any:
        try:
            if not pipe.poll(limit_s):
                self.close()
                raise Fault(f"did not return within {limit_s:.3g} s", timed_out=True)
            return pipe.recv()
        except (EOFError, OSError):
            raise self._died() from None

    def _died(self) -> Fault:
        code = self._kill()
        self.close()
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return Died(f"ended its process ({how})")


def _runs(process: subprocess.Popen[bytes]) -> bool:
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, options) is None


def serve(descriptor: int) -> NoReturn:
    """Main loop of the process: rebuild the functions, then call them until the parent exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGUSR1, lambda *_: None)  # SLURM sends it to all processes of a task
    os.set_inheritable(descriptor, False)
    pipe = Connection(descriptor)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, messages), daemon=True).start()
    try:
        functions = [rebuild(recipe) for recipe in messages.get()]
    except UserError as error:
        pipe.send(str(error))
    except (Exception, SystemExit) as error:
        pipe.send(f"cannot be rebuilt in another process: it {raised(error)}")
    else:
        pipe.send(None)
    while True:
        message = messages.get()
        try:
            if isinstance(message, Fault):
                raise message
            number, kwargs, lengths, limit_s = message
            with _self_exit(limit_s):
                reply: Any = call(functions[number], kwargs, lengths)
        except Fault as fault:
            reply = fault
        pipe.send(reply)


@contextlib.contextmanager
def _self_exit(limit_s: float) -> Iterator[None]:
    """Exits the process if the body takes longer than ``limit_s`` plus a grace period.

    A parent that is alive kills the process earlier. If the parent is dead and a call holds the GIL
    in C code, `_listen` cannot run. faulthandler's timer does not need the GIL.
    """
    with open(os.devnull, "w") as devnull:
        limit_s = min(limit_s, _LONGEST_S) + _GRACE_S
        faulthandler.dump_traceback_later(limit_s, exit=True, file=devnull)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def _listen(pipe: Connection, messages: "queue.SimpleQueue[Any]") -> None:
    """Queue incoming messages; exit, even during a call, when the parent closes the pipe."""
    while True:
        try:
            messages.put(pipe.recv())
        except (EOFError, OSError):
            if os.getpgrp() == os.getpid():
                os.killpg(0, signal.SIGKILL)  # this process and those that functions started
            os._exit(0)
        except Exception as error:  # unpickling raises nearly anything
            messages.put(Fault(f"cannot unpickle its samples in its process: it {raised(error)}"))
