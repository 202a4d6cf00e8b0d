"""Computes the memory of weights, gradients and optimizer states under ZeRO, per process.

`dschat.runtime.deepspeed_engine` decides stage, precision and offload. The rules below are from the
source of DeepSpeed 0.19 and from measurements. A full bucket of gradients is reduced through a flat
copy, the last one after the backward pass; a GPU allocates the whole bucket, a CPU only the part
that has been written.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dschat.runtime.deepspeed_engine import ZeroSettings, deepspeed_config

# DeepSpeed's defaults, in elements; dschat's settings and the user's file override them.
BUCKET_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
}
# Bytes of a quantized weight. 4 bits: with a scale of 1 byte for every 64, and 4 bytes for 256 of
# these; the scales of 8 bits, 4 bytes a row, are not counted.
_QUANTIZED = {4: 0.5 + (1 + 4 / 256) / 64, 8: 1.0}
ALLREDUCE_BUCKET = 500_000_000  # of ZeRO 0: a constant of DeepSpeed's engine


@dataclass(frozen=True)
class Held:
    """Bytes of one process on its device and in host memory."""

    device: int = 0
    host: int = 0

    def __add__(self, other: "Held") -> "Held":
        return Held(self.device + other.device, self.host + other.host)


@dataclass(frozen=True)
class Training:
    """Bytes of one trained model."""

    weights: Held  # of the forward pass: all, or this process's shard
    gathered: int  # weights gathered from other processes during a pass
    masters: Held  # fp32
    moments: Held  # fp32
    update: tuple[int, int]  # gradients and work space of the optimizer step
    gradients: Held = Held()  # persistent ones
    buffers: int = 0  # persistent ones
    per_gradient: int = 0  # of a gradient element after its backward pass
    partition: int = 0  # gradients of this process's partition, from the first reduction on
    reduces_early: bool = False  # buckets fill up, and are reduced, during the backward pass
    backward: int = 0  # work space of the backward pass


def training_bytes(
    total: int,
    trained: int,
    largest: int,
    zero: ZeroSettings,
    num_processes: int,
    on_gpu: bool,
    linear: tuple[int, int] = (0, 0),
) -> Training:
    """Memory for training ``trained`` of ``total`` parameters; ``largest``: numel of one tensor;
    ``linear``: see `frozen_bytes`.
    """
    weights, gathered = frozen_bytes(total, zero, num_processes, linear)
    stage, away, size = zero.used_stage, zero.offload_optimizer, zero.dtype.itemsize
    if stage == 0:
        # fp32 without masters; all gradients, reduced through a copy if there are other processes.
        copied = min(trained, ALLREDUCE_BUCKET + largest) if num_processes > 1 else 0
        states = Held(), Held(8 * trained)
        step = size * trained, size * copied
        return Training(weights, gathered, *states, update=step, per_gradient=size)
    # Masters are of this process's partition, and of fp32 weights too.
    shard = -(-trained // num_processes)
    states = _placed(4 * shard, away), _placed(8 * shard, away)
    made = partial(Training, weights, gathered, *states)
    limits = bucket_sizes(zero)
    in_bucket = min(trained, limits["reduce_bucket_size"])
    bucket = size * (limits["reduce_bucket_size"] if on_gpu else in_bucket)
    if stage == 1:  # all gradients
        step = size * trained, 4 * shard
        return made(update=step, per_gradient=size, backward=bucket if on_gpu else 0)
    sum_size = 4 if zero.dtype == torch.bfloat16 else size
    converts, is_early = sum_size != size, trained > in_bucket
    if stage == 3:
        # Gradients of the partition, as in stage 2, but permanently; so is the bucket.
        space = size * in_bucket + (-(-4 * in_bucket // num_processes) if converts else 0)
        return made(
            update=(0, 0 if away else 4 * min(shard, limits["sub_group_size"])),
            gradients=_placed(sum_size * shard, away) + Held(0, 4 * shard if away else 0),
            buffers=bucket,
            reduces_early=is_early,
            backward=space if is_early else 0,
        )
    # Gradients of the partition, in fp32 if the weights are bf16, from the first reduction until
    # the step; without buckets from the first gradient on, one at a time.
    if zero.sums_in_place(num_processes):
        sums = sum_size * trained
        step = sums, 0 if sum_size == 4 else 4 * trained
        return made(update=step, partition=sums, reduces_early=True, backward=4 * largest)
    space = bucket + size * in_bucket + (4 * largest if converts else 0)
    partition, gradients, work = sum_size * shard, Held(), 0
    if away:
        # A buffer of one tensor on device and host; gradients and 16-bit weights on the host.
        buffer = size * largest
        gradients = Held(buffer, (4 + size) * shard + buffer)
        partition = partition if converts else 0
    elif not converts:
        work = size * shard + (4 * shard if size != 4 else 0)
    return made(
        update=(partition, work),
        gradients=gradients,
        per_gradient=0 if on_gpu or is_early else size,
        partition=partition,
        reduces_early=is_early,
        backward=space if is_early else bucket if on_gpu else 0,
    )


def frozen_bytes(
    total: int, zero: ZeroSettings, num_processes: int, linear: tuple[int, int] = (0, 0)
) -> tuple[Held, int]:
    """Bytes of a model's weights, and the bytes that a forward pass gathers on top: in stage 3 up
    to ``stage3_max_live_parameters``; of quantized weights one, dequantized.

    ``linear``: elements of all linear layers, which can be quantized, and of the largest.
    """
    size = zero.dtype.itemsize
    if zero.weight_bits:
        quantized = math.ceil(_QUANTIZED[zero.weight_bits] * linear[0])
        return Held(size * (total - linear[0]) + quantized), size * linear[1]
    if not zero.shards_parameters:
        return Held(size * total), 0
    shard = size * -(-total // num_processes)
    live = min(total, bucket_sizes(zero)["stage3_max_live_parameters"])
    return _placed(shard, zero.offload_parameters), size * live


def bucket_sizes(zero: ZeroSettings) -> dict[str, int]:
    """DeepSpeed's limits in elements, with the values of dschat and of the user's file."""
    section: dict[str, Any] = deepspeed_config(zero)["zero_optimization"]
    sizes = {}
    for name, default in BUCKET_DEFAULTS.items():
        short = name.removeprefix("stage3_")
        sizes[name] = int(section.get(name, section.get(short, default)))
    return sizes


def _placed(num_bytes: int, in_host_memory: bool) -> Held:
    return Held(0, num_bytes) if in_host_memory else Held(num_bytes)
