"""Attention over packed rows against dense masked attention in float64, for every kernel."""

import math
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import DEVICE, fake_cuda
from torch import nn
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from dschat.models.packing import Segments, attention
from dschat.models.packing.kernels import CPU, PLAIN, Saved, SegmentKernel
from dschat.models.packing.varlen import VarlenKernel, to_device

GROUPS = {
    "one_token": ((1, ()),),
    "one_row": ((6, ()),),
    "rows": ((3, ()), (1, ()), (5, ()), (1, ())),
    "one_answer": ((4, (3,)),),
    "one_token_answers": ((1, (1, 1)),),
    "many_answers": ((5, (2,) * 9),),
    "group_last": ((2, ()), (3, (1, 4, 2))),
    "alike": ((3, (2, 2)),) * 5,
    "nearly_alike": ((5, (9,)), (5, (12,)), (5, (4, 7)), (9, (16,)), (5, (16,)), (14, (10,))),
    "mixed": ((1, (1, 1)), (7, ()), (2, (5,)), (3, (1, 2, 6, 1)), (1, ()), (4, (2, 2))),
    "dialogue": ((9, (3, 4, 1, 2, 6)),),
    "dialogues": ((7, (2, 5, 2)), (4, ()), (7, (2, 2)), (3, (1, 4)), (9, (2, 2))),
}
# Where answers leave their prefix; else at its end.
LEAVES = {
    GROUPS["dialogue"]: ((1, 4, 4, 7, 9),),
    GROUPS["dialogues"]: ((3, 5, 7), (), (3, 5), (3, 3), (1, 5)),
}
HEADS, SIZE = 4, 8
QUICK = ("one_token", "one_answer", "many_answers", "nearly_alike", "mixed")
every_group = pytest.mark.parametrize(
    "groups",
    [
        pytest.param(GROUPS[name], marks=() if name in QUICK else pytest.mark.slow, id=name)
        for name in GROUPS
    ],
)


def made(groups):
    return Segments(groups, LEAVES.get(groups, ()))


def positions_and_mask(segments):
    """Positions (N,), and (N, N) bool: whether token i attends to token j. From the definition:
    each answer is a row that begins with its prefix, or with the tokens up to where it leaves it.
    """
    num_tokens = segments.pieces[-1][1]
    position, mask = torch.zeros(num_tokens).long(), torch.zeros(num_tokens, num_tokens).bool()
    start = 0
    for (prefix, answers), leaves in zip(segments.groups, segments.leaves, strict=True):
        end = start + prefix
        for leave, length in ((prefix, 0), *zip(leaves, answers, strict=True)):
            row = torch.tensor([*range(start, start + leave), *range(end, end + length)])
            position[row] = torch.arange(len(row))
            mask[row[:, None], row] |= torch.ones(len(row), len(row)).tril().bool()
            end += length
        start = end
    return position, mask


def dense(q, k, v, segments, scale, window=None, chunk=None, softcap=None, sinks=None):
    """Attention with an (N, N) mask in float64: (1, H, N, D)."""
    position, mask = positions_and_mask(segments)
    if window is not None:
        mask &= position[:, None] - position < window
    if chunk is not None:
        mask &= position[:, None] // chunk == position // chunk
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~mask, -math.inf)
    total = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks[:, None, None])
    return (scores - total).exp() @ v


