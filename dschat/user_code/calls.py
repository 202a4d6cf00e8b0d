"""Finds the user's functions and classes, and calls them with a time limit.

``file.py:name`` or ``pkg.mod:name`` is imported in this process or in another one. Calls run in
threads and event loops. Whatever goes wrong in one becomes a `Fault` with a one-line message.

Python cannot stop a thread. One that exceeds its limit is abandoned: the run continues without it,
and it exits with the run. A function that computes in C without releasing the GIL (a huge power, a
catastrophic regular expression) blocks every thread of the process: it needs a worker process.
"""

import asyncio
import importlib
import importlib.util
import inspect
import os
import pickle
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from dschat.config import UserError
from dschat.config.errors import did_you_mean
from dschat.user_code.surroundings import restored

_SHOWN = 200  # characters of a message


class Fault(Exception):
    """A failed call. ``timed_out``: its thread may still work on it."""

    def __init__(self, problem: str, timed_out: bool = False) -> None:
        super().__init__(problem, timed_out)
        self.problem = problem
        self.timed_out = timed_out

    def __str__(self) -> str:
        return self.problem


def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a function or coroutine; in a coroutine's place, what it returns.

    Raises:
        Fault: it raised.
    """
    try:
        with restored(getattr(function, "__qualname__", type(function).__qualname__)):
            result = function(*args, **kwargs)
            return asyncio.run(awaited(result)) if inspect.isawaitable(result) else result
    # NOTE BaseException: this is user code, and a thread would swallow SystemExit silently.
    # Ctrl-C reaches the main thread, which never runs this.
    except BaseException as error:
        raise fault_of(error) from None


async def awaited(result: Any) -> Any:
    """What an awaitable returns; any other value unchanged."""
    return await result if inspect.isawaitable(result) else result


def fault_of(error: BaseException) -> Fault:
    """``error`` itself if it is a fault; else one that says what was raised."""
    return error if isinstance(error, Fault) else Fault(raised(error))


def timed_out(limit_s: float) -> Fault:
    """The fault of a call that reached its limit."""
    return Fault(f"did not return within {limit_s:.3g} s", timed_out=True)


def raised(error: BaseException) -> str:
    """An exception as one line."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r:.40})"
    try:
        message = " ".join(str(error).split())
    except Exception:
        message = ""
    if "signal only works in main thread" in message:
        message = "it uses signals, which work in a process only: pass --reward_pool process"
    name = type(error).__name__
    return f"raised {name}: {shortened(message, _SHOWN)}" if message else f"raised {name}"


def shortened(text: str, limit: int) -> str:
    """``text``, with its middle cut out if it is longer than ``limit`` characters."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2 - 2]} ... {text[len(text) - limit // 2 + 3 :]}"


_GRACE_S = 1.0  # for an event loop to cancel a call that reached its limit


def at_once(job: Callable[..., Any], *args: Any) -> Future:
    """A future of ``job(*args)``, which runs before this returns."""
    future: Future = Future()
    future.set_result(job(*args))
    return future


def background(job: Callable[..., Any], *args: Any) -> Future:
    """A future of ``job(*args)``, which runs in a daemon thread of its own."""
    future: Future = Future()
    threading.Thread(target=settle, args=(future, job, *args), daemon=True).start()
    return future


def settle(future: Future, job: Callable[..., Any], *args: Any) -> None:
    """Give ``future`` the result or the exception of ``job(*args)``."""
    try:
        future.set_result(job(*args))
    except BaseException as error:  # `future.result` raises it in the waiting thread
        future.set_exception(error)


class Pool:
    """Daemon threads that run jobs in the order of submission.

    `concurrent.futures.ThreadPoolExecutor` joins its threads at exit, so a run interrupted with
    Ctrl-C would not exit.
    """

    def __init__(self, num_threads: int) -> None:
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._num_threads = num_threads
        for _ in range(num_threads):
            threading.Thread(target=self._work, daemon=True).start()

    def submit(self, job: Callable[..., Any], *args: Any) -> Future:
        """A future of ``job(*args)``."""
        future: Future = Future()
        self._jobs.put((future, job, *args))
        return future

    def close(self) -> None:
        """Stop the threads once they are idle, without waiting for them."""
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            settle(*item)


def within(limit_s: float, job: Callable[..., Any], *args: Any) -> Any:
    """The result of ``job(*args)`` in a thread of its own.

    Raises:
        Fault: it did not return within ``limit_s``.
    """
    future = background(job, *args)
    if not wait([future], timeout=limit_s).done:
        raise timed_out(limit_s)
    return future.result()


class Loop:
    """An event loop in a thread. Its open connections serve every call."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def run(self, coroutine: Coroutine[Any, Any, Any], limit_s: float) -> Any:
        """What ``coroutine`` returns; blocks until it is done.

        Raises:
            Fault: it was not done after ``limit_s``.
        """
        loop = self._running()
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, limit_s), loop)
        if not wait([future], timeout=limit_s + _GRACE_S).done:
            with self._lock:
                if self._loop is loop:
                    self._loop = None  # abandoned with its thread
            raise Fault("blocks the event loop; await in it, or declare it with def", True)
        try:
            return future.result()
        except asyncio.TimeoutError:
            raise timed_out(limit_s) from None

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                background(_run_loop, self._loop)
            return self._loop

    def close(self) -> None:
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


