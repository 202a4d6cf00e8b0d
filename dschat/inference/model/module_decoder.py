"""Runs transformers' own module as a decoder: packed token ids to logits, over our paged cache.

The module's attention layers call a function that transformers knows by name; during a step it is
the step's `Attention`, which reads and writes the cache. A layer's place in the cache is its place
in the order of calls: layers that run several times a token, or read another one's keys, need no
rule of their own. All else, such as norms, experts, multipliers and what stands behind the head,
is the module's.

Shapes: T packed tokens, H query and K key-value heads, D head size.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cached_property, partial
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from dschat.config.errors import first_line
from dschat.inference.model.attention import Attention, KeepExperts
from dschat.inference.model.borrowed import HeadLayout
from dschat.inference.model.decoder import Attend, Decoder
from dschat.inference.model.spec import ModelSpec, UnsupportedModel
from dschat.inference.model.states import CACHE, StateShape, StepCache, holds_states, row_table
from dschat.inference.model.step_kernels import StepKernels
from dschat.models.long_rows import num_positions
from dschat.models.packing import attention as packing
from dschat.models.packing.kernels import Scores
from dschat.models.packing.model import selects_keys
from dschat.models.packing.states import StatefulRows, reading, run_by_row
from dschat.models.routing import routers_of
from dschat.models.training_engine import evaluating, without_adapters

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger("dschat")

NAME = "dschat_paged"
_PROBE = range(5)  # tokens of the longest row that a decoder tries its layers with

# Query, key and value (1, H or K, T, D) and how their scores are used -> (T, H, D of the value)
Step = Callable[[Tensor, Tensor, Tensor, Scores], Tensor]
# The step that runs, and the positions (T,) of its tokens.
_step: ContextVar[tuple[Step, Tensor] | None] = ContextVar("step", default=None)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: (1, T, H, D). Outside steps it is that of training."""
    running = _step.get()
    if running is None:
        how: dict[str, Any] = {"scaling": scaling, "sliding_window": sliding_window}
        how |= {"softcap": softcap, "s_aux": s_aux}
        return packing.attention(module, query, key, value, attention_mask, **how, **others)
    for name in packing.UNSUPPORTED:
        if others.get(name) is not None:
            raise UnsupportedModel(f"{type(module).__name__} uses {name}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Rows of a batch are tokens like others.
    q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value))
    step, positions = running
    window, chunk = packing.reach(module, sliding_window)
    q = packing.tuned(module, q, positions)
    out = step(q, k, v, Scores(scale, window, softcap, s_aux, chunk))
    return out.unflatten(0, (len(query), -1)), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class Carried(NamedTuple):
    """The states of a step's sequences, in the order of its tokens: equally many of each."""

    states: StepCache
    num_sequences: int
    num_ready: int  # the last tokens of each sequence whose logits are wanted