def tensors(segments, heads=HEADS, kv_heads=HEADS, size=SIZE, dtype=torch.float32, v_size=None):
    """Queries, keys, values and an upstream gradient: transposed views, as models make them."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = segments.pieces[-1][1]
    shapes = [(heads, size), (kv_heads, size), (kv_heads, v_size or size), (heads, v_size or size)]
    made = [torch.randn(1, num_tokens, *shape, generator=generator) for shape in shapes]
    return [x.to(dtype).transpose(1, 2).requires_grad_() for x in made]


def check(run, q, k, v, upstream, segments, scale, *reach, tolerance=1e-5, sinks=None, **how):
    """``run(q, k, v)`` (1, H, N, D) and its gradients, those of the sinks too, are the dense ones.

    ``reach``: window and chunk.
    """
    inputs = [q, k, v] if sinks is None else [q, k, v, sinks]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    if sinks is not None:
        how["sinks"] = doubles[3]
    expected = dense(*doubles[:3], segments, scale, *reach, **how)
    output = run(q, k, v)
    assert output.dtype == q.dtype
    grads = torch.autograd.grad(output, inputs, upstream.detach())
    references = torch.autograd.grad(expected, doubles, upstream.detach().double())
    for actual, reference in zip((output, *grads), (expected, *references), strict=True):
        assert actual.shape == reference.shape
        gap = (actual.detach().double() - reference.detach()).abs().max()
        assert gap <= tolerance * max(1.0, float(reference.detach().abs().max()))


def with_kernel(monkeypatch, kernel, segments, scale):
    monkeypatch.setattr(attention, "_kernel", lambda query, *how: kernel)
    return lambda q, k, v: attention.attention(None, q, k, v, None, segments, scale)[0].transpose(
        1, 2
    )


def chosen(monkeypatch, name):
    FlashOnCPU(monkeypatch)
    return {"cpu": CPU, "plain": PLAIN, "varlen": VarlenKernel()}[name]


# -- kernels ---------------------------------------------------------------------------------------


class FlashOnCPU:
    """Dense stand-ins for torch's variable-length FlashAttention, for `VarlenKernel` on a CPU.

    Arguments are bound by the names in the real operators' schemas. Like the real one, backward
    uses the output and the log-sum-exps that it is given.
    """

    def __init__(self, monkeypatch):
        self.calls = []
        for name in ("_flash_attention_forward", "_flash_attention_backward"):
            schema = getattr(torch.ops.aten, name).default._schema
            names = [argument.name for argument in schema.arguments]
            monkeypatch.setattr(torch.ops.aten, name, self._bound(getattr(self, name[17:]), names))

    def _bound(self, function, names):
        def call(*args, **kwargs):
            bound = SimpleNamespace(**dict(zip(names, args, strict=False)), **kwargs)
            self._check(bound)
            self.calls.append((function.__name__, bound.is_causal))
            groups = bound.key.shape[1]  # which divides the heads of the queries
            repeats = bound.query.shape[1] // groups
            bound.key, bound.value = (
                x.repeat_interleave(repeats, dim=1) for x in (bound.key, bound.value)
            )
            first, *others = function(bound)
            if function.__name__ == "backward":
                others = [x.unflatten(1, (groups, repeats)).sum(2) for x in others]
            return first, *others

        return call

    def _check(self, a):
        assert a.dropout_p == 0
        for cumulative, longest, x in (
            (a.cum_seq_q, a.max_q, a.query),
            (a.cum_seq_k, a.max_k, a.key),
        ):
            assert cumulative.dtype == torch.int32
            assert longest == cumulative.diff().max()
            assert cumulative[-1] == len(x)
            assert x.stride(-1) == 1  # as the kernel demands
        assert a.key.shape == a.value.shape
        assert not a.is_causal or torch.equal(a.cum_seq_q, a.cum_seq_k)

    def _parts(self, a):
        """(queries' and keys' slices, scores (H, Q, K) float64) of every sequence."""
        q_bounds, k_bounds = a.cum_seq_q.tolist(), a.cum_seq_k.tolist()
        for i in range(len(q_bounds) - 1):
            queries, keys = slice(*q_bounds[i : i + 2]), slice(*k_bounds[i : i + 2])
            q, k = (x.double().transpose(0, 1) for x in (a.query[queries], a.key[keys]))
            scores = q @ k.transpose(-1, -2) * a.scale
            if a.is_causal:
                future = torch.ones(scores.shape[-2:]).triu(1).bool()
                scores = scores.masked_fill(future, -math.inf)
                left = getattr(a, "window_size_left", -1)
                past = torch.ones(scores.shape[-2:]).tril(-left - 1).bool()
                scores = scores.masked_fill(past, -math.inf) if left >= 0 else scores
            yield queries, keys, scores

    def forward(self, a):
        output = torch.full_like(a.query, math.nan)
        logsumexp = torch.full((a.query.shape[1], len(a.query)), math.nan)
        for queries, keys, scores in self._parts(a):
            values = a.value[keys].double().transpose(0, 1)
            output[queries] = (scores.softmax(-1) @ values).transpose(0, 1).to(output.dtype)
            logsumexp[:, queries] = scores.logsumexp(-1).float()
        return output, logsumexp, None, None, None

    def backward(self, a):
        assert a.grad_out.is_contiguous()
        assert a.logsumexp.is_contiguous()
        assert a.logsumexp.shape == (a.query.shape[1], len(a.query))
        grads = [torch.full_like(x, math.nan) for x in (a.query, a.key, a.value)]
        for queries, keys, scores in self._parts(a):
            grad, output = (x[queries].double().transpose(0, 1) for x in (a.grad_out, a.out))
            q, k, v = (
                x.double().transpose(0, 1) for x in (a.query[queries], a.key[keys], a.value[keys])
            )
            probs = (scores - a.logsumexp[:, queries, None].double()).exp()
            delta = (grad * output).sum(-1, keepdim=True)
            of_scores = probs * (grad @ v.transpose(-1, -2) - delta) * a.scale
            parts = (of_scores @ k, of_scores.transpose(-1, -2) @ q, probs.transpose(-1, -2) @ grad)
            for total, part, rows in zip(grads, parts, (queries, keys, keys), strict=True):
                total[rows] = part.transpose(0, 1).to(total.dtype)
        return tuple(grads)


def test_stand_ins_have_the_cpu_kernels_results(monkeypatch):
    """One causal sequence: the fake's forward and backward are those of a real flash kernel."""
    q, k, v, _ = (x.detach() for x in tensors(Segments(((5, ()),))))
    expected = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    FlashOnCPU(monkeypatch)
    output, logsumexp = VarlenKernel().forward(q, k, v, Segments(((5, ()),)), SIZE**-0.5)
    torch.testing.assert_close(output, expected[0])
    torch.testing.assert_close(logsumexp, expected[1])


