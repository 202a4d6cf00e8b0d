"""Calls user code in worker processes, which are killed when a call takes too long.

A worker is a fresh interpreter. A fork is unsafe: the parent has threads and may hold a GPU.
`multiprocessing`, and pools built on it, would import the user's main script again. It leads a
process group, so that processes started by functions die with it.
"""

import contextlib
import faulthandler
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from dschat.config import UserError
from dschat.user_code.calls import Fault, background, fault_of, raised, resolve, timed_out

START_S = 120.0  # for the interpreter and the imports of the user's files
_GRACE_S = 5.0  # after a call's limit, before an orphaned process exits by itself
_LONGEST_S = 1e6  # of that limit: faulthandler's timer rejects more than some 1e9
_SECRET = re.compile("(^|_)(KEYS?|TOKEN|SECRET|PASSWORD|CREDENTIALS)(_|$)", re.IGNORECASE)


class Workers:
    """Worker processes that serve the same, one per concurrent call."""

    def __init__(self, spec: str, settings: tuple[Any, ...], count: int) -> None:
        self._all = [Worker(spec, settings) for _ in range(count)]
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        for worker in self._all:
            self._idle.put(worker)

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator["Worker"]:
        worker = self._idle.get()
        try:
            yield worker
        finally:
            self._idle.put(worker)

    def call(self, *arguments: Any, limit_s: float) -> Any:
        """`Worker.call` on the next idle worker."""
        with self._borrowed() as worker:
            return worker.call(*arguments, limit_s=limit_s)

    def prepare(self) -> None:
        """Start the process that the next call uses."""
        with self._borrowed() as worker, contextlib.suppress(Fault):  # the call reports it
            worker.start()

    def close(self) -> None:
        for worker in self._all:
            worker.stop()


class Worker:
    """One process, started by the first call and restarted after each call that killed it.

    Args:
        spec: of the class that it serves, as ``pkg.mod:name``. The process constructs it with
            ``settings``, and each call calls the instance.
        variables: environment of the process; None: this one's.

    Attributes:
        num_starts: of the process. What it held is lost when this grows.
    """

    def __init__(
        self,
        spec: str,
        settings: tuple[Any, ...] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._served, self._variables = (spec, settings), variables
        self.num_starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection
        self._lock = threading.RLock()  # of both: `stop` comes from another thread
        self._is_stopped = False

    def start(self) -> None:
        """Start the process unless it runs.

        Raises:
            Fault: what it serves cannot be rebuilt there.
        """
        with self._lock:
            if self._is_stopped:
                raise Fault("was stopped")
            # NOTE WNOWAIT: reaping the process would free its group's id for reuse.
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if self._process and os.waitid(os.P_PID, self._process.pid, options) is None:
                return
            self._launch()
        problem = self._reply_to(self._served, START_S)
        if problem is not None:
            self.close()
            raise Fault(problem)

    def _launch(self) -> None:
        self.close()
        self._pipe, child_end = Pipe()
        descriptor = child_end.fileno()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from dschat.user_code.processes import serve; serve({descriptor})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            env=self._variables,
            pass_fds=[descriptor],
            start_new_session=True,
        )
        child_end.close()
        self.num_starts += 1

    def call(self, *arguments: Any, limit_s: float) -> Any:
        """What the process returns for ``arguments``.

        Raises:
            Fault: the call failed, took longer than ``limit_s`` or ended the process.
        """
        self.start()
        reply = self._reply_to((*arguments, limit_s), limit_s)
        if isinstance(reply, Fault):
            raise reply
        return reply

    def _reply_to(self, message: Any, limit_s: float) -> Any:
        try:
            self._pipe.send(message)
            if self._pipe.poll(limit_s):
                return self._pipe.recv()
        except (EOFError, OSError):
            code = self.close()
            how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            raise Fault(f"ended its process ({how})") from None
        except Exception as error:  # pickle raises nearly anything
            raise Fault(f"cannot send its samples to another process: it {raised(error)}") from None
        self.close()
        raise timed_out(limit_s)

    @property
    def is_alive(self) -> bool:
        """Whether the last call left the process running."""
        return self._process is not None

    def stop(self) -> None:
        """Kill the process for good, also beside a call in another thread, which then fails."""
        self._is_stopped = True
        self.close()

    def close(self) -> int:
        """Kill the process group; the exit code of the process."""
        with self._lock:
            if self._process is None:
                return 0
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
            self._process = None
            self._pipe.close()
            return code


class Killable:
    """A function whose calls run in processes of their own, one per concurrent call, which are
    killed when one takes too long. They get no passwords and keys: what they read, a model wrote.

    ``spec`` and ``settings``: of its class; see `Worker`.
    """

    def __init__(self, spec: str, *settings: Any) -> None:
        self._served = spec, settings
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()

    def call(self, limit_s: float, *arguments: Any) -> Any:
        """The function's result; None if it takes over ``limit_s`` or ends its process. The start
        of a process (up to `START_S`) does not count.

        Raises:
            Fault: the function raised, or its process cannot start.
        """
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            public = {k: v for k, v in os.environ.items() if not _SECRET.search(k)}
            worker = Worker(*self._served, public)
        worker.start()
        try:
            result = worker.call(*arguments, limit_s=limit_s)
        except Fault:
            if worker.is_alive:
                self._idle.put(worker)
                raise
            # Restart it in the background; the next answer takes another worker.
            background(self._restart, worker)
            return None
        self._idle.put(worker)
        return result

    def _restart(self, worker: Worker) -> None:
        with contextlib.suppress(Fault):  # the next call reports it
            worker.start()
        self._idle.put(worker)


def serve(descriptor: int) -> NoReturn:
    """Main loop of the process: rebuild what it serves, then call it until the parent exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGUSR1, lambda *_: None)  # SLURM sends it to all processes of a task
    os.set_inheritable(descriptor, False)
    pipe = Connection(descriptor)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, messages), daemon=True).start()
    problem = None
    try:
        spec, settings = messages.get()
        serves = resolve(spec)(*settings)
    except UserError as error:
        problem = str(error)
    except (Exception, SystemExit) as error:
        problem = f"cannot be rebuilt in another process: it {raised(error)}"
    pipe.send(problem)
    while True:
        message = messages.get()
        try:
            if isinstance(message, Fault):
                raise message
            *arguments, limit_s = message
            with _self_exit(limit_s):
                reply: Any = serves(*arguments)
        except BaseException as error:  # this is user code
            reply = fault_of(error)
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
                os.killpg(0, signal.SIGKILL)  # this process and its children
            os._exit(0)
        except Exception as error:  # unpickling raises nearly anything
            messages.put(Fault(f"cannot unpickle its samples in its process: it {raised(error)}"))
