"""Builds DeepSpeed engines: the only code that configures and initializes DeepSpeed.

A user's JSON file is merged into the configuration by `dschat.config.deepspeed_json`.
"""

import io
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn
from transformers import get_scheduler
from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

import dschat.distributed as dist
from dschat.config import CommonConfig, RLHFConfig, SupervisedConfig, UserError
from dschat.config.deepspeed_json import merged
from dschat.config.errors import did_you_mean
from dschat.models.linear import use_fastest_products, use_liger
from dschat.models.lora import prepare_for_training
from dschat.models.packing.model import PackedModel
from dschat.models.routing import watch_routers
from dschat.models.training_engine import ModelOrEngine, TrainingEngine, full_shape
from dschat.startup.performance import keep_freed_memory

if not dist.has_gpu():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)

import deepspeed  # noqa: E402  NOTE: its import reads both settings above
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # noqa: E402
from deepspeed.utils import logger as deepspeed_logger  # noqa: E402

from dschat.runtime.zero_changes import (  # noqa: E402
    check_packing,
    compute_without_autograd,
    mark_leaves,
    sum_in_place,
    work_on_partitions,
)

logger = logging.getLogger("dschat")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_dtype(name: str) -> torch.dtype:
    """The dtype of ``--dtype``; ``auto`` is bf16 on a GPU and fp32 on a CPU, where bf16 matrix
    products are several times slower.

    Raises ``UserError`` for fp16 where DeepSpeed does not support it: on most CPUs.
    """
    if name == "fp16" and not get_accelerator().is_fp16_supported():
        raise UserError("--dtype fp16 does not work on this device; use bf16 or fp32")
    return dtype_on(name, dist.has_gpu())


def dtype_on(name: str, on_gpu: bool) -> torch.dtype:
    """The dtype of ``--dtype`` on a GPU or a CPU, which need not be here."""
    return DTYPES[("bf16" if on_gpu else "fp32") if name == "auto" else name]


@dataclass
class ZeroSettings:
    """ZeRO stage, precision and offloading of one model."""

    stage: int
    dtype: torch.dtype
    offload_optimizer: bool = False
    offload_parameters: bool = False
    max_grad_norm: float = 1.0
    overrides: Mapping[str, Any] = field(default_factory=dict)  # from the user's JSON file
    weight_bits: int = 0  # of quantized linear layers: 4 or 8; 0: not quantized

    @classmethod
    def of(
        cls, config: CommonConfig, model: str, dtype: torch.dtype, world_size: int | None = None
    ) -> "ZeroSettings":
        """What flags and the DeepSpeed file say about one trained ``model``: "actor", "critic",
        or "" in steps 1 and 2. ``world_size``: see `CommonConfig.deepspeed_overrides`.
        """
        return cls(
            getattr(config, f"{model}_zero_stage" if model else "zero_stage"),
            dtype,
            offload_optimizer=config.offloads_optimizer(model),
            offload_parameters=config.offloads_parameters(model),
            max_grad_norm=config.max_grad_norm,
            overrides=config.deepspeed_overrides(model, world_size),
            weight_bits=config.weight_bits(model or "model"),
        )

    @property
    def shards_parameters(self) -> bool:
        return self.stage == 3

    def frozen(self, config: CommonConfig, name: str) -> "ZeroSettings":
        """Settings of the frozen reference, reward model or teacher (``name``), whose trained twin
        has these. It is sharded where that is, or where it is offloaded to CPU memory.
        """
        offload = config.offloads(name)
        zero = {
            key: value
            for key, value in self.overrides.get("zero_optimization", {}).items()
            if not key.startswith("offload_")
        }
        return ZeroSettings(
            3 if self.shards_parameters or offload else 0,
            self.dtype,
            offload_parameters=offload,
            overrides={**self.overrides, "zero_optimization": zero},
            weight_bits=config.weight_bits(name),
        )

    @property
    def used_stage(self) -> int:
        """The stage that DeepSpeed runs: ``stage``, or the lowest that supports the other settings.

        16-bit weights need fp32 master weights, and bf16 weights need gradients summed in fp32:
        over 256 micro-batches bf16 sums lose 0.4% of the norm. Stage 2 keeps both, sharded; stages
        0 and 1 sum in bf16 or need another optimizer. Only ZeRO's optimizers can be offloaded.
        """
        lowest = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}[self.dtype]
        return max(self.stage, lowest, 2 if self.offload_optimizer else 0)

    def sums_in_place(self, num_processes: int) -> bool:
        """Whether gradients need no buckets: see `dschat.runtime.zero_changes`. A user's file may
        set what happens to them there.
        """
        is_default = not self.offload_optimizer and not self.overrides
        return num_processes == 1 and self.used_stage == 2 and is_default

    def describe(self) -> str:
        """``ZeRO-2 in place of 0, optimizer in CPU memory``."""
        raised = f" in place of {self.stage}" if self.used_stage != self.stage else ""
        parts = {"optimizer": self.offload_optimizer, "parameters": self.offload_parameters}
        offloaded = " and ".join(name for name, is_offloaded in parts.items() if is_offloaded)
        where = f", {offloaded} in CPU memory" if offloaded else ""
        bits = f", linear layers in {self.weight_bits} bits" if self.weight_bits else ""
        return f"ZeRO-{self.used_stage}{raised}{where}{bits}"


