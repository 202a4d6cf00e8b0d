"""From ``--reward_fn`` and callables to functions with a name, a weight and their arguments.

Specs and ``--reward_args`` come in; `Program`s go out. It must not know what functions are called
with at run time, nor where they run.
"""

import functools
import importlib
import inspect
import math
import os
import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from dschat.config import UserError
from dschat.config.errors import did_you_mean
from dschat.rewards.call import GIVEN, parameters, raised, sources_of
from dschat.rewards.user_modules import file_module, named_module

READY = "dschat.rewards.library"
RewardFunction = Callable[..., Any]


@dataclass
class Program:
    """A reward function that can be called."""

    name: str  # in metrics and --reward_args; unique
    label: str  # in messages: the flag and its value, or what Python gave
    weight: float
    function: RewardFunction
    recipe: tuple[Any, ...]  # for another process, which makes it anew by `made`
    bound: dict[str, Any] = field(default_factory=dict)  # arguments that are the same every time
    mapped: dict[str, str] = field(default_factory=dict)  # parameter -> column, as the user said
    limit_per_answer_s: float = 0.0  # what it may take by its own limits, where that is longer

    @property
    def is_async(self) -> bool:
        return is_async(self.function)

    def leave_to_others(self) -> None:
        """Only other processes call it from now on: keep no more than its signature, where they
        make one of their own.
        """
        if self.recipe[0] == "spec":
            self.function = _Signature(inspect.signature(self.function))

    def sources(self, columns: Iterable[str]) -> dict[str, str]:
        """Its parameters -> what they are given of samples with these columns.

        Raises:
            UserError: it needs another one.
        """
        try:
            return sources_of(self.function, self.bound, self.mapped, list(columns))
        except UserError as error:
            raise UserError(str(error).replace("NAME.", f"{self.name}.")) from None


class _Signature:
    """What `inspect.signature` reads, in the place of a function that is not called here."""

    def __init__(self, signature: inspect.Signature) -> None:
        self.__signature__ = signature

    def __call__(self) -> None:
        raise AssertionError("left to other processes")


def load_programs(
    specs: Sequence[str], given: Sequence[Any], reward_args: Sequence[str], taken: Iterable[str]
) -> list[Program]:
    """Every function of ``--reward_fn``, then those that Python gave, with ``--reward_args``.

    Args:
        given: callables, specs, or pairs of one of them and a weight.
        taken: names that are none of theirs.

    Raises:
        UserError: one cannot be found, imported, made, or does not take its arguments.
    """
    found = [_entry(spec, f"--reward_fn {spec}") for spec in specs]
    found += [_entry(item, "reward_fns") for item in given]
    names = _unique([name for name, *_ in found], taken)
    args = _parsed(reward_args, names)
    programs = []
    for name, (_, label, weight, target, spec) in zip(names, found, strict=True):
        programs.append(_program(name, label, weight, target, spec, args.get(name, {})))
    return programs


def made(recipe: tuple[Any, ...]) -> RewardFunction:
    """The function of a `Program`, in any process: by its spec, or out of a pickle."""
    kind, content, *rest = recipe
    if kind == "pickle":
        return pickle.loads(content)
    target = find(content)
    return target(**rest[0]) if inspect.isclass(target) else target


def find(spec: str) -> Any:
    """What ``file.py:name``, ``pkg.mod:name`` or a ready-made name stands for.

    Raises:
        UserError: there is none.
    """
    where, colon, name = spec.rpartition(":")
    if not colon:
        ready = importlib.import_module(READY).READY
        if name not in ready:
            raise UserError(
                f"is no ready-made function ({', '.join(ready)}){did_you_mean(name, ready)}; a "
                "function of yours is file.py:name or pkg.mod:name"
            )
        return ready[name]
    is_file = where.endswith(".py") or os.sep in where
    module = file_module(where) if is_file else named_module(where)
    if not hasattr(module, name):
        own = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        hint = did_you_mean(name, own)
        raise UserError(f"is not there: {where} has no {name or 'name after the colon'}{hint}")
    return getattr(module, name)


