"""Keeps the weight of a product as integers of 8 bits, with a scale for each output.

A CPU reads a quarter of fp32's bytes: steps of few rows wait for those. Our kernel multiplies fp32
rows. torch's operator rounds rows to bf16; where they are many, and on other devices, the weight is
widened first.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dschat.inference.kernels import cpu
from dschat.models.cpu_matmul import Backend

# Measured on two AVX2 cores, fp32: with 64 rows a widened weight's product takes as long.
_FEW_ROWS = 64


def backends_for(dtype: torch.dtype) -> list[Backend]:
    """The ways to multiply on a CPU, of which `fastest_backends` times these."""
    ways: list[Backend] = ["int8"] if dtype == torch.float32 and cpu.load() is not None else []
    ways += ["int8_torch"] if dtype in (torch.float32, torch.bfloat16) else []
    return ways or ["int8_widened"]


class Int8Weight:
    """W (out, in), rounded to the nearest of 255 values between +- its row's largest."""

    def __init__(self, shape: tuple[int, int], backend: Backend, device: torch.device) -> None:
        self.shape = shape
        self._kernels = cpu.load() if backend == "int8" else None
        with torch.inference_mode(False):  # else they could be written in that mode only
            self.values = torch.empty(shape, dtype=torch.int8, device=device)
            if self._kernels is not None:
                self.values = self._kernels.pack(self.values)
            self.scales = torch.empty(shape[0], dtype=torch.float32, device=device)
        # NOTE: torch's operator reads in blocks, past the end of other shapes.
        is_even = shape[0] % 16 == 0 and shape[1] % 32 == 0
        self._by_torch = backend == "int8_torch" and is_even

    @torch.no_grad()
    def write(self, weight: Tensor) -> None:
        weight = weight.float()
        largest = weight.abs().amax(1).clamp(min=1e-30)
        # NOTE: scales that bf16 holds: torch's operator takes them in the rows' dtype.
        self.scales.copy_((largest / 127).bfloat16())
        rounded = (weight / self.scales.unsqueeze(1)).round_().clamp_(-127, 127)
        if self._kernels is None:
            self.values.copy_(rounded)
        else:
            self._kernels.pack(rounded.to(torch.int8), self.values)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x`` (rows, in) -> x W^T + bias, (rows, out)."""
        if self._kernels is not None:
            return self._kernels.product(x, self.values, self.shape[0], bias, self.scales)
        scales = self.scales.to(x.dtype)
        if x.shape[0] <= _FEW_ROWS and self._by_torch:
            operands = x.bfloat16(), self.values, scales.bfloat16()
            y = torch.ops.aten._weight_int8pack_mm(*operands).to(x.dtype)
        elif x.dtype == torch.float16:  # whose sums of integers would overflow
            y = F.linear(x, self.values.to(x.dtype).mul_(scales.unsqueeze(1)))
        else:
            y = F.linear(x, self.values.to(x.dtype)).mul_(scales)
        return y if bias is None else y.add_(bias)

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.shape[1] + self.scales.nbytes
