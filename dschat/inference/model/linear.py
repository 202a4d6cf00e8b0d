"""Multiplies activations by the decoder's weights, with the fastest kernel of the device.

On a CPU that is timed per shape. MKL, oneDNN and our kernel pack a weight into the blocks that they
read, and its plain form is freed. Elsewhere a weight keeps its address across versions, so
that captured graphs stay valid. LoRA factors can be added as a side product.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dschat.inference.kernels import cpu
from dschat.models import cpu_matmul
from dschat.models.cpu_matmul import Backend, Product, Shape

_ROWS = 16  # of the products that are timed, and that a packing is optimized for; any number works
# Sides of LoRA factors, whose plain product is as fast (measured, AVX-512); MKL's packed form of a
# weight takes 9 MiB more.
_NARROW = 64
_MAX_TIMED = 1 << 23  # elements of a timed weight: 32 MiB in fp32


def fastest_backends(
    shapes: Iterable[Shape], dtype: torch.dtype, device: torch.device
) -> dict[Shape, Backend]:
    """The fastest backend for products of a few rows with weights of ``shapes`` (out, in).

    On a CPU measured, see `cpu_matmul`; of a large weight a part of the outputs is timed.
    """
    if device.type != "cpu":
        return dict.fromkeys(shapes, "plain")
    makers = {name: partial(_timed_product, name, dtype) for name in backends_for(dtype)}
    timed = {shape: (min(shape[0], -(-_MAX_TIMED // shape[1])), shape[1]) for shape in shapes}
    choices = cpu_matmul.choose(f"decoding-{_ROWS}", timed.values(), dtype, makers, narrow=_NARROW)
    return {shape: choices[timed[shape]] for shape in timed}


def backends_for(dtype: torch.dtype) -> list[Backend]:
    candidates: list[Backend] = ["plain"]
    if dtype == torch.float32 and torch.backends.mkl.is_available():
        candidates.append("mkl")
    if torch.backends.mkldnn.is_available():
        in_bf16 = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if dtype == torch.float32 or in_bf16:  # which needs AVX512-BW
            candidates.append("onednn")
    if dtype == torch.float32 and cpu.load() is not None:
        candidates.append("panels")
    return candidates


def _timed_product(name: Backend, dtype: torch.dtype, shape: Shape) -> Product:
    linear = Linear(shape, False, dtype, torch.device("cpu"), name)
    linear.open().fill_(1.0)
    linear.seal()
    return partial(linear, torch.ones(_ROWS, shape[1], dtype=dtype))


@dataclass
class SideProduct:
    """LoRA factors beside a frozen weight: adds ``scaling * (x A^T) B^T`` (scaling lies in B)."""

    a: Tensor  # (r, in)
    b: Tensor  # (out, r)

    def add_to(self, y: Tensor, x: Tensor) -> Tensor:
        return torch.addmm(y, x @ self.a.T, self.b.T)

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


class Linear:
    """``y = x W^T + b`` with W (out, in), which is written in pieces and then sealed.

    The plain form exists between `open` and `seal`; a packing back end frees it in `seal`.
    """

    # As of a `BorrowedLinear`, whose parts may be in another order: here q, k, v and gate, up.
    order: tuple[str, ...] = ()
    interleaved = False

    def __init__(
        self,
        shape: tuple[int, int],
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        backend: Backend,
        shared: Tensor | None = None,
    ) -> None:
        self.shape = shape
        self.bias = torch.zeros(shape[0], dtype=dtype, device=device) if has_bias else None
        self.side: SideProduct | None = None
        self._dtype, self._device, self._backend = dtype, device, backend
        # The overload is bound here: looking it up takes a sixth of a small product's time.
        self._product: Callable[..., Tensor]
        if backend == "mkl":
            self._product = torch.ops.mkl._mkl_linear.default
        elif backend == "onednn":
            self._product = torch.ops.mkldnn._linear_pointwise.default
        elif backend == "panels":
            kernels = cpu.load()
            assert kernels is not None, "offered without a compiler"
            self._pack_panels, self._product = kernels.pack, kernels.product
        self._shared = shared  # a tied weight has one address for both uses
        self._plain: Tensor | None = shared
        self._packed: Tensor | None = None
        # NOTE: MKL's operator also takes the unpacked weight, but reads only its shape.
        self._shape_only = torch.empty(1).expand(shape)

    @property
    def packs(self) -> bool:
        """Whether the weight is kept only in packed form."""
        return self._backend != "plain"

    @property
    def panels(self) -> Tensor | None:
        """The weight as packed for `dschat.inference.kernels.cpu`; None with other products."""
        return self._packed if self._backend == "panels" else None

    @property
    def plain(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight (out, in), contiguous, and bias, if these and `side` make up the product."""
        return None if self._plain is None else (self._plain, self.bias)

    def open(self) -> Tensor:
        """The plain weight, to be written into."""
        if self._plain is None:
            self._packed = None  # freed before the new version is allocated
            self._plain = torch.zeros(self.shape, dtype=self._dtype, device=self._device)
        return self._plain

    def seal(self) -> None:
        """Pack the weight, all pieces of which are written."""
        weight = self._plain if self._shared is None else self._shared
        assert weight is not None, "sealed before it was opened"
        if self.packs:
            self.pack(weight)

    def pack(self, weight: Tensor) -> None:
        """Pack the whole ``weight`` (out, in); no reference to it is kept."""
        self._plain = None
        if self._backend == "panels":
            self._packed = self._pack_panels(weight.to(self._dtype), self._packed)
            return
        self._packed = None
        reorder = (
            torch.ops.mkl._mkl_reorder_linear_weight
            if self._backend == "mkl"
            else torch.ops.mkldnn._reorder_linear_weight
        )
        self._packed = reorder(weight.to(self._dtype).contiguous(), _ROWS)

    def drop(self) -> None:
        """Free all tensors, even if a decoder still holds this object. It cannot be used again."""
        self._plain = self._packed = self._shared = self.bias = self.side = None

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` (rows, in) -> (rows, out)."""
        if self._plain is not None:
            y = F.linear(x, self._plain, self.bias)
        elif self._backend == "panels":
            y = self._product(x, self._packed, self.shape[0], self.bias)
        elif self._backend == "mkl":
            y = self._product(x, self._packed, self._shape_only, self.bias, x.shape[0])
        else:
            y = self._product(x, self._packed, self.bias, "none", [], "")
        return y if self.side is None else self.side.add_to(y, x)

    @property
    def nbytes(self) -> int:
        """Bytes of weight, bias and LoRA factors, without a packing's padding."""
        stored = self._packed is not None or self._plain is not self._shared
        size = self.shape[0] * self.shape[1] * self._dtype.itemsize if stored else 0
        size += self.bias.nbytes if self.bias is not None else 0
        return size + (self.side.nbytes if self.side is not None else 0)


def grouped(linears: Sequence[Any], x: Tensor, counts: list[int]) -> Tensor:
    """The first ``counts[0]`` rows of ``x`` (rows, in) through the first of ``linears``, the next
    ones through the second, and so on -> (rows, out). They are of one shape.
    """
    first = linears[0]
    is_ours = isinstance(first, Linear) and first.panels is not None
    kernels = cpu.load() if is_ours else None
    if kernels is None or any(linear.side is not None for linear in linears):
        parts = zip(linears, x.split(counts), strict=True)
        return torch.cat([linear(rows) for linear, rows in parts if rows.shape[0]])
    packed = [linear.panels for linear in linears]
    biases = None if first.bias is None else [linear.bias for linear in linears]
    return kernels.products(x, counts, packed, first.shape[0], biases)
