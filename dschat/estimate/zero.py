"""Computes the memory of weights, gradients and optimizer states under ZeRO, per process.

`dschat.runtime.deepspeed_engine` decides stage, precision and offload. The rules below are from the
source of DeepSpeed 0.19 and from measurements. A full bucket of gradients is reduced through a flat
copy, the last one after the backward pass; a GPU allocates the whole bucket, a CPU only the part
that has been written.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    reduction: tuple[int, int]  # gradients and work space during the last reduction
    update: tuple[int, int]  # gradients and work space of the optimizer step
    gradients: Held = Held()  # persistent ones
    buffers: int = 0  # persistent ones
    per_gradient: int = 0  # of a gradient element after its backward pass
    accumulates: bool = False  # gradients stay until the step; else they go into `partition`
    partition: int = 0  # gradients of this process's partition, from the first reduction on
    reduces_early: bool = False  # buckets fill up, and are reduced, during the backward pass
    backward: int = 0  # work space of the backward pass


class _Elements(NamedTuple):
    """A model to train: numbers of elements, and bytes of some."""

    trained: int
    largest: int  # of one tensor
    shard: int  # that this process updates
    in_bucket: int  # that fill a bucket of gradients
    size: int  # bytes of an element
    sum_size: int  # bytes of a reduced gradient element
    bucket: int  # bytes allocated

    @property
    def flat(self) -> int:
        """Bytes of the copy through which a bucket is reduced."""
        return self.size * self.in_bucket

    @property
    def reduces_early(self) -> bool:
        return self.trained > self.in_bucket


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
    size, limit = zero.dtype.itemsize, bucket_sizes(zero)["reduce_bucket_size"]
    elements = _Elements(
        trained,
        largest,
        shard=-(-trained // num_processes),
        in_bucket=min(trained, limit),
        size=size,
        sum_size=4 if zero.dtype == torch.bfloat16 else size,
        bucket=size * (limit if on_gpu else min(trained, limit)),
    )
    fields: dict[str, Any] = {
        "masters": _placed(4 * elements.shard, zero.offload_optimizer),
        "moments": _placed(8 * elements.shard, zero.offload_optimizer),
    }
    fields |= _STAGES[zero.used_stage](elements, zero, num_processes, on_gpu)
    return Training(weights=weights, gathered=gathered, **fields)


def _stage_0(e: _Elements, zero: ZeroSettings, num_processes: int, on_gpu: bool) -> dict[str, Any]:
    """fp32 without masters; all gradients, reduced through a copy if there are other processes."""
    reduced = min(e.trained, ALLREDUCE_BUCKET + e.largest) if num_processes > 1 else 0
    gradients_and_copy = e.size * e.trained, e.size * reduced
    return {
        "masters": Held(),
        "moments": Held(8 * e.trained),
        "per_gradient": e.size,
        "accumulates": True,
        "reduction": gradients_and_copy,
        "update": gradients_and_copy,
    }


def _stage_1(e: _Elements, zero: ZeroSettings, num_processes: int, on_gpu: bool) -> dict[str, Any]:
    """All gradients; masters of this process's partition, also of fp32 weights, in every stage."""
    return {
        "per_gradient": e.size,
        "accumulates": True,
        "backward": e.bucket if on_gpu else 0,
        "reduction": (e.size * (e.trained - e.in_bucket), e.bucket + e.flat),
        "update": (e.size * e.trained, 4 * e.shard),
    }


def _stage_2(e: _Elements, zero: ZeroSettings, num_processes: int, on_gpu: bool) -> dict[str, Any]:
    """Gradients of this process's partition, in fp32 if the weights are bf16, from the first
    reduction until the step; without buckets from the first gradient on.
    """
    converts = e.sum_size != e.size
    if zero.sums_in_place(num_processes):
        sums, step = e.sum_size * e.trained, 0 if e.sum_size == 4 else 4 * e.trained
        fields = {"partition": sums, "reduction": (sums, 0), "update": (sums, step)}
        return fields | {"reduces_early": True, "backward": 4 * e.largest}  # one gradient
    space = e.bucket + e.flat + (4 * e.largest if converts else 0)
    partition, gradients, step = e.sum_size * e.shard, Held(), 0
    if zero.offload_optimizer:
        # A buffer of one tensor on device and host; gradients and 16-bit weights on the host.
        buffer = e.size * e.largest
        gradients = Held(buffer, (4 + e.size) * e.shard + buffer)
        partition = partition if converts else 0
    elif not converts:
        step = e.size * e.shard + (4 * e.shard if e.size != 4 else 0)
    before_reduction = e.bucket if on_gpu else 0
    return {
        "gradients": gradients,
        "per_gradient": 0 if on_gpu or e.reduces_early else e.size,
        "partition": partition,
        "reduces_early": e.reduces_early,
        "backward": space if e.reduces_early else before_reduction,
        # fp32 and fp16 sums move from the bucket to the partition after its copy is freed.
        "reduction": (partition if converts else 0, space),
        "update": (partition, step),
    }


def _stage_3(e: _Elements, zero: ZeroSettings, num_processes: int, on_gpu: bool) -> dict[str, Any]:
    """Gradients of this process's partition, as in stage 2, but permanently; so is the bucket."""
    offload = zero.offload_optimizer
    gradients = _placed(e.sum_size * e.shard, offload) + Held(0, 4 * e.shard if offload else 0)
    space = e.flat + (-(-4 * e.in_bucket // num_processes) if e.sum_size != e.size else 0)
    return {
        "gradients": gradients,
        "buffers": e.bucket,
        "reduces_early": e.reduces_early,
        "backward": space if e.reduces_early else 0,
        "reduction": (0, space),
        "update": (0, 0 if offload else 4 * min(e.shard, bucket_sizes(zero)["sub_group_size"])),
    }


_STAGES = (_stage_0, _stage_1, _stage_2, _stage_3)


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
