"""Prints families' largest relative gaps between transformers' and Liger's losses and gradients.

``python liger_losses.py FAMILY..`` with benchmarks/ on the path, under TRITON_INTERPRET=1. Triton's
interpreter has neither CUDA's math library nor floats as arguments: both get stand-ins.
"""

import sys

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def prepare():
    convert = interpreter._implicit_cvt

    def with_floats(value):
        if not isinstance(value, float):
            return convert(value)
        handle = interpreter.TensorHandle(np.array([value], np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    interpreter._implicit_cvt = with_floats
    import liger_kernel.ops.geglu
    import liger_kernel.ops.rms_norm

    liger_kernel.ops.rms_norm.rsqrt = lambda x: tl.rsqrt(x)
    liger_kernel.ops.geglu.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1


def losses(model):
    """The loss of packed rows and its gradients."""
    from dschat.models.packing import pack

    rows = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12]]
    model.zero_grad()
    logprobs, _ = model(pack(rows, [range(1, len(row)) for row in rows]))
    logprobs.square().sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logprobs": logprobs.detach(), **found}


def gap(family):
    from family_configs import build

    from dschat.models.heads import LanguageModel
    from dschat.models.linear import use_liger

    base = build(family).float().eval()
    torch.manual_seed(0)
    for parameter in base.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    model = LanguageModel(base)
    expected = losses(model)
    use_liger(base, torch.device("cuda"))
    assert any("forward" in vars(m) for m in base.modules() if type(m).__name__.endswith("Norm"))
    assert not any("forward" in vars(m) for m in base.modules() if "Experts" in type(m).__name__)
    found = losses(model)
    assert found.keys() == expected.keys()
    gaps = [(found[n] - e).abs().max() / e.abs().max().clamp(min=1e-3) for n, e in expected.items()]
    return float(max(gaps))


if __name__ == "__main__":
    prepare()
    for family in sys.argv[1:]:
        print(family, gap(family))