class ModuleDecoder:
    """``module``, a causal LM in eval mode whose weights are whole on this rank."""

    slopes = None

    def __init__(
        self, module: "PreTrainedModel | PeftModel", spec: ModelSpec, weights: Any
    ) -> None:
        self.module, self.spec, self.weights = module, spec, weights
        self._keeps_logits = "logits_to_keep" in _parameters(module)
        self._routers = routers_of(without_adapters(module))
        if spec.states:
            run_by_row(without_adapters(module))

    # NOTE: in inference mode a training module's caches, of rotary tables, could not train.
    @torch.inference_mode(False)
    @torch.no_grad()
    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        ready: Tensor | None = None,
        kernels: StepKernels | None = None,
        carried: Carried | StatefulRows | None = None,
    ) -> Tensor:
        """Logits (R, V) of the rows ``ready`` of packed ids and positions (T,) int64; None: all.
        Of `Carried` sequences those that it names.
        """
        calls = iter(range(self.spec.num_layers))
        attend: Attend = attention
        if kernels is not None and kernels.runs("attention"):
            attend = kernels.attention(attention)

        def one(q: Tensor, k: Tensor, v: Tensor, how: Scores) -> Tensor:
            return _attended(attend, next(calls), q, k, v, how, self.spec)

        rows, more = 1, {}
        if isinstance(carried, Carried):
            rows, more = carried.num_sequences, _caching(carried.states)
            length = len(tokens) // rows
            ready = torch.arange(length - carried.num_ready, length, device=tokens.device)
        keep: dict[str, Any] = {}
        if self._keeps_logits and ready is not None:
            keep["logits_to_keep"] = ready
        shape = rows, -1
        with ExitStack() as scope:
            if isinstance(carried, StatefulRows):
                more = _caching(carried.cache)
                scope.enter_context(reading(carried))
            scope.enter_context(calling(one, positions))
            if not attention.chunks and (tokens.is_cuda or kernels is not None):
                scope.enter_context(self.weights.without_waits(kernels))
            if (write := attention.keep_experts) is not None:
                for router in self._routers:
                    scope.enter_context(router.register_forward_hook(partial(_keep, write)))
            logits = run_forward(
                self.module, tokens.view(shape), positions.view(shape), **keep, **more
            )
        assert next(calls, None) is None, "not all layers called the step's attention"
        if not keep and ready is not None:
            logits = logits.index_select(1, ready)
        return logits.flatten(0, 1)

    @cached_property
    def reads_rows(self) -> bool:
        """Whether layers with states compute rows together, the shorter ones padded on the left, as
        they do one by one.
        """
        problem = self._row_problem()
        if problem:
            name = type(without_adapters(self.module)).__name__
            logger.info("%s: prompts of one length at a time (%s)", name, problem)
        return not problem

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
        except (TypeError, RuntimeError, packing.UnsupportedAttentionError) as error:
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
        """Those of the first layer that has any: what others do to its input are roundings."""
        return [where for where in self.spec.states if where.layer == self.spec.states[0].layer]

    def _caches(self, count: int) -> list[StepCache]:
        return [StepCache(config=without_adapters(self.module).config) for _ in range(count)]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _probed(self, rows: list[range], cache: StepCache) -> Tensor:
        """Logits (T, V) of ``rows`` of ids, each of which is its position, too."""
        places = [token for row in rows for token in row]
        positions = torch.tensor(places, device=self.weights.device)[None]
        with calling(own_token, positions[0]):
            return run_forward(self.module, positions, positions, **_caching(cache))[0]


def own_token(q: Tensor, k: Tensor, v: Tensor, how: Scores) -> Tensor:
    """A `Step` in which a token reads its own query, key and value."""
    seen = q.mean((1, 3)) + k.mean((1, 3))
    values = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return (values + seen[:, None, :, None])[0].transpose(0, 1).contiguous()


def _is_close(actual: Tensor, expected: Tensor, all_rows: bool = True) -> bool:
    """Whether rows differ by roundings of the largest value: all of them, or the nearest."""
    gaps = (actual.float() - expected.float()).abs().flatten(1).amax(1)
    gap = (gaps.amax() if all_rows else gaps.amin()) / expected.float().abs().max().clamp(min=1e-6)
    return bool(gap <= (1e-3 if actual.dtype == torch.float32 else 0.05))


def _caching(cache: StepCache) -> dict[str, Any]:
    return {"use_cache": True, CACHE: cache}


def _keep(keep: KeepExperts, router: nn.Module, args: Any, output: Any) -> None:
    keep(router, output[-1], output[0].shape[-1])


AnyDecoder = Decoder | ModuleDecoder


