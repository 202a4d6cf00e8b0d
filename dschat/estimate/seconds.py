"""Computes the seconds of each phase of a step from FLOPs, bytes and the speed of devices.

docs/lab/cost.md has the formulas and how the shares were fitted;
``benchmarks/plan_against_published.py --fit`` repeats the fit.
"""

from dataclasses import dataclass, replace

from dschat.estimate.devices import DeviceSpeed
from dschat.estimate.memory import Model
from dschat.observability.flops import (
    decode_flops,
    prefill_flops,
    training_flops,
    transformer_flops,
)

# NCCL's ring all-gathers reach about this share of a link (nccl-tests on DGX A100: 235 of 300 GB/s
# within a node, 190 of 200 between).
LINK_SHARE = 0.8
OVERLAP = 0.5  # of communication, that runs behind matrix products: assumed
REDUCE_S = 15e-6  # a small all-reduce within a node (nccl-tests, 8 A100)
LAUNCH_S = 5e-6  # of the host, for one operation
# Adam on an element: fp32 weight and two moments are read and written, the fp32 gradient is read,
# the 16-bit weight written; and the share of the bandwidth that this reaches.
_UPDATE_BYTES, UPDATE_SHARE = 3 * 8 + 4 + 2, 0.6
_MOVED_BYTES = 2 + 2  # an element of an offloaded optimizer: gradient to the host, weight back


@dataclass(frozen=True)
class Shares:
    """What software reaches of a device's peaks."""

    products: float  # of peak FLOPs, in passes with and without gradients
    decode: float  # of the memory bandwidth, in decode steps
    step_launches: float = 0.0  # operations that a layer of a decode step waits for
    cache_passes: float = 1.0  # times that a decode step reads or writes the cache


# OpenRLHF's 7B rows. The seven kernels of a layer start before the one in front of them has ended.
ENGINE = Shares(products=0.4075, decode=0.9, step_launches=5)
# Transformers' generate: a step reads and writes the whole cache to append to it, then reads it.
HF_LOOP = replace(ENGINE, step_launches=164.8, cache_passes=3)


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


