"""Loads what ``--environment`` and ``--tools`` name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.config.errors import did_you_mean
from dschat.environments.contract import (
    Environment,
    Tool,
    ToolEnvironment,
    load_tools,
    methods_of,
    require_unique,
)
from dschat.environments.mcp_tools import MCP
from dschat.environments.processes import EnvironmentProcesses
from dschat.environments.template_text import CallParser
from dschat.user_code.calls import Recipe, load, portable


@dataclass(frozen=True)
class EnvironmentSource:
    """An environment, tools, or both.

    Attributes:
        target: a class or a function; None for tools alone.
        spec: what named the target, if anything did.
        rewards: whether it rewards answers or episodes.
    """

    target: Any = None
    tools: tuple[Tool, ...] = ()
    spec: str = ""

    @property
    def rewards(self) -> bool:
        is_class = isinstance(self.target, type)
        has = hasattr(self.target, "step") or hasattr(self.target, "get_reward")
        return has if is_class else self.target is not None

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        """Of the tools, for the chat template; None without tools."""
        return [tool.schema for tool in self.tools] or None

    def maker(
        self, tokenizer: PreTrainedTokenizerBase, tells: bool = True
    ) -> Callable[[], Environment]:
        """Makes an environment for each episode. ``tells``: the model hears of tools that fail.

        Raises:
            UserError: the tokenizer's chat template cannot call tools.
        """
        if not self.tools:
            return lambda: Environment(self.target)
        parse = CallParser(tokenizer, self.schemas or [])
        return lambda: ToolEnvironment(self.target, self.tools, parse, tells)

    def processes(
        self, tokenizer: PreTrainedTokenizerBase, tells: bool, count: int, limit_s: float
    ) -> EnvironmentProcesses:
        """Like `maker`, of environments in ``count`` worker processes. ``limit_s``: of a step.

        Raises:
            UserError: see `maker`; or a process cannot import the environment or a tool.
        """
        parse = CallParser(tokenizer, self.schemas or []) if self.tools else None
        target = _recipe(self.target, self.spec, "--environment")
        if server := next((t.spec for t in self.tools if t.spec.startswith(MCP)), None):
            raise UserError(f"--tools {server} needs --environment_pool thread: it is a process")
        tools = [(tool.name, _recipe(tool.function, tool.spec, "--tools")) for tool in self.tools]
        return EnvironmentProcesses((target, tools, tells), parse, count, limit_s)


def load_environment(
    spec: Any, tools: Sequence[Any] = (), limit_s: float = 60.0
) -> EnvironmentSource:
    """The environment ``file.py:NAME``, ``pkg.mod:NAME``, or of a class or function (None: tools
    alone), and ``tools`` and ``limit_s``, as `load_tools` takes them.

    Raises:
        UserError: one does not exist; a class has neither ``step`` nor methods that are tools.
    """
    functions = load_tools(tools, limit_s)
    if spec is None:
        return EnvironmentSource(None, tuple(functions))
    target, label = spec, "--environment"
    if isinstance(spec, str):
        label = f"--environment {spec}"
        target = load(spec, f"{label}:")
    if not callable(target):
        raise UserError(f"{label} is not a class or a function")
    methods = methods_of(target, label)
    if isinstance(target, type) and not (methods or callable(getattr(target, "step", None))):
        near = did_you_mean("step", [n for n in vars(target) if not n.startswith("_")])
        raise UserError(f"{label} has neither step(answer) nor methods that are tools{near}")
    require_unique([*methods, *functions], label)
    return EnvironmentSource(target, (*methods, *functions), spec if isinstance(spec, str) else "")


def _recipe(target: Any, spec: str, label: str) -> Recipe | None:
    """Where a process finds ``target``; None where there is none."""
    if target is None:
        return None
    name = getattr(target, "__name__", repr(target))
    return portable(target, spec, f"{label}: {name}", "--environment_pool thread")
