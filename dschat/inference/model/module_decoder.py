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
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from dschat.config.errors import first_line
from dschat.distributed import RankGroup
from dschat.inference.kernels.cuda.dispatch import StepKernels
from dschat.inference.model.architectures import ModelSpec, UnsupportedModel
from dschat.inference.model.attention import Attention, Scores
from dschat.inference.model.borrowed import HeadLayout
from dschat.inference.model.decoder import Decoder
from dschat.models.packing.model import WINDOW_IN_MASK
from dschat.models.row_length import num_positions

if TYPE_CHECKING:
    from peft import PeftModel

NAME = "dschat_paged"
# Arguments of transformers' attention functions that select keys, or change scores in other ways.
_UNKNOWN = ("position_bias", "head_mask", "indices", "block_indices")

# Query, key and value (1, H or K, T, D) and how their scores are used -> (T, H, D of the value)
Step = Callable[[Tensor, Tensor, Tensor, Scores], Tensor]
_step: ContextVar[Step] = ContextVar("step")


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
    """transformers' attention interface, in a step: (1, T, H, D)."""
    for name in _UNKNOWN:
        if others.get(name) is not None:
            raise UnsupportedModel(f"{type(module).__name__} uses {name}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _step.get()(query, key, value, Scores(scale, sliding_window, softcap, s_aux))[None], None


AttentionInterface.register(NAME, _attention)


@dataclass
class ModuleWeights:
    """What an engine asks of weights, for those of ``module``, which it does not hold."""

    module: "PreTrainedModel | PeftModel"
    num_kv_heads: int
    group: RankGroup
    version: int = 0  # changes when tensors are replaced
    loads: int = 0  # changes with every value that is loaded

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def drop(self) -> None:
        pass


class ModuleDecoder:
    """``module``, a causal LM in eval mode whose weights are whole on this rank."""

    slopes = None

    def __init__(
        self, module: "PreTrainedModel | PeftModel", spec: ModelSpec, weights: Any
    ) -> None:
        self.module, self.spec, self.weights = module, spec, weights
        self._keeps_logits = "logits_to_keep" in _parameters(module)

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
    ) -> Tensor:
        """Logits (R, V) of the rows ``ready`` of packed ids and positions (T,) int64; None: all."""
        calls = iter(range(self.spec.num_layers))

        def one(q: Tensor, k: Tensor, v: Tensor, how: Scores) -> Tensor:
            return _attended(attention, next(calls), q, k, v, how, self.spec)

        keep: dict[str, Any] = {}
        if self._keeps_logits and ready is not None:
            keep["logits_to_keep"] = ready
        with _calling(one):
            logits = _forward(self.module, tokens, positions, **keep)
        return logits if keep or ready is None else logits.index_select(0, ready)


AnyDecoder = Decoder | ModuleDecoder


def module_spec(module: "PreTrainedModel | PeftModel") -> ModelSpec:
    """The sizes of ``module``'s attention, from its calls in a forward of two tokens.

    Raises:
        UnsupportedModel: its attention cannot be followed.
    """
    if reason := module_problem(module):
        raise UnsupportedModel(f"{type(_base(module)).__name__}: {reason}")
    shapes: list[tuple[int, int, int]] = []
    windows: list[int | None] = []

    def one(q: Tensor, k: Tensor, v: Tensor, how: Scores) -> Tensor:
        windows.append(how.window)
        shapes.append((q.shape[1], k.shape[1], max(q.shape[-1], v.shape[-1])))
        return q.new_zeros(q.shape[2], q.shape[1], v.shape[-1])

    tokens = torch.arange(2, device=next(module.parameters()).device)
    try:
        with torch.no_grad(), paged(module), _calling(one):
            logits = _forward(module, tokens, tokens)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"{type(_base(module)).__name__} fails ({first_line(error)})"
        ) from error
    heads = {q for q, _, _ in shapes}
    num_kv_heads = lcm(*(k for _, k, _ in shapes)) if shapes else 0
    if not shapes or any(q % num_kv_heads for q in heads):
        raise UnsupportedModel(f"{type(_base(module)).__name__}: its attention cannot be followed")
    config = _base(module).config
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
        windows=tuple(windows),
    )


def module_problem(module: "PreTrainedModel | PeftModel") -> str:
    """Why the class and settings of ``module`` cannot run here; "" if nothing is known."""
    base = _base(module)
    config = base.config.get_text_config()
    if "position_ids" not in _parameters(module):
        return "it takes no positions"
    windows = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    if config.model_type in WINDOW_IN_MASK and any(windows):
        return "the window of its attention is in the mask alone"
    if any(name.endswith(".indexer") for name, _ in base.named_modules()):
        return "its attention selects keys"
    if getattr(base, "_is_stateful", False):
        return "it has a recurrent state"
    return ""


def page(module: "PreTrainedModel | PeftModel") -> None:
    """Let ``module`` run in eval mode with the attention of steps, for good."""
    _base(module).set_attn_implementation(NAME)
    module.eval()


@contextmanager
def paged(module: "PreTrainedModel | PeftModel") -> Iterator[None]:
    """Runs ``module`` in eval mode with the attention of steps."""
    base, training = _base(module), module.training
    name = base.config._attn_implementation
    page(module)
    try:
        yield
    finally:
        base.set_attn_implementation(name)
        module.train(training)


@contextmanager
def _calling(step: Step) -> Iterator[None]:
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def _forward(module: nn.Module, tokens: Tensor, positions: Tensor, **keep: Any) -> Tensor:
    output = module(
        input_ids=tokens[None],
        position_ids=positions[None],
        # Four dimensions: transformers builds no mask of its own, which would be (T, T).
        attention_mask=tokens.new_zeros(1, 1, 1, 1, dtype=torch.bool),
        use_cache=False,
        **keep,
    )
    return output.logits[0]


def _attended(
    attend: Attention, layer: int, q: Tensor, k: Tensor, v: Tensor, how: Scores, spec: ModelSpec
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


def _base(module: Any) -> PreTrainedModel:
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def _parameters(module: Any) -> Any:
    return inspect.signature(_base(module).forward).parameters
