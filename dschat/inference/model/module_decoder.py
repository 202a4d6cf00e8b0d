"""Runs transformers' own module as a decoder: packed token ids to logits, over our paged cache.

The module's attention layers call a function that transformers knows by name; during a step it is
the step's `Attention`, which reads and writes the cache. A layer's place in the cache is its place
in the order of calls: layers that run several times a token, or read another one's keys, need no
rule of their own. All else, such as norms, experts, multipliers and what stands behind the head,
is the module's.

Shapes: T packed tokens, H query and K key-value heads, D head size.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from math import lcm
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from dschat.config.errors import first_line
from dschat.inference.model.attention import Attend, Attention, KeepExperts, own_token
from dschat.inference.model.borrowed import HeadLayout
from dschat.inference.model.decoder import Decoder
from dschat.inference.model.spec import ModelSpec, UnsupportedModel
from dschat.inference.model.states import (
    CACHE,
    Carried,
    StateShape,
    StateTrial,
    StepCache,
    holds_states,
)
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

NAME = "dschat_paged"

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


class ModuleDecoder(StateTrial):
    """``module``, a causal LM in eval mode whose weights are whole on this rank."""

    slopes = None

    def __init__(
        self, module: "PreTrainedModel | PeftModel", spec: ModelSpec, weights: Any
    ) -> None:
        self.module, self.spec, self.weights = module, spec, weights
        base = without_adapters(module)
        self.config = base.config
        self._keeps_logits = "logits_to_keep" in _parameters(module)
        self._routers = routers_of(base)
        if spec.states:
            run_by_row(base)

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
            rows, more = carried.num_sequences, caching(carried.cache)
            length = len(tokens) // rows
            ready = torch.arange(length - carried.num_ready, length, device=tokens.device)
        keep: dict[str, Any] = {}
        if self._keeps_logits and ready is not None:
            keep["logits_to_keep"] = ready
        shape = rows, -1
        with ExitStack() as scope:
            if isinstance(carried, StatefulRows):
                more = caching(carried.cache)
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

    @torch.inference_mode(False)
    @torch.no_grad()
    def _probed(self, rows: list[range], cache: StepCache) -> Tensor:
        places = [token for row in rows for token in row]
        positions = torch.tensor(places, device=self.weights.device)[None]
        with calling(own_token, positions[0]):
            return run_forward(self.module, positions, positions, **caching(cache))[0]


def caching(cache: StepCache) -> dict[str, Any]:
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
        options = caching(cache)
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
