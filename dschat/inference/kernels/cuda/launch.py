"""A Triton kernel's launch (grid, arguments and compile options, as data), and what kernels share.

A kernel module's plans are the launches that write an operator's results to tensors of the caller;
tests compile the same plans for devices that the machine does not have, so what is checked there is
what runs.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dschat.inference import sampling

INTERPRETED: bool = triton.knobs.runtime.interpret

# Of the weight that the next kernel reads. On an H200, 4 MiB made a step of OPT-1.3B 1% faster, 8
# slower.
_MOST_AHEAD = 4 << 20
_FETCHED = tl.constexpr(2048)  # bytes, by a thread


@dataclass(frozen=True)
class Launch:
    """``kernel`` over ``grid`` programs; ``constants`` are its `tl.constexpr` parameters, of which
    DEPENDENT says whether its programs are there before the kernel before it is done, see `follow`.
    """

    kernel: Any  # a function decorated with `triton.jit`
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 1

    def __post_init__(self) -> None:
        self.constants["DEPENDENT"] = has_dependent_launch(self.args[0].device)

    @property
    def options(self) -> dict[str, Any]:
        # NOTE: Triton 3.10 changes the default of enable_fp_fusion.
        options = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }
        return options | ({"launch_pdl": True} if self.constants["DEPENDENT"] else {})

    def run(self) -> None:
        self.kernel[self.grid](*self.args, **self.constants, **self.options)


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """From compute capability 9.0 on (Hopper; AMD's numbers are others), with a driver of CUDA 12.3
    or later: before, no graph had such launches.
    """
    is_cuda = device.type == "cuda" and torch.version.hip is None
    if not is_cuda or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value >= 12_030


@triton.jit
def follow(DEPENDENT: tl.constexpr):
    """Wait until the kernel before this one is done.

    NOTE: every kernel calls this before it reads what another may have written, and before it
    writes (CUDA C++ programming guide, "Programmatic dependent launch").
    """
    if DEPENDENT:
        gdc_wait()


@triton.jit
def release(DEPENDENT: tl.constexpr):
    """Let the next kernel's programs start, and wait in `follow`, once all of this one's have
    called this or ended. Large kernels do so when their loops are done: earlier made steps slower.

    NOTE: after `follow`, so that all kernels but this one are done when the next one starts.
    """
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def fetch(weight_ptr, part, PARTS: tl.constexpr, THREADS: tl.constexpr):
    """Have the L2 cache fetch a part of a weight while memory is idle; none from ``PARTS`` on."""
    if PARTS > 0:  # noqa: SIM102 - without, the rest would be compiled
        if part < PARTS:
            offset = (part * THREADS + tl.arange(0, THREADS)) * _FETCHED
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], 2048; mov.b32 $0, 0;",
                "=r,l",
                [weight_ptr.to(tl.int64) + offset],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def prefetch(line_ptrs):
    """Have the L2 cache fetch the lines (128 bytes) that these addresses lie in."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [line_ptrs.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def parts_to_fetch(weight: Tensor | None, num_warps: int) -> dict[str, int]:
    """The constants of `fetch` for the weight that the next kernel reads, if it is known."""
    threads = 32 * num_warps
    # NOTE: a weight that lies in a flat buffer may begin anywhere; the copy engine takes 16 bytes.
    if weight is None or weight.data_ptr() % 16 or not has_dependent_launch(weight.device):
        parts = 0
    else:
        parts = min(weight.nbytes, _MOST_AHEAD) // (threads * _FETCHED.value)
    return {"PARTS": parts, "THREADS": threads}


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


# NOTE: Triton reads a literal above 2^63 as uint64.
_GAMMA = tl.constexpr(sampling._GAMMA + (1 << 64))
_MIX_1 = tl.constexpr(sampling._MIX_1 + (1 << 64))
_MIX_2 = tl.constexpr(sampling._MIX_2 + (1 << 64))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, prompt, sample, position):
    """`dschat.inference.sampling.uniforms` of int64 counters: float64 in [0, 1)."""
    state = seed.to(tl.uint64, bitcast=True)
    for counter in tl.static_range(3):
        value = prompt if counter == 0 else sample if counter == 1 else position
        state = _mix(state + _GAMMA) + value.to(tl.uint64, bitcast=True) * _GAMMA
    return (_mix(state + _GAMMA) >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53