def module_spec(module: "PreTrainedModel | PeftModel") -> ModelSpec:
    """The sizes of ``module``'s attention, from its calls in a forward of two tokens.

    Raises:
        UnsupportedModel: its attention cannot be followed.
    """
    base = without_adapters(module)
    name = type(base).__name__
    parameters = _parameters(module)
    reason = selects_keys(base) or ("" if "position_ids" in parameters else "it takes no positions")
    has_states = CACHE in parameters and holds_states(base.config)
    if getattr(base, "_is_stateful", False) and not has_states:
        reason = reason or "its states are not in transformers' cache"
    if reason:
        raise UnsupportedModel(f"{name}: {reason}")
    shapes: list[tuple[int, int, int]] = []
    scores: list[Scores] = []

    def one(q: Tensor, k: Tensor, v: Tensor, how: Scores) -> Tensor:
        scores.append(how)
        shapes.append((q.shape[1], k.shape[1], max(q.shape[-1], v.shape[-1])))
        return nothing(q, k, v, how)

    try:
        logits, states = probe(module, one, has_states)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"{name} fails ({first_line(error)})") from error
    heads = {q for q, _, _ in shapes}
    num_kv_heads = lcm(*(k for _, k, _ in shapes)) if shapes else 0
    if not shapes or any(q % num_kv_heads for q in heads):
        raise UnsupportedModel(f"{name}: its attention cannot be followed")
    config = base.config
    return ModelSpec(
        num_layers=len(shapes),
        hidden_size=0,
        num_heads=max(heads),
        num_kv_heads=num_kv_heads,
        head_size=max(size for _, _, size in shapes),
        intermediate_size=0,
        vocab_size=logits.shape[-1],
        sources=(),
        prefix="",
        activation="",
        max_positions=num_positions(config),
        windows=tuple(how.window or how.chunk for how in scores),
        states=states,
    )


@torch.inference_mode(False)  # whose tensors have no versions
def probe(
    module: "PreTrainedModel | PeftModel", step: Step, has_states: bool = False
) -> tuple[Tensor, tuple[StateShape, ...]]:
    """Logits (1, 2, V) of two tokens with ``step`` for attention, and the states they leave."""
    tokens = torch.arange(2, device=next(module.parameters()).device)[None]
    options: dict[str, Any] = {}
    if has_states:
        cache = StepCache(config=without_adapters(module).config)
        options = _caching(cache)
    with torch.no_grad(), paged(module), calling(step, tokens[0]):
        logits = run_forward(module, tokens, tokens, **options)
    return logits, cache.shapes() if has_states else ()


def nothing(q: Tensor, k: Tensor, v: Tensor, how: Scores) -> Tensor:
    """A `Step` of zeros."""
    return q.new_zeros(q.shape[2], q.shape[1], v.shape[-1])


@contextmanager
def paged(module: "PreTrainedModel | PeftModel") -> Iterator[None]:
    """Runs ``module`` in eval mode with the attention of steps."""
    with packing.attention_named(without_adapters(module), NAME), evaluating(module):
        yield


@contextmanager
def calling(step: Step, positions: Tensor) -> Iterator[None]:
    token = _step.set((step, positions))
    try:
        yield
    finally:
        _step.reset(token)


def run_forward(module: nn.Module, tokens: Tensor, positions: Tensor, **options: Any) -> Tensor:
    """Logits (B, R, V) of tokens and positions (B, T)."""
    output = module(
        input_ids=tokens,
        position_ids=positions,
        # Four dimensions: transformers builds no mask of its own, which would be (T, T).
        attention_mask=tokens.new_zeros(1, 1, 1, 1, dtype=torch.bool),
        **{"use_cache": False} | options,
    )
    return output.logits


def _attended(
    attend: Attend, layer: int, q: Tensor, k: Tensor, v: Tensor, how: Scores, spec: ModelSpec
) -> Tensor:
    """(T, H, D of ``v``): heads are repeated, and padded with zeros, to the cache's sizes."""
    num_heads, size = q.shape[1], v.shape[-1]
    if k.shape[1] < spec.num_kv_heads:
        k, v = (x.repeat_interleave(spec.num_kv_heads // x.shape[1], dim=1) for x in (k, v))
    parts = [
        F.pad(x, (0, spec.head_size - x.shape[-1])) if x.shape[-1] < spec.head_size else x
        for x in (q, k, v)
    ]
    heads = torch.cat([part[0] for part in parts]).transpose(0, 1).contiguous()
    layout = HeadLayout.of(num_heads, spec.num_kv_heads, "qkv", False)
    out = attend(layer, heads, layout, how)
    return out.view(-1, num_heads, spec.head_size)[..., :size]


def _parameters(module: Any) -> Any:
    return inspect.signature(without_adapters(module).forward).parameters
