"""Runs a causal LM of transformers on a few tokens and notes what each of its modules computes.

The model has its real sizes but few numbers, so that this takes no memory and a fraction of a
second: linear layers return sums of a few of their inputs, a thousand tokens of the vocabulary and
a few columns of each expert are kept, and rows of other large weights overlap.
"""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dschat.inference.model.attention import own_token
from dschat.inference.model.module_decoder import caching, calling, paged, run_forward
from dschat.inference.model.module_parts import is_experts
from dschat.inference.model.spec import UnsupportedModel
from dschat.inference.model.states import StepCache, holds_states
from dschat.models.checkpoint_tensors import is_constant
from dschat.models.long_rows import num_positions
from dschat.models.packing.kernels import Scores
from dschat.models.packing.states import by_torch, mixers

LINEAR = (nn.Linear, Conv1D)  # by their very type: a subclass may compute more

_POSITIONS = (0, 1, 2, 3, 5, 9, 14)  # of the tokens
_TOKENS = 1 << 10  # of the vocabulary
_FARTHEST = 1 << 17  # of a further token, beyond the original length of a scaled rotary encoding
_OVERLAPPING = 1 << 14  # elements from which a weight's rows overlap
_STEP = 7  # elements between the starts of overlapping rows
_MOST = 1 << 22  # elements of a weight that is computed with
_COLUMNS = 16  # of an expert
_TERMS = 3  # of an output of a linear layer


class Call(NamedTuple):
    """A module that was called, with the tensors that it got; the first one that it returned."""

    name: str
    module: Any
    inputs: tuple[Tensor, ...]
    output: Tensor


class Attended(NamedTuple):
    """A call of attention, by the module ``name``."""

    name: str
    q: Tensor  # (T, H, D)
    k: Tensor  # (T, K, D), as `v`
    v: Tensor
    how: Scores
    output: Tensor  # (T, H * D)


