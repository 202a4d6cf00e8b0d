"""Runs layers with recurrent states (Mamba, gated delta nets, short convolutions) on packed rows.

Such a layer carries a state from token to token, and would carry it from one row of a stream into
the next. So it reads the rows padded, a few of like length at a time, each with its prompt; all
other layers read the stream, in which the answers of a prompt share it. In a step of a rollout the
rows begin with states, or leave them behind.
"""

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations import hub_kernels

import dschat.distributed as dist
from dschat.models.packing.attention import UnsupportedAttentionError
from dschat.models.packing.segments import RowTable, Segments

_OF_PACKED_ROWS = ("segments", "positions")  # keywords of packed attention


class StatefulRows(NamedTuple):
    """The rows of a rollout's step, whose states are in transformers' caches.

    Attributes:
        masks: of each batch (B, T) bool, False where padding precedes a row; None: nowhere.
        caches: of each batch.
        cache: what the model is called with, in whose place a layer gets one of ``caches``.
        singly: of each batch, whether layers read its rows token by token.
    """

    table: RowTable
    masks: tuple[Tensor | None, ...]
    caches: tuple[Any, ...]
    cache: Any
    singly: tuple[bool, ...]


# Kernels of flash-linear-attention, causal-conv1d and mamba-ssm, which transformers calls where
# they are installed, whatever the device, read the memory of a GPU.
_by_torch: ContextVar[bool] = ContextVar("by_torch", default=False)
_is_exporting = getattr(hub_kernels, "is_torchdynamo_exporting", lambda: False)


def _keeps_to_torch() -> bool:
    return _is_exporting() or _by_torch.get() or not dist.has_gpu()


# NOTE: transformers asks only where it chooses between them and torch's operators.
hub_kernels.is_torchdynamo_exporting = _keeps_to_torch


