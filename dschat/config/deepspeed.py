"""The knobs of DeepSpeed that all three steps share, and what they say about each trained model.

They are part of `dschat.config.CommonConfig`. A model is named by the prefix of its flags:
``actor``, ``critic``, or nothing in steps 1 and 2. It must not know torch or DeepSpeed.
"""

from dataclasses import dataclass
from typing import Any, Optional

from dschat.config import deepspeed_json
from dschat.config.errors import require
from dschat.config.fields import flag

# DeepSpeed's names of the schedules that are transformers'.
_SCHEDULES = {
    "cosine": ("WarmupCosineLR",),
    "linear": ("WarmupDecayLR",),
    "constant_with_warmup": ("WarmupLR",),
}
_MEMORY = ("cpu", "nvme")


@dataclass
class DeepSpeedConfig:
    """Where weights and optimizer states lie, loss scaling, and the user's own settings."""

    deepspeed_config: Optional[str] = flag(
        None,
        "JSON file of DeepSpeed settings. What a flag decides (batch sizes, optimizer, schedule, "
        'clipping, precision, ZeRO stage) must agree with the flag or be "auto", which means '
        "dschat's value; everything else the file decides. --dtype auto follows the file.",
    )
    deepspeed: Optional[str] = flag(
        None,
        "Accepted from other scripts: alone it changes nothing, with a FILE it is "
        "--deepspeed_config.",
        nargs="?",
        const="true",
    )
    offload: bool = flag(
        False, "--offload_optimizer and, for a model under ZeRO-3, --offload_parameters."
    )
    offload_optimizer: bool = flag(
        False,
        "Keep optimizer states and fp32 master weights in CPU memory, and update them there; "
        "ZeRO stages 0 and 1 become 2.",
    )
    offload_parameters: bool = flag(
        False,
        "Keep ZeRO-3's shards of trained models in CPU memory; each layer comes when it computes.",
        aliases=["--offload_params", "--offload_param"],
    )
    initial_scale_power: Optional[int] = flag(
        None, "fp16: the loss scale starts at 2 to this power; default 16."
    )
    loss_scale_window: Optional[int] = flag(
        None, "fp16: steps without overflow before the loss scale doubles; default 100."
    )

    deepspeed_models = ("",)  # of this step, by the prefix of their flags; no annotation: no knob

    def deepspeed_overrides(self, model: str = "", world_size: int | None = None) -> dict[str, Any]:
        """What replaces dschat's own DeepSpeed settings of ``model``: its file's, and loss scaling.

        Without ``world_size``, a ``train_batch_size`` in the file goes unchecked. Raises
        ``UserError`` for a file that is missing, broken or contradicts a flag.
        """
        name, path = self._deepspeed_file(model)
        overrides: dict[str, Any] = {}
        if path:
            settings = deepspeed_json.read(path, f"--{name}")
            decided = self._decided(model, world_size)
            overrides = deepspeed_json.accepted(settings, f"--{name} {path}", decided)
        for knob in ("initial_scale_power", "loss_scale_window"):
            if getattr(self, knob) is not None:
                scale = {"fp16": {knob: getattr(self, knob)}}
                overrides = deepspeed_json.merged(overrides, scale)
        return overrides

    def deepspeed_origin(self, model: str = "") -> str:
        """``--deepspeed_config FILE``, to open a message with; empty where there is no file."""
        name, path = self._deepspeed_file(model)
        return f"--{name} {path}" if path else ""

    @property
    def training_dtype(self) -> str:
        """``dtype``; where that is auto, what the DeepSpeed files ask for, if anything."""
        if self.dtype != "auto":
            return self.dtype
        asked = {
            deepspeed_json.precision(self.deepspeed_overrides(m)) for m in self.deepspeed_models
        }
        asked.discard(None)
        require(
            len(asked) < 2,
            f"the DeepSpeed files ask for {' and '.join(sorted(map(str, asked)))}; all train in "
            "one precision: set --dtype",
        )
        return asked.pop() if asked else "auto"

    def offloads_optimizer(self, model: str = "") -> bool:
        """Whether the optimizer of ``model`` lives in CPU memory (or where its file says)."""
        return self.offload or self.offload_optimizer or self._asks(model, "offload_optimizer")

    def offloads_parameters(self, model: str = "") -> bool:
        """Whether the shards of ``model`` live in CPU memory; only ZeRO-3 has shards."""
        asked = self.offload or self.offload_parameters or self._asks(model, "offload_param")
        return asked and self._own(model, "zero_stage") == 3

    def validate_deepspeed(self) -> None:
        """Raise ``UserError`` (flag and remedy in one line) for the first knob that cannot work."""
        stages = [f"--{m}_zero_stage".replace("--_", "--") for m in self.deepspeed_models]
        sharded = [m for m in self.deepspeed_models if self._own(m, "zero_stage") == 3]
        require(
            not self.offload_parameters or bool(sharded),
            f"--offload_parameters needs {' or '.join(stages)} 3: below it every process computes "
            "with whole parameters",
        )
        for model in self.deepspeed_models:
            require(
                not self._asks(model, "offload_param") or model in sharded,
                f"{self.deepspeed_origin(model)}: offload_param needs "
                f"{'--' + model + '_zero_stage' if model else '--zero_stage'} 3",
            )
        scale, window = self.initial_scale_power, self.loss_scale_window
        dtype = self.training_dtype
        require(
            scale is None or 0 <= scale <= 32,
            f"--initial_scale_power {scale} must be in [0, 32]",
        )
        require(window is None or window >= 1, f"--loss_scale_window {window} must be at least 1")
        require(
            (scale is None and window is None) or dtype == "fp16",
            "--initial_scale_power and --loss_scale_window are for --dtype fp16",
        )

    def _own(self, model: str, knob: str) -> Any:
        return getattr(self, f"{model}_{knob}" if model else knob)

    def _deepspeed_file(self, model: str) -> tuple[str, str | None]:
        """The flag and the file of ``model``."""
        own = f"{model}_deepspeed_config"
        if model and getattr(self, own):
            return own, getattr(self, own)
        if self.deepspeed_config or (self.deepspeed or "true").lower() in ("true", "false"):
            return "deepspeed_config", self.deepspeed_config
        return "deepspeed", self.deepspeed

    def _asks(self, model: str, section: str) -> bool:
        """Whether the file of ``model`` turns this kind of offload on."""
        zero = self.deepspeed_overrides(model).get("zero_optimization", {})
        return zero.get(section, {}).get("device") in _MEMORY

    def _decided(self, model: str, world_size: int | None) -> deepspeed_json.Decided:
        """What flags say about DeepSpeed's settings of ``model``."""
        prefix = f"{model}_" if model else ""
        micro = "per_device_training_batch_size" if model else "per_device_train_batch_size"
        flags = {
            "zero_optimization.stage": f"{prefix}zero_stage",
            "gradient_clipping": "max_grad_norm",
            "gradient_accumulation_steps": "gradient_accumulation_steps",
            "train_micro_batch_size_per_gpu": micro,
            "optimizer.params.lr": f"{prefix}learning_rate",
            "optimizer.params.weight_decay": f"{prefix}weight_decay",
            "optimizer.params.betas": "adam_betas",
            "scheduler.params.warmup_num_steps": "num_warmup_steps",
            "fp16.initial_scale_power": "initial_scale_power",
            "fp16.loss_scale_window": "loss_scale_window",
        }
        given = {key: (name, getattr(self, name)) for key, name in flags.items()}
        decided = {
            key: (f"--{name} {value}", (value,))
            for key, (name, value) in given.items()
            if value is not None
        }
        if world_size is not None:
            size = (self.mini_batch_size if model else self.global_batch_size)(world_size)
            product = f"--{micro} x --gradient_accumulation_steps x {world_size} processes"
            decided["train_batch_size"] = (f"{product} = {size}", (size,))
        schedule = self.lr_scheduler_type
        decided["scheduler.type"] = (
            f"--lr_scheduler_type {schedule}",
            _SCHEDULES.get(schedule, ()),
        )
        if self._own(model, "zero_stage") == 3 and (
            model or getattr(self, "loads_reference", False)
        ):
            # DeepSpeed makes these groups with the first model, and fails with the second.
            several = "a step with several models (DeepSpeed can do this for one)"
            decided["zero_optimization.zero_hpz_partition_size"] = (several, (1,))
        decided["optimizer.type"] = ("dschat's optimizer, AdamW", ("AdamW", "Adam"))
        if self.dtype != "auto":
            for name in ("bf16", "fp16"):
                decided[f"{name}.enabled"] = (f"--dtype {self.dtype}", (self.dtype == name,))
        for section, knob in (
            ("offload_optimizer", "offload_optimizer"),
            ("offload_param", "offload_parameters"),
        ):
            if self.offload or getattr(self, knob):
                name = "--offload" if self.offload else f"--{knob}"
                decided[f"zero_optimization.{section}.device"] = (name, _MEMORY)
        return decided
