"""Computes the seconds of each phase of a step from FLOPs, bytes and the speed of devices.

A pass takes its model FLOPs over an achieved share of the peak. A decode step takes its bytes
(weights and KV cache) over an achieved share of the memory bandwidth, or its FLOPs where those take
longer. Communication takes its bytes over the slowest link on the way; a part of it runs behind
matrix products. The shares are few and fitted (`dschat.estimate.shares`); no flags here.
"""

from dataclasses import dataclass, replace

from dschat.estimate.devices import DeviceSpeed
from dschat.estimate.shares import Shares
from dschat.observability.flops import (
    Head,
    ModelShape,
    decode_flops,
    prefill_flops,
    training_flops,
    transformer_flops,
)

# NCCL's ring all-gathers reach about this share of a link (nccl-tests on DGX A100: 235 of 300 GB/s
# within a node, 190 of 200 between).
LINK_SHARE = 0.8
REDUCE_S = 15e-6  # a small all-reduce within a node (nccl-tests, 8 A100)
# Adam on an element: fp32 weight and two moments are read and written, the fp32 gradient is read,
# the 16-bit weight written.
_UPDATE_BYTES = 3 * 8 + 4 + 2
_MOVED_BYTES = 2 + 2  # an element of an offloaded optimizer: gradient to the host, weight back


@dataclass(frozen=True)
class Fleet:
    """Equal devices that hold one model together, ``per_node`` of them on a machine."""

    device: DeviceSpeed
    count: int
    per_node: int
    shares: Shares

    @property
    def flops(self) -> float:
        """Peak of all devices."""
        return self.count * self.device.flops

    @property
    def link(self) -> float:
        """Bytes per second that a device receives in a ring over all devices.

        A ring enters a node once per adapter: the node's network is shared by its devices, each of
        which needs all the bytes.
        """
        speed = self.device.link
        if self.count > self.per_node:
            speed = min(speed, self.per_node * self.device.network)
        return LINK_SHARE * speed

    def gather_s(self, num_bytes: float) -> float:
        """Seconds of an all-gather, or reduce-scatter, of ``num_bytes`` in all."""
        return num_bytes * (self.count - 1) / self.count / self.link


@dataclass(frozen=True)
class TimedModel:
    """A model as a pass sees it.

    Attributes:
        total, trained: numbers of parameters.
        itemsize: bytes of a weight.
        frozen_base: only adapters train.
        stage: ZeRO's.
        checkpointing: a backward pass recomputes the layers.
    """

    shape: ModelShape
    total: int
    trained: int
    head: Head = "lm"
    itemsize: int = 2
    stage: int = 3
    frozen_base: bool = False
    checkpointing: bool = True
    offload_optimizer: bool = False
    offload_parameters: bool = False

    @property
    def num_bytes(self) -> int:
        return self.itemsize * self.total

    def forward_flops(self, seq_len: int) -> int:
        """Of a sequence in a pass without gradients."""
        return transformer_flops(self.shape, seq_len, self.head)

    def training_flops(self, seq_len: int) -> int:
        """Of a sequence in a forward and a backward pass."""
        recomputes, frozen = self.checkpointing, self.frozen_base
        return training_flops(self.shape, seq_len, recomputes, self.head, frozen)


@dataclass(frozen=True)
class Rows:
    """``count`` sequences over all devices, in mean tokens; ``samples`` share a prompt."""

    count: float
    prompt: int
    answer: int
    samples: int = 1

    @property
    def seq_len(self) -> int:
        return self.prompt + self.answer

    @property
    def tokens(self) -> float:
        return self.count * self.seq_len


@dataclass(frozen=True)
class Phase:
    """Seconds of a phase by cause, and in all: causes may overlap."""

    name: str
    total_s: float
    products_s: float = 0.0
    memory_s: float = 0.0
    links_s: float = 0.0
    fixed_s: float = 0.0

    @property
    def bound(self) -> str:
        """What takes most of it."""
        causes = {
            "matrix products": self.products_s,
            "memory bandwidth": self.memory_s,
            "communication": self.links_s,
            "fixed overhead": self.fixed_s,
        }
        return max(causes, key=lambda cause: causes[cause])


def joined(name: str, phases: list[Phase]) -> Phase:
    """``phases`` one after another, as one."""

    def total(field: str) -> float:
        return sum(getattr(phase, field) for phase in phases)

    fields = ("total_s", "products_s", "memory_s", "links_s", "fixed_s")
    return Phase(name, *map(total, fields))


def forward(fleet: Fleet, model: TimedModel, rows: Rows, micro_batches: float) -> Phase:
    """Passes without gradients over ``rows``, in ``micro_batches`` on every device."""
    flops = rows.count * model.forward_flops(rows.seq_len)
    links_s = micro_batches * _gathered_s(fleet, model)
    return _pass(fleet, "forward", flops, links_s)


