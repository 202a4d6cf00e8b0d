"""Defines what an environment is, and makes one of the objects that users have.

A class is instantiated once per episode and has ``step(answer)``; ``reset`` is optional:

    class Env:
        def reset(self, prompt, seed, **columns): ...
        def step(self, answer): ...  # returns text, reward, done

A function ``step(observation, action)`` returns the same; ``observation`` is the episode's text so
far, as in OpenRLHF's agents. Both may be declared with ``async def``.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from dschat.config import UserError
from dschat.config.errors import did_you_mean
from dschat.rewards.call import raised
from dschat.rewards.loader import resolve

_RETURNS = "return (text, reward, done): a str or None, a number, a bool"


class EnvironmentFault(Exception):
    """A step that failed, as one line."""


@dataclass
class Observation:
    """What a step gives back."""

    text: str = ""
    reward: float = 0.0
    done: bool = False


class Environment:
    """The environment of one episode, made by ``factory``. Its methods may take long."""

    def __init__(self, factory: Any) -> None:
        self._is_class = isinstance(factory, type)
        self._factory = factory
        self._instance: Any = None
        self._text = ""

    def reset(self, prompt: str, seed: int, columns: Mapping[str, Any]) -> None:
        """Begin the episode.

        Raises:
            EnvironmentFault: the environment failed.
        """
        self._text = prompt
        if not self._is_class:
            return
        self._instance = _called(self._factory)
        if not hasattr(self._instance, "reset"):
            return
        given = {**columns, "prompt": prompt, "seed": seed}
        accepted = inspect.signature(self._instance.reset).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
            given = {name: value for name, value in given.items() if name in accepted}
        _called(self._instance.reset, **given)

    def step(self, answer: str) -> Observation:
        """The reply to ``answer``.

        Raises:
            EnvironmentFault: the environment failed, or returned something else.
        """
        if self._is_class:
            found = _observation(_called(self._instance.step, answer))
        else:
            found = _observation(_called(self._factory, self._text, answer))
        self._text += answer + found.text
        return found


def load_environment(spec: Any, label: str = "--environment") -> Callable[[], Environment]:
    """Environments of ``file.py:NAME``, ``pkg.mod:NAME``, or of a class or function.

    Raises:
        UserError: it does not exist, or has no ``step``.
    """
    target = spec
    if isinstance(spec, str):
        label = f"{label} {spec}"
        if ":" not in spec:
            raise UserError(f"{label}: name it as file.py:NAME or pkg.mod:NAME")
        try:
            target = resolve(spec)
        except UserError as error:
            raise UserError(f"{label}: {error}") from None
    if not callable(target):
        raise UserError(f"{label} is not a class or a function")
    if isinstance(target, type) and not callable(getattr(target, "step", None)):
        near = did_you_mean("step", [n for n in vars(target) if not n.startswith("_")])
        raise UserError(f"{label} has no method step(answer){near}")
    return lambda: Environment(target)


def _called(function: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        result = function(*args, **kwargs)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
    # NOTE BaseException: this is user code, and a thread would swallow SystemExit silently.
    except BaseException as error:
        raise EnvironmentFault(raised(error)) from None


async def _awaited(result: Any) -> Any:
    return await result


def _observation(result: Any) -> Observation:
    if isinstance(result, Mapping):
        result = (result.get("observation"), result.get("reward", 0.0), result.get("done", False))
    if not isinstance(result, tuple) or len(result) != 3:
        raise EnvironmentFault(f"step returned {_shown(result)}; {_RETURNS}")
    text, reward, done = result
    is_number = isinstance(reward, Real) or hasattr(reward, "item")
    if not (text is None or isinstance(text, str)) or not is_number:
        raise EnvironmentFault(f"step returned {_shown(result)}; {_RETURNS}")
    if not math.isfinite(float(reward)):
        raise EnvironmentFault(f"step returned the reward {reward}; {_RETURNS}")
    return Observation(text or "", float(reward), bool(done))


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:80]
