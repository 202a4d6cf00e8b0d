"""Computes the memory of weights, gradients and optimizer states under ZeRO, per process.

`dschat.runtime.deepspeed_engine` decides stage, precision and offload. The rules below are from the
source of DeepSpeed 0.19 and from measurements:

- ZeRO 1 to 3 update fp32 masters of this process's partition, also of fp32 weights; Adam has two
  fp32 moments. ZeRO 0 (fp32 only) has only the moments.
- Gradients: all of them in stages 0 and 1; this process's partition in stages 2 and 3, in fp32 if
  the weights are bf16, from the first reduction until the step in stage 2, permanently in stage 3.
- A full bucket of gradients is reduced through a flat copy, the last one after the backward pass.
  A GPU allocates the whole bucket, a CPU only the part that has been written.
- In stage 3 a pass gathers up to ``stage3_max_live_parameters``, and keeps parameters needed again
  within ``stage3_max_reuse_distance``.
"""

from dataclasses import dataclass
from typing import Any

import torch

from dschat.runtime.deepspeed_engine import ZeroSettings, deepspeed_config, keeps_gradients_in_place

# DeepSpeed's defaults, in elements; dschat's settings and the user's file override them.
BUCKET_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
}
ALLREDUCE_BUCKET = 500_000_000  # of ZeRO 0: a constant of DeepSpeed's engine


@dataclass(frozen=True)
class Held:
    """Bytes of one process on its device and in host memory."""

    device: int = 0
    host: int = 0

    def __add__(self, other: "Held") -> "Held":
        return Held(self.device + other.device, self.host + other.host)


NOTHING = Held()


@dataclass(frozen=True)
class Training:
    """Bytes of one trained model.

    Attributes:
        weights: of the forward pass: all, or this process's shard.
        masters, moments: fp32.
        gradients: persistent ones.
        buffers: persistent ones.
        gathered: weights gathered from other processes during a pass.
        per_gradient: of a gradient element after its backward pass.
        accumulates: gradients stay until the step; else they are reduced into ``partition``.
        partition: gradients of this process's partition, from the first reduction to the step.
        reduces_early: buckets fill up, and are reduced, during the backward pass.
        backward: work space of the backward pass.
        reduction: gradients and work space during the last reduction.
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
    """Memory for training ``trained`` of ``total`` parameters; ``largest``: numel of one tensor."""
    size, stage, offload = zero.dtype.itemsize, zero.used_stage, zero.offload_optimizer
    shard = -(-trained // num_processes)  # elements that this process updates
    limits = bucket_sizes(zero)
    used = min(trained, limits["reduce_bucket_size"])
    bucket = size * (limits["reduce_bucket_size"] if on_gpu else used)
    sum_size = 4 if zero.dtype == torch.bfloat16 else size  # of a reduced gradient element
    converts = sum_size != size
    weights, gathered = frozen_bytes(total, zero, num_processes)
    flat = size * used

    masters, moments = NOTHING, Held(8 * trained)
    if stage > 0:
        masters, moments = _placed(4 * shard, offload), _placed(8 * shard, offload)
    gradients, buffers, partition = NOTHING, 0, 0
    if stage == 0:
        reduced = min(trained, ALLREDUCE_BUCKET + largest) if num_processes > 1 else 0
        backward, reduction, step = 0, (size * trained, size * reduced), size * reduced
    elif stage == 1:
        backward = bucket if on_gpu else 0
        reduction, step = (size * (trained - used), bucket + flat), 4 * shard
    elif stage == 2:
        backward = bucket if on_gpu else 0
        partition = sum_size * shard
        in_place = keeps_gradients_in_place(zero, num_processes, on_gpu)
        space = (0 if in_place else bucket + flat) + (4 * largest if converts else 0)
        step = 0 if converts else size * shard + (4 * shard if size != 4 else 0)
        if offload:
            # A buffer of one tensor on device and host; gradients and 16-bit weights on the host.
            gradients = Held(size * largest, (4 + size) * shard + size * largest)
            partition, step = (partition if converts else 0), 0
        # fp32 and fp16 sums move from the bucket to the partition after its copy is freed.
        reduction = (partition if converts else 0, space)
    else:
        gradients = _placed(sum_size * shard, offload)
        gradients += Held(0, 4 * shard) if offload else NOTHING
        buffers, backward = bucket, 0
        reduction = (0, flat + (-(-4 * used // num_processes) if converts else 0))
        step = 0 if offload else 4 * min(shard, limits["sub_group_size"])
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
    """Bytes of a model's weights, and the bytes that a forward pass gathers on top."""
    size = zero.dtype.itemsize
    if not zero.shards_parameters:
        return Held(size * total), 0
    shard = size * -(-total // num_processes)
    live = min(total, bucket_sizes(zero)["stage3_max_live_parameters"])
    return _placed(shard, zero.offload_parameters), size * live


def bucket_sizes(zero: ZeroSettings) -> dict[str, int]:
    """DeepSpeed's limits in elements, with the values of dschat and of the user's file."""
    section: dict[str, Any] = deepspeed_config(zero, in_place=False)["zero_optimization"]
    sizes = {}
    for name, default in BUCKET_DEFAULTS.items():
        short = name.removeprefix("stage3_")
        sizes[name] = int(section.get(name, section.get(short, default)))
    return sizes


def _placed(num_bytes: int, in_host_memory: bool) -> Held:
    return Held(0, num_bytes) if in_host_memory else Held(num_bytes)
