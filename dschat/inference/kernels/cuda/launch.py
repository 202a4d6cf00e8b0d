"""A Triton kernel's launch (grid, arguments and compile options, as data), and what kernels share.

Each kernel module plans launches and runs them; tests compile the same plans for devices that the
machine does not have, so what is checked there is what runs.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret


@dataclass(frozen=True)
class Launch:
    """``kernel`` over ``grid`` programs; ``constants`` are its `tl.constexpr` parameters."""

    kernel: Any  # a function decorated with `triton.jit`
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 1

    @property
    def options(self) -> dict[str, Any]:
        # NOTE: Triton 3.10 changes the default of enable_fp_fusion.
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }

    def run(self) -> None:
        self.kernel[self.grid](*self.args, **self.constants, **self.options)


@triton.jit
def arrives_last(counter_ptr, COUNT: tl.constexpr):
    """Whether this is the last of ``COUNT`` programs that share an output; it sees what the others
    stored before, and finds the counter zero in the next launch.

    Each writes partial results to a `Workspace` and calls this. The last one adds them up in a
    fixed order, so that results do not depend on which program that is.
    """
    tl.debug_barrier()  # all threads of this program have stored
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == COUNT - 1
    if last:
        tl.store(counter_ptr, 0)
    tl.debug_barrier()
    return last


def operand_type(dtype: torch.dtype) -> Any:
    """The Triton type of `tl.dot`'s operands for tensors of ``dtype``: the same, or fp32 under the
    interpreter, which multiplies the bit patterns of bf16.
    """
    if dtype == torch.bfloat16:
        return tl.float32 if INTERPRETED else tl.bfloat16
    return {torch.float16: tl.float16, torch.float32: tl.float32}[dtype]
