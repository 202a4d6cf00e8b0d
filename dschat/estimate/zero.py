"""What training one model holds besides activations: pure arithmetic.

Numbers of elements, ZeRO's settings and the number of processes come in; bytes on the device and in
host memory of one process go out. It must not know models, steps or what fits.

The stage, precision and offload are those that `deepspeed_setup` decides. How DeepSpeed (0.19) lays
things out under them was read in its source and measured:

- ZeRO 1 to 3 update an fp32 master of this process's part, of fp32 weights too; Adam has two fp32
  moments. ZeRO 0 (fp32 only) has the moments alone.
- Gradients: whole under 0 and 1; this process's part under 2 and 3, in fp32 where the weights are
  bf16, from the first reduction until the step under 2 and for good under 3.
- They are reduced when a bucket is full, at the latest after the backward pass, through a flat copy
  of it. On a GPU all of the bucket is there at once, on a CPU what has been written.
- Under 3 a pass gathers weights up to ``stage3_max_live_parameters``, and frees none that is needed
  again before ``stage3_max_reuse_distance``.
"""

from dataclasses import dataclass
from typing import Any

import torch

from dschat.runtime.deepspeed_engine import ZeroSettings, deepspeed_config

# DeepSpeed's defaults, in elements, where neither dschat nor the user's file says anything.
BUCKET_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
}
ALLREDUCE_BUCKET = 500_000_000  # of ZeRO 0: a constant of DeepSpeed's engine


@dataclass(frozen=True)
class Held:
    """Bytes of one process, on its device and in host memory."""

    device: int = 0
    host: int = 0

    def __add__(self, other: "Held") -> "Held":
        return Held(self.device + other.device, self.host + other.host)


NOTHING = Held()


@dataclass(frozen=True)
class Training:
    """What one trained model holds.

    Attributes:
        weights: as the forward pass keeps them: whole, or this process's shard.
        masters, moments: fp32.
        gradients: of the whole time between steps.
        buffers: of the whole run.
        gathered: weights of other processes during a pass.
        per_gradient: bytes that an element takes once its backward pass has made it.
        accumulates: these stay until the step (whole gradients), or go into ``partition``.
        partition: gradients of this process's part, from the first reduction to the step.
        reduces_early: buckets fill, and are reduced, in the middle of the backward pass.
        backward: work space of the backward pass.
        reduction: gradients and work space while the last bucket is reduced.
        update: gradients and work space of the optimizer step.
    """

    weights: Held
    masters: Held
    moments: Held
    gradients: Held
    buffers: int
    gathered: int
    per_gradient: int
    accumulates: bool
    partition: int
    reduces_early: bool
    backward: int
    reduction: tuple[int, int]
    update: tuple[int, int]


def training_bytes(
    total: int, trained: int, largest: int, zero: ZeroSettings, num_processes: int, on_gpu: bool
) -> Training:
    """What training ``trained`` of ``total`` parameters holds; ``largest``: of one tensor."""
    size, stage, offload = zero.dtype.itemsize, zero.used_stage, zero.offload_optimizer
    mine = -(-trained // num_processes)  # elements this process updates
    limits = bucket_sizes(zero)
    used = min(trained, limits["reduce_bucket_size"])
    bucket = size * (limits["reduce_bucket_size"] if on_gpu else used)
    sum_size = 4 if zero.dtype == torch.bfloat16 else size  # of a summed gradient's element
    converts = sum_size != size
    weights, gathered = frozen_bytes(total, zero, num_processes)
    flat = size * used

    masters, moments = NOTHING, Held(8 * trained)
    if stage > 0:
        masters, moments = _placed(4 * mine, offload), _placed(8 * mine, offload)
    gradients, buffers, partition = NOTHING, 0, 0
    if stage == 0:
        reduced = min(trained, ALLREDUCE_BUCKET + largest)
        backward, reduction, step = 0, (size * trained, size * reduced), size * reduced
    elif stage == 1:
        backward = bucket if on_gpu else 0
        reduction, step = (size * (trained - used), bucket + flat), 4 * mine
    elif stage == 2:
        backward = bucket if on_gpu else 0
        partition = sum_size * mine
        space = bucket + flat + (4 * largest if converts else 0)
        step = 0 if converts else size * mine + (4 * mine if size != 4 else 0)
        if offload:
            # Buffers of one tensor on either side; gradients and 16-bit weights on the host's.
            gradients = Held(size * largest, (4 + size) * mine + size * largest)
            partition, step = (partition if converts else 0), 0
        # fp32 and fp16 sums move from the bucket into their place when its copy is gone.
        reduction = (partition if converts else 0, space)
    else:
        gradients = _placed(sum_size * mine, offload)
        gradients += Held(0, 4 * mine) if offload else NOTHING
        buffers, backward = bucket, 0
        reduction = (0, flat + (-(-4 * used // num_processes) if converts else 0))
        step = 0 if offload else 4 * min(mine, limits["sub_group_size"])
    early = stage > 1 and trained > used
    return Training(
        weights=weights,
        masters=masters,
        moments=moments,
        gradients=gradients,
        buffers=buffers,
        gathered=gathered,
        per_gradient=size if stage < 2 or (stage == 2 and not on_gpu and not early) else 0,
        accumulates=stage < 2,
        partition=partition,
        reduces_early=early,
        backward=reduction[1] if early else backward,
        reduction=reduction,
        update=(size * trained if stage < 2 else partition, step),
    )


def frozen_bytes(total: int, zero: ZeroSettings, num_processes: int) -> tuple[Held, int]:
    """Weights of a model as it lies, and what a forward pass gathers besides."""
    size = zero.dtype.itemsize
    if not zero.shards_parameters:
        return Held(size * total), 0
    shard = size * -(-total // num_processes)
    live = min(total, bucket_sizes(zero)["stage3_max_live_parameters"])
    return _placed(shard, zero.offload_parameters), size * live


def bucket_sizes(zero: ZeroSettings) -> dict[str, int]:
    """DeepSpeed's limits in elements, with what dschat and the user's file put in their place."""
    section: dict[str, Any] = deepspeed_config(zero)["zero_optimization"]
    found = {}
    for name, default in BUCKET_DEFAULTS.items():
        short = name.removeprefix("stage3_")
        found[name] = int(section.get(name, section.get(short, default)))
    return found


def _placed(num_bytes: int, in_host_memory: bool) -> Held:
    return Held(0, num_bytes) if in_host_memory else Held(num_bytes)
