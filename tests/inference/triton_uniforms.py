"""Triton kernels of the tests: random numbers of `kernels.cuda.uniform`, a loop."""

import torch
import triton
import triton.language as tl

from dschat.inference.kernels.cuda.launch import uniform


@triton.jit
def fill(seed_ptr, counters_ptr, out_ptr):
    i, n = tl.program_id(0), tl.num_programs(0)
    where = counters_ptr + i
    value = uniform(tl.load(seed_ptr), tl.load(where), tl.load(where + n), tl.load(where + 2 * n))
    tl.store(out_ptr + i, value)


def uniforms(seed, counters):
    """The random numbers (R,) of ``counters`` (3, R), by a kernel that does nothing else."""
    out = torch.empty(counters.shape[1], dtype=torch.float64)
    fill[(counters.shape[1],)](torch.tensor([seed]), counters, out)
    return out


@triton.jit
def count(end_ptr, out_ptr):
    n = 0
    for _ in range(tl.load(end_ptr)):
        n += 1
    tl.store(out_ptr, n)
