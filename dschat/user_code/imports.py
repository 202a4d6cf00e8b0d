"""Finds the user's functions and classes: ``file.py:name`` or ``pkg.mod:name``, imported within a
time limit, in this process or in another one.
"""

import contextlib
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from dschat.config import UserError
from dschat.config.errors import did_you_mean
from dschat.user_code.calls import raised

IMPORT_S = 120.0

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
        with _limited():
            spec.loader.exec_module(module)
    except (Exception, SystemExit, _TooLong) as error:
        del sys.modules[name]
        raise _not_imported(error, str(path)) from None
    return module


def _named_module(where: str) -> ModuleType:
    """The module ``pkg.mod``, also from the current folder."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # as `python -m` would
    try:
        with _limited():
            return importlib.import_module(where)
    except (Exception, SystemExit, _TooLong) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and f"{where}.".startswith(f"{missing}."):
            raise UserError(
                f"not found: no module {missing}; install it, or name a file (file.py:name)"
            ) from None
        raise _not_imported(error, "") from None


class _TooLong(BaseException):
    """An import reached its time limit. A `BaseException`: the module may catch `Exception`."""


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raises `_TooLong` after `IMPORT_S`, even in a blocking wait, but not inside C code.

    Without effect outside the main thread, where Python handles no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, end)
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, IMPORT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)
        signal.signal(signal.SIGALRM, before)


def _not_imported(error: BaseException, path: str) -> UserError:
    """The error of a failed import, with the line in the file ``path`` if known."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    if isinstance(error, SyntaxError) and not lines:
        lines = [error.lineno]
    at = f" in line {lines[-1]}" if lines and lines[-1] else ""
    if isinstance(error, _TooLong):
        return UserError(
            f"cannot be imported: it was not done after {IMPORT_S:g} s{at}; move slow set-up from "
            "the module into the constructor of a class"
        )
    return UserError(f"cannot be imported: it {raised(error)}{at}; fix it")