def zero_settings(config: CommonConfig, model: str = "") -> ZeroSettings:
    """Settings of one trained ``model``, checked by DeepSpeed; see `ZeroSettings.of`.

    Raises ``UserError`` for a precision that this device does not support, and for a DeepSpeed file
    that contradicts a flag or that DeepSpeed rejects; loads no model.
    """
    dtype = resolve_dtype(config.training_dtype)
    zero = ZeroSettings.of(config, model, dtype, dist.world_size())
    where = config.deepspeed_file(model)[1]
    if not where:
        return zero
    try:
        deepspeed.DeepSpeedConfig(deepspeed_config(zero))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            fields = DeepSpeedZeroConfig.model_fields.items()
            near = did_you_mean(name, {field.alias or key for key, field in fields})
            raise UserError(f"{where}: DeepSpeed has no setting {name} there{near}") from None
        raise UserError(f"{where}: {name}: {first['msg']}") from None
    except (
        *(ValueError, TypeError, KeyError, AttributeError, AssertionError),
        deepspeed.DeepSpeedConfigError,
    ) as error:
        raise UserError(f"{where}: {str(error).splitlines()[0]}") from None
    return zero


def deepspeed_config(zero: ZeroSettings) -> dict[str, Any]:
    """DeepSpeed's configuration. Its batch is one micro-batch: `OptimizerStep` accumulates."""
    in_cpu_memory = {"device": "cpu", "pin_memory": dist.has_gpu()}
    zero_section: dict[str, Any] = {"stage": zero.used_stage}
    if zero.offload_optimizer:
        zero_section["offload_optimizer"] = in_cpu_memory
    if zero.offload_parameters and zero.shards_parameters:
        zero_section["offload_param"] = in_cpu_memory
    if zero.shards_parameters and not dist.has_gpu():
        # A CPU that gathers ahead computes nothing meanwhile, and several parameters that are
        # gathered at once are copied twice more. NOTE: 0 would fail with LoRA after a checkpoint is
        # loaded ("tracing error"): PEFT reads an adapter before its layer runs, so the order of
        # gathers differs from the recorded one, which only a look ahead tolerates.
        zero_section["stage3_prefetch_bucket_size"] = 1
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": zero.max_grad_norm,
        "zero_optimization": zero_section,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "timers": {"throughput": {"enabled": False}},  # which would wait for the device
    }
    if zero.dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    elif zero.dtype == torch.float16:
        config["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 100,
        }
    return merged(config, zero.overrides)


@contextmanager
def sharded_loading(zero: ZeroSettings) -> Iterator[None]:
    """A scope in which ``from_pretrained`` loads directly into shards under ZeRO-3."""
    if not zero.shards_parameters:
        yield
        return
    start_deepspeed()
    handle = HfDeepSpeedConfig(deepspeed_config(zero))  # transformers holds only a weak reference
    try:
        yield
    finally:
        del handle
        unset_hf_deepspeed_config()


def start_deepspeed() -> None:
    """Collective. Join the process group and initialize DeepSpeed with it."""
    dist.init()
    if dist.device().type == "cpu":
        keep_freed_memory()
    deepspeed_logger.setLevel(logging.ERROR)
    if deepspeed.comm.is_initialized():
        return
    compute_without_autograd()
    if not dist.has_gpu():
        # DeepSpeed's shared-memory all-reduce for CPUs serves its inference engines only. Enabled,
        # it is compiled at the first start (a minute, with a C++ compiler and Python's headers),
        # and every run leaves 66 MB per process in /dev/shm. Reading DeepSpeed's own dict would
        # try out all its operators, which in a notebook shows the linker's errors.
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
        deepspeed.utils.nvtx.enable_nvtx = False  # ranges around every hook of ZeRO-3
    with redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(dist_init_required=False)


