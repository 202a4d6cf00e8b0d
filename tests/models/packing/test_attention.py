"""Attention over packed rows against dense masked attention in float64, for every kernel."""

from types import SimpleNamespace

import pytest
import torch
from dense_attention import (
    GROUPS,
    HEADS,
    SIZE,
    FlashOnCPU,
    compare,
    made,
    packed,
    tensors,
)
from fake_cuda import DEVICE, fake_cuda
from quick import slow
from torch import nn
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from dschat.models.packing import Segments, attention
from dschat.models.packing.kernels import CPU, PLAIN, Saved
from dschat.models.packing.varlen import VarlenKernel

QUICK = ("one_token", "nearly_alike", "mixed")
every_group = pytest.mark.parametrize(
    "groups",
    [
        pytest.param(GROUPS[name], marks=() if name in QUICK else pytest.mark.slow, id=name)
        for name in GROUPS
    ],
)


# -- kernels ---------------------------------------------------------------------------------------


@pytest.fixture(params=["cpu", "plain", "varlen"])
def kernel(request, monkeypatch):
    """Attention runs on each kernel in turn."""
    if request.param == "varlen":
        FlashOnCPU(monkeypatch)
    elif request.param == "plain":
        monkeypatch.setattr(attention, "CPU_DTYPES", ())
    return request.param


@every_group
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *slow([torch.float16])])
def test_every_kernel(kernel, groups, dtype):
    """In 16 bits to a few units: parts are rounded, and their sums again."""
    tolerance = max(1e-5, 6 * torch.finfo(dtype).eps)
    compare(groups, 0.3, tolerance=tolerance, sizes={"dtype": dtype})


def test_large_scores_join_without_overflow(kernel):
    """Scores of hundreds: one part has all the weight, and exp of either log-sum-exp overflows."""
    compare(GROUPS["mixed"], 1.0, tolerance=1e-4, sizes={"largest": 100})


def test_two_varlen_calls_for_any_number_of_groups(monkeypatch):
    flash = FlashOnCPU(monkeypatch)
    for name, num_shared in (("rows", 0), ("mixed", 1)):
        segments = made(GROUPS[name])
        flash.calls.clear()
        q, k, v, upstream = tensors(segments)
        packed(q, k, v, segments).backward(upstream.detach())
        shared = [("forward", False)] * num_shared
        assert flash.calls[: len(flash.calls) // 2] == [("forward", True), *shared]
        assert len(flash.calls) == 2 + 2 * len(shared)


@pytest.mark.parametrize(
    ("device", "dtype", "size", "major", "expected"),
    [
        ("cpu", torch.float32, 8, 9, CPU),
        ("cpu", torch.bfloat16, 8, 9, CPU),
        ("cpu", torch.float64, 8, 9, PLAIN),
        ("cuda", torch.float32, 8, 9, PLAIN),
        ("cuda", torch.bfloat16, 256, 8, VarlenKernel),
        ("cuda", torch.float16, 64, 9, VarlenKernel),
        ("cuda", torch.bfloat16, 264, 9, PLAIN),  # FlashAttention's largest head is 256
        ("cuda", torch.float16, 64, 7, PLAIN),  # before Ampere
    ],
)
def test_which_kernel_runs(monkeypatch, device, dtype, size, major, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, 0))
    query = SimpleNamespace(
        device=torch.device(device), dtype=dtype, shape=(1, 2, 3, size), is_meta=False
    )
    kernel = attention.kernel_for(query)
    assert kernel is expected or type(kernel) is expected


# -- transformers' interface -----------------------------------------------------------------------


@every_group
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_query_heads(kernel, groups, kv_heads):
    """Keys and values are saved once, not for every head of the queries."""
    segments, saved = made(groups), []
    q, k, v, _ = tensors(segments, kv_heads=kv_heads)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        packed(q, k, v, segments)
    assert sum(x.numel() for x in saved) == 2 * q.numel() + 2 * k.numel() + q[..., 0].numel()
    compare(groups, sizes={"kv_heads": kv_heads})


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(("size", "v_size"), [(1, 1), (5, 5), (16, 16), (80, 80), (12, 8), (8, 12)])
def test_head_sizes(size, v_size, window):
    """DeepSeek's values are smaller than its keys. The default scale is that of the queries."""
    sizes = {"size": size, "v_size": v_size}
    compare(GROUPS["mixed"], None, sizes=sizes, sliding_window=window)


