"""Times FlashInfer's paged decode on the shapes of `gpu.py --cases kernels --kernels attention`.

    pip install flashinfer-python
    python benchmarks/gpu_flashinfer.py

Keys and values lie in pages of 32 tokens, shuffled; launches are timed as there. Unlike the kernel
here it gets rotated heads, and keys and values that are in the cache already. One JSON line per
shape: microseconds of a launch, of heads that share keys also by tensor cores, and the largest
difference from SDPA in fp32, relative to the largest result.
"""

import json
from typing import Any

import flashinfer
import torch
import torch.nn.functional as F
from gpu_cases import CASES
from gpu_kernels import Timed, num_copies
from gpu_operations import DTYPE, DecodeAttention, operations
from report import environment, figures, spread, take_turns
from torch import Tensor

from dschat.inference.requests.cuda_graphs import CudaCapture

PAGE = 32
DEVICE = torch.device("cuda", 0)


def decode(op: DecodeAttention, pages: Tensor, tensor_cores: bool) -> Any:
    """A planned wrapper over ``pages`` (rows, pages of a row) of int32."""
    rows, used = pages.shape
    index = (torch.arange(rows + 1, device=DEVICE) * used).int()
    last = torch.full((rows,), (op.keys - 1) % PAGE + 1, dtype=torch.int32, device=DEVICE)
    space = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        space,
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=tensor_cores,
        paged_kv_indptr_buffer=index.clone(),
        paged_kv_indices_buffer=pages.flatten().clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )
    heads = op.spec.num_heads, op.spec.num_kv_heads, op.spec.head_size
    types = {"q_data_type": DTYPE, "kv_data_type": DTYPE}
    wrapper.plan(index, pages.flatten(), last, *heads, PAGE, **types)
    return wrapper


def expected(op: DecodeAttention, q: Tensor, cache: Tensor, pages: Tensor) -> Tensor:
    """SDPA in fp32: (rows, heads, head size)."""
    k, v = cache[pages.long()].float().unbind(2)  # (rows, pages, page, key-value heads, size)
    groups = op.spec.num_heads // op.spec.num_kv_heads
    k, v = (
        x.flatten(1, 2)[:, : op.keys].repeat_interleave(groups, 2).transpose(1, 2) for x in (k, v)
    )
    return F.scaled_dot_product_attention(q.float().unsqueeze(2), k, v).squeeze(2)


def measure(op: DecodeAttention, capture: CudaCapture) -> dict:
    """The fields of a line; heads that share keys are computed by tensor cores, too."""
    spec, rows, copies = op.spec, op.rows, num_copies(op, DEVICE)
    room = -(-(op.case.prompt_tokens + op.case.new_tokens) // PAGE)
    shape = rows * room, 2, PAGE, spec.num_kv_heads, spec.head_size
    q = torch.randn(rows, spec.num_heads, spec.head_size, device=DEVICE, dtype=DTYPE)
    operands = [(q, torch.randn(shape, device=DEVICE, dtype=DTYPE)) for _ in range(copies)]
    table = torch.randperm(rows * room).view(rows, room)[:, : -(-op.keys // PAGE)]
    pages = table.to(DEVICE, torch.int32)
    wanted = expected(op, *operands[0], pages)
    sides, differences = {}, {}
    for tensor_cores in (False, True)[: 1 + (spec.num_kv_heads < spec.num_heads)]:
        name = "tensor_cores" if tensor_cores else "flashinfer"
        wrapper = decode(op, pages, tensor_cores)
        apart = (wrapper.run(*operands[0]).float() - wanted).abs().max() / wanted.abs().max()
        differences[name] = float(apart)
        sides[name] = Timed(
            lambda *given, run=wrapper.run: (run(*given),), operands, DEVICE, capture
        )
    results = take_turns(op.label, sides, 3, figures)
    return {
        "model": op.case.model,
        "shape": op.shape,
        "us": {side: spread([r["us"] for r in found[1:]]) for side, found in results.items()},
        "difference": differences,
        "flashinfer": flashinfer.__version__,
    }


def main() -> None:
    about, capture = environment(DEVICE), CudaCapture(required=True)
    for op in operations(CASES["kernels"].kernels, ["attention"]):
        print(json.dumps(about | measure(op, capture)), flush=True)


if __name__ == "__main__":
    main()
