"""Position encodings that have no weights: rotary tables, ALiBi's slopes, growing queries."""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dschat.inference.model.spec import ModelSpec
from dschat.models.long_rows import num_positions


class Rotary:
    """cos and sin of every position: (num_positions, rotary_dim) each, in the model's dtype.

    Su et al. 2021 (RoFormer), in the "rotate half" layout of most families, or of adjacent elements
    (``interleaved``). sin is stored with the sign of the rotation: a rotated x is ``x * cos +
    swapped(x) * sin``. ``layer_type``: of the layers that have these positions; "": all.
    """

    def __init__(
        self,
        spec: ModelSpec,
        config: PretrainedConfig,
        layer_type: str,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        inv_freq, scale = _frequencies(config, spec, layer_type)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        sin = -sin if spec.backward_rotary else sin
        self.dim, self.interleaved = 2 * inv_freq.numel(), spec.interleaved_rotary
        pairs = torch.stack([cos, cos]), torch.stack([-sin, sin])  # (2, num_positions, half)
        order = (1, 2, 0) if self.interleaved else (1, 0, 2)
        # NOTE: kernels read it by address, and of a single pair the flattened one is a view.
        self.cos, self.sin = (
            x.permute(order).flatten(1).to(device=device, dtype=dtype).contiguous() for x in pairs
        )

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at ``positions`` (T,): (T, 1, rotary_dim) each."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)

    def rotate_(self, x_THD: Tensor, rows: tuple[Tensor, Tensor]) -> None:
        """Rotate the heads of each token, in place."""
        cos, sin = rows
        x = x_THD if self.dim == x_THD.shape[-1] else x_THD[..., : self.dim]
        half = self.dim // 2
        if self.interleaved:
            swapped = x.unflatten(-1, (half, 2)).flip(-1).flatten(-2)
        else:
            swapped = torch.cat([x[..., half:], x[..., :half]], dim=-1)
        x.mul_(cos).addcmul_(swapped, sin)


def rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """The settings of rotary positions, by the type of a layer where layers differ; {}: none."""
    given, size = (getattr(config, name, None) for name in ("rope_parameters", "rotary_dim"))
    if given or not size:
        return given or {}
    part = size * config.num_attention_heads / config.hidden_size  # GPT-J's form
    return {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": part}


def _frequencies(
    config: PretrainedConfig, spec: ModelSpec, layer_type: str
) -> tuple[Tensor, float]:
    """Inverse frequencies (rotary_dim / 2,) fp32, and the factor of cos and sin.

    Scaled kinds (linear, dynamic, yarn, llama3, longrope) use transformers' functions. Some depend
    on the sequence length, but not up to `num_positions`.
    """
    parameters = rope_parameters(config)
    parameters = parameters[layer_type] if layer_type else parameters
    kind = parameters["rope_type"]
    if kind != "default":
        function, device = ROPE_INIT_FUNCTIONS[kind], torch.device("cpu")
        inv_freq, scale = function(config, device, layer_type=layer_type or None)
        return inv_freq.float(), float(scale)
    # NOTE: other families ignore such a factor in their config, as their transformers modules do.
    part = parameters.get("partial_rotary_factor", 1.0) if spec.partial_rotary else 1.0
    dim = int(spec.rotary_size * part)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / parameters["rope_theta"] ** exponents, 1.0


def model_positions(spec: ModelSpec, config: PretrainedConfig) -> int | None:
    """Longest sequence that the model reads; None: unbounded."""
    return num_positions(config) if spec.rotary else spec.max_positions


def query_scales(spec: ModelSpec, num_positions: int) -> Tensor | None:
    """What queries are multiplied by at each position, fp32; None: nothing up to there."""
    if spec.query_growth is None or num_positions <= spec.query_growth[1]:
        return None
    factor, size = spec.query_growth
    return 1 + factor * torch.log1p(torch.arange(num_positions) // size)


def alibi_slopes(num_heads: int) -> Tensor:
    """ALiBi slopes (num_heads,) fp32: Press et al. 2021, section 3, as BLOOM extends it.

    For a power of two they are ``2 ** (-8 h / num_heads)``, h = 1, 2, ... For other counts, the
    heads beyond the previous power of two take every other slope of the next one.
    """
    lower = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * h / lower) for h in range(1, lower + 1)]
    odd = range(1, 2 * (num_heads - lower) + 1, 2)
    return torch.tensor(slopes + [2 ** (-4 * h / lower) for h in odd])
