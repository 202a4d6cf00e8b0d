"""Triton: how the programs that share an output find out which of them is the last.

Each writes partial results to a `Workspace`, then counts itself. The last one to arrive adds them
up in a fixed order, so that results do not depend on which program that is.
"""

import triton
import triton.language as tl


@triton.jit
def arrives_last(counter_ptr, COUNT: tl.constexpr):
    """Whether this is the last of ``COUNT`` programs to call this; it sees what the others stored
    before, and finds the counter zero in the next launch.
    """
    tl.debug_barrier()  # all threads of this program have stored
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == COUNT - 1
    if last:
        tl.store(counter_ptr, 0)
    tl.debug_barrier()
    return last
