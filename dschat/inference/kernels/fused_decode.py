"""Runs a whole decode step of a small model in one C call.

Describes the weights of a decoder and a cache once, as the structures of cpu_step.c; each step then
maps ids and positions to logits. Applies to steps in which every sequence decodes, in fp32 on one
CPU, for families with pre-norm, sequential layers. The decoder runs all other steps.

NOTE: the structures hold raw addresses, which are valid for one `Weights.version` (a refresh writes
in place) and one cache. Call `FusedDecode.fits` before each step.
"""

import ctypes

import torch
from torch import Tensor

from dschat.inference.kernels import cpu
from dschat.inference.model.architectures import ModelSpec
from dschat.inference.model.attention import Decodes
from dschat.inference.model.decoder import Decoder
from dschat.inference.model.kv_cache import KVCache
from dschat.inference.model.linear import Linear

# For larger models, matrix products on all cores are faster than one call on one core. Speed of one
# call relative to the decoder, 16 rows: on two AVX-512 cores 2.6 with 1.1 million parameters, 1.0
# with 2.5 million, 0.8 with 4.2 million; on two AVX2 cores 2.5, 1.6 (2.7 million) and 1.2.
MAX_PARAMETERS = 2_500_000

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


class FusedDecode:
    """Runs ``decoder``'s steps over ``cache``, until either is replaced."""

    def __init__(self, decoder: Decoder, cache: KVCache, max_num_seqs: int) -> None:
        self._decoder, self._cache = decoder, cache
        self._version = decoder.weights.version
        kernels = cpu.load()
        assert kernels is not None, "`suits` requires the kernels"
        self._kernels = kernels
        self._tensors: list[Tensor] = []  # kept alive: the structures point to them
        self._available = self._describe()
        spec, weights = decoder.spec, decoder.weights
        out_size = spec.num_heads * spec.head_size
        qkv_size = out_size + 2 * spec.num_kv_heads * spec.head_size
        width = 3 * spec.hidden_size + max(spec.hidden_size, out_size) + qkv_size
        width += spec.intermediate_size * (3 if spec.gated else 2)
        self._width, self._scratch = width, torch.empty(max_num_seqs * width)
        self._vocab_size = weights.vocab_size

    def fits(self, decoder: Decoder, cache: KVCache) -> bool:
        """Whether the structures describe this decoder and cache."""
        return (
            decoder is self._decoder
            and cache is self._cache
            and decoder.weights.version == self._version
        )

    def logits(
        self, tokens: Tensor, positions: Tensor, slot_mapping: Tensor, decodes: Decodes
    ) -> Tensor | None:
        """Logits (B, V) of a step of B decoding rows.

        ``tokens``, ``positions``, ``slot_mapping`` (B,) int64, contiguous. None if the weights have
        no panels (borrowed, or with LoRA side products).
        """
        if not self._available:
            return None
        kernels = self._kernels
        step = kernels.decode_attention(
            decodes.lengths,
            slot_mapping,
            decodes.block_table,
            self._cache.page_size,
            self._decoder.slopes,
        )
        if self._scratch.numel() < decodes.count * self._width:  # drafts take rows too
            self._scratch = torch.empty(decodes.count * self._width)
        logits = self._scratch.new_empty(decodes.count, self._vocab_size)
        kernels.decode_step(
            ctypes.addressof(self._model),
            step.address,
            tokens.data_ptr(),
            positions.data_ptr(),
            self._scratch.data_ptr(),
            logits.data_ptr(),
        )
        return logits

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
