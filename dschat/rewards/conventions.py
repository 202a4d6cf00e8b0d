"""Calls reward functions as the trainer does that they were written for.

A function's parameters tell which trainer that is. TRL's functions need no adapter:
`dschat.rewards.samples.GIVEN` has the names of their parameters, `Logs` the names that are about
the run.

No torch here: worker processes import this module and should start fast.
"""

import asyncio
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

TRL = {"completions", "completion_ids"}  # a function that takes one of them was written for TRL
_VERL = {"data_source", "solution_str", "ground_truth"}
_VERL_BATCH = {f"{name}s" for name in _VERL}
_OPENRLHF = ["queries", "prompts", "labels"]

Column = Sequence[Any] | None
Calls = list[dict[str, Any]]  # the arguments of each call


def is_async(function: Callable[..., Any]) -> bool:
    """Whether it is declared with ``async def``."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 an instance may define an async one
    )


def adapted(
    function: Callable[..., Any], options: Mapping[str, Any] | None = None
) -> tuple[Callable[..., Any], str]:
    """``function``, or one that calls it as another trainer does; and that trainer's name, or "".

    ``options``: arguments of every call.
    """
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return function, ""
    calls: Callable[..., Calls]
    if set(names) >= _VERL:
        trainer, calls = "verl", _verl_calls
    elif set(names) >= _VERL_BATCH:
        trainer, calls = "verl", _verl_batch
    elif names[:3] == _OPENRLHF:
        trainer, calls = "OpenRLHF", _openrlhf_calls
    else:
        return function, "TRL" if TRL & {*names} else ""
    given = options or {}

    def values_of(results: list[Any]) -> Any:
        values = results if calls is _verl_calls else results[0]
        if trainer == "verl" and isinstance(values, list):
            return [value["score"] if isinstance(value, dict) else value for value in values]
        return values["rewards"] if isinstance(values, dict) else values

    def call(**arguments: Any) -> Any:
        return values_of([function(**each, **given) for each in calls(**arguments)])

    async def call_async(**arguments: Any) -> Any:
        waiting = [function(**each, **given) for each in calls(**arguments)]
        return values_of(await asyncio.gather(*waiting))

    made: Any = call_async if is_async(function) else call
    made.__signature__ = inspect.signature(calls)
    return made, trainer


def _verl_calls(
    answers: Sequence[str],
    reference: Column = None,
    reward_model: Column = None,
    data_source: Column = None,
    extra_info: Column = None,
) -> Calls:
    """A call for each answer; it returns a number, or a dict with ``score``.

    ``reward_model``: a column of verl's data, whose ``ground_truth`` is the reference.
    """
    calls = []
    for i, answer in enumerate(answers):
        truth = None if reference is None else reference[i]
        if reward_model is not None and isinstance(reward_model[i], dict):
            truth = reward_model[i].get("ground_truth", truth)
        source = data_source[i] if data_source else ""
        call = {"data_source": source, "solution_str": answer, "ground_truth": truth}
        calls.append(call | {"extra_info": extra_info[i] if extra_info else None})
    return calls


@functools.wraps(_verl_calls)
def _verl_batch(**columns: Any) -> Calls:
    """One call, for all answers."""
    calls = _verl_calls(**columns)
    return [{f"{name}s": [call[name] for call in calls] for name in (*_VERL, "extra_info")}]


def _openrlhf_calls(
    _prompts: Sequence[str],
    _queries: Sequence[str],
    label: Column = None,
    labels: Column = None,
    reference: Column = None,
) -> Calls:
    """One call; a query is prompt + answer. It returns one number per sample, or a dict with them
    as ``rewards``.
    """
    known = next((c for c in (labels, label, reference) if c is not None), [""] * len(_prompts))
    return [{"queries": list(_queries), "prompts": list(_prompts), "labels": list(known)}]


class Logs:
    """What TRL's functions get of a run, under TRL's names, and what this rank's calls have logged.

    Attributes:
        trainer_state: ``global_step``, the iterations done, and ``max_steps``.
        metrics: name -> values of ``log_metric``.
        extra: column -> values of ``log_extra``, in the order of the calls.
    """

    def __init__(self) -> None:
        self.trainer_state = SimpleNamespace(global_step=0, max_steps=0)
        self.clear()

    def arguments(self, accepted: Mapping[str, inspect.Parameter], can_log: bool) -> dict[str, Any]:
        """The arguments that a function with these parameters takes; one of TRL's takes all as
        ``**kwargs``. ``can_log``: it does not run in another process.
        """
        takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        takes_all = takes_any and bool(TRL & {*accepted})
        names = ("trainer_state", *(("log_metric", "log_extra") if can_log else ()))
        return {name: getattr(self, name) for name in names if takes_all or name in accepted}

    def clear(self) -> None:
        self.metrics = defaultdict[str, list[float]](list)
        self.extra = defaultdict[str, list[Any]](list)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name].append(float(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        self.extra[column].extend(values)