# Where another process finds an object: its spec, or a pickle, which holds its name.
Recipe = str | bytes


def load(spec: str, label: str) -> Any:
    """The object named by ``file.py:name`` or ``pkg.mod:name``.

    Raises:
        UserError: it does not exist, or its module cannot be imported. ``label`` begins the line.
    """
    try:
        return resolve(spec)
    except UserError as error:
        raise UserError(f"{label} {error}") from None


def resolve(spec: str) -> Any:
    """`load` for messages without a label."""
    where, colon, name = spec.rpartition(":")
    if not colon:
        raise UserError("name it as file.py:NAME or pkg.mod:NAME")
    is_file = where.endswith(".py") or os.sep in where
    with restored(spec):
        module = _file_module(where) if is_file else _named_module(where)
    if not hasattr(module, name):
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        missing = name or "name after the colon"
        raise UserError(f"not found: {where} has no {missing}{did_you_mean(name, public)}")
    return getattr(module, name)


def portable(target: Any, spec: str, label: str, instead: str) -> Recipe:
    """The recipe from which `rebuilt` finds ``target`` in another process.

    Args:
        spec: what named it; "" if it was given as an object.
        instead: the flag for code that cannot move.

    Raises:
        UserError: another process cannot import it.
    """
    if spec:
        return spec
    home = getattr(target, "__module__", None)
    try:
        if home == "__main__" or type(target).__module__ == "__main__":
            raise pickle.PicklingError("it is defined in the main program or notebook")
        return pickle.dumps(target)
    except Exception as error:
        raise UserError(
            f"{label} cannot run in another process ({' '.join(str(error).split())}); put it into "
            f"a file and pass it as file.py:name, or pass {instead}"
        ) from None


def rebuilt(recipe: Recipe) -> Any:
    """The object of a recipe, in the other process."""
    return pickle.loads(recipe) if isinstance(recipe, bytes) else resolve(recipe)


# -- modules -----------------------------------------------------------------------------------


def _file_module(where: str) -> ModuleType:
    """The module of a file, imported once per process; its folder is added to ``sys.path``."""
    path = Path(os.path.expanduser(where)).absolute()
    if not path.is_file():
        raise UserError("not found: no such file; check the path")
    name = f"user_{path.stem}_{blake2b(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError("is not a Python file; name one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _not_imported(error, str(path)) from None
    return module


def _named_module(where: str) -> ModuleType:
    """The module ``pkg.mod``, also from the current folder."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # as `python -m` would
    try:
        return importlib.import_module(where)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and f"{where}.".startswith(f"{missing}."):
            raise UserError(
                f"not found: no module {missing}; install it, or name a file (file.py:name)"
            ) from None
        raise _not_imported(error, "") from None


def _not_imported(error: BaseException, path: str) -> UserError:
    """The error of a failed import, with the line in the file ``path`` if known."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    if isinstance(error, SyntaxError) and not lines:
        lines = [error.lineno]
    at = f" in line {lines[-1]}" if lines and lines[-1] else ""
    return UserError(f"cannot be imported: it {raised(error)}{at}; fix it")
