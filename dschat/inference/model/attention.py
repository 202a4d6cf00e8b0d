"""Computes the attention of one step, in which sequences decode a token or prefill a prompt chunk.

Reads the query, key and value heads of packed tokens, writes new keys and values into the cache and
returns packed outputs. This is the `sdpa` back end, for any device; on a CPU, small decode batches
use `dschat.inference.kernels.cpu` instead.

Shapes: T packed tokens (B decoding ones first), H query heads, K key-value heads, D head size, L
keys.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dschat.inference.kernels import cpu
from dschat.inference.model.borrowed import HeadLayout
from dschat.inference.model.kv_cache import KVCache
from dschat.inference.model.spec import ModelSpec
from dschat.models.packing.kernels import Scores, capped

# Router, experts that the tokens chose (T, k), and of how many; see `KVCache.keep_experts`.
KeepExperts = Callable[[Hashable, Tensor, int], None]

# Layer, heads (T, H + 2 K, D), where q, k and v are among them, and how their scores are used
# -> (T, H * D)
Attend = Callable[[int, Tensor, HeadLayout, Scores], Tensor]

# Keys that one batch of chunks with cached prefixes gathers: 128 MiB a layer for Llama-2-7B's in
# bf16.
_GATHERED_TOKENS = 8192


@dataclass
class Decodes:
    """The decoding rows, one token each: the first ones of the packed tokens."""

    count: int  # B
    lengths: Tensor  # (B,) int64: keys that each attends to, its own included
    max_length: int  # the largest length, or an upper bound that fits the block table
    block_table: Tensor | None  # (B, pages) int64; None: sequence b lies in page b, whole
    ragged: bool  # whether some length is not max_length


@dataclass
class Chunk:
    """A piece of a prompt: ``length`` packed tokens from ``start``; ``prefix`` are cached."""

    start: int
    length: int
    prefix: int
    pages: list[int]


@dataclass
class _Dense:
    """Chunks with prefixes of one length as a padded batch, and its mapping to packed tokens.

    ``pages`` (rows, pages) int64 hold prefix and chunk; None without a prefix.
    """

    rows: int
    longest: int
    prefix: int
    pages: Tensor | None
    tokens: slice  # of the packed ones
    cells: Tensor | None = None  # (rows * longest,): packed index of each cell; None: no padding
    packed: Tensor | None = None  # cell of each packed token


@dataclass
class Attention:
    """Attention of one step: holds what its layers share; call it with each layer's heads."""

    spec: ModelSpec
    cache: KVCache
    slot_mapping: Tensor  # (T,) int64: cache slot of each token's key and value
    decodes: Decodes | None
    chunks: list[Chunk]
    slopes: Tensor | None = None  # (H,) fp32: ALiBi's, of this rank's heads
    _biases: dict[tuple[object, ...], Tensor] = field(default_factory=dict)
    _dense: list[_Dense] = field(default_factory=list)
    _kernel: cpu.DecodeAttention | None = None

    def __post_init__(self) -> None:
        if self.decodes is not None:
            self._kernel = self._kernel_for(self.decodes)
        groups: list[list[Chunk]] = []
        for chunk in self.chunks:
            if not groups or not self._joins(groups[-1], chunk):
                groups.append([])
            groups[-1].append(chunk)
        self._dense += map(self._padded, groups)

    def _joins(self, group: list[Chunk], chunk: Chunk) -> bool:
        """Whether a padded batch of ``group``, which is sorted by length, takes ``chunk`` too."""
        longest, last = group[0], group[-1]
        tokens = (len(group) + 1) * (longest.prefix + longest.length)
        return (
            last.start + last.length == chunk.start
            and 2 * chunk.length >= longest.length >= chunk.length
            and chunk.prefix == longest.prefix
            and (not chunk.prefix or tokens <= _GATHERED_TOKENS)
        )

    def __call__(self, layer: int, heads_THD: Tensor, layout: HeadLayout, how: Scores) -> Tensor:
        """Query, key and value heads (T, H + 2 K, D), in the order of ``layout`` -> (T, H * D)."""
        rows, keys, values = self.cache.layers[layer]
        decodes = self.decodes
        kernel = self._kernel if layout.in_order and how.is_plain else None
        if kernel is not None and not self.chunks:
            return kernel(heads_THD, rows, how.window, how.scale)
        self._store(rows, heads_THD, layout)
        q_THD = heads_THD[:, layout.q]
        if decodes is not None and not self.chunks:
            return self._decode(decodes, how, q_THD, keys, values)
        k_TKD, v_TKD = heads_THD[:, layout.k], heads_THD[:, layout.v]
        outputs = []
        if kernel is not None:
            outputs.append(kernel(heads_THD, rows, how.window, how.scale))
        elif decodes is not None:
            outputs.append(self._decode(decodes, how, q_THD[: decodes.count], keys, values))
        for dense in self._dense:
            part = dense.tokens
            if dense.pages is None:
                k, v = (self._rows(dense, x[part]) for x in (k_TKD, v_TKD))
            else:  # in the cache, behind the prefixes, are the chunks' own already
                total = dense.prefix + dense.longest
                k, v = (
                    x[dense.pages].flatten(1, 2)[:, :total].transpose(1, 2) for x in (keys, values)
                )
            outputs.append(self._prompts(how, dense, self._rows(dense, q_THD[part]), k, v))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    @property
    def keep_experts(self) -> KeepExperts | None:
        """Keeps the experts that the tokens chose, if the cache is to."""
        cache = self.cache
        return partial(cache.keep_experts, self.slot_mapping) if cache.keeps_experts else None

    def _store(self, rows: Tensor, heads_THD: Tensor, layout: HeadLayout) -> None:
        """Write keys and values into the cache's ``rows`` (slots, 2 K, D)."""
        pairs = rows.unflatten(1, (2, -1))
        stored = layout.keys_and_values(heads_THD)
        if stored is not None:
            copy_rows(pairs, self.slot_mapping, stored)
            return
        for i, part in enumerate((layout.k, layout.v)):
            copy_rows(pairs[:, i], self.slot_mapping, heads_THD[:, part])

    # -- decode ------------------------------------------------------------------------------------

    def _kernel_for(self, d: Decodes) -> cpu.DecodeAttention | None:
        pairs = self.cache.pairs
        is_fp32 = pairs.device.type == "cpu" and pairs.dtype == torch.float32
        kernels = cpu.load() if is_fp32 else None
        if kernels is None:
            return None
        # NOTE: in a step with chunks, keys and values of all tokens are stored before the kernel.
        slot_mapping = None if self.chunks else self.slot_mapping
        assert d.lengths.is_contiguous()
        assert pairs.is_contiguous()
        assert d.block_table is None or d.block_table.stride(1) == 1
        assert slot_mapping is None or slot_mapping.is_contiguous()
        return cpu.DecodeAttention(
            kernels, d.lengths, slot_mapping, d.block_table, self.cache.page_size, self.slopes
        )

    def _decode(
        self, d: Decodes, how: Scores, q_BHD: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        k, v = (self._history(x, d) for x in (keys, values))
        num_kv_heads = k.shape[2]
        # Query heads that share a key head become query positions, so no key is repeated.
        q = q_BHD.unflatten(1, (num_kv_heads, -1))
        bias = self._decode_bias(d, how, q, k.shape[1])
        if how.sinks is not None:  # of each query, as they are arranged
            how = how._replace(sinks=how.sinks.view(num_kv_heads, -1))
        out = _attended(q, k.transpose(1, 2), v.transpose(1, 2), how, bias)
        return out.reshape(d.count, -1)

    @staticmethod
    def _history(cached: Tensor, d: Decodes) -> Tensor:
        """Keys or values of the decoding sequences, (B, L, K, D)."""
        if d.block_table is None:
            return cached[: d.count, : d.max_length]
        if cached.shape[1] >= d.max_length:  # one page each, but not in order
            return cached[:, : d.max_length].index_select(0, d.block_table[:, 0])
        return cached[d.block_table].flatten(1, 2)

    def _decode_bias(self, d: Decodes, how: Scores, q: Tensor, num_keys: int) -> Tensor | None:
        """Bias of the scores, (B, 1 or K, 1 or H / K, L), shared by layers with the same window."""
        reach = how.within(num_keys)
        if not d.ragged and not any(reach) and self.slopes is None and num_keys == d.max_length:
            return None
        key = ("decode", reach)
        if key not in self._biases:
            ends, slopes = d.lengths.view(-1, 1, 1, 1), self.slopes
            if slopes is not None:
                slopes = slopes.view(q.shape[1], -1, 1)
            self._biases[key] = _bias(how, ends, num_keys, slopes, q.dtype)
        return self._biases[key]

    # -- prompts -----------------------------------------------------------------------------------

    def _padded(self, group: list[Chunk]) -> _Dense:
        rows, longest = len(group), max(c.length for c in group)
        first, num_tokens = group[0].start, sum(c.length for c in group)
        device, prefix = self.slot_mapping.device, group[0].prefix
        pages = self._pages(group, prefix + longest) if prefix else None
        dense = _Dense(rows, longest, prefix, pages, slice(first, first + num_tokens))
        if num_tokens == rows * longest:
            return dense
        inside = np.arange(longest) < np.array([[chunk.length] for chunk in group])
        packed, cells = np.flatnonzero(inside), np.zeros(inside.size, np.int64)
        cells[packed] = np.arange(num_tokens)
        dense.cells, dense.packed = (torch.from_numpy(x).to(device) for x in (cells, packed))
        return dense

    def _pages(self, group: list[Chunk], num_tokens: int) -> Tensor:
        """The pages that a batch attends to, (rows, pages); where a row has fewer, any."""
        width = self.cache.pages_for(num_tokens)
        rows = [(c.pages + c.pages[:1] * width)[:width] for c in group]
        return torch.tensor(rows, device=self.slot_mapping.device)

    @staticmethod
    def _rows(dense: _Dense, packed: Tensor) -> Tensor:
        """Packed heads (tokens, heads, D) as padded rows, (rows, heads, longest, D)."""
        if dense.cells is not None:
            packed = packed.index_select(0, dense.cells)
        return packed.view(dense.rows, dense.longest, *packed.shape[1:]).transpose(1, 2)

    def _prompts(self, how: Scores, dense: _Dense, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of (rows, heads, tokens, D) -> (packed tokens, H * D). No token of a
        chunk attends to the padding on its right.
        """
        bias = self._prompt_bias(how, q, dense.prefix, dense.prefix + dense.longest)
        shared = k.shape[1] != q.shape[1]
        # Flash attention, in 16 bits without a bias, reads a key head for several query heads in
        # place; torch's other kernels would compute all scores at once.
        in_place = shared and q.is_cuda and q.dtype != torch.float32 and bias is None
        if shared and not in_place:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        if how.sinks is not None:
            how = how._replace(sinks=how.sinks.unsqueeze(1))
        out = _attended(q, k, v, how, bias, is_causal=bias is None, enable_gqa=in_place)
        out = out.transpose(1, 2).reshape(dense.rows * dense.longest, -1)
        return out if dense.packed is None else out.index_select(0, dense.packed)

    def _prompt_bias(self, how: Scores, q: Tensor, prefix: int, total: int) -> Tensor | None:
        """Bias of the scores, (1 or H, tokens, total); None if a causal mask is enough."""
        reach = how.within(total)
        if prefix == 0 and not any(reach) and self.slopes is None:
            return None
        key = (prefix, total, reach)
        if key not in self._biases:
            ends = torch.arange(prefix + 1, total + 1, device=q.device).view(1, -1, 1)
            slopes = None if self.slopes is None else self.slopes.view(-1, 1, 1)
            self._biases[key] = _bias(how, ends, total, slopes, q.dtype)
        return self._biases[key]


def own_token(q: Tensor, k: Tensor, v: Tensor, how: Scores) -> Tensor:
    """Stands in for attention: a token reads its own query, key and value (1, H or K, T, D)."""
    seen = q.mean((1, 3)) + k.mean((1, 3))
    values = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return (values + seen[:, None, :, None])[0].transpose(0, 1).contiguous()


def own_heads(_: int, heads: Tensor, layout: HeadLayout, how: Scores) -> Tensor:
    """The same of heads (T, H + 2 K, D) in the order of ``layout``."""
    q, k, v = (heads[:, part].transpose(0, 1)[None] for part in (layout.q, layout.k, layout.v))
    return own_token(q, k, v, how).flatten(1)


def _bias(
    how: Scores, ends: Tensor, num_keys: int, slopes: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """What is added to the scores of queries that read keys before ``ends`` (..., 1), their own
    the last one: (..., keys).
    """
    positions = torch.arange(num_keys, device=ends.device)
    seen = positions < ends
    if any(how.within(num_keys)):
        seen &= positions >= how.first_key(ends - 1)
    bias = torch.zeros(seen.shape, dtype=dtype, device=ends.device)
    bias = bias.masked_fill_(~seen, float("-inf"))
    # Distances count from the query: a softmax ignores a constant per row.
    return bias if slopes is None else bias + (slopes * (positions - (ends - 1))).to(dtype)


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    how: Scores,
    bias: Tensor | None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of (..., heads, queries, D); ``how.sinks`` is (heads, queries or 1)."""
    if how.softcap is None and how.sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, bias, is_causal=is_causal, scale=how.scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = capped(torch.matmul(q, k.transpose(-1, -2)).float() * how.scale, how.softcap)
    if bias is not None:
        scores = scores + bias
    elif is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    if how.sinks is not None:
        sinks = how.sinks.unsqueeze(-1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    return torch.matmul(scores.softmax(-1)[..., : k.shape[-2]].to(v.dtype), v)


def copy_rows(rows: Tensor, index: Tensor, values: Tensor) -> None:
    """``rows``[``index``] = ``values``. Four elements of 16 bits are copied as one, where they lie
    so: torch's kernel for GPUs computes an address for each.
    """
    if all(
        x.element_size() == 2
        and x.stride(-1) == 1
        and not any(n % 4 for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
        for x in (rows, values)
    ):
        rows, values = rows.view(torch.int64), values.view(torch.int64)
    rows.index_copy_(0, index, values)
