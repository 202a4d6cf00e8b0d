"""Runs the operations of captured decode steps by Triton kernels on CUDA, where they apply.

NOTE: kernels are off unless DSCHAT_CUDA_KERNELS is 1: none was ever run or timed on a device. Their
results are checked under Triton's interpreter, their machine code for sm_90 is inspected.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from dschat.config.errors import UserError
from dschat.inference.kernels.cuda import operators
from dschat.inference.kernels.cuda.workspace import Workspace, workspace
from dschat.inference.model.attention import Attention
from dschat.inference.model.head_layout import HeadLayout
from dschat.inference.model.rotary import Rotary
from dschat.inference.model.weights import AnyLinear
from dschat.inference.protocol import SamplingParams

logger = logging.getLogger("dschat")


def choose(device: torch.device) -> "StepKernels | None":
    """The kernels of an engine on ``device``; None: torch computes everything.

    Raises:
        UserError: kernels are wanted and Triton is not installed.
    """
    if device.type != "cuda" or os.environ.get("DSCHAT_CUDA_KERNELS") != "1":
        return None
    if find_spec("triton") is None:
        raise UserError("DSCHAT_CUDA_KERNELS=1 needs Triton: pip install 'dschat[kernels]'")
    logger.info(
        "decode steps run attention, norms, products of up to %d rows and draws by Triton kernels, "
        "none of which was measured on a device",
        operators.MAX_ROWS,
    )
    return StepKernels(device)


class StepKernels:
    """The kernels of a step in which all sequences decode. An operand that no kernel takes goes to
    torch's operators.
    """

    def __init__(self, device: torch.device) -> None:
        self._space = workspace(device)

    def add_norm(
        self, h: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        """``h`` (R, E) += ``added``, in place; returns its LayerNorm, or without ``bias`` its
        RMSNorm.
        """
        return operators.add_norm(h, added, weight, bias, eps)

    def takes(self, linear: AnyLinear, x: Tensor, activation: str = "") -> bool:
        """Whether a kernel multiplies ``x`` (R, E) and applies ``activation``."""
        fits = len(x) <= operators.MAX_ROWS and activation in operators.ACTIVATIONS
        return fits and linear.plain is not None

    def product(
        self,
        linear: AnyLinear,
        x: Tensor,
        activation: str = "",
        gated: bool = False,
        gate_first: bool = True,
    ) -> Tensor:
        """act(x W^T + b), or if ``gated`` act(gate) * up of the two halves of x W^T + b."""
        assert linear.plain is not None
        options = activation, gated, gate_first
        return operators.skinny_linear(
            x, *linear.plain, *options, self._space.partials, self._space.counters
        )

    def linear(self, linear: AnyLinear, x: Tensor) -> Tensor:
        """``linear(x)``."""
        return self.product(linear, x) if self.takes(linear, x) else linear(x)

    def attention(
        self, step: Attention, rotary: Rotary | None, tensors: Mapping[str, Tensor]
    ) -> "PagedDecode":
        """``step``'s attention; ``tensors``: the weights of query and key norms, by name."""
        return PagedDecode(step, rotary, tensors, self._space)

    def draw(
        self,
        logits: Tensor,
        params: SamplingParams,
        numbers: Tensor,
        seed: Tensor,
        key: Sequence[Tensor],
        forbidden: tuple[Tensor, Tensor] | None,
        num_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        """Ids (R,) int64 and log-probs (R,) fp32 drawn from ``logits`` (R, V), as `sample` does.

        ``params`` says what applies, with its own top-k; ``numbers`` (3,) float64 are the
        temperature, top-p and min-p. ``seed`` (1,) int64. ``key``: prompt, sample and position,
        (R,) int64 each. ``forbidden``: rows (R,) bool and the ids (S,) that they may not draw.
        """
        short, stops = forbidden or (None, None)
        applies = params.temperature == 0, params.top_k, params.top_p < 1, params.min_p > 0
        counters = torch.stack(list(key))
        return operators.draw(
            logits.contiguous(), numbers, *applies, seed, counters, short, stops, num_tokens
        )


@dataclass(frozen=True)
class PagedDecode:
    """Attention of a step: normalizes and rotates the heads, writes new keys and values to the
    cache and attends, by one kernel a layer.
    """

    step: Attention
    rotary: Rotary | None
    tensors: Mapping[str, Tensor]
    space: Workspace

    def __call__(self, layer: int, heads_BHD: Tensor, layout: HeadLayout) -> Tensor:
        """Query, key and value heads (B, H + 2 K, D), in the order of ``layout`` -> (B, H * D)."""
        step, decodes, rotary = self.step, self.step.decodes, self.rotary
        assert decodes is not None
        assert not step.chunks
        norms = [self.tensors.get(f"layers.{layer}.{name}.weight") for name in ("q_norm", "k_norm")]
        return operators.paged_decode(
            *(heads_BHD, list(layout.origins), step.cache.layers[layer][0]),
            *(decodes.lengths, step.slot_mapping, decodes.block_table, step.cache.page_size),
            *(step.slopes, step.spec.window(layer), step.spec.attention_scale(layer)),
            *(*norms, step.spec.norm_eps),
            *((None, None) if rotary is None else (rotary.cos, rotary.sin)),
            *(self.space.partials, self.space.counters),
        )
