"""Defines what an environment is, and makes one of the objects that users have.

A class is instantiated once per episode and has ``step(answer)``; ``reset`` is optional:

    class Env:
        def reset(self, prompt, seed, **columns): ...  # may return text that the prompt gets
        def step(self, answer): ...  # returns text, reward, done

A function ``step(observation, action)`` returns the same; ``observation`` is the episode's text so
far. Both may be declared with ``async def``. A class without ``step`` is one of tools, as in TRL.

Tools are functions, or methods of an environment, that the model calls by name. A tool is described
to the model by its name, type hints and docstring, as transformers reads them for chat templates.
"""

import asyncio
import inspect
import json
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from numbers import Real
from types import MethodType
from typing import Any

from dschat.config import UserError
from dschat.config.errors import did_you_mean
from dschat.config.reward import REFERENCE
from dschat.data.sources.turns import storable
from dschat.environments.mcp_tools import MCP, McpServer
from dschat.user_code.calls import Fault, Pool, awaited, called, fault_of, load

_RETURNS = "return (text, reward, done): a str or None, a number, a bool"


@dataclass(frozen=True)
class Call:
    """A call of a tool that the model wrote. ``problem``: why it cannot be read."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class ToolResult:
    """What the tool ``name`` returned, or why it could not."""

    name: str
    text: str
    failed: bool = False


@dataclass
class Observation:
    """What a step gives back.

    Attributes:
        results: of the tools that the answer called; then there is no ``text``.
        is_raw: ``text`` stands as it is, without the chat template's pieces around it.
    """

    text: str = ""
    reward: float = 0.0
    done: bool = False
    results: tuple[ToolResult, ...] = ()
    is_raw: bool = False


class Environment:
    """The environment of one episode. Its methods may take long.

    ``target``: a class with ``step``, or a function; None: every answer ends its episode.

    Attributes:
        wants_special_tokens: whether ``step`` gets the answer's text with special tokens too.
        pool: where its methods run, and are stopped at their time limit; None: any thread.
        calls: of tools, in the last answer.
        tells_calls: the model hears of tools that fail, whatever the flags say of steps.
    """

    wants_special_tokens = False
    pool: Pool | None = None

    def __init__(self, target: Any = None, tells_calls: bool = False) -> None:
        self.tells_calls, self.calls = tells_calls, list[Call]()
        self._is_class = isinstance(target, type)
        self._target = target
        self._has_step = hasattr(target, "step") if self._is_class else target is not None
        self._columns: dict[str, Any] = {}
        self.instance: Any = None  # of the class
        self._text = ""

    def reset(self, prompt: str, seed: int, columns: Mapping[str, Any]) -> str:
        """Begin the episode. Returns text to append to the prompt.

        Raises:
            Fault: the environment failed.
        """
        self._columns = {**columns, "prompt": prompt, "seed": seed}
        text = None
        if self._is_class:
            self.instance = called(self._target)
            if hasattr(self.instance, "reset"):
                text = self._given(self.instance.reset)
        if isinstance(text, Mapping):
            text = str(text.get("observation", prompt)).removeprefix(prompt)
        if not isinstance(text, str | None):
            raise Fault(f"reset returned {shown(text)}; return a str or None")
        text = storable(text or "")
        self._text = prompt + text
        return text

    def step(self, answer: str, marked: str = "", begun: str | None = None) -> Observation:
        """The reply to ``answer``. ``marked``: with its special tokens, if they are wanted;
        ``begun``: the text of the prompt's last turn, if this answer continues it.

        Raises:
            Fault: the environment failed, or returned something else.
        """
        if not self._has_step:
            return Observation(done=True)
        found = _observation(self._stepped(answer))
        self._text += answer + found.text
        return found

    @property
    def rewards_the_end(self) -> bool:
        return hasattr(self.instance, "get_reward")

    def final_reward(self) -> float:
        """What ``get_reward`` of the class says of the whole episode.

        Raises:
            Fault: it failed, or returned no number.
        """
        return _finite(called(self.instance.get_reward), "get_reward returned")

    def told(self, fault: Fault) -> Observation | None:
        """How the model hears of a failed step; None: the episode cannot continue."""
        if fault.timed_out and self.instance is not None:
            return None  # the step may still change it
        text = f"error: {fault}"
        results = tuple(ToolResult(call.name, text, failed=True) for call in self.calls)
        return Observation(results=results) if results else Observation(text)

    def _stepped(self, answer: str) -> Any:
        if not self._is_class:
            return self._given(self._target, self._text, answer)
        step = self.instance.step
        if "states" in inspect.signature(step).parameters:
            said = {"observation_text": self._text, "action_text": answer}
            return self._given(step, states={**self._states(), **said})
        return called(step, answer)

    def _states(self) -> dict[str, Any]:
        """What OpenRLHF's agents know of an episode."""
        label = next((self._columns[n] for n in REFERENCE if n in self._columns), None)
        return {"label": label, "sampling_params": None, **self._columns}

    def _given(self, function: Any, *args: Any, **more: Any) -> Any:
        """``function`` of ``args`` and of the columns of the row that it takes; ``label`` and
        ``states`` only where it names them.
        """
        accepted = list(inspect.signature(function).parameters.values())[len(args) :]
        states = self._states()
        by_name = {"states": states, "label": states["label"], **self._columns, **more}
        given = {p.name: by_name[p.name] for p in accepted if p.name in by_name}
        if any(p.kind is p.VAR_KEYWORD for p in accepted):
            given = {**self._columns, **given}
        return called(function, *args, **given)


