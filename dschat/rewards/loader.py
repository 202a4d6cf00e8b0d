"""Resolves ``--reward_fn``, ``--reward_args`` and callables to named, weighted functions."""

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

LIBRARY = "dschat.rewards.library"


@dataclass
class RewardFunction:
    """A reward function with its name, weight and fixed arguments."""

    name: str  # in metrics and --reward_args; unique
    label: str  # in messages: the flag and its value, or the function's name
    weight: float
    function: Any  # None once other processes have their own
    accepted: dict[str, inspect.Parameter]  # the function's parameters
    recipe: tuple[Any, ...]  # from which `rebuild` makes it in another process
    bound: dict[str, Any] = field(default_factory=dict)  # the same arguments for every call
    mapped: dict[str, str] = field(default_factory=dict)  # parameter -> column, from @COLUMN
    limit_per_answer_s: float = 0.0  # the function's own time limit; extends the call's if longer

    @property
    def is_async(self) -> bool:
        return is_async(self.function)

    def sources(self, columns: Iterable[str]) -> dict[str, str]:
        """The source of each argument, for samples with ``columns``; see `sources_of`.

        Raises:
            UserError: a column is missing.
        """
        try:
            return sources_of(self.accepted, self.bound, self.mapped, list(columns))
        except UserError as error:
            raise UserError(str(error).replace("NAME.", f"{self.name}.")) from None


def load_reward_functions(
    specs: Sequence[str], given: Sequence[Any], reward_args: Sequence[str], taken: Iterable[str]
) -> list[RewardFunction]:
    """The functions of ``--reward_fn``, then ``given``, with their ``--reward_args``.

    Args:
        given: callables, specs, or (callable or spec, weight) pairs.
        taken: reserved names.

    Raises:
        UserError: one cannot be found, imported or constructed, or does not take its arguments.
    """
    entries = [_entry(spec, f"--reward_fn {spec}") for spec in specs]
    entries += [_entry(item, "reward_fns") for item in given]
    names = _unique([name for name, *_ in entries], taken)
    args = _parsed(reward_args, names)
    rewards = []
    for name, (_, label, weight, target, spec) in zip(names, entries, strict=True):
        rewards.append(_reward_function(name, label, weight, target, spec, args.get(name, {})))
    return rewards


def rebuild(recipe: tuple[Any, ...]) -> Callable[..., Any]:
    """The function of a `RewardFunction` in another process, from its spec or a pickle."""
    kind, content, *rest = recipe
    if kind == "pickle":
        return pickle.loads(content)
    target = resolve(content)
    return target(**rest[0]) if isinstance(target, type) else target


def resolve(spec: str) -> Any:
    """The object named by ``file.py:name``, ``pkg.mod:name`` or the name of a ready-made function.

    Raises:
        UserError: it does not exist, or its module cannot be imported.
    """
    where, colon, name = spec.rpartition(":")
    if not colon:
        ready_made = importlib.import_module(LIBRARY).READY_MADE
        if name not in ready_made:
            hint = did_you_mean(name, ready_made)
            raise UserError(
                f"is not a ready-made function ({', '.join(ready_made)}){hint}; "
                "name your own as file.py:name or pkg.mod:name"
            )
        return ready_made[name]
    is_file = where.endswith(".py") or os.sep in where
    module = file_module(where) if is_file else named_module(where)
    if not hasattr(module, name):
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        missing = name or "name after the colon"
        raise UserError(f"not found: {where} has no {missing}{did_you_mean(name, public)}")
    return getattr(module, name)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether it is declared with ``async def``."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 an instance may define an async one
    )


# -- one entry ---------------------------------------------------------------------------------


def _entry(item: Any, label: str) -> tuple[str, str, float, Any, str | None]:
    """(name, label, weight, function or class, spec or None) of an entry of --reward_fn."""
    weight = 1.0
    if isinstance(item, tuple) and len(item) == 2:
        item, weight = item
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise UserError(f"{label}: the weight {weight!r} of {item!r} is not a number")
    if isinstance(item, str):
        spec, spec_weight = _weighted(item)
        label = label if label.startswith("--") else f"{label} {item!r}"
        weight = _finite(weight * spec_weight, label)
        try:
            target = resolve(spec)
        except UserError as error:
            raise UserError(f"{label} {error}") from None
        return spec.rpartition(":")[2], label, weight, target, spec
    if not callable(item):
        raise UserError(f"{label}: {item!r:.80} is not a function, spec or (function, weight)")
    name = _name_of(item)
    return name, f"reward function {name}", _finite(weight, label), item, None