@every_group
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["cpu", "plain", "varlen"])
def test_every_kernel(monkeypatch, groups, dtype, kernel):
    """In 16 bits to a few units: parts are rounded, and their sums again."""
    segments = made(groups)
    q, k, v, upstream = tensors(segments, dtype=dtype)
    run = with_kernel(monkeypatch, chosen(monkeypatch, kernel), segments, 0.3)
    tolerance = max(1e-5, 6 * torch.finfo(dtype).eps)
    check(run, q, k, v, upstream, segments, 0.3, tolerance=tolerance)


def test_large_scores_join_without_overflow(monkeypatch):
    """Scores of hundreds: one part has all the weight, and exp of either log-sum-exp overflows."""
    segments = Segments(GROUPS["mixed"])
    q, k, v, upstream = tensors(segments)
    q = (q.detach() * 100).requires_grad_()
    for kernel in (CPU, PLAIN):
        check(
            with_kernel(monkeypatch, kernel, segments, 1.0),
            *(q, k, v, upstream),
            segments,
            1.0,
            tolerance=1e-4,
        )


def test_two_varlen_calls_for_any_number_of_groups(monkeypatch):
    """And one more for each further place where answers leave the prefix of one group."""
    flash = FlashOnCPU(monkeypatch)
    for name, num_shared in (("rows", 0), ("mixed", 1), ("dialogues", 3)):
        segments = made(GROUPS[name])
        flash.calls.clear()
        q, k, v, upstream = tensors(segments)
        with_kernel(monkeypatch, VarlenKernel(), segments, 0.3)(q, k, v).backward(upstream.detach())
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
    kernel = attention._kernel(query)
    assert kernel is expected or type(kernel) is expected


# -- transformers' interface -----------------------------------------------------------------------


def packed(q, k, v, segments, **options):
    return attention.attention(None, q, k, v, None, segments, **options)[0].transpose(1, 2)


@every_group
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("kernel", ["cpu", "plain", "varlen"])
def test_grouped_query_heads(monkeypatch, groups, kv_heads, kernel):
    """Keys and values are saved once, not for every head of the queries."""
    segments, saved = made(groups), []
    q, k, v, upstream = tensors(segments, kv_heads=kv_heads)
    run = with_kernel(monkeypatch, chosen(monkeypatch, kernel), segments, 0.5)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        run(q, k, v)
    assert sum(x.numel() for x in saved) == 2 * q.numel() + 2 * k.numel() + q[..., 0].numel()
    check(run, q, k, v, upstream, segments, 0.5)