@every_group
@pytest.mark.parametrize("window", [1, 4, *slow([2, 100])])
def test_sliding_window(groups, window):
    """Keys less than ``window`` positions back; positions continue from a prefix to its answers."""
    compare(groups, sizes={"kv_heads": 2}, sliding_window=window)


def chunked(chunk, layer):
    """A layer of Llama 4, of which the second alone has chunks."""
    config = SimpleNamespace(
        model_type="llama4_text",
        layer_types=["full_attention", "chunked_attention"],
        attention_chunk_size=chunk,
    )
    return SimpleNamespace(config=config, layer_idx=layer)


@every_group
@pytest.mark.parametrize("chunk", [3, *slow([1, 4, 100])])
def test_chunks(groups, chunk):
    """Llama 4's: keys of the same ``chunk`` positions; its mask alone has them."""
    compare(groups, module=chunked(chunk, 0), sizes={"kv_heads": 2})
    compare(groups, chunk=chunk, module=chunked(chunk, 1), sizes={"kv_heads": 2})


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize(
    ("name", "softcap", "calls"),
    [
        ("rows", None, [("forward", True), ("backward", True)]),
        ("mixed", None, []),
        ("rows", 2.0, []),
    ],
)
def test_flash_attention_takes_windows_within_rows(
    monkeypatch, name, softcap, calls, window, has_sinks
):
    """One call each way; not across prefixes, and not with a softcap."""
    flash = FlashOnCPU(monkeypatch)
    sinks = torch.randn(HEADS) if has_sinks else None
    compare(GROUPS[name], sliding_window=window, softcap=softcap, s_aux=sinks)
    assert flash.calls == calls


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "window"), [("mixed", None), ("rows", 3)])
def test_on_a_gpu(name, window):
    how = {"sizes": {"dtype": torch.bfloat16}, "tolerance": 6 * torch.finfo(torch.bfloat16).eps}
    compare(GROUPS[name], device="cuda", sliding_window=window, **how)


@every_group
@pytest.mark.parametrize("window", [*slow([None]), 3])
@pytest.mark.parametrize(
    ("softcap", "has_sinks"), [*slow([(1.5, False)]), (None, True), (0.7, True)]
)
def test_softcap_and_sinks(kernel, groups, window, softcap, has_sinks):
    """Of Gemma 2 and gpt-oss; sinks are trained. A softcap has no kernel but the plain one."""
    sinks = torch.linspace(-2, 3, HEADS) if has_sinks else None
    how = {"sliding_window": window, "softcap": softcap, "s_aux": sinks}
    compare(groups, sizes={"kv_heads": 2}, **how)


@pytest.mark.parametrize("sinks", [-200.0, 200.0])
def test_sinks_of_hundreds_join_without_overflow(sinks):
    compare(GROUPS["mixed"], s_aux=torch.full((HEADS,), sinks))


@pytest.mark.parametrize(("window", "chunk"), [(3, None), (270, None), (None, 3), (None, 270)])
def test_rows_longer_than_a_block_of_queries(window, chunk):
    module = chunked(chunk, 1) if chunk else None
    groups = ((600, ()), (300, (7, 590)))
    sizes = {"heads": 1, "kv_heads": 1}
    compare(groups, 0.5, chunk, module, sizes=sizes, sliding_window=window)


@every_group
def test_dropout_runs_row_by_row(groups):
    """Too small to drop anything it is dense attention; else a seed decides."""
    compare(groups, None, dropout=1e-12)
    segments = made(groups)
    q, k, v, _ = tensors(segments)

    def drawn(seed):
        torch.manual_seed(seed)
        return packed(q, k, v, segments, dropout=0.5)

    with torch.no_grad():
        assert torch.equal(drawn(1), drawn(1))
        assert not torch.equal(drawn(1), drawn(2))


