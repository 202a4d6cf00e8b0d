"""Flags of DeepSpeed: offload, and the user's own settings file.

Part of `dschat.config.CommonConfig`. Methods name a trained model by the prefix of its flags:
``"actor"``, ``"critic"``, or ``""`` in steps 1 and 2. No torch or DeepSpeed here: ``--help``
answers before either loads.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Optional

from dschat.config import deepspeed_json
from dschat.config.errors import require
from dschat.config.fields import flag, speed_flag
from dschat.config.lora import QuantizedConfig

# --lr_scheduler_type -> DeepSpeed's name of the same schedule.
_SCHEDULES: dict[str, tuple[str, ...]] = {
    "cosine": ("WarmupCosineLR",),
    "linear": ("WarmupDecayLR",),
    "constant_with_warmup": ("WarmupLR",),
}
_MEMORY = ("cpu", "nvme")
FROZEN = ("reference", "reward", "teacher")


def _flag_of(model: str, name: str) -> str:
    """``actor_zero_stage``, or ``zero_stage`` in steps 1 and 2."""
    return f"{model}_{name}" if model else name


@dataclass
class DeepSpeedConfig(QuantizedConfig):
    """DeepSpeed."""

    deepspeed_config: Optional[str] = flag(
        None,
        "JSON file of DeepSpeed settings. A setting that has a flag (batch sizes, optimizer, "
        'schedule, clipping, precision, ZeRO stage) must agree with it or be "auto"; all others '
        "are the file's. --dtype auto follows the file.",
        reads="files",
    )
    offload: Optional[list[str]] = speed_flag(
        None,
        "Keep in CPU memory: optimizer, params (ZeRO-3), activations, reference, reward, teacher, "
        "frozen (these three), rollout (states, in rollouts); no value or auto: the first two.",
        short=True,
        nargs="*",
    )

    # Flag prefixes of the models that this step trains, and the values that --offload has here.
    deepspeed_models: ClassVar[tuple[str, ...]] = ("",)
    offload_values: ClassVar[tuple[str, ...]] = (*("auto", "optimizer", "params", "activations"),)

    def deepspeed_overrides(self, model: str = "", world_size: int | None = None) -> dict[str, Any]:
        """Settings of the file of ``model``, which override dschat's.

        Without ``world_size``, a ``train_batch_size`` in the file is not checked.

        Raises:
            UserError: the file is missing, broken or contradicts a flag.
        """
        path, origin = self.deepspeed_file(model)
        if not path:
            return {}
        if path not in self._contents:
            self._contents[path] = deepspeed_json.read(path, origin)
        decided = self._decided(model, world_size)
        return deepspeed_json.accepted(self._contents[path], origin, decided)

    def deepspeed_file(self, model: str) -> tuple[str, str]:
        """The file of ``model``, and ``--deepspeed_config FILE``, the start of an error message;
        both empty without a file.
        """
        own = _flag_of(model, "deepspeed_config")
        name = own if getattr(self, own) else "deepspeed_config"
        path = getattr(self, name) or ""
        return path, f"--{name} {path}" if path else ""

    @property
    def training_dtype(self) -> str:
        """``dtype``; if that is auto, the precision of the DeepSpeed files, else auto."""
        dtype = self._flag("", "dtype")
        return self._precision_of_files() if dtype == "auto" else dtype

    def _precision_of_files(self) -> str:
        overrides = (self.deepspeed_overrides(m) for m in self.deepspeed_models)
        precisions = {p for p in map(deepspeed_json.precision, overrides) if p is not None}
        require(
            len(precisions) < 2,
            f"the DeepSpeed files ask for {' and '.join(sorted(map(str, precisions)))}; all models "
            "train in one precision: set --dtype",
        )
        return precisions.pop() if precisions else "auto"

    def offloads_optimizer(self, model: str = "") -> bool:
        """Whether the optimizer states of ``model`` are offloaded (to CPU, or as its file says)."""
        return self._keeps("optimizer") or self._file_offloads(model, "offload_optimizer")

    def offloads_parameters(self, model: str = "") -> bool:
        """Whether the parameter shards of ``model`` are offloaded; ZeRO-3 only."""
        return self._flag(model, "zero_stage") == 3 and (
            self._keeps("params") or self._file_offloads(model, "offload_param")
        )

    def offloads(self, part: str) -> bool:
        """Whether ``--offload`` names ``part``, alone or among the frozen models."""
        return not {part, "frozen" if part in FROZEN else part}.isdisjoint(self.offload or ())

    def _keeps(self, part: str) -> bool:
        return self.offloads(part) or self.offloads("auto")

    def validate_deepspeed(self) -> None:
        stages = [f"--{_flag_of(m, 'zero_stage')}" for m in self.deepspeed_models]
        sharded = [m for m in self.deepspeed_models if self._flag(m, "zero_stage") == 3]
        for part in self.offload or ():
            require(
                part in self.offload_values,
                f"--offload {part}: choose from {', '.join(self.offload_values)} (train.py: "
                "--step3.offload has more)",
            )
        require(
            not self.offloads("params") or bool(sharded),
            f"--offload params needs {' or '.join(stages)} 3: lower stages do not shard parameters",
        )
        flags = [_flag_of(m, "gradient_checkpointing") for m in self.deepspeed_models]
        require(
            not self.offloads("activations") or any(getattr(self, flag) for flag in flags),
            f"--offload activations needs --{' or --'.join(flags)}",
        )
        for model in self.deepspeed_models:
            require(
                not self._file_offloads(model, "offload_param") or model in sharded,
                f"{self.deepspeed_file(model)[1]}: offload_param needs "
                f"--{_flag_of(model, 'zero_stage')} 3",
            )
        self._precision_of_files()
        self.validate_quantization()

    def _flag(self, model: str, name: str) -> Any:
        return getattr(self, _flag_of(model, name))

    @cached_property
    def _contents(self) -> dict[str, dict[str, Any]]:
        """File -> the settings in it. Read once: all checks and engines see the same."""
        return {}

    def _file_offloads(self, model: str, section: str) -> bool:
        """Whether the file of ``model`` turns on offload in this section."""
        zero = self.deepspeed_overrides(model).get("zero_optimization", {})
        return zero.get(section, {}).get("device") in _MEMORY

    def _decided(self, model: str, world_size: int | None) -> deepspeed_json.Decided:
        """DeepSpeed settings of ``model`` that flags decide."""
        config: Any = self  # the step's dataclass has the other flags
        micro = "per_device_training_batch_size" if model else "per_device_train_batch_size"
        flags = {
            "zero_optimization.stage": _flag_of(model, "zero_stage"),
            "gradient_clipping": "max_grad_norm",
            "gradient_accumulation_steps": "gradient_accumulation_steps",
            "train_micro_batch_size_per_gpu": micro,
            "optimizer.params.weight_decay": _flag_of(model, "weight_decay"),
            "optimizer.params.betas": "adam_betas",
            "scheduler.params.warmup_num_steps": "num_warmup_steps",
        }
        decided: dict[str, tuple[str, tuple[Any, ...]]] = {
            key: (f"--{name} {value}", (value,))
            for key, name in flags.items()
            if (value := getattr(self, name)) is not None
        }
        rate = config.rate_of(model)
        decided["optimizer.params.lr"] = f"--{_flag_of(model, 'learning_rate')} {rate}", (rate,)
        if world_size is not None:
            size = (config.mini_batch_size if model else config.global_batch_size)(world_size)
            product = f"--{micro} x --gradient_accumulation_steps x {world_size} processes"
            decided["train_batch_size"] = (f"{product} = {size}", (size,))
        schedule = config.schedule
        accepted = _SCHEDULES.get(schedule, ())
        decided["scheduler.type"] = (f"--lr_scheduler_type {schedule}", accepted)
        if self._flag(model, "zero_stage") == 3 and (
            model or getattr(self, "loads_reference", False)
        ):
            # DeepSpeed creates these groups for the first model and fails at the second.
            reason = "a step with several models (DeepSpeed supports one)"
            decided["zero_optimization.zero_hpz_partition_size"] = (reason, (1,))
        decided["optimizer.type"] = ("dschat's optimizer, AdamW", ("AdamW", "Adam"))
        if config.dtype != "auto":
            for name in ("bf16", "fp16"):
                decided[f"{name}.enabled"] = (f"--dtype {config.dtype}", (config.dtype == name,))
        for section, part in (("offload_optimizer", "optimizer"), ("offload_param", "params")):
            if self._keeps(part):
                origin = f"--offload {' '.join(self.offload or ())}"
                decided[f"zero_optimization.{section}.device"] = (origin, _MEMORY)
        return decided
