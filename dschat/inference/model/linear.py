"""Matrix products of the decoder, by the fastest kernel of the device.

Rows of a weight come in once per version, activations for ever after. On a CPU a weight is packed
into the blocks the kernel reads (MKL's in fp32 where torch has MKL, else oneDNN's) and its plain
form is let go; elsewhere it keeps its address, so that captured graphs stay valid. LoRA factors may
ride along as a side product. It must not know names, layouts or ranks.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Backend = Literal["mkl", "onednn", "plain"]
_PACK_ROWS = 16  # the number of rows a packing is best for; any number works
_PANEL = 32  # PANEL of cpu_step.c


def best_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """Measured on two AVX-512 cores, fp32, 16 rows: MKL's packed product makes 170-190 GFLOP/s,
    oneDNN's 100-150, ``F.linear`` 85-110.
    """
    if device.type != "cpu":
        return "plain"
    if dtype == torch.float32 and torch.backends.mkl.is_available():
        return "mkl"
    if torch.backends.mkldnn.is_available() and dtype in (torch.float32, torch.bfloat16):
        return "onednn"
    return "plain"


def in_panels(weight: Tensor) -> Tensor:
    """(out, in) -> (panels, in, 32): the weights of 32 outputs by input, zeros beyond the last."""
    padded = F.pad(weight, (0, 0, 0, -len(weight) % _PANEL))
    return padded.unflatten(0, (-1, _PANEL)).transpose(1, 2).contiguous()


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
    """``y = x W^T + b`` for W of (out, in), which is written in pieces and then sealed.

    Between `open` and `seal` the plain form exists; on a packing back end it is gone afterwards.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        backend: Backend,
        shared: Tensor | None = None,
        keep_panels: bool = False,
    ) -> None:
        self.shape = shape
        self.panels: Tensor | None = None  # where wanted: `small_step` reads this form
        self._keep_panels = keep_panels
        self.bias = torch.zeros(shape[0], dtype=dtype, device=device) if has_bias else None
        self.side: SideProduct | None = None
        self._dtype, self._device, self._backend = dtype, device, backend
        # The overload is bound once: looking it up costs a sixth of a small product.
        self._product = None
        if backend == "mkl":
            self._product = torch.ops.mkl._mkl_linear.default
        elif backend == "onednn":
            self._product = torch.ops.mkldnn._linear_pointwise.default
        self._shared = shared  # a tied weight has one address for both uses
        self._plain: Tensor | None = shared
        self._packed: Tensor | None = None
        # NOTE: MKL's operator wants the unpacked weight too, for its shape alone.
        self._shape_only = torch.empty(1).expand(shape)

    @property
    def packs(self) -> bool:
        """Whether products read a packed form, and no plain one stays."""
        return self._backend != "plain"

    def open(self) -> Tensor:
        """The plain weight, to be written into."""
        if self._plain is None:
            self._packed = None  # the version before goes first
            self._plain = torch.zeros(self.shape, dtype=self._dtype, device=self._device)
        return self._plain

    def seal(self) -> None:
        """The weight is whole: pack it."""
        if self.packs:
            self.pack(self._plain if self._shared is None else self._shared)

    def pack(self, weight: Tensor) -> None:
        """Take the whole ``weight`` (out, in), packed; it is not kept."""
        self._plain = self._packed = None
        reorder = (
            torch.ops.mkl._mkl_reorder_linear_weight
            if self._backend == "mkl"
            else torch.ops.mkldnn._reorder_linear_weight
        )
        weight = weight.to(self._dtype).contiguous()
        self._packed = reorder(weight, _PACK_ROWS)
        if self._keep_panels:
            if self.panels is None:
                self.panels = in_panels(weight)
            else:  # its address stays
                self.panels.copy_(in_panels(weight))

    def drop(self) -> None:
        """Let everything go, whoever still holds this object; another one takes its place."""
        self._plain = self._packed = self._shared = self.bias = self.side = self.panels = None

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` (rows, in) -> (rows, out)."""
        if self._packed is None:
            y = F.linear(x, self._plain, self.bias)
        elif self._backend == "mkl":
            y = self._product(x, self._packed, self._shape_only, self.bias, x.shape[0])
        else:
            y = self._product(x, self._packed, self.bias, "none", [], "")
        return y if self.side is None else self.side.add_to(y, x)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and bias, not counting a packing's padding nor the second form that
        a small model has (panels); LoRA factors too."""
        held = self._packed is not None or self._plain is not self._shared
        size = self.shape[0] * self.shape[1] * self._dtype.itemsize if held else 0
        size += self.bias.nbytes if self.bias is not None else 0
        return size + (self.side.nbytes if self.side is not None else 0)


@dataclass
class BorrowedPart:
    """Somebody else's weight and bias, as a checkpoint lays them out."""

    weight: Tensor  # (out, in), or (in, out) where `transposed`
    bias: Tensor | None
    transposed: bool
    num_heads: int  # of an interleaved weight; 0: not interleaved


class BorrowedLinear:
    """The same product on weights that live elsewhere (training's own): nothing is copied.

    What a fused weight computes in one product takes one for every part here.
    """

    def __init__(self, parts: list[BorrowedPart]) -> None:
        self.parts = parts
        self.side: SideProduct | None = None

    def __call__(self, x: Tensor) -> Tensor:
        outputs = [_borrowed_product(x, part) for part in self.parts]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return y if self.side is None else self.side.add_to(y, x)

    @property
    def nbytes(self) -> int:
        """Bytes of its own: those of LoRA factors."""
        return self.side.nbytes if self.side is not None else 0


def _borrowed_product(x: Tensor, part: BorrowedPart) -> Tensor:
    if part.transposed:
        y = x @ part.weight if part.bias is None else torch.addmm(part.bias, x, part.weight)
    else:
        y = F.linear(x, part.weight, part.bias)
    if not part.num_heads:
        return y
    per_head = y.view(y.shape[0], part.num_heads, 3, -1)
    return per_head.transpose(1, 2).reshape(y.shape[0], -1)
