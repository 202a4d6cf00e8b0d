"""Reward functions written for other trainers, called as there. Their parameters tell them apart.

TRL's functions need nothing of this: their names are in `dschat.rewards.samples.GIVEN`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_VERL = {"data_source", "solution_str", "ground_truth"}
_OPENRLHF = ["queries", "prompts", "labels"]

Column = Sequence[Any] | None


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
    if set(names) >= _VERL:
        return VerlFunction(function, options or {}), "verl"
    if names[:3] == _OPENRLHF:
        return OpenRLHFFunction(function, options or {}), "OpenRLHF"
    return function, "TRL" if "completions" in names else ""


class VerlFunction:
    """Calls ``compute_score(data_source, solution_str, ground_truth, extra_info)`` for each answer.
    It returns a number, or a dict with ``score``.
    """

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._function, self._options = function, options

    def __call__(
        self,
        answers: Sequence[str],
        reference: Column = None,
        reward_model: Column = None,
        data_source: Column = None,
        extra_info: Column = None,
    ) -> list[Any]:
        """``reward_model``: a column of verl's data, whose ``ground_truth`` is the reference."""
        scores = []
        for i, answer in enumerate(answers):
            truth = None if reference is None else reference[i]
            if reward_model is not None and isinstance(reward_model[i], dict):
                truth = reward_model[i].get("ground_truth", truth)
            score = self._function(
                data_source=data_source[i] if data_source else "",
                solution_str=answer,
                ground_truth=truth,
                extra_info=extra_info[i] if extra_info else None,
                **self._options,
            )
            scores.append(score["score"] if isinstance(score, dict) else score)
        return scores


class OpenRLHFFunction:
    """Calls ``reward_func(queries, prompts, labels)``; a query is prompt + answer. It returns one
    number per sample, or a dict with them as ``rewards``.
    """

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._function, self._options = function, options

    def __call__(
        self,
        prompts: Sequence[str],
        answers: Sequence[str],
        label: Column = None,
        labels: Column = None,
        reference: Column = None,
    ) -> Any:
        known = next((c for c in (labels, label, reference) if c is not None), [""] * len(prompts))
        queries = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        found = self._function(queries, list(prompts), list(known), **self._options)
        return found["rewards"] if isinstance(found, dict) else found
