"""Tools: functions, or methods of an environment, that the model calls by name.

A tool is described to the model by its name, type hints and docstring, as transformers reads them
for chat templates.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

from dschat.config import UserError
from dschat.config.errors import did_you_mean
from dschat.data.sources.turns import storable
from dschat.environments.contract import Call, Environment, Observation, ToolResult, shown
from dschat.user_code.calls import Fault, awaited, fault_of
from dschat.user_code.imports import load

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


def load_tools(specs: Sequence[Any], label: str = "--tools") -> list[Tool]:
    """Tools of ``file.py:NAME[,NAME...]`` and ``pkg.mod:NAME[,NAME...]``, or of functions.

    Raises:
        UserError: one does not exist or is not described, or two have the same name.
    """
    tools = []
    for spec in specs:
        if not isinstance(spec, str):
            tools.append(_tool(spec, label, spec))
            continue
        home, colon, names = spec.rpartition(":")
        for name in names.split(","):
            one = f"{home}{colon}{name.strip()}"
            function = load(one, f"{label} {one}:")
            tools.append(_tool(function, f"{label} {one}", function, one))
    require_unique(tools, label)
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
        parse: the calls in an answer with its special tokens.
        tells: a tool that fails is told to the model; else it fails the step.
    """

    wants_special_tokens = True

    def __init__(
        self, target: Any, tools: Sequence[Tool], parse: Callable[[Any], list[Call]], tells: bool
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

    def step(self, answer: str, marked: Any = "") -> Observation:
        self.calls = self._parse(marked)
        if not self.calls:
            return super().step(answer)
        results = asyncio.run(self._results())
        self._text += "\n".join([answer, *(result.text for result in results)])
        return Observation(results=results)

    async def _results(self) -> tuple[ToolResult, ...]:
        """Of all calls, in their order: coroutines together, functions one after the other."""
        return tuple(await asyncio.gather(*map(self._result, self.calls)))

    async def _result(self, call: Call) -> ToolResult:
        function = self._functions.get(call.name)
        problem = call.problem
        if not problem and function is None:
            near = did_you_mean(call.name, list(self._functions))
            problem = f"there is no tool {call.name[:80]!r}{near}"
        if not problem and function is not None:
            try:
                inspect.signature(function).bind(**call.arguments)
            except TypeError as error:
                problem = str(error)
        if problem or function is None:
            return ToolResult(call.name, f"error: {problem}", failed=True)
        try:
            result = await awaited(function(**call.arguments))
            return ToolResult(call.name, result_text(result))
        except BaseException as error:  # this is user code
            fault = fault_of(error)
            if not self.tells_calls:
                raise Fault(f"the tool {call.name} {fault}") from None
            return ToolResult(call.name, f"error: {call.name} {fault}", failed=True)