@pytest.mark.parametrize(("size", "v_size"), [(1, 1), (5, 5), (16, 16), (80, 80), (12, 8), (8, 12)])
def test_head_sizes(size, v_size):
    """DeepSeek's values are smaller than its keys. The default scale is that of the queries."""
    segments = Segments(GROUPS["mixed"])
    q, k, v, upstream = tensors(segments, size=size, v_size=v_size)
    check(lambda *x: packed(*x, segments), q, k, v, upstream, segments, size**-0.5)


@every_group
@pytest.mark.parametrize("window", [1, 2, 4, 100])
def test_sliding_window(groups, window):
    """Keys less than ``window`` positions back; positions continue from a prefix to its answers."""
    segments = made(groups)
    q, k, v, upstream = tensors(segments, kv_heads=2)
    run = lambda *x: packed(*x, segments, scaling=0.5, sliding_window=window)  # noqa: E731
    check(run, q, k, v, upstream, segments, 0.5, window)


@every_group
@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
def test_chunks(groups, chunk):
    """Llama 4's: keys of the same ``chunk`` positions; its mask alone has them."""
    segments = made(groups)
    q, k, v, upstream = tensors(segments, kv_heads=2)
    config = SimpleNamespace(
        model_type="llama4_text",
        layer_types=["full_attention", "chunked_attention"],
        attention_chunk_size=chunk,
    )
    for layer, reach in ((0, None), (1, chunk)):
        module = SimpleNamespace(config=config, layer_idx=layer)

        def run(*x, module=module):
            how = {"segments": segments, "scaling": 0.5}
            return attention.attention(module, *x, None, **how)[0].transpose(1, 2)

        check(run, q, k, v, upstream, segments, 0.5, None, reach)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [1, 3])
def test_flash_attention_takes_windows(monkeypatch, window, has_sinks):
    """One call each way for rows without prefixes."""
    segments, flash = made(GROUPS["rows"]), FlashOnCPU(monkeypatch)
    monkeypatch.setattr(attention, "_flash_takes", lambda *_: True)
    monkeypatch.setattr(attention, "_kernel", lambda query, softcap, window: VarlenKernel(window))
    q, k, v, upstream = tensors(segments)
    sinks = torch.randn(q.shape[1]).requires_grad_() if has_sinks else None
    how = {"scaling": 0.5, "sliding_window": window, "s_aux": sinks}
    run = lambda *x: packed(*x, segments, **how)  # noqa: E731
    check(run, q, k, v, upstream, segments, 0.5, window, sinks=sinks)
    assert flash.calls == [("forward", True), ("backward", True)]


def test_windows_across_prefixes_and_softcaps_are_not_flash_attentions(monkeypatch):
    monkeypatch.setattr(VarlenKernel, "supports", lambda query: True)
    query, how = (
        SimpleNamespace(device=torch.device("cuda")),
        attention.Scores(1, window=3),
    )
    assert attention._flash_takes(query, made(GROUPS["rows"]), how)
    assert not attention._flash_takes(query, made(GROUPS["mixed"]), how)
    assert not attention._flash_takes(query, made(GROUPS["rows"]), how._replace(softcap=2.0))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "window"), [("mixed", None), ("dialogues", None), ("rows", 3)])
def test_on_a_gpu(name, window):
    segments, dtype = made(GROUPS[name]), torch.bfloat16
    q, k, v, upstream = tensors(segments, dtype=dtype)
    moved, how = to_device(segments, "cuda"), {"scaling": 0.5, "sliding_window": window}
    run = lambda *x: packed(*(part.cuda() for part in x), moved, **how).cpu()  # noqa: E731
    tolerance = 6 * torch.finfo(dtype).eps
    check(run, q, k, v, upstream, segments, 0.5, window, tolerance=tolerance)


