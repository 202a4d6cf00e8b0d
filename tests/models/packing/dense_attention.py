"""What packed attention is compared with: dense masked attention in float64."""

import math
from types import SimpleNamespace

import torch

from dschat.models.packing import Segments, attention
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
}
HEADS, SIZE = 4, 8


def made(groups):
    return Segments(groups)


def positions_and_mask(segments):
    """Positions (N,), and (N, N) bool: whether token i attends to token j. From the definition:
    each answer is a row that begins with its prefix.
    """
    num_tokens = segments.pieces[-1][1]
    position, mask = torch.zeros(num_tokens).long(), torch.zeros(num_tokens, num_tokens).bool()
    start = 0
    for prefix, answers in segments.groups:
        end = start + prefix
        for length in (0, *answers):
            row = torch.tensor([*range(start, start + prefix), *range(end, end + length)])
            position[row] = torch.arange(len(row))
            mask[row[:, None], row] |= torch.ones(len(row), len(row)).tril().bool()
            end += length
        start = end
    return position, mask


def dense(q, k, v, segments, scale, window, chunk, softcap, sinks=None):
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


def tensors(
    segments, heads=HEADS, kv_heads=HEADS, size=SIZE, v_size=None, dtype=torch.float32, largest=1
):
    """Queries, keys, values and an upstream gradient: transposed views, as models make them.

    Queries are ``largest`` times as large.
    """
    generator = torch.Generator().manual_seed(0)
    num_tokens = segments.pieces[-1][1]
    shapes = [(heads, size), (kv_heads, size), (kv_heads, v_size or size), (heads, v_size or size)]
    made = [torch.randn(1, num_tokens, *shape, generator=generator) for shape in shapes]
    made[0] *= largest
    return [x.to(dtype).transpose(1, 2).requires_grad_() for x in made]


def packed(q, k, v, segments, module=None, **options):
    """Attention (1, H, N, D), through transformers' interface."""
    output, weights = attention.attention(module, q, k, v, None, segments, **options)
    assert weights is None
    assert output.is_contiguous()  # as transformers' is: Afmoe takes a view of it
    return output.transpose(1, 2)


def compare(
    groups, scale=0.5, chunk=None, module=None, tolerance=1e-5, sizes=None, device="cpu", **how
):
    """Packed attention and its gradients, those of the sinks too, are the dense ones.

    ``sizes``: of `tensors`. ``how``: in the words of transformers.
    """
    segments = made(groups)
    q, k, v, upstream = tensors(segments, **(sizes or {}))
    sinks = how.get("s_aux")
    inputs = [q, k, v] if sinks is None else [q, k, v, sinks.requires_grad_()]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    reach = how.get("sliding_window"), chunk, how.get("softcap")
    expected = dense(*doubles[:3], segments, scale or q.shape[-1] ** -0.5, *reach, *doubles[3:])
    parts = [x.to(device) for x in (q, k, v)]
    output = packed(*parts, to_device(segments, device), module, scaling=scale, **how).cpu()
    assert output.dtype == q.dtype
    grads = torch.autograd.grad(output, inputs, upstream.detach())
    references = torch.autograd.grad(expected, doubles, upstream.detach().double())
    for actual, reference in zip((output, *grads), (expected, *references), strict=True):
        assert actual.shape == reference.shape
        gap = (actual.detach().double() - reference.detach()).abs().max()
        assert gap <= tolerance * max(1.0, float(reference.detach().abs().max()))


class FlashOnCPU:
    """Torch's variable-length FlashAttention, for `VarlenKernel` on a CPU: its CPU kernel, one
    sequence at a time.

    Arguments are bound by the names in the real operators' schemas. Like the real one, backward
    uses the output and the log-sum-exps that it is given.
    """

    def __init__(self, monkeypatch):
        self.calls = []
        monkeypatch.setattr(VarlenKernel, "supports", lambda query: True)
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

    def _sequences(self, a):
        """(queries' and keys' slices, options of the CPU's kernel) of every sequence."""
        q_bounds, k_bounds = a.cum_seq_q.tolist(), a.cum_seq_k.tolist()
        for i in range(len(q_bounds) - 1):
            queries, keys = slice(*q_bounds[i : i + 2]), slice(*k_bounds[i : i + 2])
            mask = torch.zeros(queries.stop - queries.start, keys.stop - keys.start)
            if a.is_causal:
                left = len(mask) if a.window_size_left is None else a.window_size_left
                unseen = torch.ones_like(mask).tril(-left - 1) + torch.ones_like(mask).triu(1)
                mask = mask.masked_fill(unseen.bool(), -math.inf)
            yield queries, keys, {"attn_mask": mask.to(a.query.dtype), "scale": a.scale}

    def forward(self, a):
        output = torch.full_like(a.query, math.nan)
        logsumexp = torch.full((a.query.shape[1], len(a.query)), math.nan)
        for queries, keys, options in self._sequences(a):
            parts = (
                x.transpose(0, 1)[None] for x in (a.query[queries], a.key[keys], a.value[keys])
            )
            flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            of_queries, sums = flash(*parts, **options)
            output[queries], logsumexp[:, queries] = of_queries[0].transpose(0, 1), sums[0]
        return output, logsumexp, None, None, None

    def backward(self, a):
        assert a.grad_out.is_contiguous()
        assert a.logsumexp.is_contiguous()
        assert a.logsumexp.shape == (a.query.shape[1], len(a.query))
        grads = [torch.full_like(x, math.nan) for x in (a.query, a.key, a.value)]
        for queries, keys, options in self._sequences(a):
            rows = (a.grad_out, queries), (a.query, queries), (a.key, keys), (a.value, keys)
            *parts, output = (
                x[place].transpose(0, 1)[None] for x, place in (*rows, (a.out, queries))
            )
            flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            found = flash(*parts, output, a.logsumexp[None, :, queries], 0.0, False, **options)
            for total, part, place in zip(grads, found, (queries, keys, keys), strict=True):
                total[place] = part[0].transpose(0, 1)
        return tuple(grads)
