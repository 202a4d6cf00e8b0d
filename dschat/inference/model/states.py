"""Keeps the recurrent states of sequences, of layers that carry one from token to token.

Such layers (Mamba, gated delta nets, short convolutions) have states of a fixed size in place of
keys and values. A slot holds those of one sequence, of all layers. Samples of a prompt that wait to
continue from its state share its slot; a running sequence has one of its own.
"""

import heapq
import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, cache_utils
from transformers.modeling_outputs import CausalLMOutputWithPast

from dschat.config.errors import first_line
from dschat.models.packing.attention import UnsupportedAttentionError
from dschat.models.packing.segments import RowTable
from dschat.models.packing.states import StatefulRows, reading

logger = logging.getLogger("dschat")

_PROBE = range(5)  # tokens of the longest row that a decoder tries its layers with
# Of rows that are read together: the shortest new one as a share of the longest, and the most
# tokens of several, padding included: a layer may need many times its input.
_LIKE, _MOST_TOKENS = 0.5, 4096
_KINDS = ("conv_states", "recurrent_states")
# Before transformers had one class for them, states could not be reached from outside.
_StateLayer: Any = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())
# The argument of a model's forward that takes its cache: named as in what the forward returns.
CACHE = next(f.name for f in fields(CausalLMOutputWithPast) if "Cache" in str(f.type))

CACHES = CACHE, "cache_params", "past_key_values"  # of the forward of a part


