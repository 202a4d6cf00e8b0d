"""Multiplies by weights in another module's storage, without a copy.

DeepSpeed lays the parts of a fused weight (q, k and v, or gate and up) back to back in a flat
buffer, in the order of the module's parameters. One view of them is then the fused matrix, and one
product computes them all; the rows are in the order of memory (OPT's: k, v, q). Parts that lie
elsewhere have a product each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from dschat.inference.model.linear import SideProduct


@dataclass(frozen=True)
class BorrowedPart:
    """A weight and bias owned by another module."""

    weight: Tensor  # (out, in), of any strides
    bias: Tensor | None
    interleaved: bool = False  # q, k and v of a head are adjacent rows, and so in the product

    def product(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)  # a router may compute in fp32


class BorrowedLinear:
    """``y = x W^T + b`` on weights of another module (the one in training).

    ``parts``: by name (see `WeightSource.part`), in the order of a copied weight.
    """

    def __init__(self, parts: Mapping[str, BorrowedPart]) -> None:
        joined = _joined(parts) if len(parts) > 1 else None
        order = tuple(parts) if joined is None else joined[0]
        self.products = list(parts.values()) if joined is None else [joined[1]]
        self.order = order if len(order) > 1 else ()
        self.interleaved = any(part.interleaved for part in parts.values())
        firsts = accumulate((len(parts[name].weight) for name in order), initial=0)
        self.first_row = dict(zip(order, firsts, strict=False))  # of each part in `y`
        self.side: SideProduct | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` (rows, in) -> (rows, out), the parts in the order of `order`."""
        outputs = [part.product(x) for part in self.products]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return y if self.side is None else self.side.add_to(y, x)

    @property
    def plain(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight (out, in), contiguous or the transpose of what is, and bias, if these and `side`
        make up the product.
        """
        weight = self.products[0].weight
        is_dense = weight.is_contiguous() or weight.T.is_contiguous()
        return (weight, self.products[0].bias) if len(self.products) == 1 and is_dense else None

    @property
    def nbytes(self) -> int:
        """Bytes of the LoRA factors; borrowed weights are not counted."""
        return self.side.nbytes if self.side is not None else 0


def _joined(parts: Mapping[str, BorrowedPart]) -> tuple[tuple[str, ...], BorrowedPart] | None:
    """The names in the order of memory, and all parts as one, if they can be read so; else None."""
    order = tuple(sorted(parts, key=lambda name: parts[name].weight.storage_offset()))
    weights = [parts[name].weight for name in order]
    biases = [b for name in order if (b := parts[name].bias) is not None]
    if not are_adjacent(weights) or (biases and not are_adjacent(biases)):
        return None
    return order, BorrowedPart(_view_of(weights), _view_of(biases) if biases else None)


def are_adjacent(tensors: Sequence[Tensor]) -> bool:
    """Whether one contiguous view covers ``tensors``, stacked along their first dimension."""
    first = tensors[0]
    storage, end = first.untyped_storage()._cdata, first.storage_offset()
    for t in tensors:
        is_next = t.untyped_storage()._cdata == storage and t.storage_offset() == end
        is_alike = t.dtype == first.dtype and t.shape[1:] == first.shape[1:]
        if not (is_next and is_alike and t.is_contiguous()):
            return False
        end += t.numel()
    return True


def _view_of(tensors: Sequence[Tensor]) -> Tensor:
    """The view of `are_adjacent`."""
    first, num_rows = tensors[0], sum(t.shape[0] for t in tensors)
    return first.as_strided((num_rows, *first.shape[1:]), first.stride())


@dataclass(frozen=True)
class HeadLayout:
    """The query, key and value heads among the H + 2 K heads of a fused product, as slices.

    A copied weight has queries, keys, values. A borrowed one has the order of its storage, where
    heads may also alternate.
    """

    q: slice
    k: slice
    v: slice

    @classmethod
    def of(
        cls,
        num_heads: int,
        num_kv_heads: int,
        order: Sequence[str] = "qkv",
        interleaved: bool = False,
    ) -> "HeadLayout":
        """Blocks of heads in ``order``; or ``interleaved``: q, k, v of head 0, then of head 1."""
        if interleaved:
            return cls(*(slice(i, None, 3) for i in range(3)))
        slices, first = {}, 0
        for part in order:
            count = num_heads if part == "q" else num_kv_heads
            slices[part] = slice(first, first + count)
            first += count
        return cls(**slices)

    @cached_property
    def in_order(self) -> bool:
        """Whether blocks of queries, keys and values follow each other."""
        return self.k.start == self.q.stop and self.v.start == self.k.stop

    @cached_property
    def origins(self) -> tuple[int, int, int, int]:
        """The first query, key and value head, and the step to the next one of its kind."""
        return self.q.start, self.k.start, self.v.start, self.q.step or 1

    @cached_property
    def rotated(self) -> tuple[slice, ...]:
        """Slices that cover queries and keys: one if they are adjacent blocks."""
        for first, second in ((self.q, self.k), (self.k, self.q)):
            if second.start == first.stop:
                return (slice(first.start, second.stop),)
        return (self.q, self.k)

    def keys_and_values(self, heads_THD: Tensor) -> Tensor | None:
        """One view (T, 2, K, D) of keys and values; None where values precede keys."""
        step = self.v.start - self.k.start
        if step < 0:
            return None
        keys = heads_THD[:, self.k]
        token, head, element = keys.stride()
        return keys.as_strided(
            (keys.shape[0], 2, *keys.shape[1:]),
            (token, step * heads_THD.stride(1), head, element),
            keys.storage_offset(),
        )
