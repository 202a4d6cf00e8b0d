"""Defines the operations of captured decode steps that `gpu_kernels` times, one by one.

Each runs the decoder's own code: with `StepKernels` its Triton kernel, without them torch's
operators. Numbers are random. What a step computes once for all its layers is computed before the
first launch: the tables of rotations and pages, and torch's bias that hides unused keys.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from rollout_workloads import MODELS, Case
from torch import Tensor
from transformers import PretrainedConfig

from dschat.distributed import RankGroup
from dschat.inference import EngineConfig, SamplingParams
from dschat.inference.kernels.cuda import MAX_ROWS
from dschat.inference.model.architectures import model_spec
from dschat.inference.model.attention import Attention, Decodes
from dschat.inference.model.borrowed import BorrowedLinear, BorrowedPart, HeadLayout
from dschat.inference.model.decoder import Decoder, _Step
from dschat.inference.model.kv_cache import KVCache
from dschat.inference.model.layers import Layer, Mlp, Norm
from dschat.inference.model.spec import ModelSpec
from dschat.inference.model.step_kernels import StepKernels
from dschat.inference.model.weights import Weights
from dschat.inference.requests.sampler import Sampler, SamplingKind, StepSampling
from dschat.inference.requests.sequence import Request
from dschat.models.packing.kernels import Scores

DTYPE = torch.bfloat16
Operands = tuple[Tensor | None, ...]
Launch = Callable[..., tuple[Tensor, ...]]  # of `Operands`
PRODUCTS = ("qkv", "out", "up", "down", "head")
SAMPLINGS = {
    "draw": SamplingParams(),
    "draw-greedy": SamplingParams(temperature=0.0),
    "draw-top-p": SamplingParams(top_p=0.9),
}


@dataclass(frozen=True)
class Operation(ABC):
    """An operation of the decode steps of ``case``, when half of each answer is drawn.

    ``limit``: of the difference between two right results.
    """

    name: str
    case: Case

    # Reads weights or keys, which no cache holds; else what the step has just written.
    is_cold: ClassVar[bool] = True
    limit: ClassVar[float] = 1.6e-2  # four roundings to bf16, as in a gated product
    changed: ClassVar[tuple[int, ...]] = ()  # operands that are results too

    @cached_property
    def config(self) -> PretrainedConfig:
        return MODELS[self.case.model]()

    @cached_property
    def spec(self) -> ModelSpec:
        return model_spec(self.config)

    @property
    def label(self) -> str:
        return f"{self.name} of {self.case.model}"

    @property
    def rows(self) -> int:
        return self.case.slots

    @property
    @abstractmethod
    def shape(self) -> dict[str, int]:
        """Sizes, by name."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """What it must move."""

    @abstractmethod
    def operands(self, device: torch.device, copies: int) -> list[Operands]:
        """``copies`` tuples, whose weights or keys and values are different memory."""

    @abstractmethod
    def launch(self, decoder: Decoder, kernels: StepKernels | None) -> Launch:
        """What computes it, by Triton with ``kernels``, else by torch."""

    def decoder(self, device: torch.device) -> Decoder:
        """A decoder without weights: they are operands."""
        weights = Weights(self.spec, DTYPE, device, RankGroup())
        length = self.case.prompt_tokens + self.case.new_tokens
        return Decoder(self.spec, self.config, weights, length)

    def difference(self, got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
        """The largest one, relative to the largest expected number of its tensor, or NaN."""
        apart = [_difference(a, b) for a, b in zip(got, expected, strict=True)]
        return torch.tensor(apart).max().item()  # NOTE: Python's max of (0, NaN) is 0


def _difference(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    apart = (got.float() - expected.float()).abs().max() / expected.float().abs().max()
    return apart.item()


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=device)


class Product(Operation):
    """A product with a weight and what follows it: of ``up`` the activation and the gate. Of as
    many rows as the kernel takes.
    """

    @property
    def rows(self) -> int:
        return min(self.case.slots, MAX_ROWS)

    @cached_property
    def _sizes(self) -> tuple[int, int, bool]:
        """Outputs, inputs, and whether it has a bias."""
        weights = Weights(self.spec, DTYPE, torch.device("meta"), RankGroup())
        name = self.name if self.name == "head" else f"layers.0.{self.name}"
        shape = weights._share.linear_shape(name)
        assert shape is not None
        return *shape, f"{name}.bias" in weights._parts

    @property
    def shape(self) -> dict[str, int]:
        outputs, inputs, _ = self._sizes
        return {"rows": self.rows, "outputs": outputs, "inputs": inputs}

    @property
    def num_bytes(self) -> int:
        """Of weight and bias."""
        outputs, inputs, has_bias = self._sizes
        return outputs * (inputs + has_bias) * DTYPE.itemsize

    def operands(self, device: torch.device, copies: int) -> list[Operands]:
        outputs, inputs, has_bias = self._sizes
        x = _random(device, self.rows, inputs)
        return [
            (
                x,
                _random(device, outputs, inputs).mul_(inputs**-0.5),
                _random(device, outputs) if has_bias else None,
            )
            for _ in range(copies)
        ]

    def launch(self, decoder: Decoder, kernels: StepKernels | None) -> Launch:
        step, is_up = _Step(_no_attention, _NO_POSITIONS, cuda=kernels), self.name == "up"
        activation = self.spec.activation if is_up else ""

        def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
            linear = BorrowedLinear({"": BorrowedPart(weight, bias)})
            assert kernels is None or kernels.takes(linear, x, activation)
            if is_up:
                return (decoder._mlp(_layer(mlp=Mlp(linear, _Same())), x, step),)
            return (step.product(linear, x),)

        return run


class _Same:
    """Stands for the product after ``up``: returns its input."""

    plain = None

    def __call__(self, x: Tensor) -> Tensor:
        return x


def _layer(**parts: Any) -> Layer:
    """A layer with ``parts`` only."""
    return Layer(**dict.fromkeys(Layer._fields) | parts)


_NO_POSITIONS = torch.zeros(0, dtype=torch.int64)  # nothing is rotated


def _no_attention(*call: Any) -> Tensor:
    raise AssertionError("a product has no attention")


class DecodeAttention(Operation):
    """Rotation of queries and keys, the new tokens' entries in the cache, and attention."""

    changed = (1,)

    @property
    def keys(self) -> int:
        """Keys of each row, its own included."""
        return self.case.prompt_tokens + self.case.new_tokens // 2

    @property
    def shape(self) -> dict[str, int]:
        s = self.spec
        heads = {"heads": s.num_heads, "kv_heads": s.num_kv_heads, "head_size": s.head_size}
        return {"rows": self.rows, "keys": self.keys, **heads}

    @property
    def num_bytes(self) -> int:
        """Of keys and values."""
        per_token = 2 * self.spec.num_kv_heads * self.spec.head_size
        return self.rows * self.keys * per_token * DTYPE.itemsize

    @property
    def _pages(self) -> tuple[int, int]:
        """Tokens of a page, and pages of a row, which hold its whole answer."""
        length = self.case.prompt_tokens + self.case.new_tokens
        size = EngineConfig().tokens_per_page(length, True, token_bytes=0, free_bytes=0)
        return size, -(-length // size)

    def operands(self, device: torch.device, copies: int) -> list[Operands]:
        s, (page_size, num_pages) = self.spec, self._pages
        heads = _random(device, self.rows, (s.num_heads + 2 * s.num_kv_heads) * s.head_size)
        sizes = self.rows * num_pages, page_size, s.num_kv_heads, s.head_size
        cache = KVCache(copies, *sizes, DTYPE, device)
        cache.pairs.normal_()
        return [(heads, layer) for layer in cache.pairs]

    def launch(self, decoder: Decoder, kernels: StepKernels | None) -> Launch:
        device, (page_size, num_pages) = decoder.weights.device, self._pages
        lengths = torch.full((self.rows,), self.keys, device=device)
        positions = lengths - 1
        shuffled = torch.Generator().manual_seed(1)
        pages = torch.randperm(self.rows * num_pages, generator=shuffled)
        table = pages.view(self.rows, num_pages).to(device)
        slots = table[:, (self.keys - 1) // page_size] * page_size + (self.keys - 1) % page_size
        decodes = Decodes(self.rows, lengths, num_pages * page_size, table, ragged=True)
        step = decoder.begin(positions, _no_attention, kernels)
        layout = HeadLayout.of(self.spec.num_heads, self.spec.num_kv_heads)
        rotary = next(iter(decoder._rotaries.values()), None)
        scores = Scores(self.spec.attention_scale(0), self.spec.window(0))
        layer, biases = _layer(layout=layout, rotary=rotary, scores=scores), {}

        def run(heads: Tensor, pairs: Tensor) -> tuple[Tensor, ...]:
            cache = _CacheLayer(pairs, page_size)
            attention = Attention(decoder.spec, cache, slots, decodes, [], decoder.slopes, biases)
            attend = attention
            if kernels is not None:
                attend = kernels.attention(attention, [layer])
            return (attend(0, decoder._heads(layer, heads, step), layout, scores),)

        return run


class _CacheLayer:
    """One layer of a `KVCache`, with its views."""

    def __init__(self, pairs: Tensor, page_size: int) -> None:
        self.pairs, self.page_size = pairs, page_size
        self.layers = [(pairs.view(-1, 2 * pairs.shape[3], pairs.shape[4]), *pairs.unbind(2))]


class AddNorm(Operation):
    """The residual sum and its LayerNorm or RMSNorm."""

    is_cold = False
    changed = (0,)

    @property
    def shape(self) -> dict[str, int]:
        return {"rows": self.rows, "size": self.spec.hidden_size}

    @property
    def num_bytes(self) -> int:
        """Two operands and two results of all rows, weight and bias."""
        vectors = 4 * self.rows + (2 if self.spec.norm == "layernorm" else 1)
        return vectors * self.spec.hidden_size * DTYPE.itemsize

    def operands(self, device: torch.device, copies: int) -> list[Operands]:
        size = self.spec.hidden_size
        h, added = (_random(device, self.rows, size) for _ in range(2))  # inductor minds views
        bias = _random(device, size) if self.spec.norm == "layernorm" else None
        return [(h, added, _random(device, size), bias)] * copies

    def launch(self, decoder: Decoder, kernels: StepKernels | None) -> Launch:
        step = _Step(_no_attention, _NO_POSITIONS, cuda=kernels)

        def run(
            h: Tensor, added: Tensor, weight: Tensor, bias: Tensor | None
        ) -> tuple[Tensor, ...]:
            return (decoder._add_norm(Norm(weight, bias), h, added, step),)

        return run


class Draw(Operation):
    """A token of each row and its log-prob."""

    is_cold = False
    limit = 1e-3  # log-probs are fp32

    @property
    def shape(self) -> dict[str, int]:
        return {"rows": self.rows, "vocab": self.spec.vocab_size}

    @property
    def num_bytes(self) -> int:
        """Of the logits, read once."""
        return self.rows * self.spec.vocab_size * DTYPE.itemsize

    def operands(self, device: torch.device, copies: int) -> list[Operands]:
        # Sharp, as a trained model's: at a bound of top-p with many equal logits, torch's sort,
        # which is not stable, keeps others than the kernel.
        return [(6 * _random(device, self.rows, self.spec.vocab_size),)] * copies

    def launch(self, decoder: Decoder, kernels: StepKernels | None) -> Launch:
        device = decoder.weights.device
        sampling = StepSampling(self.rows, device)
        request = Request([0], SAMPLINGS[self.name])
        Sampler(self.spec.vocab_size, device, RankGroup()).prepare(request, ())
        rows = request.sequences * self.rows
        kind = SamplingKind.of(rows)
        sampling.load(rows, kind, put=lambda copy: copy())
        row = torch.arange(self.rows, device=device)
        key: Any = row, torch.zeros_like(row), row + self.case.new_tokens // 2
        if kernels is not None:
            key = torch.stack(key)  # as `read_rows` returns it
        too_short = torch.zeros_like(row, dtype=torch.bool)

        def run(logits: Tensor) -> tuple[Tensor, ...]:
            return sampling.draw(logits, kind, key, too_short, self.spec.vocab_size, kernels)

        return run

    def difference(self, got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
        """The share of rows with other tokens; where rounding may explain it, up to an eighth of
        them, the difference of the other rows' log-probs.
        """
        same = got[0] == expected[0]
        if 8 * (~same).sum().item() > self.rows:
            return 1.0 - same.float().mean().item()
        return _difference(got[1][same], expected[1][same])


def operations(cases: Sequence[Case], names: Sequence[str] = ()) -> Iterator[Operation]:
    """Those of each case, with ``names`` only these. Of a model whose queries share keys, for which
    `gpu.py` has no rollout: its attention.
    """
    for case in cases:
        spec = model_spec(MODELS[case.model]())
        for name, made in OPERATIONS.items():
            shares_keys = spec.num_kv_heads < spec.num_heads
            if (name in names or not names) and (name == "attention" or not shares_keys):
                yield made(name, case)


OPERATIONS: dict[str, type[Operation]] = {
    **dict.fromkeys(PRODUCTS, Product),
    "attention": DecodeAttention,
    "add_norm": AddNorm,
    **dict.fromkeys(SAMPLINGS, Draw),
}
