"""An environment of tools: runs the calls that an answer contains, and tells the model the results.

An answer without a call goes to the environment's ``step``, if it has one, and else ends the
episode. The contract of TRL's ``environment_factory`` is one of these: a class whose public methods
are tools, with ``reset(**columns)`` and, for the reward at the end, ``get_reward()``.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dschat.config.errors import did_you_mean
from dschat.environments.contract import (
    Call,
    Environment,
    EnvironmentFault,
    Observation,
    ToolResult,
    awaited,
    begun,
)
from dschat.environments.tools import Tool, problem_of, result_text


def failed(calls: Sequence[Call], fault: EnvironmentFault) -> Observation:
    """What the model hears where ``calls`` failed as a whole."""
    return Observation(results=tuple(ToolResult(c.name, f"error: {fault}", True) for c in calls))


class ToolEnvironment(Environment):
    """See `Environment`.

    Args:
        tools: functions, and methods of ``target``.
        parse: the calls in an answer with its special tokens.
        tells: a tool that fails is told to the model; else it fails the step.
    """

    wants_special_tokens = True

    def __init__(
        self, target: Any, tools: Sequence[Tool], parse: Callable[[Any], list[Call]], tells: bool
    ) -> None:
        super().__init__(target)
        self._tools, self._parse, self._tells_calls = tools, parse, tells
        self._calls: list[Call] = []
        self._functions: dict[str, Callable[..., Any]] = {}

    def reset(self, prompt: str, seed: int, columns: Mapping[str, Any]) -> str:
        text = super().reset(prompt, seed, columns)
        self._functions = {
            tool.name: tool.function or getattr(self.instance, tool.name) for tool in self._tools
        }
        return text

    def step(self, answer: str, marked: Any = "") -> Observation:
        self._calls = self._parse(marked)
        if not self._calls:
            return super().step(answer)
        results = asyncio.run(self._results())
        self._text += "\n".join([answer, *(result.text for result in results)])
        return Observation(results=results)

    @property
    def tells(self) -> bool:  # type: ignore[override]
        return self._tells_calls and bool(self._calls)

    def told(self, fault: EnvironmentFault) -> Observation | None:
        if not self._calls:
            return super().told(fault)
        if fault.hung and self.instance is not None:
            return None
        return failed(self._calls, fault)

    async def _results(self) -> tuple[ToolResult, ...]:
        """Of all calls, in their order: coroutines together, functions one after the other."""
        return tuple(await asyncio.gather(*map(self._result, self._calls)))

    async def _result(self, call: Call) -> ToolResult:
        function = self._functions.get(call.name)
        problem = call.problem
        if not problem and function is None:
            near = did_you_mean(call.name, list(self._functions))
            problem = f"there is no tool {call.name[:80]!r}{near}"
        if not problem and function is not None:
            problem = problem_of(function, call.arguments)
        if problem or function is None:
            return ToolResult(call.name, f"error: {problem}", failed=True)
        try:
            result = await awaited(begun(function, **call.arguments))
            return ToolResult(call.name, result_text(result))
        except EnvironmentFault as fault:
            if not self._tells_calls:
                raise EnvironmentFault(f"the tool {call.name} {fault}") from None
            return ToolResult(call.name, f"error: {call.name} {fault}", failed=True)