def num_slots(max_num_seqs: int) -> int:
    """Slots for ``max_num_seqs`` rows, and for prompts with samples that wait."""
    return max_num_seqs + max(2, max_num_seqs // 4)


class StateShape(NamedTuple):
    """A state of a layer, by its place in transformers' cache."""

    layer: int
    kind: str  # an attribute of the cache's layer: one of `_KINDS`
    number: int  # there
    shape: tuple[int, ...]  # of one sequence
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def state_bytes(
    shapes: tuple[StateShape, ...], max_num_seqs: int, captures: bool
) -> tuple[int, int]:
    """Bytes of a pool for ``max_num_seqs`` rows, with `RowStates` where steps are captured, and of
    the copy that a step works on.
    """
    each = sum(shape.nbytes for shape in shapes)
    held = num_slots(max_num_seqs) + 1 + (max_num_seqs if captures else 0)
    return held * each, max_num_seqs * each


class StepCache(DynamicCache):
    """What a module reads and writes in one step: states. Keys and values are the engine's."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions and masks are given

    def shapes(self) -> tuple[StateShape, ...]:
        """Of the states that a forward has left here."""
        return tuple(
            StateShape(layer_number, kind, number, tuple(state.shape[1:]), state.dtype)
            for layer_number, layer in enumerate(self.layers)
            if isinstance(layer, _StateLayer)
            for kind in _KINDS
            for number, state in getattr(layer, kind).items()
            if state is not None
        )

    def state(self, where: StateShape) -> Any:
        """The tensor (B, ...); None before a forward has left any."""
        return getattr(self.layers[where.layer], where.kind).get(where.number)

    def put(self, where: StateShape, state: Tensor) -> None:
        """Let a forward continue from ``state`` (B, ...), in place."""
        layer: Any = self.layers[where.layer]
        getattr(layer, where.kind)[where.number] = state
        getattr(layer, f"is_{where.kind}_initialized")[where.number] = True
        layer.has_previous_state[where.number] = True
        if where.kind == "conv_states":
            layer.conv_kernel_size[where.number] = state.shape[-1]


class Carried(NamedTuple):
    """The states of a step's sequences, in the order of its tokens: equally many of each."""

    cache: StepCache
    num_sequences: int
    num_ready: int  # the last tokens of each sequence whose logits are wanted


def batches_alike(counts: Sequence[int], are_new: Sequence[bool]) -> list[list[int]]:
    """Batches of rows of ``counts`` tokens for layers with states: new rows, which are padded on
    the left, of like length; rows that continue a state, of equal length.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(counts)), key=lambda i: (are_new[i], -counts[i])):
        first = batches[-1][0] if batches else i
        least = _LIKE * counts[first] if are_new[i] else counts[first]
        is_full = bool(batches) and (len(batches[-1]) + 1) * counts[first] > _MOST_TOKENS
        if not batches or is_full or are_new[i] != are_new[first] or counts[i] < least:
            batches.append([])
        batches[-1].append(i)
    return batches


def row_table(
    counts: Sequence[int], batches: list[list[int]], device: torch.device
) -> tuple[RowTable, tuple[Tensor | None, ...]]:
    """How layers read packed rows of ``counts`` tokens in ``batches``, and their masks, see
    `StatefulRows`.
    """
    starts = np.cumsum([0, *counts])
    places, tables, masks, end = np.zeros(starts[-1], np.int64), [], [], 0
    for batch in batches:
        longest = max(counts[i] for i in batch)
        table = np.zeros((len(batch), longest), np.int64)
        mask = np.zeros(table.shape, bool)
        for row, i in enumerate(batch):
            table[row, longest - counts[i] :] = np.arange(starts[i], starts[i + 1])
            mask[row, longest - counts[i] :] = True
            end += longest
            places[starts[i] : starts[i + 1]] = np.arange(end - counts[i], end)
        tables.append(torch.from_numpy(table).to(device))
        masks.append(None if mask.all() else torch.from_numpy(mask).to(device))
    return RowTable(tuple(tables), torch.from_numpy(places).to(device)), tuple(masks)


def holds_states(config: PretrainedConfig) -> bool:
    """Whether transformers' cache for this model has states."""
    try:
        layers = DynamicCache(config=config).layers
    except (AttributeError, KeyError):  # transformers has none
        return False
    return any(isinstance(layer, _StateLayer) for layer in layers)


class StateTrial:
    """The base class of decoders, whose layers may have states."""

    config: Any
    spec: Any
    weights: Any

    @abstractmethod
    def _probed(self, rows: list[range], cache: StepCache) -> Tensor:
        """Logits (T, V) of rows of ids, each its position, too; a token attends to itself."""

    _reads_rows: bool | None = None

    @property
    def reads_rows(self) -> bool:
        """Collective. Whether layers with states compute rows together, the shorter ones padded on
        the left, as they do one by one.
        """
        # NOTE: no cached_property, which up to Python 3.11 has one lock for all decoders.
        if self._reads_rows is None:
            problem = self._row_problem()
            if problem:
                name = self.config.model_type
                logger.info("%s: prompts of one length at a time (%s)", name, problem)
            self._reads_rows = not problem
        return self._reads_rows

    def _row_problem(self) -> str:
        rows = [_PROBE, _PROBE[:3], _PROBE[:2]]
        table, masks = row_table([*map(len, rows)], [[0, 1, 2]], self.weights.device)
        together, *alone = self._caches(1 + len(rows))
        step = StatefulRows(table, masks, (together,), self._caches(1)[0], (False,))
        try:
            with reading(step):
                logits = self._probed(rows, step.cache)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (TypeError, RuntimeError, UnsupportedAttentionError) as error:
            return first_line(error)
        if any(together.state(where) is None for where in self.spec.states):
            return "a state stays elsewhere"
        expected = [self._probed([row], cache) for row, cache in zip(rows, alone, strict=True)]
        # Where rounding decides which experts a router chooses, single tokens differ.
        parts = zip(logits.split([*map(len, rows)]), expected, strict=True)
        if not all(_is_close(*part, all_rows=False) for part in parts):
            return "padding changes logits"
        for where in self._first_states:
            if not _is_close(
                together.state(where), torch.cat([cache.state(where) for cache in alone])
            ):
                return "padding changes a state"
        return ""

    @cached_property
    def continues_states(self) -> bool:
        """Whether layers with states continue a state with several tokens. Mamba 1 of transformers
        5.24 starts from an empty state instead.
        """
        whole, parts = self._caches(2)
        self._probed([_PROBE], whole)
        self._probed([_PROBE[:3]], parts)
        self._probed([_PROBE[3:]], parts)
        return all(_is_close(parts.state(w), whole.state(w)) for w in self._first_states)

    @property
    def _first_states(self) -> list[StateShape]:
        """The states of the first layer that has any; in later layers roundings add up."""
        return [where for where in self.spec.states if where.layer == self.spec.states[0].layer]

    def _caches(self, count: int) -> list[StepCache]:
        return [StepCache(config=self.config) for _ in range(count)]


def _is_close(actual: Tensor, expected: Tensor, all_rows: bool = True) -> bool:
    """Whether rows differ by roundings of the largest value: all of them, or the nearest."""
    gaps = (actual.float() - expected.float()).abs().flatten(1).amax(1)
    gap = (gaps.amax() if all_rows else gaps.amin()) / expected.float().abs().max().clamp(min=1e-6)
    return bool(gap <= (1e-3 if actual.dtype == torch.float32 else 0.05))


@dataclass(frozen=True, eq=False)
class MixerSpec:
    """A part of a layer that carries states: ``module``, on the meta device. Our products run the
    modules ``linears`` in it.
    """

    module: Any
    linears: frozenset[str]

    def __call__(self, x: Tensor, cache: Any, module: Any = None) -> Tensor:
        """What ``module``, else its own, returns of ``x`` (B, T, E)."""
        names = list(signature(type(self.module).forward).parameters)[1:]
        masks = dict.fromkeys(name for name in names if name.endswith("_mask"))
        (of_cache,) = (name for name in names if name in CACHES)
        return (module or self.module)(**masks | {names[0]: x, of_cache: cache})

    def target(self, path: str) -> str:
        """Where the parameter ``path`` goes below its layer: a weight of `linears`, or another."""
        owner, _, suffix = path.rpartition(".")
        if owner in self.linears:
            return f"product.{owner.replace('.', '_')}.{suffix}"
        return f"mixer.{path.replace('.', '_')}.weight"

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of weights, by the names that `target` gives them."""
        return {self.target(path): tuple(p.shape) for path, p in self.module.named_parameters()}


class StatePool:
    """``num_slots`` slots for states of ``shapes``, and a ``trash`` slot for captured rows without
    a sequence.
    """

    def __init__(
        self,
        shapes: tuple[StateShape, ...],
        num_slots: int,
        config: PretrainedConfig,
        device: torch.device,
    ) -> None:
        self._config, self._users, self.trash = config, [0] * num_slots, num_slots
        self._device = device
        self._free = list(range(num_slots))  # a heap: the lowest number first
        with torch.inference_mode(False):
            self.tensors = {
                where: torch.zeros(num_slots + 1, *where.shape, dtype=where.dtype, device=device)
                for where in shapes
            }

    def empty(self) -> StepCache:
        """A cache without states."""
        return StepCache(config=self._config)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Take the lowest free slot, with one user."""
        slot = heapq.heappop(self._free)
        self._users[slot] = 1
        return slot

    def retain(self, slot: int) -> int:
        self._users[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        self._users[slot] -= 1
        assert self._users[slot] >= 0
        if not self._users[slot]:
            heapq.heappush(self._free, slot)

    def own(self, slot: int) -> int:
        """``slot`` if it has one user; else a copy of it, in its place for this user."""
        if self._users[slot] == 1:
            return slot
        copy = self.allocate()
        for state in self.tensors.values():
            state[copy].copy_(state[slot])
        self.release(slot)
        return copy

    def carried(self, slots: list[int], is_first: bool) -> AbstractContextManager[StepCache]:
        """The states of ``slots``, which a forward changes; ``is_first``: it starts new ones."""
        return _carried(self.empty(), self.tensors, self.index(slots), is_first)

    def index(self, slots: list[int]) -> slice | Tensor:
        """Of ``slots`` in a tensor: a slice, which copies nothing, if they are adjacent."""
        first, end = slots[0], slots[0] + len(slots)
        if slots == list(range(first, end)):
            return slice(first, end)
        return torch.tensor(slots).to(self._device)


class RowStates:
    """The states of the first rows of captured steps, which change them in place: they are fetched
    from their slots of ``pool`` before the first step of some rows, and go back after the last one.
    """

    def __init__(self, pool: StatePool, num_rows: int) -> None:
        self._pool = pool
        with torch.inference_mode(False):
            self.tensors = {s: x.new_zeros(num_rows, *s.shape) for s, x in pool.tensors.items()}

    def fetch(self, slots: Tensor) -> None:
        """``slots`` (B,) int64 of the first rows, on the device; not read on the host."""
        for where, states in self._pool.tensors.items():
            self.tensors[where][: len(slots)] = states[slots]

    def give_back(self, slots: Tensor) -> None:
        """Likewise; several rows may have the trash slot."""
        for where, states in self._pool.tensors.items():
            states[slots] = self.tensors[where][: len(slots)]

    def of_step(self, size: int) -> AbstractContextManager[StepCache]:
        """The states of the first ``size`` rows, which a forward changes."""
        return _carried(self._pool.empty(), self.tensors, slice(size), is_first=False)


@contextmanager
def _carried(
    cache: StepCache,
    tensors: dict[StateShape, Tensor],
    index: slice | Tensor,
    is_first: bool,
) -> Iterator[StepCache]:
    """``cache`` with the states at ``index``, to which they return."""
    with torch.inference_mode(False):  # whose tensors could not be written outside it
        for where, states in tensors.items():
            if not is_first:
                cache.put(where, states[index])
    yield cache
    for where, states in tensors.items():
        now = cache.state(where)
        if now.untyped_storage()._cdata != states.untyped_storage()._cdata:
            states[index] = now