@pytest.mark.parametrize("name", ["position_bias", "head_mask", "indices"])
def test_what_changes_scores_is_refused(name):
    segments = Segments(GROUPS["rows"])
    q, k, v, _ = tensors(segments)
    with pytest.raises(attention.UnsupportedAttentionError, match=f"Linear uses {name}"):
        attention.attention(nn.Linear(1, 1), q, k, v, None, segments, **{name: 1.0})
    attention.attention(nn.Linear(1, 1), q, k, v, None, segments, **{name: None})


def test_without_segments_it_is_sdpa():
    module = nn.Module()
    module.config, module.is_causal = LlamaConfig(), True
    module.num_key_value_groups = 2
    q, k, v, _ = tensors(Segments(((6, ()),)), kv_heads=2)
    mask = torch.randn(1, 1, 6, 6)
    for given in (None, mask):
        actual, _ = attention.attention(module, q, k, v, given, scaling=0.7, sliding_window=2)
        expected, _ = sdpa_attention_forward(module, q, k, v, given, scaling=0.7)
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("kv_len", [1, 4, 9])
@pytest.mark.parametrize("masked", [False, True])
def test_without_segments_softcap_and_sinks_are_as_eager_has_them(kv_len, masked):
    """Generation by the training module: a prompt, or tokens that follow a cache."""
    torch.manual_seed(0)
    module = SimpleNamespace(num_key_value_groups=2, training=False, is_causal=True)
    module.sinks = torch.randn(HEADS)
    num_queries = 1 if kv_len == 9 else kv_len
    q = torch.randn(2, HEADS, num_queries, SIZE)
    k, v = torch.randn(2, 2, 2, kv_len, SIZE)
    mask = torch.ones(num_queries, kv_len).tril(kv_len - num_queries).bool().expand(2, 1, -1, -1)
    if masked:
        mask = mask.clone()
        mask[0, ..., : kv_len // 2] = False  # padding on the left
        mask[..., torch.arange(num_queries), torch.arange(kv_len)[-num_queries:]] = True
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    given = mask if masked else None
    for eager, how in (
        (modeling_gemma2.eager_attention_forward, {"softcap": 1.5}),
        (modeling_gpt_oss.eager_attention_forward, {"s_aux": module.sinks}),
    ):
        expected, _ = eager(module, q, k, v, added, scaling=0.5, **how)
        actual, _ = attention.attention(module, q, k, v, given, scaling=0.5, **how)
        torch.testing.assert_close(actual, expected)


def test_sequences_taken_together_give_the_same_bits():
    """As each by itself: results do not depend on the rest of a micro-batch."""
    group = (10, (6, 7, 8, 9))  # no two sequences of one length
    together, alone = Segments((group,) * 6), Segments((group,))
    q, k, v, grad = (x.detach() for x in tensors(together))
    assert len(CPU.batches(q, together)) < len(CPU.batches(q, alone)) * 3
    output = CPU.forward(q, k, v, together, 0.3)
    results = (*output, *CPU.backward(grad, Saved(q, k, v, *output), together, 0.3))
    size = q.shape[2] // 6
    for start in range(0, 6 * size, size):
        q_, k_, v_, grad_ = (x[:, :, start : start + size] for x in (q, k, v, grad))
        output = CPU.forward(q_, k_, v_, alone, 0.3)
        own = (*output, *CPU.backward(grad_, Saved(q_, k_, v_, *output), alone, 0.3))
        for whole, part in zip(results, own, strict=True):
            assert torch.equal(whole[:, :, start : start + size], part)


def test_heads_have_the_sizes_that_cuda_s_kernel_takes():
    q, v = torch.randn(1, 2, 3, 12), torch.randn(1, 2, 3, 9)
    assert [x.shape[-1] for x in attention.padded_heads(q, q, v)] == [12] * 3
    with fake_cuda():
        q, v = torch.empty(1, 2, 3, 12, device=DEVICE), torch.empty(1, 2, 3, 9, device=DEVICE)
        assert [x.shape[-1] for x in attention.padded_heads(q, q, v)] == [16] * 3