def _parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay on matrices only, not on biases, norms and other vectors."""
    trained = [p for p in module.parameters() if p.requires_grad]
    decayed = [p for p in trained if len(full_shape(p)) >= 2]
    others = [p for p in trained if len(full_shape(p)) < 2]
    groups = [(decayed, weight_decay), (others, 0.0)]
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def _use_fast_operators(module: nn.Module, zero: ZeroSettings) -> None:
    if dist.device().type == "cpu" and zero.dtype == torch.float32:
        use_fastest_products(module)
    if isinstance(module, PackedModel):
        use_liger(module.base, dist.device())


def initialize_training(
    module: nn.Module,
    zero: ZeroSettings,
    learning_rate: float,
    weight_decay: float,
    betas: list[float],
    schedule: str,
    num_warmup_steps: int,
    num_total_steps: int,
) -> TrainingEngine:
    """Collective. An engine with AdamW and a schedule over ``num_total_steps`` optimizer steps."""
    start_deepspeed()
    _use_fast_operators(module, zero)
    mark_leaves(module)
    # Torch's fused AdamW needs no compilation and runs both on CUDA and on offloaded CPU shards.
    optimizer = torch.optim.AdamW(
        _parameter_groups(module, weight_decay),
        lr=learning_rate,
        betas=(betas[0], betas[1]),
        fused=True,
    )
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        lr_scheduler=lambda basic: get_scheduler(
            schedule, basic, num_warmup_steps, num_total_steps
        ),
        config=deepspeed_config(zero),
        dist_init_required=False,
    )
    if zero.used_stage == 0 and dist.world_size() == 1:
        # Without it DeepSpeed copies all gradients into one tensor and back.
        engine.enable_backward_allreduce = False
    if zero.used_stage in (1, 2):
        work_on_partitions(engine.optimizer)
    if zero.sums_in_place(dist.world_size()):
        sum_in_place(engine.optimizer)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is not None:
        # `SkippedSteps` ends a run whose gradients are never finite.
        scaler.raise_error_at_min_scale = False
    check_packing(module)
    return engine


def trained_engine(
    model: nn.Module,
    config: SupervisedConfig | RLHFConfig,
    name: str,
    zero: ZeroSettings,
    wrap: Callable[..., PackedModel],
    num_total_steps: int,
) -> TrainingEngine:
    """Collective. ``model`` in an engine, by the flags of ``name``: actor, critic, or "" in steps 1
    and 2. Adds adapters and gradient checkpointing; ``wrap`` makes it read `PackedRows`.
    """

    def flag(suffix: str) -> Any:
        return getattr(config, f"{name}_{suffix}".removeprefix("_"))

    model = prepare_for_training(
        model,
        flag("gradient_checkpointing"),
        flag("lora_dim"),
        config.lora_alpha,
        flag("lora_modules"),
        config.only_optimize_lora,
        f"--{name}_lora_modules".replace("--_", "--"),
        config.offloads("activations"),
    )
    if config.num_warmup_steps >= num_total_steps:
        logger.warning(
            "--num_warmup_steps %d of %d steps in all: the learning rate never arrives",
            *(config.num_warmup_steps, num_total_steps),
        )
    packed = wrap(model, *config.row_form)
    is_policy = isinstance(config, RLHFConfig) or getattr(config, "trains_policy", False)
    if isinstance(packed, PackedModel):
        asked = None if name == "critic" else config.router_aux_loss_coef
        watch_routers(packed, asked, is_policy)
    return initialize_training(
        packed,
        zero,
        config.rate_of(name),
        flag("weight_decay"),
        config.adam_betas,
        config.schedule,
        config.num_warmup_steps,
        num_total_steps,
    )


def initialize_frozen(module: nn.Module, zero: ZeroSettings) -> nn.Module:
    """Collective. A frozen model for scoring: sharded under ZeRO-3, else on the device."""
    module.requires_grad_(False).eval()
    _use_fast_operators(module, zero)
    frozen = module
    if zero.shards_parameters:
        start_deepspeed()
        mark_leaves(module)
        frozen, *_ = deepspeed.initialize(
            model=module, config=deepspeed_config(zero), dist_init_required=False
        )
        frozen.eval()  # NOTE: DeepSpeed's eval() returns None, not the engine
    else:
        module.to(device=dist.device(), dtype=zero.dtype)
    check_packing(module)
    return frozen


def unwrap(model: ModelOrEngine) -> nn.Module:
    """The transformers model, or PEFT's around it, without engine and `PackedModel`."""
    module = model.module if isinstance(model, deepspeed.DeepSpeedEngine) else model
    module = module.model if isinstance(module, PackedModel) else module
    assert isinstance(module, nn.Module)
    return module