def _observation(result: Any) -> Observation:
    """Of (text, reward, done), or of a mapping with these names or OpenRLHF's."""
    is_raw = False
    if isinstance(result, Mapping):
        is_raw = "environment_feedback" in result
        text = result.get("environment_feedback", result.get("observation"))
        reward = result.get("rewards", result.get("reward", 0.0))
        result = (text, reward, result.get("done", False))
    if not isinstance(result, tuple) or len(result) != 3:
        raise Fault(f"step returned {shown(result)}; {_RETURNS}")
    text, reward, done = result
    if not isinstance(text, str | None):
        raise Fault(f"step returned {shown(result)}; {_RETURNS}")
    try:
        done = bool(done)
    except Exception:  # such as an array of several
        raise Fault(f"step returned {shown(result)}; {_RETURNS}") from None
    return Observation(text or "", _finite(reward, "step returned"), done, is_raw=is_raw)


def _finite(value: Any, what: str) -> float:
    if not isinstance(value, Real):
        try:
            value = value.item()
        except Exception:
            raise Fault(f"{what} the reward {shown(value)}; {_RETURNS}") from None
    if not math.isfinite(float(value)):
        raise Fault(f"{what} the reward {value}; {_RETURNS}")
    return float(value)


def shown(value: Any) -> str:
    return f"{type(value).__name__} {reprlib.repr(value)}"[:80]


_NOT_TOOLS = ("reset", "get_reward")


@dataclass(frozen=True)
class Tool:
    """``schema``: JSON schema in OpenAI's form. ``function``: None for a method, which belongs to
    the environment of an episode. ``spec``: what named the function, if anything did.
    """

    name: str
    schema: dict[str, Any]
    function: Callable[..., Any] | None
    spec: str = ""


def load_tools(specs: Sequence[Any], limit_s: float = 60.0) -> list[Tool]:
    """Tools of ``file.py:NAME[,NAME...]``, ``pkg.mod:NAME[,NAME...]`` and ``mcp:COMMAND``, or of
    functions. ``limit_s``: of a call of an MCP server.

    Raises:
        UserError: one does not exist or is not described, or two have the same name.
    """
    tools = []
    for spec in specs:
        if not isinstance(spec, str):
            tools.append(_tool(spec, "--tools", spec))
            continue
        if spec.startswith(MCP):
            tools += _mcp_tools(spec, limit_s)
            continue
        home, colon, names = spec.rpartition(":")
        for name in names.split(","):
            one = f"{home}{colon}{name.strip()}"
            function = load(one, f"--tools {one}:")
            tools.append(_tool(function, f"--tools {one}", function, one))
    require_unique(tools, "--tools")
    return tools


