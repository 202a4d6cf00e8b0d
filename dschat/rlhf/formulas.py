"""Finds the formulas that flags name: those of `dschat.losses`, and the user's, file.py:NAME.

A user's function is tried on a few zeros before weights load.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dschat import losses
from dschat.config import UserError
from dschat.config.errors import require
from dschat.user_code.calls import raised
from dschat.user_code.imports import load

_GROUP_ESTIMATORS = {
    "grpo": losses.grpo_advantages,
    "dr_grpo": losses.dr_grpo_advantages,
    "rloo": losses.rloo_advantages,
}


@cache
def group_estimator(name: str) -> Callable[..., Tensor] | None:
    """The function of ``--advantage_estimator`` that takes scores, as `losses.grpo_advantages`
    does; None for an estimator that takes rewards of actions.

    Raises:
        UserError: the user's cannot be found, or does not fit.
    """
    if ":" not in name:
        return _GROUP_ESTIMATORS.get(name)
    scores, groups = torch.zeros(4), torch.tensor([0, 0, 1, 1])
    stats = losses.group_stats(scores, groups, 2)
    return _own("advantage_estimator", name, losses.grpo_advantages, scores, groups, stats)


@cache
def policy_loss(name: str) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """The function of ``--policy_loss``; raises as `group_estimator` does."""
    if ":" not in name:
        return losses.POLICY_LOSSES[name]
    zeros = torch.zeros(2, 3)
    given = (zeros.clone().requires_grad_(), zeros, zeros, zeros == 0, (0.2, 0.2))
    return _own("policy_loss", name, losses.policy_loss, *given, weights=zeros)


def _own(flag: str, spec: str, like: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The function ``spec``, which takes and returns for these arguments what ``like`` does."""
    label = f"--{flag} {spec}"
    function = load(spec, label)
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        names = ", ".join([*list(inspect.signature(like).parameters)[: len(args)], *kwargs])
        raise UserError(f"{label} must be a function of ({names})") from None
    try:
        found = function(*args, **kwargs)
    except Exception as error:
        raise UserError(f"{label} {raised(error)}; fix it") from None
    wanted = _form(like(*args, **kwargs))
    require(_form(found) == wanted, f"{label} must return {wanted}; see {like.__name__}")
    return function


def _form(value: Any) -> str:
    if isinstance(value, tuple):
        return " and ".join(map(_form, value))
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {[*value.shape]}{' with a gradient' * value.requires_grad}"