@contextmanager
def _holding(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def by_torch() -> AbstractContextManager[None]:
    """Context in which models run on the CPU or the meta device of a machine with a GPU."""
    return _holding(_by_torch, True)


_stateful_rows: ContextVar[StatefulRows | None] = ContextVar("stateful_rows", default=None)


def reading(rows: StatefulRows) -> AbstractContextManager[None]:
    """Let layers that carry states read ``rows``, in models of which `run_by_row` knows."""
    return _holding(_stateful_rows, rows)


def mixers(base: PreTrainedModel) -> list[tuple[nn.Module, nn.Module]]:
    """The modules of ``base`` that carry states, each with the layer that calls it: they have a
    convolution over tokens. Not the layers of an encoder of sounds beside its decoder.
    """
    return [
        (layer, module)
        for layer in base.get_decoder().modules()
        for module in layer.children()
        if any(isinstance(child, nn.Conv1d) for child in module.children())
    ]


def is_sharded(module: nn.Module) -> bool:
    """Whether ZeRO-3 gathers its weights: then all ranks must call it equally often."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def run_by_row(base: PreTrainedModel) -> bool:
    """Let the layers of ``base`` that carry states read packed rows one by one; whether there are
    any.
    """
    found = mixers(base)
    if found and not dist.has_gpu():  # transformers asks for the kernels in a warning
        logging.getLogger(hub_kernels.__name__).setLevel(logging.ERROR)
    for layer, module in found:
        if not isinstance(module.forward, _ByRow):
            layer.register_forward_pre_hook(read_by_row(module).note, with_kwargs=True)
    return bool(found)


def read_by_row(module: Any) -> "_ByRow":
    """Let one of `mixers` read packed rows one by one."""
    _bound_steps(sys.modules[type(module).__module__])
    module.forward = by_row = _ByRow(module)
    return by_row


class _ByRow:
    """In place of the ``forward`` of a module that takes tokens (B, T, D): takes a stream
    (1, N, D), too, of packed rows or of a rollout's step.
    """

    def __init__(self, module: nn.Module) -> None:
        # NOTE: no bound method, which a copy by pickle would look up where this stands by then.
        self._module, self._own = module, vars(module).get("forward")
        self._segments: Segments | None = None
        forward = type(module).forward.__get__(module) if self._own is None else self._own
        self._names = tuple(inspect.signature(forward).parameters)

    def note(self, layer: nn.Module, args: Any, options: dict[str, Any]) -> None:
        """Before each forward of its layer, also one that is recomputed in the backward pass."""
        self._segments = options.get("segments")

    def _forward(self, *args: Any, **options: Any) -> Any:
        with _holding(_dt_bounds, getattr(self._module, "time_step_limit", None)):
            if self._own is not None:
                return self._own(*args, **options)
            return type(self._module).forward(self._module, *args, **options)

    def __call__(self, *args: Any, **options: Any) -> Any:
        step, segments = _stateful_rows.get(), self._segments
        if step is None and segments is None:
            return self._forward(*args, **options)
        options = {k: v for k, v in options.items() if k not in _OF_PACKED_ROWS}
        stream = args[0] if args else options.get("hidden_states")
        if stream is None:
            raise UnsupportedAttentionError("a layer with a state takes no hidden states")
        if step is not None:
            table = step.table
        elif segments is not None:
            table = segments.rows_on(stream.device, alike=not is_sharded(self._module))
        given = dict(zip(self._names, args, strict=False)) | options
        by_token = {
            key: table.fetch(value[0])
            for key, value in given.items()
            if isinstance(value, Tensor)
            and value.shape[:2] == stream.shape[:2]
            and not key.endswith("_mask")
        }

        def read(number: int, rows: Tensor) -> Any:
            own = given | {key: values[rows] for key, values in by_token.items()}
            mask = None if step is None else step.masks[number]
            own |= {key: mask for key in own if key.endswith("_mask")}
            if step is None:
                return self._forward(**own)
            own |= {key: step.caches[number] for key, x in given.items() if x is step.cache}
            if not step.singly[number]:
                return self._forward(**own)
            columns = ({k: own[k][:, i : i + 1] for k in by_token} for i in range(rows.shape[1]))
            outputs = [self._forward(**own | column) for column in columns]
            return _joined(outputs, partial(torch.cat, dim=1))

        outputs = [read(i, rows) for i, rows in enumerate(table.batches)]
        return _joined(outputs, partial(_stream, table=table))


_STEP, _BOUNDED = "mamba2_selective_state_update", "bounds_dt"
_dt_bounds: ContextVar[tuple[float, float] | None] = ContextVar("dt_bounds", default=None)


def _bound_steps(module: Any) -> None:
    """Let Mamba 2 of transformers' ``module`` bound dt in its step of one token, too.

    Only its scan does (seen in 5.24): cached decoding was another function than a forward.
    """
    step = getattr(module, _STEP, None)
    if step is None or hasattr(step, _BOUNDED):
        return

    @wraps(step)
    def bounded(state: Tensor, x: Tensor, dt: Tensor, *args: Any, **options: Any) -> Tensor:
        bounds = _dt_bounds.get()
        if bounds is None or tuple(bounds) == (0.0, float("inf")):
            return step(state, x, dt, *args, **options)
        # NOTE: one number a head: kernels see by strides of 0 that it is the same in all of it.
        bias = options["dt_bias"]
        each = F.softplus(dt[..., :1].float() + bias[..., :1].float()).clamp(*bounds)
        options |= {"dt_bias": bias.new_zeros(()).expand(bias.shape), "dt_softplus": False}
        return step(state, x, each.expand(dt.shape), *args, **options)

    setattr(bounded, _BOUNDED, True)
    setattr(module, _STEP, bounded)


def _joined(outputs: list[Any], join: Callable[[list[Tensor]], Tensor]) -> Any:
    """What a layer returned of each part, tensors or tuples of such and of None, as of all."""
    if isinstance(outputs[0], tuple):
        return tuple(_joined(list(parts), join) for parts in zip(*outputs, strict=True))
    return None if outputs[0] is None else join(outputs)


def _stream(outputs: list[Tensor], table: RowTable) -> Tensor:
    """The stream of what a layer returned of each batch, (B, T, D).

    Raises:
        UnsupportedAttentionError: it returned something else.
    """
    if any(x.shape[:2] != rows.shape for x, rows in zip(outputs, table.batches, strict=True)):
        raise UnsupportedAttentionError("what a layer with a state returns is not by row and token")
    return table.give_back(torch.cat([x.flatten(0, 1) for x in outputs])[table.places])[None]
