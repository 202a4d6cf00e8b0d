"""Runs Triton launches in a process of their own, under the interpreter or to compile them.

Triton decides when it is imported whether it interprets kernels, and torch may import it: neither
must happen in the tests' process. Requests and answers are pickles on the worker's standard input
and output.
"""

import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

PACKAGE = "dschat.inference.kernels.cuda"
HAS_TRITON = importlib.util.find_spec("triton") is not None
REASON = "needs Triton: pip install 'dschat[kernels]'"


class Worker:
    """``worker("function", *args)`` calls a function of this module there, ``"module.function"``
    one of another module.
    """

    def __init__(self, interpret):
        self._folder = tempfile.TemporaryDirectory()
        variables = {
            **os.environ,
            "TRITON_INTERPRET": "1" if interpret else "0",
            "TRITON_CACHE_DIR": f"{self._folder.name}/cache",
            "TMPDIR": self._folder.name,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables
        )

    def __call__(self, function, *args):
        pickle.dump((function, args), self._process.stdin)
        self._process.stdin.flush()
        failure, result = pickle.load(self._process.stdout)
        if failure:
            raise RuntimeError(failure)
        return result

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=60)
        self._folder.cleanup()


def module(name, fault=None):
    """A module of the kernels; ``fault``: a replacement (old, new) in its source."""
    if fault is None:
        return importlib.import_module(f"{PACKAGE}.{name}")
    source = Path(importlib.util.find_spec(f"{PACKAGE}.{name}").origin).read_text()
    old, new = fault
    assert source.count(old) == 1, f"{name} has {source.count(old)} times: {old}"
    path = Path(tempfile.mkdtemp()) / f"{name}.py"  # Triton reads a kernel's source
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"faulty_{name}", path)
    faulty = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faulty)
    return faulty


def launches_of(name, *args, **options):
    """What ``plan`` of a module, or another function that is named, returns, as a list."""
    home, _, function = name.partition(".")
    planned = getattr(module(home), function or "plan")(*args, **options)
    return list(planned) if isinstance(planned, tuple) else [planned]


def run(name, args):
    """Run ``plan(*args)`` of a module; returns the arguments, as the launches left them."""
    for launch in launches_of(name, *args):
        launch.run()
    return args


def attribute(name, attribute, *args):
    """A function's result, or with no ``args`` a constant, of a module."""
    value = getattr(module(name), attribute)
    return value(*args) if args else value


def check_operator(name, args):
    """torch's own checks of an operator's schema (what it changes) and its fake version."""
    import torch

    operator = getattr(module("operators"), name)
    return torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))


def counts_to(end):
    """``end``, counted by a kernel whose loop ends at a number that it loads."""
    import torch
    from triton_uniforms import count

    out = torch.zeros(1, dtype=torch.int64)
    count[(1,)](torch.tensor([end]), out)
    return out.item()


def main():
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything printed goes to standard error
    while True:
        try:
            function, args = pickle.load(sys.stdin.buffer)
        except EOFError:
            os._exit(0)  # freeing torch takes seconds
        try:
            home, _, name = function.rpartition(".")
            answer = (None, getattr(importlib.import_module(home or __name__), name)(*args))
        except Exception:
            answer = (traceback.format_exc(), None)
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