@dataclass(frozen=True)
class Fleet:
    """Equal devices that hold one model together, ``per_node`` of them on a machine. Its methods
    give the seconds of a phase.
    """

    device: DeviceSpeed
    count: int
    per_node: int
    shares: Shares = ENGINE

    def score(self, model: Model, rows: Rows, micro_batches: float) -> float:
        """Passes without gradients over ``rows``, in ``micro_batches`` on every device."""
        flops = rows.count * transformer_flops(model.shape, rows.seq_len, model.use.kind)
        return self._passes_s(flops, micro_batches * self._weights_s(model))

    def train(self, model: Model, rows: Rows, micro_batches: float) -> float:
        """Forward and backward passes. ZeRO-3 gathers weights for either pass; stages 2 and 3
        reduce gradients after every micro-batch.
        """
        use, reduced = model.use, model.zero.used_stage >= 2
        how = use.gradient_checkpointing, use.kind, use.only_adapters
        flops = rows.count * training_flops(model.shape, rows.seq_len, *how)
        gather_s = 2 * self._weights_s(model) + reduced * self._trained_s(model)
        return self._passes_s(flops, micro_batches * gather_s)

    def update(self, model: Model, num_steps: float) -> float:
        """Optimizer steps: Adam on this device's shard, on the device or in host memory; below
        stage 3 the new weights, and below stage 2 the gradients, go to the other devices.
        """
        stage, trained = model.zero.used_stage, model.sizes.trained
        shard = trained / self.count if stage else trained
        bandwidth, moved_s = self.device.bandwidth, 0.0
        if model.zero.offload_optimizer:
            bandwidth = self.device.host_bandwidth
            moved_s = shard * _MOVED_BYTES / self.device.pcie
        memory_s = shard * _UPDATE_BYTES / (UPDATE_SHARE * bandwidth)
        return num_steps * (memory_s + (2, 2, 1, 0)[stage] * self._trained_s(model) + moved_s)

    def refresh(self, model: Model, tp_size: int) -> float:
        """Gathers the weights (ZeRO-3) and writes the rollout's copy of them."""
        memory_s = 2 * model.num_bytes / tp_size / (self.shares.decode * self.device.bandwidth)
        return memory_s + self._weights_s(model)

    def prefill(self, model: Model, rows: Rows, tp_size: int = 1) -> float:
        """Prompts through the rollout's weights, once for all samples of a prompt."""
        prompts = rows.count / rows.samples
        tokens = prompts * rows.prompt / (self.count / tp_size)
        flops = prompts * prefill_flops(model.shape, rows.prompt)
        return self._products_s(flops) + self._reduces_s(model, tokens, tp_size)

    def decode(self, model: Model, rows: Rows, concurrent: float, tp_size: int = 1) -> float:
        """Decode steps of all answers; ``concurrent`` sequences in each tensor-parallel group.

        A step reads the weights and the keys and values of its sequences, on average half way
        through their answers, while it computes.
        """
        shares, per_group = self.shares, rows.count / (self.count / tp_size)
        concurrent = min(max(1.0, concurrent), per_group)
        steps = per_group / concurrent * max(rows.answer - 1, 0)
        num_bytes = model.num_bytes + shares.cache_passes * concurrent * cached_bytes(model, rows)
        memory_s = num_bytes / tp_size / (shares.decode * self.device.bandwidth)
        waits_s = model.shape.num_layers * shares.step_launches * LAUNCH_S
        waits_s += self._reduces_s(model, concurrent, tp_size)
        products_s = self._products_s(
            rows.count * decode_flops(model.shape, rows.prompt, rows.answer)
        )
        return max(products_s, steps * memory_s) + steps * waits_s

    def _products_s(self, flops: float) -> float:
        return flops / (self.shares.products * self.count * self.device.flops)

    def _passes_s(self, flops: float, links_s: float) -> float:
        """Matrix products, which hide a share of the communication."""
        products_s = self._products_s(flops)
        return products_s + links_s - min(OVERLAP * links_s, products_s)

    def _gather_s(self, num_bytes: float) -> float:
        """An all-gather, or reduce-scatter, of ``num_bytes`` in all.

        A ring over several nodes enters a node once per adapter: the node's network is shared by
        its devices, each of which needs all the bytes.
        """
        link = self.device.link
        if self.count > self.per_node:
            link = min(link, self.per_node * self.device.network)
        return num_bytes * (self.count - 1) / self.count / (LINK_SHARE * link)

    def _trained_s(self, model: Model) -> float:
        """A gather of the weights that train, or a reduction of their gradients."""
        return self._gather_s(model.use.dtype.itemsize * model.sizes.trained)

    def _weights_s(self, model: Model) -> float:
        """A gather of ZeRO-3's shards of the weights, first read from the host if offloaded."""
        if model.zero.used_stage < 3:
            return 0.0
        read_s = model.num_bytes / self.count / self.device.pcie
        return self._gather_s(model.num_bytes) + model.zero.offload_parameters * read_s

    def _reduces_s(self, model: Model, tokens: float, tp_size: int) -> float:
        """Tensor parallelism's two all-reduces a layer, for ``tokens`` of a group within a node."""
        reduces = 2 * model.shape.num_layers * (tp_size > 1)
        num_bytes = 2 * tokens * model.shape.hidden * model.use.dtype.itemsize
        bytes_s = num_bytes * (tp_size - 1) / tp_size / (LINK_SHARE * self.device.link)
        return reduces * (REDUCE_S + bytes_s)


def cached_bytes(model: Model, rows: Rows) -> float:
    """Keys and values of a sequence of ``rows`` half way through its answer."""
    token_bytes = 2 * model.shape.num_layers * model.shape.kv_width * model.use.dtype.itemsize
    return token_bytes * (rows.prompt + rows.answer / 2)
