"""DeepSpeed: the only writer of its configurations and the only caller of ``deepspeed.initialize``.

A module and a few knobs come in; an engine with an optimizer and schedule goes out. Also the one
way to take an optimizer step, so that "sum over tokens / tokens of the whole step" means the same
everywhere. It must not know what is trained.
"""

import io
import logging
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import get_scheduler
from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

from dschat import dist
from dschat.config import UserError

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)

import deepspeed  # noqa: E402  NOTE: it reads both of the above while it is imported
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.utils import logger as deepspeed_logger  # noqa: E402

logger = logging.getLogger("dschat")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_dtype(name: str) -> torch.dtype:
    """``auto`` is bf16 on an accelerator and fp32 on a CPU, where bf16 products are several times
    slower.

    Raises ``UserError`` for fp16 where DeepSpeed does not train in it: on most CPUs.
    """
    if name == "auto":
        name = "bf16" if torch.cuda.is_available() else "fp32"
    if name == "fp16" and not get_accelerator().is_fp16_supported():
        raise UserError("--dtype fp16 does not work on this device; use bf16 or fp32")
    return DTYPES[name]


@dataclass
class ZeroSettings:
    """How one model is laid out and computed."""

    stage: int
    dtype: torch.dtype
    offload_optimizer: bool = False
    offload_parameters: bool = False
    max_grad_norm: float = 1.0

    @property
    def shards_parameters(self) -> bool:
        return self.stage == 3


def deepspeed_config(zero: ZeroSettings) -> dict[str, Any]:
    """The configuration DeepSpeed gets. It hears of one micro-batch: accumulation is `Step`'s."""
    # 16-bit weights need fp32 masters, and bf16 ones fp32 sums of gradients: over 256 micro-batches
    # bf16 sums lose 0.4% of the norm. Stage 2 keeps both, sharded; stages 0 and 1 sum in bf16 or
    # need another optimizer.
    lowest = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}[zero.dtype]
    # Only ZeRO's optimizers can live in CPU memory.
    stage = max(zero.stage, lowest, 2 if zero.offload_optimizer else 0)
    zero_section: dict[str, Any] = {"stage": stage}
    if zero.offload_optimizer:
        zero_section["offload_optimizer"] = {
            "device": "cpu",
            "pin_memory": torch.cuda.is_available(),
        }
    if zero.offload_parameters and stage == 3:
        zero_section["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": zero.max_grad_norm,
        "zero_optimization": zero_section,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if zero.dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    elif zero.dtype == torch.float16:
        config["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}
    return config


@contextmanager
def sharded_loading(zero: ZeroSettings) -> Iterator[None]:
    """A scope in which ``from_pretrained`` loads straight into shards, if this is ZeRO-3."""
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
    """Collective. Join the process group and let DeepSpeed wrap it; says so if that compiles
    something.

    On a CPU DeepSpeed compiles its communication op at its first start, and again when torch
    changes.
    """
    dist.init()
    deepspeed_logger.setLevel(logging.ERROR)
    if deepspeed.comm.is_initialized():
        return
    notice = (
        "DeepSpeed is compiling its CPU communication op: about a minute, only at its first start"
    )
    timer = threading.Timer(3.0, logger.info, args=(notice,))
    timer.start()
    try:
        with redirect_stdout(io.StringIO()):  # it reports its success there
            deepspeed.init_distributed(dist_init_required=False)
    finally:
        timer.cancel()


def _parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decay matrices only: biases, norms and other vectors are left alone."""
    trained = [p for p in module.parameters() if p.requires_grad]
    decayed = [p for p in trained if len(getattr(p, "ds_shape", p.shape)) >= 2]
    others = [p for p in trained if len(getattr(p, "ds_shape", p.shape)) < 2]
    groups = [(decayed, weight_decay), (others, 0.0)]
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def initialize_training(
    module: nn.Module,
    zero: ZeroSettings,
    learning_rate: float,
    weight_decay: float,
    betas: list[float],
    schedule: str,
    num_warmup_steps: int,
    num_total_steps: int,
) -> "deepspeed.DeepSpeedEngine":
    """Collective. An engine with AdamW and a schedule over ``num_total_steps`` optimizer steps."""
    start_deepspeed()
    # NOTE: torch's fused AdamW needs no compilation and runs on CUDA and on offloaded CPU shards
    # alike.
    optimizer = torch.optim.AdamW(
        _parameter_groups(module, weight_decay), lr=learning_rate, betas=tuple(betas), fused=True
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
    return engine


def initialize_frozen(module: nn.Module, zero: ZeroSettings) -> nn.Module:
    """Collective. A frozen model for scoring: sharded under ZeRO-3, else whole on the device."""
    module.requires_grad_(False).eval()
    if not zero.shards_parameters:
        return module.to(device=dist.device(), dtype=zero.dtype)
    start_deepspeed()
    engine, *_ = deepspeed.initialize(
        model=module, config=deepspeed_config(zero), dist_init_required=False
    )
    engine.eval()  # NOTE: DeepSpeed's returns None, not the engine
    return engine


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside an engine, or the module itself."""
    return model.module if isinstance(model, deepspeed.DeepSpeedEngine) else model


def parameter_shards_are_partitioned(parameter: nn.Parameter) -> bool:
    """Whether ZeRO-3 owns this parameter and keeps this rank's part in ``ds_tensor``."""
    return hasattr(parameter, "ds_tensor")


class Step:
    """One optimizer step, cut into micro-batches any way: sum of losses / ``denominator`` over all
    ranks.

    DeepSpeed averages gradients over ranks, hence the factor of the world size. Use::

        step = Step(engine, num_micro_batches=k, denominator=tokens_of_all_ranks)
        for batch in micro_batches:
            step.backward(loss_sum(batch))   # exactly k times, after one forward each
        applied = step.finish()

    `finish` is False where the gradient was not finite: all ranks then skipped the step together.
    """

    def __init__(
        self, engine: "deepspeed.DeepSpeedEngine", num_micro_batches: int, denominator: float
    ):
        assert num_micro_batches >= 1
        self._engine = engine
        self._remaining = num_micro_batches
        self._scale = dist.world_size() / max(denominator, 1.0)
        self.grad_norm = 0.0

    def backward(self, loss_sum: Tensor) -> None:
        """Collective. Accumulate the gradient of one micro-batch's ``loss_sum`` (0-d)."""
        self._remaining -= 1
        assert self._remaining >= 0, "more micro-batches than announced"
        self._engine.set_gradient_accumulation_boundary(self._remaining == 0)
        self._engine.backward(loss_sum * self._scale, scale_wrt_gas=False)

    def finish(self) -> bool:
        """Collective. Clip, update, advance the schedule; or, if not finite, skip on all ranks."""
        assert self._remaining == 0, "fewer micro-batches than announced"
        engine = self._engine
        if engine.zero_optimization_stage() == 0:
            # Plain torch steps here, and would write NaN into every weight.
            gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
            self.grad_norm = float(nn.utils.get_total_norm(gradients))
            if not math.isfinite(self.grad_norm):
                engine.optimizer.zero_grad()
                return False
            engine.step()
            return True
        engine.step()
        self.grad_norm = float(engine.get_global_grad_norm() or 0.0)
        return bool(engine.was_step_applied())


def learning_rate(engine: "deepspeed.DeepSpeedEngine") -> float:
    """The rate the next step will use."""
    return float(engine.get_lr()[0])
