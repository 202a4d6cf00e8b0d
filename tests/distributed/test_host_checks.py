"""Launcher variables, limits, streams and versions that cannot work: one line and an exit code."""

import errno
import os
import re
import resource
import subprocess
import sys
from contextlib import nullcontext
from itertools import product

import pytest
from python_process import ROOT, environment, python
from quick import slow, some

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


def run(code: str, redirect: str = "", *options: str) -> tuple[int, str]:
    """Exit code and standard error of ``code``, with what it needs imported."""
    code = f"from dschat.distributed import entrypoint, host_checks\n{code}"
    command = f'exec "$0" "${{@:2}}" -c "$1" {redirect}'
    words = ["bash", "-c", command, sys.executable, code, *options]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("before", "after"),
    [((32, 4096), (host_checks.NUM_FILES, 4096)), *slow([((1024, 4096), (1024, 4096))])],
)
def test_files_are_allowed_up_to_the_limit(before, after):
    code = "import sys; from resource import *; setrlimit(RLIMIT_NOFILE, {}); host_checks.check()"
    code += "; sys.stderr.write(str(getrlimit(RLIMIT_NOFILE)))"
    assert run(code.format(before)) == (0, str(after))
    _, said = run(code.format((32, 40)))
    line = "UserError: a process may open 40 files here (ulimit -n) and needs 64; raise that"
    assert said.splitlines()[-1].endswith(line)


def test_no_limit_on_files_stays(monkeypatch):
    """A soft limit of -1, as some systems have it."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    host_checks.check()  # Linux refuses to set such a hard limit


def test_a_process_without_a_right_number_speaks(capsys, variables):
    variables(**TWO | {"RANK": "5"})
    with pytest.raises(SystemExit) as stop:
        entrypoint.run(lambda: pytest.fail("it runs"))
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert said.startswith("error: rank 5 of 2 processes")
    assert said.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize(
    ("options", "flush"),
    some(product([(), ("-u",)], [True, False]), [((), True), (("-u",), False)]),
)
def test_output_to_a_full_device(options, flush):
    """What is printed later is lost without an exception."""
    line = "error: standard output cannot be written: No space left on device\n"
    code = "import atexit; atexit.register(print, 2, flush=True)\n"
    code += f"entrypoint.run(lambda: print(1, flush={flush}))"
    assert run(code, ">/dev/full", *options) == (1, line)


def test_closed_streams_are_no_files_of_ours():
    code = "import os, sys; host_checks.plug_streams(); opened = os.open('/dev/zero', os.O_RDONLY)"
    code += "; print(input) or sys.stderr.write(f'{opened > 2} {host_checks.closed}')"
    assert run(code, "<&- >&-")[1] == "True ['stdin', 'stdout']"


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
    _, said = run(
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\n"
        "try: bytes(2**31)\n"
        "except MemoryError as error: sys.stderr.write(host_checks.shortage(error))"
    )
    assert said == "out of memory; raise the limit of 1.0 GiB (ulimit -v), or use less"


def write_metadata(folder, name, version, *requirements):
    """What an installed library says of itself."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {line}" for line in requirements]
    (info / "METADATA").write_text("\n".join([*lines, ""]))


REQUIRED = ["a-lib<6,>=5.2", "b-lib!=6.0.4,>=6.0", "c-lib>=2.9", "tqdm"]
REQUIRED += ['extra>=1; extra == "some"', 'tool>=1; extra == "dev"']


@pytest.mark.parametrize(
    ("name", "version", "is_right"),
    [
        ("a-lib", "5.2", True),
        ("a-lib", "5.24.1+cpu", True),
        ("a-lib", "5.3rc1", True),
        ("a-lib", "5.1.9", False),
        ("a-lib", "6.0.0.dev1", False),
        ("a-lib", "10.0", False),
        ("b-lib", "6.0.4", False),
        ("b-lib", "6.0.5", True),
        ("c-lib", "2.10.0", True),
        ("extra", "0.9", False),
        ("tool", "0.9", True),
        ("tqdm", "0.1", True),
    ],
)
def test_versions_inside_and_outside_the_ranges(name, version, is_right, tmp_path, monkeypatch):
    """The other libraries are not installed."""
    write_metadata(tmp_path, "dschat", "0", *REQUIRED)
    write_metadata(tmp_path, name, version)
    monkeypatch.syspath_prepend(tmp_path)
    line = f"^{name} {re.escape(version)} does not work .*pip install '{name}"
    with nullcontext() if is_right else pytest.raises(UserError, match=line):
        host_checks.check_versions()


@pytest.mark.parametrize(("flags", "code"), [(["--dry-run"], 2), *slow([(["--help"], 0)])])
def test_a_command_with_a_library_of_a_wrong_version(flags, code, tmp_path):
    write_metadata(tmp_path, "dschat", "0", "pip<6,>=5")
    write_metadata(tmp_path, "pip", "6.1")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = python("-m", "dschat", "train", *flags, cwd=tmp_path, env=environment(PYTHONPATH=path))
    line = "error: pip 6.1 does not work with dschat: pip install 'pip<6,>=5'\n"
    assert (done.returncode, done.stderr) == (code, line if code else "")
