"""Times FlashInfer's paged decode on the shapes of `gpu.py --cases kernels --kernels attention`.

    pip install flashinfer-python
    python benchmarks/gpu_flashinfer.py

Keys and values lie in pages of 32 tokens, shuffled, twice as many as the L2 cache holds; launches
are replayed as a CUDA graph. Unlike the kernel here it gets rotated heads, and keys and values that
are in the cache already. One JSON line per shape: microseconds of a launch (median of three), and
the largest difference from SDPA in fp32, relative to the largest result. tensor_cores: of heads
that share keys both ways are timed.
"""

import json
import statistics
from typing import Any

import flashinfer
import torch
import torch.nn.functional as F
from gpu_cases import CASES
from gpu_operations import DTYPE, DecodeAttention, operations
from torch import Tensor

PAGE, LAUNCHES, REPLAYS = 32, 48, 10
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


def measure(op: DecodeAttention, tensor_cores: bool) -> dict:
    spec, rows = op.spec, op.rows
    room = -(-(op.case.prompt_tokens + op.case.new_tokens) // PAGE)
    held = 2 * torch.cuda.get_device_properties(DEVICE).L2_cache_size
    copies = min(max(-(-held // op.num_bytes), 2), 512)
    shape = rows * room, 2, PAGE, spec.num_kv_heads, spec.head_size
    caches = [torch.randn(shape, device=DEVICE, dtype=DTYPE) for _ in range(copies)]
    q = torch.randn(rows, spec.num_heads, spec.head_size, device=DEVICE, dtype=DTYPE)
    table = torch.randperm(rows * room).view(rows, room)[:, : -(-op.keys // PAGE)]
    pages = table.to(DEVICE, torch.int32)
    wrapper = decode(op, pages, tensor_cores)
    wanted = expected(op, q, caches[0], pages)
    difference = (wrapper.run(q, caches[0]).float() - wanted).abs().max() / wanted.abs().max()
    launches = copies * -(-LAUNCHES // copies)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            wrapper.run(q, caches[i % copies])
    us = []
    for _ in range(4):  # the first one is a warm-up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        us.append(1e3 * start.elapsed_time(end) / (REPLAYS * launches))
    return {
        "model": op.case.model,
        "shape": op.shape,
        "tensor_cores": tensor_cores,
        "us": round(statistics.median(us[1:]), 2),
        "difference": float(difference),
        "flashinfer": flashinfer.__version__,
        "card": torch.cuda.get_device_name(DEVICE),
    }


def main() -> None:
    for op in operations(CASES["kernels"].kernels, ["attention"]):
        shares = op.spec.num_kv_heads < op.spec.num_heads
        for tensor_cores in (False, True)[: 1 + shares]:
            print(json.dumps(measure(op, tensor_cores)), flush=True)


if __name__ == "__main__":
    main()
