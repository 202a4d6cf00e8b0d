"""Finds the formulas that flags name: those of `dschat.losses`, and the user's, file.py:NAME.

A user's function has the signature of those, and is tried on a few zeros before weights load.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dschat.config import UserError
from dschat.config.errors import require
from dschat.losses import (
    POLICY_LOSSES,
    dr_grpo_advantages,
    group_stats,
    grpo_advantages,
    rloo_advantages,
)
from dschat.user_code.calls import raised
from dschat.user_code.imports import load

_GROUP_ESTIMATORS = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
}


@cache
def group_estimator(name: str) -> Callable[..., Tensor] | None:
    """The function of ``--advantage_estimator`` that takes scores, as `grpo_advantages` does; None
    for an estimator that takes rewards of actions.

    Raises:
        UserError: the user's cannot be found, or does not fit.
    """
    if ":" not in name:
        return _GROUP_ESTIMATORS.get(name)
    zeros, groups = torch.zeros(4), torch.tensor([0, 0, 1, 1])
    given = {"scores": zeros, "group_ids": groups, "stats": group_stats(zeros, groups, 2)}
    label = f"--advantage_estimator {name}"
    function, advantages = _tried(name, label, given)
    fits = isinstance(advantages, Tensor) and advantages.shape == zeros.shape
    require(fits, f"{label} must return a tensor with an advantage for each of the scores")
    return function


@cache
def policy_loss(name: str) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """The function of ``--policy_loss``; raises as `group_estimator` does."""
    if ":" not in name:
        return POLICY_LOSSES[name]
    zeros = torch.zeros(2, 3)
    given = {"logprobs": zeros.clone().requires_grad_(), "old_logprobs": zeros}
    given |= {"advantages": zeros, "answer_mask": zeros == 0}
    label = f"--policy_loss {name}"
    function, result = _tried(name, label, given | {"cliprange": (0.2, 0.2)}, {"weights": zeros})
    fits = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
    is_scalar = fits and isinstance(result[0], Tensor) and result[0].shape == ()
    require(
        is_scalar and result[0].requires_grad,
        f"{label} must return the sum of the losses, a tensor with a gradient, and a dict of sums",
    )
    return function


def _tried(
    spec: str, label: str, given: Mapping[str, Any], named: Mapping[str, Any] | None = None
) -> tuple[Callable[..., Any], Any]:
    """The function ``spec``, and what it returns for ``given`` by position and ``named``."""
    function, named = load(spec, label), named or {}
    try:
        inspect.signature(function).bind(*given.values(), **named)
    except (TypeError, ValueError):
        form = ", ".join([*given, *(f"*, {name}" for name in named)])
        raise UserError(f"{label} must be a function of ({form})") from None
    try:
        return function, function(*given.values(), **named)
    except Exception as error:
        raise UserError(f"{label} {raised(error)}; fix it") from None