def methods_of(environment: Any, label: str) -> list[Tool]:
    """The public methods of a class without ``step``; none of any other object.

    Raises:
        UserError: one is not described.
    """
    if not isinstance(environment, type) or hasattr(environment, "step"):
        return []
    methods = inspect.getmembers(environment, inspect.isfunction)
    return [
        # bound to a stand-in, so that `self` is not a parameter
        _tool(MethodType(method, environment), f"{label} has no step(answer); its {name}", None)
        for name, method in methods
        if not name.startswith("_") and name not in _NOT_TOOLS
    ]


def require_unique(tools: Sequence[Tool], label: str) -> None:
    names = [tool.name for tool in tools]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{label}: two tools are called {double}; rename one")


def result_text(value: Any) -> str:
    """A tool's result as text: text itself, else JSON.

    Raises:
        Fault: it is neither.
    """
    if isinstance(value, str):
        return storable(value)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise Fault(f"returned {shown(value)}, which is neither text nor JSON") from None


_server = cache(McpServer)  # the trainer loads its tools again


def _mcp_tools(spec: str, limit_s: float) -> list[Tool]:
    server, tools = _server(spec.removeprefix(MCP)), []
    for tool in server.tools:
        told = {"name": tool.name, "description": tool.description or ""}
        schema = {"type": "function", "function": told | {"parameters": tool.input_schema}}
        tools.append(Tool(tool.name, schema, server.function(tool.name, limit_s), spec))
    return tools


def _tool(described: Any, label: str, function: Callable[..., Any] | None, spec: str = "") -> Tool:
    from transformers.utils import get_json_schema  # takes a second: worker processes need none

    if not callable(described):
        raise UserError(f"{label} is not a function")
    try:
        schema = get_json_schema(described)
    except Exception as error:  # no docstring, no type hints, or ones that it cannot read
        why = " ".join(str(error).split())
        raise UserError(f"{label} cannot be described to the model: {why}") from None
    return Tool(schema["function"]["name"], schema, function, spec)


class ToolEnvironment(Environment):
    """Runs the calls that an answer contains, and tells the model the results.

    An answer without a call goes to the environment's ``step``, if it has one, and else ends the
    episode. The contract of TRL's ``environment_factory`` is one of these: a class whose public
    methods are tools, with ``reset(**columns)`` and, for the reward at the end, ``get_reward()``.

    Args:
        tools: functions, and methods of ``target``.
        parse: the calls in an answer with its special tokens, and with what it continues.
        tells: a tool that fails is told to the model; else it fails the step.
    """

    wants_special_tokens = True

    def __init__(
        self, target: Any, tools: Sequence[Tool], parse: Callable[..., list[Call]], tells: bool
    ) -> None:
        super().__init__(target, tells)
        self._tools, self._parse = tools, parse
        self._functions: dict[str, Callable[..., Any]] = {}

    def reset(self, prompt: str, seed: int, columns: Mapping[str, Any]) -> str:
        text = super().reset(prompt, seed, columns)
        self._functions = {
            tool.name: tool.function or getattr(self.instance, tool.name) for tool in self._tools
        }
        return text

    def step(self, answer: str, marked: Any = "", begun: str | None = None) -> Observation:
        self.calls = self._parse(marked, begun)
        if not self.calls:
            return super().step(answer)
        results = asyncio.run(self._results())
        self._text += "\n".join([answer, *(result.text for result in results)])
        return Observation(results=results)

    async def _results(self) -> tuple[ToolResult, ...]:
        """Of all calls, in their order: coroutines together, functions one after the other."""
        return tuple(await asyncio.gather(*map(self._result, self.calls)))

    async def _result(self, call: Call) -> ToolResult:
        problem, function = call.problem, self._functions.get(call.name)
        if function is None:
            near = did_you_mean(call.name, list(self._functions))
            problem = problem or f"there is no tool {call.name[:80]!r}{near}"
        elif not problem:
            try:
                inspect.signature(function).bind(**call.arguments)
            except TypeError as error:
                problem = str(error)
        if problem or function is None:
            return ToolResult(call.name, f"error: {problem}", failed=True)
        try:
            result = await awaited(function(**call.arguments))
            return ToolResult(call.name, result_text(result))
        except UserError:  # an MCP server has ended: no answer can help
            raise
        except BaseException as error:  # this is user code
            fault = fault_of(error)
            if not self.tells_calls:
                raise Fault(f"the tool {call.name} {fault}") from None
            return ToolResult(call.name, f"error: {call.name} {fault}", failed=True)