def is_async(function: RewardFunction) -> bool:
    """Whether calling it makes a coroutine, and it says so."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 an instance may have an async one
    )


# -- one entry ---------------------------------------------------------------------------------


def _entry(item: Any, label: str) -> tuple[str, str, float, Any, str | None]:
    """Name, label, weight, what it stands for and, where it was named so, the spec."""
    weight = 1.0
    if isinstance(item, tuple) and len(item) == 2:
        item, weight = item
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise UserError(f"{label}: the weight {weight!r} of {item!r} is not a number")
    if isinstance(item, str):
        spec, own = _weighted(item, label)
        label = label if label.startswith("--") else f"{label} {item!r}"
        try:
            target = find(spec)
        except UserError as error:
            raise UserError(f"{label} {error}") from None
        name = spec.rpartition(":")[2]
        return name, label, _finite(weight * own, label), target, spec
    if not callable(item):
        raise UserError(f"{label}: {item!r:.80} is no function, spec or (function, weight)")
    name = _name_of(item)
    return name, f"reward function {name}", _finite(weight, label), item, None


def _weighted(spec: str, label: str) -> tuple[str, float]:
    """Split ``SPEC[:WEIGHT]``: a number after the last colon."""
    head, colon, tail = spec.rpartition(":")
    try:
        return (head, _finite(float(tail), label)) if colon else (spec, 1.0)
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        return spec, 1.0


def _finite(weight: float, label: str) -> float:
    if not math.isfinite(weight):
        raise UserError(f"{label}: the weight {weight} is not a finite number")
    return float(weight)


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None)
    if name is None:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(function).__name__).lower()
    return re.sub(r"\W+", "_", name).strip("_") or "function"


def _unique(names: Sequence[str], taken: Iterable[str]) -> list[str]:
    """The names, numbered from 2 where one is there already."""
    seen = set(taken)
    for position, name in enumerate(names):
        number = 2
        unique = name
        while unique in seen:
            unique, number = f"{name}_{number}", number + 1
        seen.add(unique)
        names = [*names[:position], unique, *names[position + 1 :]]
    return list(names)


def _program(
    name: str, label: str, weight: float, target: Any, spec: str | None, args: dict[str, str]
) -> Program:
    """With its arguments: those of a class make the instance, those of a function every call."""
    mapped = {key: value[1:] for key, value in args.items() if value.startswith("@")}
    own = {key: value for key, value in args.items() if key not in mapped}
    where = f"{label}: --reward_args {name}"
    if not callable(target):
        raise UserError(f"{label} is a {type(target).__name__}, not a function")
    try:
        values = {key: _argument(target, key, text, where) for key, text in own.items()}
        function, bound = target, values
        if inspect.isclass(target):
            function, bound = _instance(target, values, label), {}
            if not callable(function):
                raise UserError("is a class whose instances are no functions; give it __call__")
        found = parameters(function)
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(label) else f"{label} {text}") from None
    catches_all = any(p.kind is p.VAR_KEYWORD for p in found.values())
    for key in mapped:
        if key not in found and not catches_all:
            raise UserError(f"{where}.{key}: it takes no {key}; it takes: {', '.join(found)}")
    recipe = ("spec", spec, values) if spec else ("callable", function)
    limit_s = getattr(function, "limit_per_answer_s", 0.0)
    return Program(name, label, weight, function, recipe, bound, mapped, limit_s)


def _instance(target: type, values: dict[str, Any], label: str) -> Any:
    try:
        return target(**values)
    except UserError as error:
        raise UserError(f"{label}: {error}") from None
    except Exception as error:
        raise UserError(f"{label} cannot be made: it {raised(error)}; see --reward_args") from None


def portable(program: Program) -> tuple[Any, ...]:
    """A recipe of ``program`` that another process can follow.

    Raises:
        UserError: the function cannot be found by name there.
    """
    if program.recipe[0] == "spec":
        return program.recipe
    home = getattr(program.function, "__module__", None)
    try:
        if home == "__main__" or type(program.function).__module__ == "__main__":
            raise pickle.PicklingError("it is defined in the main program or notebook")
        return ("pickle", pickle.dumps(program.function))
    except Exception as error:
        raise UserError(
            f"{program.label} cannot go to another process ({' '.join(str(error).split())}); put "
            "it into a file and name it file.py:name, or pass --reward_pool thread"
        ) from None


# -- arguments ---------------------------------------------------------------------------------


def _parsed(reward_args: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, str]]:
    """``NAME.KEY=VALUE`` by name and key, values still as text."""
    parsed: dict[str, dict[str, str]] = {}
    for text in reward_args:
        match = re.fullmatch(r"([^.=]+)\.(\w+)=(.*)", text, re.DOTALL)
        if not match:
            raise UserError(f"--reward_args {text} is not NAME.KEY=VALUE, such as length.target=64")
        name, key, value = match.groups()
        if name not in names:
            there = ", ".join(names) or "none is named"
            raise UserError(f"--reward_args {text}: no --reward_fn is called {name} ({there})")
        parsed.setdefault(name, {})[key] = value
    return parsed


def _argument(target: Any, key: str, text: str, where: str) -> Any:
    """The value of an argument: as YAML, or as it stands where the parameter is declared ``str``.

    So a regular expression needs no quotes.
    """
    found = parameters(target)
    known = [n for n, p in found.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if key in GIVEN:
        raise UserError(f"{where}.{key}: {key} comes from the samples; choose another name")
    if key not in known:
        if any(p.kind is p.VAR_KEYWORD for p in found.values()):
            return _yaml(text, f"{where}.{key}")
        takes = ", ".join(n for n in known if n not in GIVEN) or "no arguments"
        raise UserError(f"{where}.{key}: it takes no {key}; it takes: {takes}")
    if found[key].annotation in (str, "str"):
        return text
    return _yaml(text, f"{where}.{key}")


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UserError(f"{where}={text}: the value is no YAML; put text into quotes") from None