def training(fleet: Fleet, model: TimedModel, rows: Rows, micro_batches: float) -> Phase:
    """Forward and backward passes over ``rows``. ZeRO-3 gathers weights for either pass; gradients
    are reduced after every micro-batch in stages 2 and 3.
    """
    flops = rows.count * model.training_flops(rows.seq_len)
    gradients = fleet.gather_s(model.itemsize * model.trained) * (1 if model.stage >= 2 else 0)
    links_s = micro_batches * (2 * _gathered_s(fleet, model) + gradients)
    return _pass(fleet, "train", flops, links_s)


def _gathered_s(fleet: Fleet, model: TimedModel) -> float:
    """Seconds to gather the weights once: ZeRO-3's shards, first read from the host if offloaded.

    No stage below 3 gathers weights in a pass, on any number of devices.
    """
    if model.stage < 3:
        return 0.0
    from_host = model.num_bytes / fleet.count / fleet.device.pcie if model.offload_parameters else 0
    return fleet.gather_s(model.num_bytes) + from_host


def _pass(fleet: Fleet, name: str, flops: float, links_s: float) -> Phase:
    """Communication hides behind products, but not all of it."""
    products_s = flops / (fleet.shares.products * fleet.flops)
    hidden_s = min(fleet.shares.overlap * links_s, products_s)
    return Phase(name, products_s + links_s - hidden_s, products_s, 0.0, links_s)


def update(fleet: Fleet, model: TimedModel, num_steps: float) -> Phase:
    """Optimizer steps: Adam on this device's shard, on the device or in host memory; below stage 3
    the new weights, and below stage 2 the gradients, go to the other devices.
    """
    shard = model.trained / fleet.count if model.stage else model.trained
    bandwidth = fleet.device.bandwidth
    moved_s = 0.0
    if model.offload_optimizer:
        bandwidth = fleet.device.host_bandwidth
        moved_s = shard * _MOVED_BYTES / fleet.device.pcie
    memory_s = num_steps * shard * _UPDATE_BYTES / (fleet.shares.update * bandwidth)
    exchanges = {0: 2, 1: 2, 2: 1, 3: 0}[model.stage]
    links_s = num_steps * (exchanges * fleet.gather_s(model.itemsize * model.trained) + moved_s)
    return Phase("update", memory_s + links_s, 0.0, memory_s, links_s)


def refresh(fleet: Fleet, model: TimedModel, tp_size: int) -> Phase:
    """Gathers the weights (ZeRO-3) and writes the rollout's copy of them."""
    memory_s = 2 * model.num_bytes / tp_size / (fleet.shares.decode * fleet.device.bandwidth)
    links_s = _gathered_s(fleet, model)
    return Phase("refresh", memory_s + links_s, 0.0, memory_s, links_s)


def prefill(fleet: Fleet, model: TimedModel, rows: Rows, tp_size: int = 1) -> Phase:
    """Prompts through the rollout's weights, once for all samples of a prompt."""
    prompts = rows.count / rows.samples
    flops = prompts * prefill_flops(model.shape, rows.prompt)
    tokens = prompts * rows.prompt / (fleet.count / tp_size)
    links_s = _reduced_s(fleet, model, tokens, tp_size)
    exposed = replace(fleet, shares=replace(fleet.shares, overlap=0.0))  # a layer waits for them
    return _pass(exposed, "prefill", flops, links_s)


def decode(
    fleet: Fleet, model: TimedModel, rows: Rows, concurrent: float, tp_size: int = 1
) -> Phase:
    """Decode steps of all answers; ``concurrent`` sequences in each tensor-parallel group.

    A step reads the weights and the keys and values of its sequences, which are on average half way
    through their answers. `Shares.cache_passes` is more than 1 where a step also copies the cache.
    """
    shape, shares, device = model.shape, fleet.shares, fleet.device
    groups = fleet.count / tp_size
    per_group = rows.count / groups
    concurrent = min(concurrent, per_group)
    steps = per_group / concurrent * max(rows.answer - 1, 0)
    token_bytes = 2 * shape.num_layers * shape.kv_width * model.itemsize
    cached = concurrent * (rows.prompt + rows.answer / 2) * token_bytes * shares.cache_passes
    memory_s = steps * (model.num_bytes + cached) / tp_size / (shares.decode * device.bandwidth)
    flops = rows.count * decode_flops(shape, rows.prompt, rows.answer)
    products_s = flops / (shares.products * fleet.flops)
    fixed_s = steps * shape.num_layers * shares.step_launches * device.launch_s
    links_s = steps * _reduced_s(fleet, model, concurrent, tp_size)
    total_s = max(memory_s, products_s) + fixed_s + links_s
    return Phase("decode", total_s, products_s, memory_s, links_s, fixed_s)


def _reduced_s(fleet: Fleet, model: TimedModel, tokens: float, tp_size: int) -> float:
    """Seconds of tensor parallelism's two all-reduces a layer for ``tokens`` of a group, which is
    within one node.
    """
    if tp_size == 1:
        return 0.0
    reduces = 2 * model.shape.num_layers
    num_bytes = 2 * reduces * tokens * model.shape.hidden * model.itemsize
    bytes_s = num_bytes * (tp_size - 1) / tp_size / (LINK_SHARE * fleet.device.link)
    return reduces * REDUCE_S + bytes_s