class Trial:
    """What a model of ``config`` computes for ``ids`` at ``positions`` (T,), in which attention
    mixes a token's own heads: the calls of its modules in the order of their ends, and logits.

    Raises:
        UnsupportedModel: it cannot be run so. What transformers raises is passed on.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, config: PretrainedConfig) -> None:
        draw = torch.Generator().manual_seed(0)
        self.model, self.shapes, self.mixers = _model(config, draw)
        self.layers = _layers(self.model)
        bound = num_positions(config)
        places = [*_POSITIONS, *_beyond_original(config)]
        self.positions = torch.tensor([p for p in places if bound is None or p < bound])
        rows = len(self.model.get_input_embeddings().weight)
        self.ids = torch.randint(rows, self.positions.shape, generator=draw)
        self.calls: list[Call | Attended] = []
        self._open: list[tuple[str, tuple[Tensor, ...]]] = []
        with ExitStack() as scope:
            scope.enter_context(by_torch())
            scope.enter_context(self._noting())
            scope.enter_context(paged(self.model))
            scope.enter_context(calling(self._attend, self.positions))
            more = caching(StepCache(config=self.model.config)) if self.mixers else {}
            self.logits = run_forward(self.model, self.ids[None], self.positions[None], **more)[0]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, how: Scores) -> Tensor:
        out = own_token(q, k, v, how)
        queries, keys, values = (x[0].transpose(0, 1).clone() for x in (q, k, v))
        heads = self._open[-1][0], queries, keys, values
        self.calls.append(Attended(*heads, how, out.flatten(1).clone()))
        return out

    @contextmanager
    def _noting(self) -> Iterator[None]:
        hooks = []
        for name, module in self.model.named_modules():
            hooks += [
                module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True),
                module.register_forward_hook(partial(self._leave, name)),
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, name: str, _: nn.Module, args: Any, named: dict[str, Any]) -> None:
        given = (x for x in (*args, *named.values()) if isinstance(x, Tensor))
        self._open.append((name, tuple(x.clone() for x in given)))

    def _leave(self, name: str, module: nn.Module, _: Any, output: Any) -> None:
        given = self._open.pop()[1]
        output = output[0] if isinstance(output, tuple) else output
        if isinstance(output, Tensor):
            self.calls.append(Call(name, module, given, output.clone()))


def _model(
    config: PretrainedConfig, draw: torch.Generator
) -> tuple[PreTrainedModel, dict[str, torch.Size], dict[str, Any]]:
    """The model, the real shapes of what its checkpoints hold, and its parts with states, by name,
    on the meta device.
    """
    config = copy.deepcopy(config)
    ways: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    # NOTE: the fork: initializing on the meta device takes draws of the host's generator.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **ways)
    of_tokens = model.get_input_embeddings(), model.get_output_embeddings()
    if None in of_tokens:
        raise UnsupportedModel(f"{type(model).__name__} has no head")
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    stateful = {m for _, m in mixers(model)} if holds_states(config) else set()
    skeletons = {n: copy.deepcopy(m) for n, m in model.named_modules() if m in stateful}
    read = {child for m in stateful for child in m.modules()}  # which may read weights themselves
    weights: dict[int, nn.Parameter] = {}  # by the id of those on the meta device: tied ones share
    for module in model.modules():
        kept = _kept_of_experts(module) if is_experts(module) else {}
        is_linear = type(module) in LINEAR and module not in of_tokens
        for name, p in module._parameters.items():
            if p is not None and id(p) not in weights:
                part = p[:_TOKENS] if module in of_tokens else p[kept.get(name, ...)]
                is_table = isinstance(module, nn.Embedding) or module in of_tokens or name in kept
                if not (is_linear or is_table or part.numel() <= _MOST):
                    kind = type(module).__name__
                    raise UnsupportedModel(f"{type(model).__name__}: a {kind} has large weights")
                if not (is_linear and name == "weight") or module in read:
                    fan_in = 1 if isinstance(module, nn.Embedding) else part.shape[-1]
                    part = _weight(part.shape, fan_in, draw)
                weights[id(p)] = nn.Parameter(part, requires_grad=False)
                weights[id(p)]._is_hf_initialized = True  # type: ignore[attr-defined]
            if p is not None:
                module._parameters[name] = weights[id(p)]
        if is_linear:
            how = module.weight, module.bias, isinstance(module, Conv1D), draw
            module.forward = _sums_of_inputs(*how)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()  # buffers alone
    for name, tensor in model.state_dict(keep_vars=True).items():
        is_drawn = isinstance(tensor, nn.Parameter) or is_constant(name)
        if not is_drawn and tensor.is_floating_point():  # else zeros, which say nothing
            tensor.copy_(_weight(tensor.shape, 1, draw) - 1)
    return model.eval(), shapes, skeletons


def _kept_of_experts(experts: Any) -> dict[str, Any]:
    """Of each of their tensors, what belongs to the first columns."""
    both = _COLUMNS * (2 if experts.has_gate else 1)
    first, every = ("gate_up_proj" if experts.has_gate else "up_proj"), slice(None)
    up: Any = every, slice(both)
    down: Any = every, every, slice(_COLUMNS)
    if experts.is_transposed:
        up, down = (every, every, slice(both)), (every, slice(_COLUMNS))
    return {first: up, "down_proj": down, f"{first}_bias": (every, slice(both))}


def _weight(shape: torch.Size, fan_in: int, draw: torch.Generator) -> Tensor:
    """Vectors around 1, and matrices that make outputs three times as large as inputs."""
    if len(shape) < 2:
        return 0.5 + torch.rand(shape, generator=draw)
    spread = 3 * fan_in**-0.5
    if shape.numel() < _OVERLAPPING:
        return spread * torch.randn(shape, generator=draw)
    steps = [1]
    for _ in shape[1:]:
        steps.insert(0, _STEP * steps[0])
    size = 1 + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
    return (spread * torch.randn(size, generator=draw)).as_strided(shape, steps)


def _layers(model: PreTrainedModel) -> str:
    """The name of the list of layers."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name
    raise UnsupportedModel(f"{type(model).__name__} has no list of layers")


def _sums_of_inputs(weight: Tensor, bias: Tensor | None, is_transposed: bool, draw: Any) -> Any:
    """Stands in for the product with ``weight``."""
    size, width = weight.shape[::-1] if is_transposed else weight.shape
    places = torch.randint(width, (_TERMS, size), generator=draw)

    def run(x: Tensor) -> Tensor:
        y = x[..., places[0]]
        for index in places[1:]:
            y = 2 * y + x[..., index]
        return y if bias is None else y + bias

    return run


def _beyond_original(config: PretrainedConfig) -> list[int]:
    """A position beyond each original length that rotary positions are scaled from."""
    given = getattr(config, "rope_parameters", None) or {}
    parts = [given, *(part for part in given.values() if isinstance(part, dict))]
    sizes = {part.get("original_max_position_embeddings") or 0 for part in parts}
    return sorted(int(size) + 3 for size in sizes if 0 < size <= _FARTHEST)
