"""Runs the operations of captured decode steps by Triton kernels on CUDA, where they apply.

`dschat.config.rollout` says which parts do.
"""

import copy
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from dschat.config.errors import UserError, first_line
from dschat.config.rollout import STEP_PARTS, VARIABLE, cuda_kernels
from dschat.inference.kernels.cuda import ACTIVATIONS, MAX_ROWS, Workspace, operators, workspace
from dschat.inference.model.attention import Attention
from dschat.inference.model.borrowed import HeadLayout
from dschat.inference.model.layers import Rotary
from dschat.inference.model.weights import AnyLinear
from dschat.inference.protocol import SamplingParams
from dschat.models.packing.kernels import Scores

logger = logging.getLogger("dschat")


def choose(device: torch.device) -> "StepKernels | None":
    """The kernels of an engine on ``device``; None: torch computes everything.

    Raises:
        UserError: kernels are asked for, and Triton is not installed or cannot compile. Where they
            are not, a warning says so, and torch computes everything.
    """
    wanted = cuda_kernels()
    parts = [part for part in STEP_PARTS if part in wanted]
    if device.type != "cuda" or not parts:
        return None
    if problem := _problem(device):
        if VARIABLE in os.environ:
            raise UserError(f"{VARIABLE}: {problem}, or leave {VARIABLE} out")
        logger.warning("decode steps run without Triton kernels, several times slower: %s", problem)
        return None
    return StepKernels(device, frozenset(parts))


def _problem(device: torch.device) -> str:
    """Why Triton's kernels cannot run, and what to do; "" if the smallest of them runs."""
    if find_spec("triton") is None:
        return "Triton is not installed; pip install 'dschat[kernels]'"
    x = torch.ones(1, 16, device=device)
    try:
        operators.add_norm(x, None, x[0], None, 1e-5)
    except Exception as error:  # of Triton, of the compiler that it starts, or of the driver
        return (
            f"Triton cannot compile a kernel here: {first_line(error)}; install a C compiler and "
            "Python's headers (python3-dev)"
        )
    return ""


class StepKernels:
    """The kernels of a captured step. An operand that no kernel takes goes to
    torch's operators.

    ``parts``: the others' operations are torch's, too.
    """

    def __init__(self, device: torch.device, parts: frozenset[str] = frozenset(STEP_PARTS)) -> None:
        self._space = workspace(device)
        self._parts = parts
        self.embed = operators.embed
        self.read_rows, self.advance_rows = operators.read_rows, operators.advance_rows

    def runs(self, part: str) -> bool:
        """Whether ``part`` is one of these kernels; `takes` says it for "product"."""
        # Only the attention kernel reads no page of a dead row.
        needed = {part, "attention"} if part == "state" else {part}
        return needed <= self._parts

    def without(self, part: str) -> "StepKernels":
        """The same with one part fewer."""
        fewer = copy.copy(self)
        fewer._parts = self._parts - {part}
        return fewer

    def takes(self, linear: AnyLinear, x: Tensor, activation: str = "") -> bool:
        """Whether a kernel multiplies ``x`` (R, E) and applies ``activation``."""
        fits = len(x) <= MAX_ROWS and activation in ACTIVATIONS
        return self.runs("product") and fits and linear.plain is not None

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
        space = self._space.partials, self._space.counters
        return operators.skinny_linear(x, *linear.plain, *options, *space)

    def linear(self, linear: AnyLinear, x: Tensor) -> Tensor:
        """``linear(x)``."""
        return self.product(linear, x) if self.takes(linear, x) else linear(x)

    def add_norm(
        self,
        h: Tensor,
        added: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        following: AnyLinear | None = None,
    ) -> Tensor:
        """See `operators.add_norm`. ``following``: multiplies the result."""
        return operators.add_norm(h, added, weight, bias, eps, _read_by(following))

    def attention(
        self,
        step: Attention,
        rotary: Rotary | None,
        tensors: Mapping[str, Tensor],
        linears: Mapping[str, AnyLinear],
    ) -> "PagedDecode":
        """``step``'s attention; ``tensors``: the weights of query and key norms, ``linears``: the
        products of outputs, by name.
        """
        return PagedDecode(step, rotary, tensors, linears, self._space)

    def draw(
        self,
        logits: Tensor,
        params: SamplingParams,
        has_greedy: bool,
        numbers: Tensor,
        integers: Tensor,
        key: Tensor | Sequence[Tensor],
        forbidden: tuple[Tensor, Tensor] | None,
        num_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        """See `operators.draw`. ``params`` says what applies to any row, and ``has_greedy`` whether
        some are greedy in a step that draws. ``key``: prompt, sample and position, (R,) int64 each,
        or one tensor (3, R). ``forbidden``: rows (R,) bool and the ids (R, S) that they may not
        draw; -1 is none.
        """
        short, stops = forbidden or (None, None)
        draws = params.temperature > 0
        truncates = params.top_k > 0, params.top_p < 1, params.min_p > 0
        applies = has_greedy or not draws, draws, *truncates
        counters = key if isinstance(key, Tensor) else torch.stack(list(key))
        return operators.draw(
            *(logits.contiguous(), numbers, integers, counters, *applies),
            *(short, stops, num_tokens),
        )


def _read_by(linear: AnyLinear | None) -> Tensor | None:
    """The weight that a product reads; None: it is not in one piece, or not known."""
    return None if linear is None or linear.plain is None else linear.plain[0]


@dataclass(frozen=True)
class PagedDecode:
    """Attention of a step: normalizes and rotates the heads, writes new keys and values to the
    cache and attends, by one kernel a layer.
    """

    step: Attention
    rotary: Rotary | None
    tensors: Mapping[str, Tensor]
    linears: Mapping[str, AnyLinear]
    space: Workspace

    def __call__(
        self, layer: int, heads_BHD: Tensor, layout: HeadLayout, scores: Scores | None = None
    ) -> Tensor:
        """Query, key and value heads (B, H + 2 K, D), in the order of ``layout`` -> (B, H * D)."""
        step, decodes, rotary = self.step, self.step.decodes, self.rotary
        how = scores or Scores(step.spec.attention_scale(layer), step.spec.window(layer))
        assert how.is_plain, "see `ModelSpec.has_plain_attention`"
        assert decodes is not None
        assert decodes.block_table is not None
        assert not step.chunks
        norms = [self.tensors.get(f"layers.{layer}.{name}.weight") for name in ("q_norm", "k_norm")]
        return operators.paged_decode(
            *(heads_BHD, list(layout.origins), step.cache.layers[layer][0]),
            *(decodes.lengths, step.slot_mapping, decodes.block_table, step.cache.page_size),
            *(step.slopes, how.window, how.scale),
            *(*norms, step.spec.norm_eps),
            *((None, None) if rotary is None else (rotary.cos, rotary.sin)),
            *(self.space.partials, self.space.counters),
            _read_by(self.linears.get(f"layers.{layer}.out")),
        )
