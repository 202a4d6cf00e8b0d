"""Old flags that became part of another, or have no effect: DeepSpeed-Chat's still work, others are
refused in one line with the new form.

Settings that older versions recorded are translated by the same table.
"""

from collections.abc import Collection, Mapping
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
    result: dict[str, Any] = {}
    offload, file, best = (values.get(name) for name in ("offload", "deepspeed", "keep_best"))
    if isinstance(offload, bool):
        result["offload"] = ["auto"] if offload else None
    if isinstance(file, str) and file.lower() not in ("true", "false"):
        result["deepspeed_config"] = values.get("deepspeed_config") or file
    if isinstance(best, bool):
        result["keep_best"] = (values.get("best_metric") or "eval/score") if best else None
    both, *sides = (values.get(f"cliprange{side}") for side in ("", "_low", "_high"))
    if any(sides):
        usual = [both] * 2 if both else CLIPRANGES[values.get("policy_loss", "ppo")]
        result["cliprange"] = [given or side for given, side in zip(sides, usual, strict=True)]
    elif isinstance(both, float):
        result["cliprange"] = [both]
    return result


def hint(name: str, names: Collection[str], prefix: str = "") -> str:
    """The end of an error about the unknown flag ``name``: what replaced it, or the closest of
    ``names``.
    """
    now = RENAMED.get(name)
    if now is not None and now.flag in names:
        return f"; it is now --{now.flag} {now.form}"
    return did_you_mean(name, names, prefix)
