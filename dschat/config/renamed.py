"""Old flags that became part of another, or have no effect: DeepSpeed-Chat's still work, others are
refused in one line with the new form.

Settings that older versions recorded are translated by the same table.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Optional

from dschat.config.errors import did_you_mean

VALUE = "VALUE"
_SWITCHES = ("true", "false")  # `--deepspeed true` names no file


@dataclass(frozen=True)
class Renamed:
    """What became of an old flag."""

    flag: str  # of today, which has the setting
    # The value of that flag, or an item of its list; VALUE is the old flag's. Empty: none, ignored.
    form: str = VALUE
    accepts: Optional[type] = None  # the type of the old flag's values, if it still works
    stays: bool = False  # in records: whether today's flag has the same setting is not known


RENAMED = {
    "offload_optimizer": Renamed("offload", "optimizer"),
    "offload_parameters": Renamed("offload", "params"),
    "offload_params": Renamed("offload", "params"),
    "offload_param": Renamed("offload", "params"),
    "offload_reference_model": Renamed("offload", "reference", accepts=bool),
    "offload_reward_model": Renamed("offload", "reward"),
    "offload_teacher_model": Renamed("offload", "teacher"),
    "offload_training_states": Renamed("offload", "rollout"),
    "print_answers": Renamed("sample_steps", "", accepts=bool),
    "deepspeed": Renamed("deepspeed_config", accepts=str),  # without a value: ignored
    "local_rank": Renamed("deepspeed_config", "", accepts=int),  # set by launchers
    **{
        key: Renamed("deepspeed_config", f"FILE, with fp16.{key}", stays=True)
        for key in ("initial_scale_power", "loss_scale_window")
    },
    "num_padding_at_beginning": Renamed("deepspeed_config", "", accepts=int),
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
    result = {name: value for name, value in values.items() if name not in moved}
    if isinstance(result.get("offload"), bool):
        result["offload"] = ["auto"] if result["offload"] else None
    for name, now in moved.items():
        value, given = values.get(name), result.get(now.flag)
        if value is None or value is False or not now.form:
            continue
        if now.form == VALUE:
            result[now.flag] = given or (None if str(value).lower() in _SWITCHES else value)
        else:
            result[now.flag] = [*(given or ()), now.form.replace(VALUE, str(value))]
    return result


def hint(name: str, names: Collection[str], prefix: str = "") -> str:
    """The end of an error about the unknown flag ``name``: what replaced it, or the closest of
    ``names``.
    """
    now = RENAMED.get(name)
    if now is not None and now.flag in names:
        return f"; it is now --{now.flag} {now.form}"
    return did_you_mean(name, names, prefix)
