"""Runs a whole step of a small model in one C call for each thread.

Describes the weights of a decoder and a cache once, as the structures of cpu_step.c; each step then
maps ids and positions to logits. Applies to fp32 on one CPU and families with pre-norm, sequential
layers. The decoder runs all other steps.

NOTE: the structures hold raw addresses, which are valid for one `Weights.version` (a refresh writes
in place) and one cache. Call `FusedStep.fits` before each step.
"""

import ctypes
from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from dschat.inference.kernels import cpu
from dschat.inference.model.architectures import ModelSpec
from dschat.inference.model.attention import Decodes
from dschat.inference.model.decoder import Decoder
from dschat.inference.model.kv_cache import KVCache
from dschat.inference.model.linear import Linear

# Speed relative to the decoder on two AVX-512 cores, 16 to 32 new tokens after 16, for 1, 16 and 64
# sequences: 3.8, 1.8 and 1.45 with 3.9 million parameters; 2.4, 1.4 and 1.3 with 7.8.
MAX_PARAMETERS = 8_000_000

# Longer prompts are the decoder's: here each row reads all its keys. 0.93 with prompts of 480.
MAX_PROMPT = 512

# Rows x parameters of a step for each thread more: about 0.4 ms, handing over takes 0.1.
_THREAD_WORK = 1 << 24

_ACTIVATIONS = {"silu": 0, "swish": 0, "relu": 1, "gelu_new": 2, "gelu_pytorch_tanh": 2}
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Linear(ctypes.Structure):
    _fields_ = [("weight", _POINTER), ("bias", _POINTER), ("k", _INT), ("n", _INT)]


class _Norm(ctypes.Structure):
    _fields_ = [("weight", _POINTER), ("bias", _POINTER)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *(("norm1", _Norm), ("norm2", _Norm), ("q_norm", _POINTER), ("k_norm", _POINTER)),
        *((name, _Linear) for name in ("qkv", "out", "up", "down")),
        *(("cache", _POINTER), ("window", _INT), ("scale", _FLOAT)),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((n, _INT) for n in ("num_layers", "num_heads", "num_kv_heads", "head_size")),
        *((n, _INT) for n in ("hidden_size", "rotary_dim", "activation", "position_offset")),
        *((n, _POINTER) for n in ("embed", "positions", "cos", "sin")),
        *(("embed_norm", _Norm), ("final_norm", _Norm), ("head", _Linear)),
        *(("layers", _POINTER), ("eps", _FLOAT)),
    ]


def applies(spec: ModelSpec, dtype: torch.dtype, device: torch.device, num_ranks: int) -> bool:
    """Whether a model's decode steps use this kernel; its weights must then keep panels."""
    return (
        (device.type, dtype, num_ranks) == ("cpu", torch.float32, 1)
        and spec.num_parameters() <= MAX_PARAMETERS
        and spec.pre_norm
        and not (spec.parallel_residual or spec.residual_after_norm)
        and spec.embedding_size == spec.hidden_size
        and spec.activation in _ACTIVATIONS
        and spec.gated == (_ACTIVATIONS[spec.activation] == 0)
        and cpu.load() is not None
    )


