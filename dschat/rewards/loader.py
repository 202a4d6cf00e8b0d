"""Resolves ``--reward_fn``, ``--reward_args`` and callables to named, weighted functions."""

import functools
import inspect
import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import yaml

from dschat.config import UserError
from dschat.config.errors import did_you_mean
from dschat.rewards.conventions import adapted
from dschat.rewards.function import RewardFunction
from dschat.rewards.samples import GIVEN
from dschat.user_code.calls import load, raised
from dschat.user_code.surroundings import restored

logger = logging.getLogger("dschat")


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
    rewards = [_entry(spec, f"--reward_fn {spec}") for spec in specs]
    rewards += [_entry(item, "reward_fns") for item in given]
    _number(rewards, taken)
    args = _parsed(reward_args, [reward.name for reward in rewards])
    for reward in rewards:
        _bind(reward, args.get(reward.name, {}))
    return rewards


# -- one entry ---------------------------------------------------------------------------------


def _entry(item: Any, label: str) -> RewardFunction:
    """An entry of --reward_fn, without its arguments: ``function`` may be a class."""
    weight = 1.0
    if isinstance(item, tuple) and len(item) == 2:
        item, weight = item
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise UserError(f"{label}: the weight {weight!r} of {item!r} is not a number")
    if isinstance(item, str):
        spec, spec_weight = _weighted(item)
        label = label if label.startswith("--") else f"{label} {item!r}"
        weight = _finite(weight * spec_weight, label)
        name = spec.rpartition(":")[2]
        if ":" not in spec:
            spec = _ready_made(spec, label)
        return RewardFunction(name, label, weight, load(spec, label), spec)
    if hasattr(item, "save_pretrained"):
        raise UserError(
            f"{label}: {type(item).__name__} is a model; name its folder as reward_model"
        )
    if not callable(item):
        raise UserError(f"{label}: {item!r:.80} is not a function, spec or (function, weight)")
    name = _name_of(item)
    return RewardFunction(name, f"reward function {name}", _finite(weight, label), item)


def _ready_made(name: str, label: str) -> str:
    """The spec of a ready-made function."""
    from dschat.rewards.library import READY_MADE

    if name not in READY_MADE:
        hint = did_you_mean(name, READY_MADE)
        raise UserError(
            f"{label} is not a ready-made function ({', '.join(READY_MADE)}){hint}; "
            "name your own as file.py:name or pkg.mod:name"
        )
    return f"{READY_MADE[name].__module__}:{READY_MADE[name].__name__}"


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


def _number(rewards: Sequence[RewardFunction], taken: Iterable[str]) -> None:
    """Number repeated names from 2: score, score_2."""
    seen = set(taken)
    for reward in rewards:
        name, number = reward.name, 2
        while reward.name in seen:
            reward.name, number = f"{name}_{number}", number + 1
        seen.add(reward.name)


def _bind(reward: RewardFunction, args: dict[str, str]) -> None:
    """Give ``reward`` its ``--reward_args``: for a class, arguments of the constructor; for a
    function, of every call.
    """
    label, target = reward.label, reward.function
    reward.mapped = {key: value[1:] for key, value in args.items() if value.startswith("@")}
    fixed = {key: value for key, value in args.items() if key not in reward.mapped}
    where = f"{label}: --reward_args {reward.name}"
    if not callable(target):
        raise UserError(f"{label} is a {type(target).__name__}, not a function")
    try:
        values = {key: _argument(target, key, text, where) for key, text in fixed.items()}
        reward.settings, options = values, values
        if inspect.isclass(target):
            reward.function, options = _instance(target, values, label), {}
            if not callable(reward.function):
                raise UserError("is a class whose instances are not callable; give it __call__")
        reward.target = reward.function
        reward.function, trainer = adapted(reward.function, options)
        if trainer:
            logger.info("%s is called as %s calls it", label, trainer)
        if reward.function is reward.target:
            reward.bound = options
        reward.accepted = parameters(reward.function)
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(label) else f"{label} {text}") from None
    takes_any = any(p.kind is p.VAR_KEYWORD for p in reward.accepted.values())
    for key in reward.mapped:
        if key not in reward.accepted and not takes_any:
            takes = ", ".join(reward.accepted)
            raise UserError(f"{where}.{key}: it takes no {key}; it takes: {takes}")
    reward.limit_per_answer_s = getattr(reward.function, "limit_per_answer_s", 0.0)


def _instance(target: type, values: dict[str, Any], label: str) -> Any:
    try:
        with restored(label):
            return target(**values)
    except UserError as error:
        raise UserError(f"{label}: {error}") from None
    except Exception as error:
        raise UserError(f"cannot be constructed: it {raised(error)}; see --reward_args") from None


def parameters(function: Callable) -> dict[str, inspect.Parameter]:
    """The parameters of ``function`` by name.

    Raises:
        UserError: no readable signature, or a required parameter is positional-only.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise UserError("has no readable signature; wrap it in a def") from None
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise UserError(f"takes {name} by position; reward functions get keyword arguments")
    return dict(signature.parameters)


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
