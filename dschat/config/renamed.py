"""Old flags that became part of another, or have no effect: DeepSpeed-Chat's still work, others are
refused in one line with the new form.

Settings that older versions recorded are translated by the same table.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Optional

from dschat.config.algorithm import CLIPRANGES
from dschat.config.data import ROLES
from dschat.config.errors import did_you_mean


@dataclass(frozen=True)
class Renamed:
    """What became of an old flag."""

    flag: str  # of today, which has the setting
    form: str  # what follows that flag, in messages
    accepts: Optional[type] = None  # the type of the old flag's values, if it still works
    is_item: bool = False  # whether ``form`` is an item of today's list, where the old flag is on
    stays: bool = False  # in records: whether today's flag has the same setting is not known


def _offloads(part: str, accepts: Optional[type] = None) -> Renamed:
    return Renamed("offload", part, accepts, is_item=True)


_SCALING = ("initial_scale_power", "loss_scale_window")
RENAMED = {
    **{f"{role}_column": Renamed("columns", f"{role}=COLUMN", is_item=True) for role in ROLES},
    "offload_optimizer": _offloads("optimizer"),
    "offload_parameters": _offloads("params"),
    "offload_params": _offloads("params"),
    "offload_param": _offloads("params"),
    "offload_reference_model": _offloads("reference", accepts=bool),
    "offload_reward_model": _offloads("reward"),
    "offload_teacher_model": _offloads("teacher"),
    "offload_training_states": _offloads("rollout"),
    "cliprange_low": Renamed("cliprange", "LOW HIGH"),
    "cliprange_high": Renamed("cliprange", "LOW HIGH"),
    "best_metric": Renamed("keep_best", "METRIC"),
    "rollout_is_min": Renamed("rollout_is_range", "MIN MAX"),
    "rollout_is_max": Renamed("rollout_is_range", "MIN MAX"),
    "add_eot_token": Renamed("eot_token", "TOKEN", accepts=bool),
    "unsupervised_dataset_config_name": Renamed(
        "unsupervised_dataset_name", "NAME:CONFIG", accepts=str
    ),
    "deepspeed": Renamed("deepspeed_config", "FILE", accepts=str),
    **{k: Renamed("deepspeed_config", f"FILE, with fp16.{k}", stays=True) for k in _SCALING},
    # without effect
    "print_answers": Renamed("sample_steps", "N", accepts=bool),
    "num_padding_at_beginning": Renamed("deepspeed_config", "FILE", accepts=int),
    "local_rank": Renamed("deepspeed_config", "FILE", accepts=int),  # set by launchers
}


def accepted(names: Collection[str]) -> dict[str, type]:
    """Old flags that a dataclass with fields ``names`` accepts, and the type of their values."""
    return {
        old: now.accepts
        for old, now in RENAMED.items()
        if now.accepts is not None and now.flag in names
    }


def translated(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` by the flags of today."""
    moved = {name: now for name, now in RENAMED.items() if not now.stays}
    result = {name: value for name, value in values.items() if name not in moved} | _merged(values)
    for name, now in moved.items():
        if now.is_item and values.get(name):
            item = now.form.replace("COLUMN", str(values[name]))
            result[now.flag] = [*(result.get(now.flag) or ()), item]
    return result


def _merged(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of today that were several flags, or had another type."""
    new: dict[str, Any] = {}
    old: Callable[[str], Any] = values.get
    if isinstance(old("offload"), bool):
        new["offload"] = ["auto"] if old("offload") else None
    if isinstance(old("deepspeed"), str) and old("deepspeed").lower() not in ("true", "false"):
        new["deepspeed_config"] = old("deepspeed_config") or old("deepspeed")
    if isinstance(old("keep_best"), bool):
        new["keep_best"] = (old("best_metric") or "eval/score") if old("keep_best") else None
    if old("add_eot_token") is not None:
        new["eot_token"] = (old("eot_token") or "<|endoftext|>") if old("add_eot_token") else None
    if old("unsupervised_dataset_name") and old("unsupervised_dataset_config_name"):
        names = old("unsupervised_dataset_name"), old("unsupervised_dataset_config_name")
        new["unsupervised_dataset_name"] = ":".join(names)
    both, low, high = (old(f"cliprange{side}") for side in ("", "_low", "_high"))
    if low or high:
        sides = [both] * 2 if both else CLIPRANGES[old("policy_loss") or "ppo"]
        new["cliprange"] = [low or sides[0], high or sides[1]]
    elif isinstance(both, float):
        new["cliprange"] = [both]
    low, high = values.get("rollout_is_min", 0.5), old("rollout_is_max")
    if low != 0.5 or high:
        new["rollout_is_range"] = [low, high or (5.0 if old("rollout_is") == "icepop" else 2.0)]
    return new


def hint(name: str, names: Collection[str], prefix: str = "") -> str:
    """The end of an error about the unknown flag ``name``: what replaced it, or the closest of
    ``names``.
    """
    now = RENAMED.get(name)
    if now is not None and now.flag in names:
        return f"; it is now --{now.flag} {now.form}"
    return did_you_mean(name, names, prefix)
