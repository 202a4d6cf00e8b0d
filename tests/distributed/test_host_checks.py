"""Launcher variables, limits and streams that cannot work: one line, and exit code 2 or 1."""

import errno
import io
import os
import resource
import subprocess
import sys

import pytest
from python_process import environment

from dschat.config import UserError
from dschat.distributed import entrypoint, host_checks

TWO = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "RANK": "1"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"WORLD_SIZE": "two"}, "^WORLD_SIZE=two .* not a whole number"),
        ({"LOCAL_RANK": "x"}, "^LOCAL_RANK=x .* not a whole number"),
        (TWO | {"RANK": "-1"}, "^RANK=-1 .* not a whole number"),
        (TWO | {"RANK": "5"}, "^rank 5 of 2 processes"),
        (TWO | {"RANK": "2"}, "^rank 2 of 2 processes"),
        (TWO | {"MASTER_PORT": "abc"}, "^MASTER_PORT=abc .* from 1 to 65535"),
        (TWO | {"MASTER_PORT": "70000"}, "^MASTER_PORT=70000 "),
        ({"DS_ACCELERATOR": "abacus"}, "^DS_ACCELERATOR=abacus .* cpu and cuda; unset"),
    ],
)
def test_a_variable_that_cannot_work(given, message, variables):
    host_checks.check()
    variables(**given)
    with pytest.raises(UserError, match=message):
        host_checks.check()


def test_good_variables(variables):
    variables(**TWO, MASTER_PORT="29500", DS_ACCELERATOR="cpu")
    host_checks.check()


def test_files_are_allowed_up_to_the_limit(monkeypatch):
    limits, infinity = [(32, 4096)], resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    host_checks.check()
    assert limits[-1] == (host_checks.NUM_FILES, 4096)
    for enough in ((1024, 4096), (infinity, infinity)):
        limits[:] = [enough]
        host_checks.check()
        assert limits == [enough]


def exits_with(main, capsys) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        entrypoint.run(main)
    return stop.value.code, capsys.readouterr().err


def test_a_process_without_a_right_number_speaks(capsys, variables):
    variables(**TWO | {"RANK": "5"})
    code, said = exits_with(lambda: pytest.fail("it runs"), capsys)
    assert code == 2
    assert said.startswith("error: rank 5 of 2 processes")
    assert said.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("flush", [True, False])
def test_output_to_a_full_device(buffered, flush, capsys, monkeypatch):
    full = io.FileIO("/dev/full", "w")
    out = io.TextIOWrapper(io.BufferedWriter(full) if buffered else full, write_through=True)
    monkeypatch.setattr(sys, "stdout", out)
    line = "error: standard output cannot be written: No space left on device\n"
    assert exits_with(lambda: print(1, flush=flush), capsys) == (1, line)
    out.close()  # without an exception, as an interpreter does at its end


def run(code: str, redirect: str = "") -> str:
    """Standard error of ``code``, with `environment` imported."""
    code = f"from dschat.distributed import host_checks\n{code}"
    command = ["bash", "-c", f'exec "$0" -c "$1" {redirect}', sys.executable, code]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    return done.stderr


def test_closed_streams_are_no_files_of_ours():
    code = "import os, sys; host_checks.plug_streams(); opened = os.open('/dev/zero', os.O_RDONLY)"
    code += "; print(input) or sys.stderr.write(f'{opened > 2} {host_checks.closed}')"
    assert run(code, "<&- >&-") == "True ['stdin', 'stdout']"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("can't start new thread"), "out of memory (can't start new thread); raise"),
        (MemoryError(), "out of memory; raise the limit"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), "out of memory (Def"),
        (OSError(errno.EMFILE, "Too many open files"), "[Errno 24] Too many open files; raise"),
    ],
)
def test_a_limit_that_is_reached_is_one_line(error, line):
    assert host_checks.shortage(error).startswith(line)
    assert "\n" not in host_checks.shortage(error)


def test_any_other_exception_is_no_shortage():
    for error in (RuntimeError("shapes differ"), FileNotFoundError(2, "No such file", "x")):
        assert host_checks.shortage(error) is None


def test_little_memory_names_the_limit():
    said = run(
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\n"
        "try: bytes(2**31)\n"
        "except MemoryError as error: sys.stderr.write(host_checks.shortage(error))"
    )
    assert said == "out of memory; raise the limit of 1.0 GiB (ulimit -v), or use less"