def _weighted(spec: str) -> tuple[str, float]:
    """Split ``SPEC[:WEIGHT]``: a number after the last colon is the weight."""
    head, colon, tail = spec.rpartition(":")
    try:
        return (head, float(tail)) if colon else (spec, 1.0)
    except ValueError:
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
    """The names, with repeated ones numbered from 2: score, score_2."""
    seen = set(taken)
    uniques = []
    for name in names:
        number = 2
        unique = name
        while unique in seen:
            unique, number = f"{name}_{number}", number + 1
        seen.add(unique)
        uniques.append(unique)
    return uniques


def _reward_function(
    name: str, label: str, weight: float, target: Any, spec: str | None, args: dict[str, str]
) -> RewardFunction:
    """The function with its ``--reward_args``: for a class, arguments of the constructor; for a
    function, of every call.
    """
    mapped = {key: value[1:] for key, value in args.items() if value.startswith("@")}
    fixed = {key: value for key, value in args.items() if key not in mapped}
    where = f"{label}: --reward_args {name}"
    if not callable(target):
        raise UserError(f"{label} is a {type(target).__name__}, not a function")
    try:
        values = {key: _argument(target, key, text, where) for key, text in fixed.items()}
        function, bound = target, values
        if inspect.isclass(target):
            function, bound = _instance(target, values, label), {}
            if not callable(function):
                raise UserError("is a class whose instances are not callable; give it __call__")
        accepted = parameters(function)
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(label) else f"{label} {text}") from None
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    for key in mapped:
        if key not in accepted and not takes_any:
            raise UserError(f"{where}.{key}: it takes no {key}; it takes: {', '.join(accepted)}")
    recipe = ("spec", spec, values) if spec else ("callable", function)
    limit_s = getattr(function, "limit_per_answer_s", 0.0)
    return RewardFunction(name, label, weight, function, accepted, recipe, bound, mapped, limit_s)


def _instance(target: type, values: dict[str, Any], label: str) -> Any:
    try:
        return target(**values)
    except UserError as error:
        raise UserError(f"{label}: {error}") from None
    except Exception as error:
        raise UserError(
            f"{label} cannot be constructed: it {raised(error)}; see --reward_args"
        ) from None


def portable(reward: RewardFunction) -> tuple[Any, ...]:
    """A recipe from which `rebuild` makes the function in another process.

    Raises:
        UserError: the function cannot be imported by name there.
    """
    if reward.recipe[0] == "spec":
        return reward.recipe
    return ("pickle", pickled(reward.function, reward.label, "--reward_pool thread"))


def pickled(function: Any, label: str, instead: str) -> bytes:
    """A function or class for another process, which imports it by name.

    Raises:
        UserError: it cannot; pass ``instead``.
    """
    home = getattr(function, "__module__", None)
    try:
        if home == "__main__" or type(function).__module__ == "__main__":
            raise pickle.PicklingError("it is defined in the main program or notebook")
        return pickle.dumps(function)
    except Exception as error:
        raise UserError(
            f"{label} cannot run in another process ({' '.join(str(error).split())}); put it into "
            f"a file and pass it as file.py:name, or pass {instead}"
        ) from None


# -- arguments ---------------------------------------------------------------------------------


def _parsed(reward_args: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, str]]:
    """``NAME.KEY=VALUE`` flags as {name: {key: text of the value}}."""
    parsed: dict[str, dict[str, str]] = {}
    for text in reward_args:
        match = re.fullmatch(r"([^.=]+)\.(\w+)=(.*)", text, re.DOTALL)
        if not match:
            raise UserError(f"--reward_args {text} is not NAME.KEY=VALUE, such as length.target=64")
        name, key, value = match.groups()
        if name not in names:
            available = ", ".join(names) or "none is given"
            raise UserError(f"--reward_args {text}: no --reward_fn is called {name} ({available})")
        parsed.setdefault(name, {})[key] = value
    return parsed


def _argument(target: Any, key: str, text: str, where: str) -> Any:
    """The value of an argument: parsed as YAML, or the text itself for a ``str`` parameter.

    So a regular expression needs no quotes.
    """
    accepted = parameters(target)
    named = [n for n, p in accepted.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if key in GIVEN:
        raise UserError(f"{where}.{key}: {key} comes from the samples; choose another name")
    if key not in named:
        if any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
            return _yaml(text, f"{where}.{key}")
        takes = ", ".join(n for n in named if n not in GIVEN) or "no arguments"
        raise UserError(f"{where}.{key}: it takes no {key}; it takes: {takes}")
    if accepted[key].annotation in (str, "str"):
        return text
    return _yaml(text, f"{where}.{key}")


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UserError(f"{where}={text}: the value is not YAML; put text into quotes") from None
