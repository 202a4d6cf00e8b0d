"""Captures a step without a GPU, as strictly as CUDA does: a trace that replays on the CPU.

The trace has operators and the tensors they were given, nothing of Python: a host number is frozen
at its value during the capture, and a read of a tensor's value fails.
"""

from contextlib import contextmanager

import pytest
from torch.fx.experimental.proxy_tensor import make_fx

from dschat.inference.kernels import cpu


def soft_capture(step):
    """Stands for `dschat.inference.requests.cuda_graphs.CudaCapture`."""
    step()  # the warm-up run, in which what is made once is made
    return make_fx(step, tracing_mode="real")()


@contextmanager
def operators_only():
    """A scope without the CPU kernels, which write to memory behind torch's back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "load", lambda: None)
        yield
