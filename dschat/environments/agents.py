"""Runs the user's agents: a function that gets an OpenAI client, or a command; and their rewards.

An agent owns its loop. It asks the model at an address of its own, which ends with its episode.
"""

import asyncio
import inspect
import json
import math
import os
import re
import resource
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from numbers import Real
from tempfile import TemporaryFile
from typing import IO, Any

from dschat.builtin.verifiers_tasks import VERIFIERS, agent_of
from dschat.config import UserError
from dschat.environments.contract import shown
from dschat.user_code.calls import Fault, Loop, called, load, timed_out, within

# No proxy; and no certificates, which take longer to read than a small model to answer.
_LOCAL: dict[str, Any] = {"trust_env": False, "verify": False}
_SERVES = ("fastapi", "uvicorn", "httptools")
_MAX_BYTES = 1 << 30  # of a file that a command writes, its output too
_TAIL = 1 << 16  # bytes at the end of its output, which have the last line


@dataclass(frozen=True)
class Outcome:
    """What an agent returned: the reward of its episode, if it gave one, and numbers to log."""

    reward: float | None = None
    logged: Mapping[str, float] | None = None


class Agent:
    """A function ``run(client, prompt, **columns)``, or a ``command``. Coroutines share an event
    loop and its connections.
    """

    def __init__(self, function: Callable[..., Any] | None, command: Sequence[str] = ()) -> None:
        self._function, self._command = function, command
        self._loop = Loop()
        self._http: dict[asyncio.AbstractEventLoop, Any] = {}

    def run(
        self, url: str, key: str, prompt: Any, columns: Mapping[str, Any], limit_s: float
    ) -> Outcome:
        """Run it on one row of the data, with the model at ``url``.

        Raises:
            Fault: it failed, took longer than ``limit_s``, or returned something else.
        """
        if self._function is None:
            row = {**columns, "prompt": prompt}
            return _outcome(_run_command(self._command, url, key, row, limit_s))
        accepted = inspect.signature(self._function).parameters.values()
        takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted)
        names = {p.name for p in accepted}
        given = {n: v for n, v in columns.items() if takes_all or n in names}
        client: dict[str, Any] = {
            "base_url": url,
            "api_key": key,
            "max_retries": 0,
            "timeout": limit_s,
        }
        if inspect.iscoroutinefunction(self._function):
            return _outcome(called(self._loop.run, self._ask(client, prompt, given), limit_s))
        from openai import DefaultHttpxClient, OpenAI

        with OpenAI(**client, http_client=DefaultHttpxClient(**_LOCAL)) as made:
            run = partial(called, self._function, made, prompt, **given)
            return _outcome(within(limit_s, run))

    async def _ask(self, client: dict[str, Any], prompt: Any, given: Mapping[str, Any]) -> Any:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        assert self._function is not None
        loop = asyncio.get_running_loop()  # another one after an agent has blocked it
        if loop not in self._http:
            self._http[loop] = DefaultAsyncHttpxClient(**_LOCAL)
        made = AsyncOpenAI(**client, http_client=self._http[loop])
        return await self._function(made, prompt, **given)


def played(environment: Any) -> bool:
    """Whether an agent plays this environment."""
    return isinstance(environment, str) and environment.startswith(VERIFIERS)


def load_agent(spec: Any) -> Agent:
    """The agent ``file.py:NAME``, ``pkg.mod:NAME``, of a function, or of a command; or one that
    plays an environment ``verifiers:NAME``.

    Raises:
        UserError: it does not exist, or a library is missing.
    """
    if missing := [name for name in _SERVES if find_spec(name) is None]:
        raise UserError(f"--agent: {missing[0]} is missing: pip install 'dschat[serve]'")
    if played(spec):
        return Agent(agent_of(spec))
    if isinstance(spec, str) and not re.fullmatch(r"\S+:\w+", spec):
        try:
            return Agent(None, shlex.split(spec))
        except ValueError as error:
            raise UserError(f"--agent {spec}: {error}; quote it as a shell does") from None
    function = load(spec, f"--agent {spec}:") if isinstance(spec, str) else spec
    if not callable(function):
        raise UserError(f"--agent {spec} is not a function run(client, prompt, **columns)")
    if find_spec("openai") is None:
        raise UserError("--agent: openai is missing: pip install 'dschat[agents]'")
    return Agent(function)


def _outcome(value: Any) -> Outcome:
    """Raises ``Fault`` for what is no reward."""
    if value is None:
        return Outcome()
    if not isinstance(value, Mapping):
        return Outcome(_number(value))
    reward = value.get("reward")
    others = {str(n): v for n, v in value.items() if n != "reward" and isinstance(v, Real)}
    logged = {name: _number(v) for name, v in others.items()}
    return Outcome(None if reward is None else _number(reward), logged)


def _number(value: Any) -> float:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, Real) or not math.isfinite(float(value)):
        raise Fault(f"returned {shown(value)}; return a number, a dict with reward, or None")
    return float(value)


def _run_command(
    command: Sequence[str], url: str, key: str, row: Mapping[str, Any], limit_s: float
) -> Any:
    """The last line that a command prints, if it is JSON of a number or an object."""
    text = json.dumps(row, ensure_ascii=False, default=str)
    words = [word.replace("{base_url}", url).replace("{row}", text) for word in command]
    variables = os.environ | {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
    with TemporaryFile() as given, TemporaryFile() as said, TemporaryFile() as errors:
        given.write(text.encode(errors="replace"))
        given.seek(0)
        files: dict[str, Any] = {"stdin": given, "stdout": said, "stderr": errors}
        try:
            process = subprocess.Popen(words, **files, env=variables, start_new_session=True)
        except OSError as error:
            raise Fault(f"cannot start {words[0]}: {error.strerror}") from None
        try:
            with suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (_MAX_BYTES, _MAX_BYTES))
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise timed_out(limit_s) from None
        finally:
            with suppress(ProcessLookupError):  # what it has started, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code:
            raise Fault(f"exited with code {code}: {_last_line(errors):.200}")
        try:
            value = json.loads(_last_line(said))
        except ValueError:
            return None
    return value if isinstance(value, Real | Mapping) else None


def _last_line(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
    return (file.read().decode(errors="replace").strip().splitlines() or [""])[-1]