@every_group
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(1.5, False), (None, True), (0.7, True)])
@pytest.mark.parametrize("kernel", ["cpu", "plain", "varlen"])
def test_softcap_and_sinks(monkeypatch, groups, window, softcap, has_sinks, kernel):
    """Of Gemma 2 and gpt-oss; sinks are trained. A softcap has no kernel but the plain one."""
    segments = made(groups)
    q, k, v, upstream = tensors(segments, kv_heads=2)
    sinks = torch.linspace(-2, 3, HEADS).requires_grad_() if has_sinks else None
    if softcap is None:
        own = chosen(monkeypatch, kernel)
        monkeypatch.setattr(attention, "_kernel", lambda query, softcap, *_: own)
    how = {"scaling": 0.5, "sliding_window": window, "softcap": softcap, "s_aux": sinks}
    run = lambda *x: packed(*x, segments, **how)  # noqa: E731
    check(run, q, k, v, upstream, segments, 0.5, window, softcap=softcap, sinks=sinks)


@pytest.mark.parametrize("sinks", [-200.0, 200.0])
def test_sinks_of_hundreds_join_without_overflow(sinks):
    segments = Segments(GROUPS["mixed"])
    q, k, v, upstream = tensors(segments)
    all_sinks = torch.full((HEADS,), sinks).requires_grad_()
    run = lambda *x: packed(*x, segments, scaling=0.5, s_aux=all_sinks)  # noqa: E731
    check(run, q, k, v, upstream, segments, 0.5, sinks=all_sinks)


@pytest.mark.parametrize(("window", "chunk"), [(3, None), (270, None), (None, 3), (None, 270)])
def test_rows_longer_than_a_block_of_queries(window, chunk):
    segments = Segments(((600, ()), (300, (7, 590))))
    q, k, v, upstream = tensors(segments, heads=1, kv_heads=1)
    how = attention.Scores(0.5, window, chunk=chunk)

    def run(*x):
        return attention._sequence_by_sequence(*x, segments, how)

    check(run, q, k, v, upstream, segments, 0.5, window, chunk)


@every_group
def test_dropout_runs_row_by_row(groups):
    """Too small to drop anything it is dense attention; else a seed decides."""
    segments = made(groups)
    q, k, v, upstream = tensors(segments)
    check(lambda *x: packed(*x, segments, dropout=1e-12), q, k, v, upstream, segments, SIZE**-0.5)

    def drawn(seed):
        torch.manual_seed(seed)
        return packed(q, k, v, segments, dropout=0.5)

    with torch.no_grad():
        assert torch.equal(drawn(1), drawn(1))
        assert not torch.equal(drawn(1), drawn(2))


def test_the_result_is_contiguous_as_transformers_is():
    """Afmoe takes a view of it."""
    for groups in GROUPS.values():
        segments = made(groups)
        q, k, v, _ = tensors(segments, size=12, v_size=8)
        for window in (None, 2):
            output, weights = attention.attention(
                None, q, k, v, None, segments, sliding_window=window
            )
            assert weights is None
            assert output.is_contiguous()
            assert output.shape == (1, q.shape[2], HEADS, 8)


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
    alone = SegmentKernel(CPU._forward, CPU._backward)
    groups = tuple((prefix, (6, 7, 7, 8, 9, 6)) for prefix in (9, 10, 10, 10, 10, 11))
    segments = Segments(groups, ((3, 3, 5, 5, 6, 9),) * 6)
    q, k, v, grad = (x.detach() for x in tensors(segments))
    assert len(CPU._batches(q, segments)) < len(alone._batches(q, segments)) / 2
    results = []
    for kernel in (CPU, alone):
        output = kernel.forward(q, k, v, segments, 0.3)
        results.append((*output, *kernel.backward(grad, Saved(q, k, v, *output), segments, 0.3)))
    assert all(map(torch.equal, *results))


def test_heads_have_the_sizes_that_cuda_s_kernel_takes():
    q, v = torch.randn(1, 2, 3, 12), torch.randn(1, 2, 3, 9)
    assert [x.shape[-1] for x in attention._same_sizes(q, q, v)] == [12] * 3
    with fake_cuda():
        q, v = torch.empty(1, 2, 3, 12, device=DEVICE), torch.empty(1, 2, 3, 9, device=DEVICE)
        assert [x.shape[-1] for x in attention._same_sizes(q, q, v)] == [16] * 3
