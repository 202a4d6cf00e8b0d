"""Runs a transformers model on packed rows, or on padded ones where its family cannot be packed."""

import inspect
import logging
from typing import Literal

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat.config import UserError
from dschat.models.eval_mode import evaluating
from dschat.models.packing import attention
from dschat.models.packing.rows import PackedRows, pack

logger = logging.getLogger("dschat")

Packing = Literal["auto", "on", "off"]

# Implementations that packed attention stands in for; others were asked for by name.
_REPLACED = ("sdpa", "flash_attention_2", attention.NAME)


class PackedModel(nn.Module):
    """A transformers model, or PEFT's around it, that reads hidden states of `PackedRows`.

    Args:
        model: with or without a head.
        packing: ``--packing``.

    Attributes:
        packs: whether rows run as one stream. False also where the family's attention does not go
            through transformers' interface, or where packed rows changed its hidden states.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, packing: Packing = "auto") -> None:
        super().__init__()
        self.model = model
        self.packs = packing != "off" and _can_pack(self.base, must=packing == "on")

    @property
    def base(self) -> PreTrainedModel:
        """The transformers model."""
        # NOTE: PEFT's wrapper has a `model` attribute of its own, which would shadow the backbone.
        model = self.model
        return model.get_base_model() if isinstance(model, PeftModel) else model

    def hidden_states(self, rows: PackedRows) -> Tensor:
        """Last hidden states at the columns that ``rows`` reads: (M, D)."""
        return self.run(rows, "last_hidden_state", getattr(self.base, self.base.base_model_prefix))

    def run(self, rows: PackedRows, output: str, module: nn.Module | None = None) -> Tensor:
        """``output`` (..., D) of ``module`` at the columns that ``rows`` reads: (M, D)."""
        return _run(module or self.base, rows, output, self.packs)


def _run(module: nn.Module, rows: PackedRows, output: str, packs: bool) -> Tensor:
    if not packs:
        padded = module(input_ids=rows.padded_ids, use_cache=False)
        return getattr(padded, output).flatten(0, 1)[rows.padded_columns]
    packed = module(
        input_ids=rows.input_ids[None],
        position_ids=rows.position_ids[None],
        # Four dimensions: transformers builds no mask of its own, which would be (N, N).
        attention_mask=rows.input_ids.new_zeros(1, 1, 1, 1, dtype=torch.bool),
        use_cache=False,
        segments=rows.segments,
    )
    return getattr(packed, output)[0][rows.columns]


def _can_pack(base: PreTrainedModel, must: bool) -> bool:
    """Whether packed rows give the hidden states of rows by themselves; switches ``base`` to packed
    attention if so. Logs a line if not; with ``must`` it raises ``UserError``.
    """
    before = base.config._attn_implementation
    reason = packing_problem(base)
    if not reason:
        base.set_attn_implementation(attention.NAME)
        if _is_whole(base):
            reason = _measured_reason(base)
        if not reason:
            return True
        base.set_attn_implementation(before)
    if must:
        raise cannot_pack(base, reason)
    logger.info("%s: rows are padded, not packed (%s)", type(base).__name__, reason)
    return False


def cannot_pack(base: PreTrainedModel, reason: str) -> UserError:
    """The error where ``--packing on`` asks for what ``base`` cannot do."""
    return UserError(
        f"--packing on: a {type(base).__name__} cannot run on packed rows ({reason}); "
        "--packing auto pads its rows"
    )


def packing_problem(base: PreTrainedModel) -> str:
    """Why the class and settings of ``base`` cannot be packed; "" if they can. Weights are not
    read: it may be on the meta device.
    """
    attention_name = base.config._attn_implementation
    if attention_name not in _REPLACED:
        return f"its attention is {attention_name}"
    backbone = getattr(base, base.base_model_prefix, None)
    if not getattr(base, "_supports_attention_backend", False) or backbone is None:
        return "its attention does not use transformers' interface"
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        return "it takes no positions"
    if getattr(base, "_is_stateful", False):
        return "it has a recurrent state"
    return ""


def _is_whole(base: PreTrainedModel) -> bool:
    """Whether the weights can be used here: neither sharded nor on the meta device."""
    weights = list(base.parameters())
    return not any(hasattr(w, "ds_tensor") or w.is_meta for w in weights)


@torch.no_grad()
def _measured_reason(base: PreTrainedModel) -> str:
    """Why packed rows of ``base`` give other hidden states than padded ones; "" if they do not."""
    ids = [[1, 2, 3, 4, 5], [1, 2, 3, 5], [2, 1]]
    ids = [[token % base.config.get_text_config().vocab_size for token in row] for row in ids]
    rows = pack(ids, [range(len(row)) for row in ids], [3, 3, 1]).to(base.device)
    backbone = getattr(base, base.base_model_prefix)
    with evaluating(base):
        try:
            packed = _run(backbone, rows, "last_hidden_state", packs=True).float()
        except (TypeError, attention.UnsupportedAttentionError) as error:
            return str(error).splitlines()[0]
        padded = _run(backbone, rows, "last_hidden_state", packs=False).float()
    tolerance = 1e-3 if base.dtype == torch.float32 else 0.05
    gap = float((packed - padded).abs().max() / padded.abs().max().clamp(min=1e-6))
    return "" if gap <= tolerance else f"hidden states differ by {gap:.2g} of the largest"
