"""Tools: functions, or methods of an environment, that the model calls by name.

A tool is described to the model by its name, type hints and docstring, as transformers reads them
for chat templates.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

from dschat.config import UserError
from dschat.environments.contract import EnvironmentFault, shown, sound
from dschat.rewards.loader import resolve

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
        home, found, names = spec.rpartition(":")
        if not found:
            raise UserError(f"{label} {spec}: name it as file.py:NAME or pkg.mod:NAME")
        for name in names.split(","):
            one = f"{home}:{name.strip()}"
            try:
                function = resolve(one)
            except UserError as error:
                raise UserError(f"{label} {one}: {error}") from None
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
        # bound to a stand-in, so that `self` is no parameter
        _tool(MethodType(method, environment), f"{label} has no step(answer); its {name}", None)
        for name, method in methods
        if not name.startswith("_") and name not in _NOT_TOOLS
    ]


def require_unique(tools: Sequence[Tool], label: str) -> None:
    names = [tool.name for tool in tools]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{label}: two tools are called {double}; rename one")


def problem_of(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Why ``function`` does not take ``arguments``, for the model; "" if it does."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        return str(error)
    return ""


def result_text(value: Any) -> str:
    """A tool's result as text: text itself, else JSON.

    Raises:
        EnvironmentFault: it is neither.
    """
    if isinstance(value, str):
        return sound(value)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise EnvironmentFault(f"returned {shown(value)}, which is neither text nor JSON") from None


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
