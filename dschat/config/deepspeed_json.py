"""Reads and checks the user's DeepSpeed JSON file (``--deepspeed_config``).

1. Settings that a flag decides (batch sizes, accumulation, optimizer, schedule, clipping,
   precision, ZeRO stage) must agree with the flag; a contradiction is an error.
2. ``"auto"`` means dschat's value, or DeepSpeed's default where dschat has none.
3. The file decides everything else: details of ``zero_optimization``, communication, aio, loss
   scaling, profiling, ...
4. Settings that would break dschat's loss sums or make its weights unreadable, and parts of
   DeepSpeed that dschat does not use, are errors.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from dschat.config.errors import UserError, did_you_mean
from dschat.config.fields import read_named

Decided = Mapping[str, tuple[str, tuple[Any, ...]]]  # dotted key -> (flag and value, accepted)

_OURS = {  # checked but not passed to DeepSpeed: dschat accumulates and updates itself
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("optimizer", "scheduler"),
}
_THE_FILES = {
    *("zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *("fp16", "bf16", "data_types", "torch_autocast"),
    *("gradient_clipping", "gradient_allreduce_op", "gradient_predivide_factor"),
    *("prescale_gradients", "managed_gradient_accumulation", "disable_allgather"),
    *("communication_data_type", "seq_parallel_communication_data_type"),
    *("aio", "activation_checkpointing", "hybrid_engine", "checkpoint", "disable_python_gc"),
    *("tensorboard", "wandb", "csv_monitor", "comet", "comms_logger", "flops_profiler", "timers"),
    *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level"),
}
_UNUSED = {  # parts of DeepSpeed, old or new, that dschat does not use; accepted if disabled
    *("amp", "autotuning", "compile", "compression_training", "weight_quantization"),
    *("curriculum_learning", "data_efficiency", "dataloader_drop_last", "elasticity"),
    *("expert_parallel", "use_data_before_expert_parallelism", "pipeline", "tensor_parallel"),
    *("progressive_layer_drop", "sparse_attention", "sparse_gradients"),
}
_OBJECTS = {
    "fp16",
    "bf16",
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
}
_SUMS = "its losses are sums over the tokens of all ranks"
_READS = "rollouts and saving read every rank's own shard from memory"
_MASTERS = "small updates need fp32 master weights"
_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {  # key -> (accepted, why)
    "gradient_allreduce_op": (("mean",), _SUMS),
    "gradient_predivide_factor": ((1,), _SUMS),
    "prescale_gradients": ((False,), _SUMS),
    "managed_gradient_accumulation": ((True,), _SUMS),
    "bf16.check_grad_overflow": ((True,), "it skips steps whose gradient is not finite"),
    "zero_optimization.compute_grad_norm": ((True,), "it reports the norm and skips bad steps"),
    "bf16.bf16_master_weights_and_grads": ((False,), _MASTERS),
    "fp16.fp16_master_weights_and_grads": ((False,), _MASTERS),
    "fp16.auto_cast": ((False,), "--dtype decides"),
    "torch_autocast.enabled": ((False,), "--dtype decides"),
    "hybrid_engine.enabled": ((False,), "it has its own: --enable_hybrid_engine"),
    "zero_force_ds_cpu_optimizer": ((False,), "its AdamW updates shards in CPU memory too"),
    "zero_optimization.offload_param.device": (("none", "cpu"), _READS),
    "zero_optimization.zero_quantized_nontrainable_weights": ((False,), _READS),
    "zero_optimization.cpu_offload": ((False,), "it was replaced by offload_optimizer"),
    "zero_optimization.cpu_offload_param": ((False,), "it was replaced by offload_param"),
}


def read(path: str, where: str) -> dict[str, Any]:
    """The JSON object in ``path``; ``where`` is the start of every error message."""
    text = read_named(path, where, "a JSON file")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: broken JSON at line {error.lineno}: {error.msg}") from None
    if not isinstance(content, dict):
        raise UserError(f"{where}: must be an object of DeepSpeed's settings, as {{...}}")
    return content


def accepted(settings: Mapping[str, Any], where: str, decided: Decided) -> dict[str, Any]:
    """The part of ``settings`` to pass to DeepSpeed, checked against ``decided``, without "auto".

    ``where`` is the start of every error message.

    Raises:
        UserError: a setting is unknown, unused, or contradicts ``decided``.
    """
    for key, value in settings.items():
        if key not in _THE_FILES | _OURS | _UNUSED:
            hint = did_you_mean(key, _THE_FILES | _OURS)
            raise UserError(f"{where}: DeepSpeed has no setting {key}{hint}")
        if key in _UNUSED and not _is_off(value):
            raise UserError(f"{where}: dschat does not use {key}; take it out of the file")
    used = {key: value for key, value in settings.items() if key not in _UNUSED}
    checked = _checked(used, "", where, decided)
    result = {key: value for key, value in checked.items() if key not in _OURS}
    if all(result.get(name, {}).get("enabled") for name in ("fp16", "bf16")):
        raise UserError(f"{where}: fp16 and bf16 are both enabled; choose one")
    zero = result.get("zero_optimization", {})
    for section in ("offload_optimizer", "offload_param"):
        if zero.get(section, {}).get("device") == "none":
            del zero[section]  # so that a section means offload
    return result


def merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """``ours`` with every leaf of ``theirs``."""
    result = dict(ours)
    for key, value in theirs.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def precision(settings: Mapping[str, Any]) -> str | None:
    """The precision in a file: fp16, bf16, fp32; None if it sets none."""
    fp16, bf16 = (settings.get(name, {}).get("enabled") for name in ("fp16", "bf16"))
    if fp16 or bf16:
        return "fp16" if fp16 else "bf16"
    return "fp32" if bf16 is False else None


def _checked(
    settings: Mapping[str, Any], prefix: str, where: str, decided: Decided
) -> dict[str, Any]:
    """``settings`` below ``prefix`` without "auto", empty objects and the ZeRO stage."""
    result: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            if below := _checked(value, f"{name}.", where, decided):
                result[key] = below
        elif name in _OBJECTS and value not in ("auto", None):
            raise UserError(f"{where}: {name} must be an object, as {{...}}")
        elif value != "auto" and name not in _OBJECTS:
            _check(name, value, where, decided)
            if name != "zero_optimization.stage":
                result[key] = value
    return result


def _check(name: str, value: Any, where: str, decided: Decided) -> None:
    shown = f"{where}: {name} {json.dumps(value)}"
    if name in decided:
        flag, allowed = decided[name]
        if not any(_same(value, one) for one in allowed):
            raise UserError(
                f'{shown} contradicts {flag}; make them agree, or write "auto" in the file'
            )
    elif name in _FIXED:
        allowed, why = _FIXED[name]
        if not any(_same(value, one) for one in allowed):
            needed = " or ".join(map(json.dumps, allowed))
            raise UserError(f"{shown}: dschat needs {needed}, for {why}")
    elif name.partition(".")[0] in ("optimizer", "scheduler"):
        raise UserError(
            f'{shown}: dschat creates its own AdamW and schedule; write "auto" or take it out'
        )


def _same(value: Any, expected: Any) -> bool:
    if isinstance(value, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(map(_same, value, expected))
    numbers = all(
        isinstance(v, (int, float)) and not isinstance(v, bool) for v in (value, expected)
    )
    return math.isclose(value, expected, rel_tol=1e-9) if numbers else value == expected


def _is_off(value: Any) -> bool:
    return value in (False, None) or (isinstance(value, Mapping) and value.get("enabled") is False)
