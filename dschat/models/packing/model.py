"""Runs a transformers model on packed rows, or on padded ones where its family cannot be packed."""

import inspect
import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import dschat.distributed as dist
from dschat.config import UserError
from dschat.models.long_rows import probe_length
from dschat.models.packing import attention
from dschat.models.packing.rows import PackedRows, pack
from dschat.models.packing.sequence_parallel import Share, share_of
from dschat.models.packing.states import is_sharded, mixers, run_by_row
from dschat.models.training_engine import ModelOrEngine, evaluating, without_adapters

# NOTE: PEFT imports DeepSpeed, which reads settings of `dschat.runtime.deepspeed_engine`.
if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger("dschat")

Packing = Literal["auto", "on", "off"]

# Implementations that packed attention stands in for; others were asked for by name.
_REPLACED = ("sdpa", "flash_attention_2", attention.NAME)

# Families that call transformers' attention interface and do not say so.
_CALLS_INTERFACE = ("biogpt", "stablelm")
_DOGE_MASK = "prepare_dynamic_mask"

# Of `PackedModel.check`: probes, tokens of the longest row of each, and where one probe must do.
_PROBES, _SHORTEST, _LONG = 3, 5, 512


class PackedModel(nn.Module):
    """A transformers model, or PEFT's around it, that reads hidden states of `PackedRows`.

    Args:
        model: with or without a head.
        packing: ``--packing``.
        parallel: ``--sequence_parallel_size``.

    Attributes:
        packs: whether rows run as one stream. False also where the family's attention does not go
            through transformers' interface, or where `check` found other hidden states.
        by_row: whether it packs, and layers with states read each row with its prompt.
        router_loss, router_loads, replay: see `dschat.models.routing`; None of most models.
    """

    router_loss: Any = None
    router_loads: Any = None
    _share: Share | None = None  # of the last forward
    replay: Any = None

    def __init__(
        self, model: "PreTrainedModel | PeftModel", packing: Packing = "auto", parallel: int = 1
    ) -> None:
        super().__init__()
        self.model = model
        self._group = dist.RankGroup(parallel)
        self._packing = "on" if parallel > 1 else packing
        self._attention = self.base.config._attn_implementation
        self.packs, self.by_row = packing != "off", False
        if reason := self.packs and packing_problem(self.base):
            self._pad(reason)
        elif self.packs:
            self.base.set_attn_implementation(attention.NAME)
            self.by_row = run_by_row(self.base)

    @property
    def pads(self) -> bool:
        """Whether any layer pads rows to the longest of all."""
        return not self.packs or (self.by_row and is_sharded(self))

    @property
    def base(self) -> PreTrainedModel:
        """The transformers model."""
        # NOTE: PEFT's wrapper has a `model` attribute of its own, which would shadow the backbone.
        return without_adapters(self.model)

    def forward(self, rows: PackedRows, *args: Any, **options: Any) -> Any:
        """Collective with sequence parallelism. `compute` of ``rows``."""
        if self._group.size == 1:
            return self.compute(rows, *args, **options)
        self._share = share = share_of(rows, self._group)
        results = self.compute(share.rows, *args, **options)
        if isinstance(results, Tensor):
            return share.own(results)
        return tuple(None if result is None else share.own(result) for result in results)

    def compute(self, rows: PackedRows, *args: Any, **options: Any) -> Any:
        """What a forward returns, at the columns that ``rows`` reads."""
        raise NotImplementedError

    def of_tokens(self, values: Tensor) -> Tensor:
        """Collective with sequence parallelism. What the last forward computed of each token that
        it was given (N, ...), from ``values`` of those computed here.
        """
        return values if self._share is None else self._share.of_tokens(values)

    def hidden_states(self, rows: PackedRows) -> Tensor:
        """Last hidden states at the columns that ``rows`` reads: (M, D)."""
        return self.run(rows, "last_hidden_state", backbone(self.base))

    def run(self, rows: PackedRows, output: str, module: nn.Module | None = None) -> Tensor:
        """``output`` (..., D) of ``module`` at the columns that ``rows`` reads: (M, D)."""
        with nullcontext() if self.replay is None else self.replay.of(rows):
            return _run(module or self.base, rows, output, self.packs)

    def check(self, device: torch.device) -> None:
        """Collective under ZeRO-3. Run a few tokens both ways, on the device that trains.

        NOTE: not while the model is built, when weights are sharded without the engine's hooks; nor
        inside a forward: ZeRO-3 would take all of it for the order of modules in every forward,
        and keep the weights for a second use.

        Raises ``UserError`` where ``--packing on`` asks for what the model cannot do.
        """
        with torch.no_grad(), evaluating(self.base):
            self._check(device)

    def _check(self, device: torch.device) -> None:
        if not self.packs:
            return
        longest_row = getattr(self.base, "longest_row", 0)
        length = probe_length(self.base.config, longest_row, _SHORTEST)
        count = _PROBES if length <= _LONG else 1  # memory
        rows = probe(self.base, length, count).to(device)
        try:
            packed = self.hidden_states(rows)
        except (TypeError, attention.UnsupportedAttentionError) as error:
            return self._pad(str(error).splitlines()[0])
        except RuntimeError as error:  # of a layer with a state that takes rows in another shape
            if not self.by_row or isinstance(error, torch.OutOfMemoryError):
                raise
            return self._pad(str(error).splitlines()[0])
        self.packs = False
        # The attention that packed attention stands in for.
        own = "sdpa" if self.base._supports_sdpa else "eager"
        with attention.attention_named(self.base, own):
            gap = self.gap(packed, self.hidden_states(rows), count)
        self.packs = True
        if gap is not None:
            self._pad(f"hidden states differ by {gap:.2g} of the largest")

    def gap(self, actual: Tensor, expected: Tensor, count: int = _PROBES) -> float | None:
        """How far columns of ``count`` probes differ, relative to the largest value; None if that
        may be rounding.

        Where rounding decides which experts a router chooses, some columns of one probe differ. A
        fault hits the same columns of every probe, and more than a twentieth of them.
        """
        scale = expected.float().abs().max().clamp(min=1e-6)
        gaps = (actual.float() - expected.float()).abs().amax(-1).view(count, -1).amin(0)
        gap = float(gaps.topk(1 + len(gaps) // 20).values[-1] / scale)
        return None if gap <= (1e-3 if self.base.dtype == torch.float32 else 0.05) else gap

    def _pad(self, reason: str) -> None:
        """Run padded rows from here on."""
        self.packs = self.by_row = False
        if self._packing == "on":
            raise cannot_pack(self.base, reason, self._group.size)
        if self.base.config._attn_implementation != self._attention:
            self.base.set_attn_implementation(self._attention)
        logger.info("%s: rows are padded, not packed (%s)", type(self.base).__name__, reason)


def backbone(base: PreTrainedModel) -> nn.Module | None:
    """``base`` without its head; None where the family does not name it."""
    names = base.base_model_prefix or " ", "model"  # the prefix of Llama 4's is another class's
    return next((getattr(base, name) for name in names if hasattr(base, name)), None)


def packed_model(model: ModelOrEngine) -> PackedModel:
    """The `PackedModel` in ``model``."""
    module = getattr(model, "module", model)
    assert isinstance(module, PackedModel)
    return module


def _run(module: nn.Module, rows: PackedRows, output: str, packs: bool) -> Tensor:
    if not packs:
        padded = module(input_ids=rows.padded_ids, use_cache=False)
        return getattr(padded, output).flatten(0, 1)[rows.padded_columns]
    # Four dimensions: transformers builds no mask of its own, which would be (N, N).
    mask: Any = rows.input_ids.new_zeros(1, 1, 1, 1, dtype=torch.bool)
    mask.segments = rows.segments
    packed = module(
        input_ids=rows.input_ids[None],
        position_ids=rows.position_ids[None],
        attention_mask=mask,
        use_cache=False,
        segments=rows.segments,
        positions=rows.position_ids,
    )
    return getattr(packed, output)[0][rows.columns]


def probe(base: PreTrainedModel, length: int = _SHORTEST, count: int = _PROBES) -> PackedRows:
    """Rows of up to ``length`` tokens with and without a shared prompt, ``count`` times with other
    tokens; all columns are read.
    """
    shared, num_ids = (length + 1) // 2, base.config.get_text_config().vocab_size
    longest = list(range(1, length + 1))
    rows = [longest, longest[:shared] + longest[shared + 1 :], [2, 1]]
    ids = [[(7 * i + token) % num_ids for token in row] for i in range(count) for row in rows]
    return pack(ids, [range(len(row)) for row in ids], [shared, shared, 1] * count)


def cannot_pack(base: PreTrainedModel, reason: str, parallel: int = 1) -> UserError:
    """The error where ``--packing on`` or sequence parallelism asks for what ``base`` cannot do."""
    flag, remedy = "--packing on", "--packing auto pads its rows"
    if parallel > 1:
        flag, remedy = f"--sequence_parallel_size {parallel}", "leave it out"
    return UserError(
        f"{flag}: a {type(base).__name__} cannot run on packed rows ({reason}); {remedy}"
    )


def packing_problem(base: PreTrainedModel) -> str:
    """Why the class and settings of ``base`` cannot be packed; "" if they can. Weights are not
    read: it may be on the meta device.
    """
    attention_name, body = base.config._attn_implementation, backbone(base)
    by_row = mixers(base)  # such families do not say whether they call the interface
    calls_interface = getattr(base, "_supports_attention_backend", False) or bool(by_row)
    calls_interface |= base.config.model_type in _CALLS_INTERFACE
    if attention_name not in _REPLACED and (base._supports_sdpa or not calls_interface):
        return f"its attention is {attention_name}"  # not for a softcap or sinks
    if not calls_interface or body is None:
        return "its attention does not use transformers' interface"
    if "position_ids" not in inspect.signature(body.forward).parameters:
        return "it takes no positions"
    if getattr(base, "_is_stateful", False) and not by_row:
        return "it has a recurrent state"
    return selects_keys(base)


def selects_keys(base: PreTrainedModel) -> str:
    """That attention reads some keys only; "" if it is not known to."""
    named = base.named_modules()
    selects = any(n.endswith(".indexer") or hasattr(m, _DOGE_MASK) for n, m in named)
    return "its attention selects keys" if selects else ""