class FusedStep:
    """Runs ``decoder``'s steps over ``cache``, until either is replaced.

    ``is_available``: whether the weights have panels: not borrowed ones, nor with LoRA side
    products.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, max_num_seqs: int) -> None:
        self._decoder, self._cache = decoder, cache
        self._version = decoder.weights.version
        kernels = cpu.load()
        assert kernels is not None, "`applies` requires the kernels"
        self._kernels = kernels
        self._tensors: list[Tensor] = []  # kept alive: the structures point to them
        self.is_available = self._describe()
        spec, weights = decoder.spec, decoder.weights
        out_size = spec.num_heads * spec.head_size
        qkv_size = out_size + 2 * spec.num_kv_heads * spec.head_size
        width = 3 * spec.hidden_size + max(spec.hidden_size, out_size) + qkv_size
        width += spec.intermediate_size * (3 if spec.gated else 2)
        self._width, self._vocab_size = width, weights.vocab_size
        self._scratch = torch.empty(max_num_seqs * width)
        self._num_parameters = spec.num_parameters()
        self._pool = ThreadPoolExecutor(max(1, torch.get_num_threads() - 1))

    def fits(self, decoder: Decoder, cache: KVCache) -> bool:
        """Whether the structures describe this decoder and cache."""
        return (
            decoder is self._decoder
            and cache is self._cache
            and decoder.weights.version == self._version
        )

    def logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        rows: Decodes,
        counts: list[int],
        ready: list[int],
    ) -> Tensor:
        """Logits (R, V) of the rows ``ready`` of a step of N rows, one for each token.

        ``tokens``, ``positions``, ``slot_mapping`` (N,) int64, contiguous. ``counts``: adjacent
        rows that are tokens of one sequence.
        """
        if self._scratch.numel() < rows.count * self._width:
            self._scratch = torch.empty(rows.count * self._width)
        logits = self._scratch.new_empty(len(ready), self._vocab_size)
        table = rows.block_table
        bounds = self._bounds(counts)
        if table is None and len(bounds) > 2:
            table = torch.arange(rows.count).unsqueeze(1)  # sequence b is in page b
        calls = []
        for first, last in pairwise(bounds):
            step = self._kernels.decode_attention(
                rows.lengths[first:last],
                slot_mapping[first:last],
                None if table is None else table[first:last],
                self._cache.page_size,
                self._decoder.slopes,
            )
            begin, end = bisect_left(ready, first), bisect_left(ready, last)
            own_ready = torch.tensor([r - first for r in ready[begin:end]], dtype=torch.int64)
            scratch = self._scratch[first * self._width :]
            ids = tokens[first:last], positions[first:last]
            calls.append((step, *ids, own_ready, scratch, logits[begin:end]))
        others = [self._pool.submit(self._call, *call) for call in calls[1:]]
        self._call(*calls[0])
        for other in others:
            other.result()
        return logits

    def _bounds(self, counts: list[int]) -> list[int]:
        """Where the rows of each thread begin, and the number of rows.

        A sequence's rows are one thread's: they read what its earlier rows write.
        """
        ends = list(accumulate(counts))
        work = ends[-1] * self._num_parameters // _THREAD_WORK
        parts = min(torch.get_num_threads(), 1 + work)
        inner = {ends[bisect_left(ends, ends[-1] * i // parts)] for i in range(1, parts)}
        return sorted({0, ends[-1]} | inner)

    def _call(
        self,
        step: cpu.DecodeAttention,
        tokens: Tensor,
        positions: Tensor,
        ready: Tensor,
        scratch: Tensor,
        logits: Tensor,
    ) -> None:
        self._kernels.step(
            ctypes.addressof(self._model),
            step.address,
            tokens.data_ptr(),
            positions.data_ptr(),
            ready.data_ptr(),
            ready.numel(),
            scratch.data_ptr(),
            logits.data_ptr(),
        )

    # -- the structures ----------------------------------------------------------------------------

    def _describe(self) -> bool:
        decoder = self._decoder
        spec, weights = decoder.spec, decoder.weights
        linears = weights.linears.values()
        if not all(isinstance(w, Linear) and w.panels is not None and not w.side for w in linears):
            return False
        self._layers = (_Layer * spec.num_layers)(*map(self._layer, range(spec.num_layers)))
        rotary = decoder.rotary
        self._model = _Model(
            num_layers=spec.num_layers,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            hidden_size=spec.hidden_size,
            rotary_dim=rotary.dim if rotary else 0,
            activation=_ACTIVATIONS[spec.activation],
            position_offset=spec.position_offset,
            embed=self._address("embed.weight"),
            positions=self._address("positions.weight"),
            cos=rotary.cos.data_ptr() if rotary else None,
            sin=rotary.sin.data_ptr() if rotary else None,
            embed_norm=self._norm("embed_norm"),
            final_norm=self._norm("final_norm"),
            head=self._linear("head"),
            layers=ctypes.addressof(self._layers),
            eps=spec.norm_eps,
        )
        return True

    def _layer(self, i: int) -> _Layer:
        spec, cached = self._decoder.spec, self._cache.layers[i][0]
        return _Layer(
            norm1=self._norm(f"layers.{i}.norm1"),
            norm2=self._norm(f"layers.{i}.norm2"),
            q_norm=self._address(f"layers.{i}.q_norm.weight"),
            k_norm=self._address(f"layers.{i}.k_norm.weight"),
            **{n: self._linear(f"layers.{i}.{n}") for n in ("qkv", "out", "up", "down")},
            cache=cached.data_ptr(),
            window=spec.window(i) or 0,
            scale=spec.attention_scale(i),
        )

    def _linear(self, name: str) -> _Linear:
        linear = self._decoder.weights.linears[name]
        assert isinstance(linear, Linear)
        assert linear.panels is not None
        bias = None if linear.bias is None else self._hold(linear.bias)
        return _Linear(self._hold(linear.panels), bias, linear.shape[1], linear.shape[0])

    def _norm(self, name: str) -> _Norm:
        return _Norm(self._address(f"{name}.weight"), self._address(f"{name}.bias"))

    def _address(self, name: str) -> int | None:
        tensor = self._decoder.weights.tensors.get(name)
        return None if tensor is None else self._hold(tensor)

    def _hold(self, tensor: Tensor) -> int:
        assert tensor.is_contiguous()
        assert tensor.dtype == torch.float32
        self._tensors.append(tensor)
        return tensor.data_ptr()
