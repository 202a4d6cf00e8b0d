"""Computes the attention of one step, in which sequences decode a token or prefill a prompt chunk.

Reads the query, key and value heads of packed tokens, writes new keys and values into the cache and
returns packed outputs. This is the `sdpa` back end, for any device; on a CPU, small decode batches
use `dschat.inference.kernels.cpu` instead.

Shapes: T packed tokens (B decoding ones first), H query heads, K key-value heads, D head size, L
keys.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from dschat.inference.kernels import cpu
from dschat.inference.model.architectures import ModelSpec
from dschat.inference.model.head_layout import HeadLayout
from dschat.inference.model.kv_cache import KVCache

# Measured on two AVX-512 cores, fp32: our kernel reads keys and values at 16 GB/s on one thread;
# torch's takes 25 us to start, then reads 9 GB/s on each of its threads.
_KERNEL_BYTES_PER_S, _TORCH_BYTES_PER_S, _TORCH_START_S = 16e9, 9e9, 25e-6


@dataclass
class Decodes:
    """The decoding sequences, one token each: the first rows of the packed tokens."""

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
    """Prompts without a cached prefix as one padded batch, and its mapping to packed tokens."""

    rows: int
    longest: int
    cells: Tensor | None  # (rows * longest,): packed index of each cell; None: no padding
    packed: Tensor | None  # cell of each packed token
    first: int
    num_tokens: int


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
    _later: list[tuple[Chunk, Tensor]] = field(default_factory=list)  # with its pages, int64
    _kernel: cpu.DecodeAttention | None = None

    def __post_init__(self) -> None:
        if self.decodes is not None and self._kernel_is_faster(self.decodes):
            self._kernel = self._prepared(self.decodes)
        fresh = [c for c in self.chunks if c.prefix == 0]
        # NOTE: one tensor for all layers; on CUDA, each is a copy that the host waits for.
        self._later = [(c, self._pages(c)) for c in self.chunks if c.prefix > 0]
        group: list[Chunk] = []
        for chunk in fresh:  # longest first; one less than half as long starts another batch
            adjacent = not group or group[-1].start + group[-1].length == chunk.start
            if group and (2 * chunk.length < group[0].length or not adjacent):
                self._dense.append(self._padded(group))
                group = []
            group.append(chunk)
        if group:
            self._dense.append(self._padded(group))

    def __call__(self, layer: int, heads_THD: Tensor, layout: HeadLayout) -> Tensor:
        """Query, key and value heads (T, H + 2 K, D), in the order of ``layout`` -> (T, H * D)."""
        rows, keys, values = self.cache.layers[layer]
        decodes = self.decodes
        kernel = self._kernel if layout.in_order else None
        if kernel is not None and not self.chunks:
            return self._decode_by_kernel(kernel, layer, heads_THD, rows)
        self._store(rows, heads_THD, layout)
        q_THD = heads_THD[:, layout.q]
        if decodes is not None and not self.chunks:
            return self._decode(decodes, layer, q_THD, keys, values)
        k_TKD, v_TKD = heads_THD[:, layout.k], heads_THD[:, layout.v]
        outputs = []
        if kernel is not None:
            outputs.append(self._decode_by_kernel(kernel, layer, heads_THD, rows))
        elif decodes is not None:
            outputs.append(self._decode(decodes, layer, q_THD[: decodes.count], keys, values))
        for dense in self._dense:
            end = dense.first + dense.num_tokens
            part = slice(dense.first, end)
            outputs.append(self._fresh(layer, dense, q_THD[part], k_TKD[part], v_TKD[part]))
        for chunk, pages in self._later:
            part = slice(chunk.start, chunk.start + chunk.length)
            outputs.append(self._continued(layer, chunk, pages, q_THD[part], keys, values))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _store(self, rows: Tensor, heads_THD: Tensor, layout: HeadLayout) -> None:
        """Write keys and values into the cache's ``rows`` (slots, 2 K, D)."""
        pairs = rows.unflatten(1, (2, -1))
        stored = layout.keys_and_values(heads_THD)
        if stored is not None:
            pairs.index_copy_(0, self.slot_mapping, stored)
            return
        for i, part in enumerate((layout.k, layout.v)):
            pairs[:, i].index_copy_(0, self.slot_mapping, heads_THD[:, part])

    # -- decode ------------------------------------------------------------------------------------

    def _kernel_is_faster(self, d: Decodes) -> bool:
        """Whether one core reads the step's keys and values faster than torch's threads do."""
        pairs = self.cache.pairs
        if pairs.device.type != "cpu" or pairs.dtype != torch.float32 or not cpu.load():
            return False
        num_bytes = d.count * d.max_length * pairs.stride(2) * pairs.itemsize
        torch_s = _TORCH_START_S + num_bytes / (_TORCH_BYTES_PER_S * torch.get_num_threads())
        return num_bytes / _KERNEL_BYTES_PER_S < torch_s

    def _prepared(self, d: Decodes) -> cpu.DecodeAttention:
        kernels = cpu.load()
        assert kernels is not None
        assert d.lengths.is_contiguous()
        assert self.cache.pairs.is_contiguous()
        assert d.block_table is None or d.block_table.stride(1) == 1
        # NOTE: in a step with chunks, keys and values of all tokens are stored before the kernel.
        slot_mapping = None if self.chunks else self.slot_mapping
        assert slot_mapping is None or slot_mapping.is_contiguous()
        return kernels.decode_attention(
            d.lengths, slot_mapping, d.block_table, self.cache.page_size, self.slopes
        )

    def _decode_by_kernel(
        self, kernel: cpu.DecodeAttention, layer: int, heads_THD: Tensor, rows: Tensor
    ) -> Tensor:
        spec = self.spec
        return kernel(heads_THD, rows, spec.window(layer), spec.attention_scale(layer))

    def _decode(
        self, d: Decodes, layer: int, q_BHD: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        k, v = (self._history(x, d) for x in (keys, values))
        num_kv_heads = k.shape[2]
        # Query heads that share a key head become query positions, so no key is repeated.
        q = q_BHD.unflatten(1, (num_kv_heads, -1))
        bias = self._decode_bias(d, layer, q, k.shape[1])
        out = F.scaled_dot_product_attention(
            q,
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=bias,
            scale=self.spec.attention_scale(layer),
        )
        return out.reshape(d.count, -1)

    @staticmethod
    def _history(cached: Tensor, d: Decodes) -> Tensor:
        """Keys or values of the decoding sequences, (B, L, K, D)."""
        if d.block_table is None:
            return cached[: d.count, : d.max_length]
        if cached.shape[1] >= d.max_length:  # one page each, but not in order
            return cached[:, : d.max_length].index_select(0, d.block_table[:, 0])
        return cached[d.block_table].flatten(1, 2)

    def _decode_bias(self, d: Decodes, layer: int, q: Tensor, num_keys: int) -> Tensor | None:
        """Bias of the scores, (B, 1 or K, 1 or H / K, L), shared by layers with the same window."""
        window = self.spec.window(layer)
        if window is not None and window >= num_keys:
            window = None
        if not d.ragged and window is None and self.slopes is None and num_keys == d.max_length:
            return None
        key = ("decode", window)
        if key not in self._biases:
            positions = torch.arange(num_keys, device=q.device)
            seen = positions < d.lengths.unsqueeze(1)
            if window is not None:
                seen &= positions >= (d.lengths - window).unsqueeze(1)
            hidden = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
            hidden = hidden.masked_fill_(~seen, float("-inf"))[:, None, None, :]
            if self.slopes is not None:
                # Distances count from the newest key: a softmax ignores a constant per row.
                distance = positions - (d.lengths - 1).unsqueeze(1)
                slopes = self.slopes.view(q.shape[1], q.shape[2], 1)
                hidden = hidden + (slopes * distance[:, None, None, :]).to(q.dtype)
            self._biases[key] = hidden
        return self._biases[key]

    # -- prompts -----------------------------------------------------------------------------------

    def _padded(self, group: list[Chunk]) -> _Dense:
        rows, longest = len(group), max(c.length for c in group)
        first, num_tokens = group[0].start, sum(c.length for c in group)
        device = self.slot_mapping.device
        if num_tokens == rows * longest:
            return _Dense(rows, longest, None, None, first, num_tokens)
        cells = torch.zeros(rows, longest, dtype=torch.int64)
        packed = torch.empty(num_tokens, dtype=torch.int64)
        for row, chunk in enumerate(group):
            offset = chunk.start - first
            inside = torch.arange(chunk.length)
            cells[row, : chunk.length] = offset + inside
            packed[offset : offset + chunk.length] = row * longest + inside
        cells, packed = cells.view(-1).to(device), packed.to(device)
        return _Dense(rows, longest, cells, packed, first, num_tokens)

    def _fresh(self, layer: int, dense: _Dense, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of whole prompts: no token attends to the padding on its right."""
        if dense.cells is not None:
            q, k, v = (x.index_select(0, dense.cells) for x in (q, k, v))
        q, k, v = (
            x.view(dense.rows, dense.longest, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)
        )
        bias = self._prompt_bias(layer, q, 0, dense.longest)
        out = self._attend(layer, q, k, v, bias)
        out = out.transpose(1, 2).reshape(dense.rows * dense.longest, -1)
        return out if dense.packed is None else out.index_select(0, dense.packed)

    def _pages(self, chunk: Chunk) -> Tensor:
        """The pages of all keys that a chunk attends to."""
        count = self.cache.pages_for(chunk.prefix + chunk.length)
        return torch.tensor(chunk.pages[:count], device=self.slot_mapping.device)

    def _continued(
        self, layer: int, chunk: Chunk, pages: Tensor, q: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Attention of a later chunk of a prompt over the cache, which already holds the chunk."""
        total = chunk.prefix + chunk.length
        k, v = (
            x.index_select(0, pages).flatten(0, 1)[:total].transpose(0, 1).unsqueeze(0)
            for x in (keys, values)
        )
        q = q.transpose(0, 1).unsqueeze(0)
        out = self._attend(layer, q, k, v, self._prompt_bias(layer, q, chunk.prefix, total))
        return out.transpose(1, 2).reshape(chunk.length, -1)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """(rows, heads, tokens, D); ``bias`` None: causal."""
        shared = k.shape[1] != q.shape[1]
        in_place = shared and _reads_shared_heads(q, bias)
        if shared and not in_place:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=bias,
            is_causal=bias is None,
            scale=self.spec.attention_scale(layer),
            enable_gqa=in_place,
        )

    def _prompt_bias(self, layer: int, q: Tensor, prefix: int, total: int) -> Tensor | None:
        """Bias of the scores, (1 or H, tokens, total); None if a causal mask is enough."""
        window = self.spec.window(layer)
        if window is not None and window >= total:
            window = None
        if prefix == 0 and window is None and self.slopes is None:
            return None
        key = (prefix, total, window)
        if key not in self._biases:
            query = torch.arange(prefix, total, device=q.device).unsqueeze(1)
            positions = torch.arange(total, device=q.device)
            seen = positions <= query
            if window is not None:
                seen &= positions > query - window
            bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
            bias = bias.masked_fill_(~seen, float("-inf")).unsqueeze(0)
            if self.slopes is not None:
                distance = (positions - query).unsqueeze(0)
                bias = bias + (self.slopes.view(-1, 1, 1) * distance).to(q.dtype)
            self._biases[key] = bias
        return self._biases[key]


def _reads_shared_heads(q: Tensor, bias: Tensor | None) -> bool:
    """Whether torch has a kernel that reads a key head for several query heads in place.

    Flash attention does, in 16 bits without a bias; the others would compute all scores at once.
    """
    return q.is_cuda and q.dtype != torch.float32 and bias is None
