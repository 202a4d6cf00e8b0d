"""Prints the largest relative gap between transformers' and Liger's losses and gradients.

``python liger_losses.py FAMILY``, under TRITON_INTERPRET=1. Triton's interpreter has neither CUDA's
math library nor floats as arguments: both get stand-ins.
"""

import os
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


def main(family):
    from transformers import AutoConfig, AutoModelForCausalLM

    from dschat.models.language_model import LanguageModel
    from dschat.models.linear import use_liger

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **ids))
    for parameter in base.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    model = LanguageModel(base)
    expected = losses(model)
    os.environ["DSCHAT_CUDA_KERNELS"] = "1"
    use_liger(base, torch.device("cuda"))
    assert type(base.model.norm).forward is not base.model.norm.forward.__func__
    found = losses(model)
    assert found.keys() == expected.keys()
    gaps = [(found[n] - e).abs().max() / e.abs().max().clamp(min=1e-3) for n, e in expected.items()]
    print(float(max(gaps)))


if __name__ == "__main__":
    prepare()
    main(sys.argv[1])
