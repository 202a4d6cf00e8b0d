"""Finds the functions that ``--advantage_estimator`` and ``--policy_loss`` name: of
`dschat.losses`, or the user's, file.py:NAME.
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
from dschat.config.methods import ESTIMATORS, POLICY_LOSSES
from dschat.user_code.calls import load, raised
from dschat.user_code.surroundings import restored


@cache
def estimator(name: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """The function of ``--advantage_estimator``, and the names of what it takes, in order.

    Raises:
        UserError: the user's cannot be found, or does not fit.
    """
    if ":" not in name:
        function = getattr(losses.advantages, ESTIMATORS[name].function)
        parameters = inspect.signature(function).parameters.values()
        return function, tuple(p.name for p in parameters if p.default is p.empty)
    scores, groups = torch.zeros(4), torch.tensor([0, 0, 1, 1])
    stats = losses.group_stats(scores, groups, 2)
    own = _own("advantage_estimator", name, losses.grpo_advantages, scores, groups, stats)
    return own, ("scores", "group_ids", "stats")


@cache
def policy_loss(name: str) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """The function of ``--policy_loss``; raises as `estimator` does."""
    if ":" not in name:
        return getattr(losses.policy, POLICY_LOSSES[name].function)
    zeros = torch.zeros(2, 3)
    given = (zeros.clone().requires_grad_(), zeros, zeros, zeros == 0, (0.2, 0.2))
    return _own("policy_loss", name, losses.ppo_loss, *given, weights=zeros)


def _own(flag: str, spec: str, like: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The function ``spec``, which takes and returns for these arguments what ``like`` does."""
    label = f"--{flag} {spec}"
    function = restored(label)(load(spec, label))
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
