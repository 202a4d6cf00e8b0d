"""Runs layers with recurrent states (Mamba, gated delta nets, short convolutions) on packed rows.

Such a layer carries a state from token to token, and would carry it from one row of a stream into
the next. So it reads the rows padded, a few of like length at a time, each with its prompt; all
other layers read the stream, in which the answers of a prompt share it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat.models.packing.attention import UnsupportedAttentionError
from dschat.models.packing.segments import RowTable, Segments

_OF_PACKED_ROWS = ("segments", "positions")  # keywords of packed attention


def mixers(base: PreTrainedModel) -> list[tuple[nn.Module, nn.Module]]:
    """The modules of ``base`` that carry states, each with the layer that calls it: they have a
    convolution over tokens. Not those of an encoder of sounds beside its decoder.
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
    for layer, module in found:
        if not isinstance(module.forward, _ByRow):
            module.forward = by_row = _ByRow(module)
            layer.register_forward_pre_hook(by_row.note, with_kwargs=True)
    return bool(found)


class _ByRow:
    """In place of the ``forward`` of a module that takes tokens (B, T, D): takes a stream
    (1, N, D), too.
    """

    def __init__(self, module: nn.Module) -> None:
        # NOTE: no bound method, which a copy by pickle would look up where this stands by then.
        self._module, self._own = module, vars(module).get("forward")
        self._segments: Segments | None = None

    def note(self, layer: nn.Module, args: Any, options: dict[str, Any]) -> None:
        """Before each forward of its layer, also one that is recomputed in the backward pass."""
        self._segments = options.get("segments")

    def _forward(self, *args: Any, **options: Any) -> Any:
        if self._own is not None:
            return self._own(*args, **options)
        return type(self._module).forward(self._module, *args, **options)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._segments is None:
            return self._forward(*args, **options)
        options = {k: v for k, v in options.items() if k not in _OF_PACKED_ROWS}
        if "attention_mask" in options:
            options["attention_mask"] = None
        stream = args[0] if args else options.get("hidden_states")
        if stream is None:
            raise UnsupportedAttentionError("a layer with a state takes no hidden states")
        table = self._segments.rows_on(stream.device, alike=not is_sharded(self._module))

        def of(rows: Tensor, value: Any) -> Any:
            by_token = isinstance(value, Tensor) and value.shape[:2] == stream.shape[:2]
            return value[0][rows] if by_token else value

        outputs = [
            self._forward(
                *(of(rows, x) for x in args), **{k: of(rows, x) for k, x in options.items()}
            )
            for rows in table.batches
        ]
        return _joined(outputs, table)


def _joined(outputs: list[Any], table: RowTable) -> Any:
    """The stream of what a layer returned of each batch: a tensor (B, T, D), or a tuple of such
    and of None.

    Raises:
        UnsupportedAttentionError: it returned something else.
    """
    if isinstance(outputs[0], tuple):
        return tuple(_joined(list(parts), table) for parts in zip(*outputs, strict=True))
    if outputs[0] is None:
        return None
    if any(x.shape[:2] != rows.shape for x, rows in zip(outputs, table.batches, strict=True)):
        raise UnsupportedAttentionError("what a layer with a state returns is not by row and token")
    return torch.cat([x.flatten(0, 1) for x in outputs])[table.places][None]
