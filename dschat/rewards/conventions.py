"""Reward functions written for other trainers, called as there. Their parameters tell them apart.

TRL's functions need no adapter: `dschat.rewards.samples.GIVEN` has their names, `Logs` those that
are about the run.
"""

import asyncio
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

_VERL = {"data_source", "solution_str", "ground_truth"}
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
    elif names[:3] == _OPENRLHF:
        trainer, calls = "OpenRLHF", _openrlhf_calls
    else:
        return function, "TRL" if "completions" in names else ""
    given = options or {}

    def values_of(results: list[Any]) -> Any:
        if trainer == "verl":
            return [found["score"] if isinstance(found, dict) else found for found in results]
        return results[0]["rewards"] if isinstance(results[0], dict) else results[0]

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


def _openrlhf_calls(
    prompts: Sequence[str],
    answers: Sequence[str],
    label: Column = None,
    labels: Column = None,
    reference: Column = None,
) -> Calls:
    """One call; a query is prompt + answer. It returns one number per sample, or a dict with them
    as ``rewards``.
    """
    known = next((c for c in (labels, label, reference) if c is not None), [""] * len(prompts))
    queries = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    return [{"queries": queries, "prompts": list(prompts), "labels": list(known)}]


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
        """Those that a function with these parameters takes; one of TRL's takes all as
        ``**kwargs``. ``can_log``: it does not run in another process.
        """
        takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        takes_all = takes_any and "completions" in accepted
        names = ("trainer_state", *(("log_metric", "log_extra") if can_log else ()))
        return {name: getattr(self, name) for name in names if takes_all or name in accepted}

    def clear(self) -> None:
        self.metrics = defaultdict[str, list[float]](list)
        self.extra = defaultdict[str, list[Any]](list)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name].append(float(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        self.extra[column].extend(values)
