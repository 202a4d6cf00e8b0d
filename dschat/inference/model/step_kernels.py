"""Runs the operations of captured decode steps by Triton kernels on CUDA, where they apply.

`dschat.config.rollout` says which parts do.
"""

import copy
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from dschat.config.errors import UserError, first_line
from dschat.config.rollout import STEP_PARTS, VARIABLE, cuda_kernels
from dschat.inference.kernels.cuda import (
    ACTIVATIONS,
    MAX_CHOICES,
    MAX_ROWS,
    operators,
    workspace,
)
from dschat.inference.model.attention import Attention
from dschat.inference.model.borrowed import HeadLayout
from dschat.inference.model.experts import Stack
from dschat.inference.model.layers import Layer, Norm
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
        self.embed, self.choose_experts = operators.embed, operators.choose_experts
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
        """act(y), or if ``gated`` act(gate) * up of the two halves of y, which is ``linear(x)``."""
        assert linear.plain is not None
        options = activation, gated, gate_first
        space = self._space.partials, self._space.counters
        side = (None, None) if linear.side is None else (linear.side.a, linear.side.b)
        return operators.skinny_linear(x, *linear.plain, *options, *space, *side)

    def linear(self, linear: AnyLinear, x: Tensor) -> Tensor:
        """``linear(x)``."""
        return self.product(linear, x) if self.takes(linear, x) else linear(x)

    def gate(self, inner: Tensor, activation: str, gate_first: bool) -> Tensor | None:
        """See `operators.gate`; None: no kernel applies ``activation``."""
        fits = inner.dim() == 2 and inner.is_contiguous() and activation in ACTIVATIONS
        if not self.runs("product") or not fits:
            return None
        return operators.gate(inner, activation, gate_first)

    def takes_experts(self, stacks: tuple[Stack, Stack], num_choices: int, activation: str) -> bool:
        """Whether kernels run gated experts of such weights, on so many choices of rows."""
        most = min(MAX_CHOICES, MAX_ROWS * len(stacks[0].weight))  # more were not timed
        fits = num_choices <= most and activation in ACTIVATIONS
        return self.runs("product") and fits and not any(stack.side for stack in stacks)

    def experts(
        self,
        stacks: tuple[Stack, Stack],
        x: Tensor,
        chosen: Tensor,
        shares: Tensor,
        activation: str,
        clamped: tuple[float, float] | None = None,
        in_pairs: bool = False,
    ) -> Tensor:
        """See `operators.experts`; ``clamped``: factor and limit."""
        (up, up_bias, _), (down, down_bias, _) = stacks
        how = "pairs" if in_pairs else "halves", activation, *(clamped or (0.0, 0.0))
        rows = x.contiguous(), chosen.contiguous(), shares.contiguous()
        return operators.experts(*rows, up, up_bias, down, down_bias, *how)

    def add_norm(
        self,
        norm: Norm,
        h: Tensor,
        added: Tensor | None,
        eps: float,
        following: AnyLinear | None = None,
    ) -> Tensor:
        """See `operators.add_norm`. ``following``: multiplies the result."""
        how = norm.weight, norm.bias, eps, norm.offset
        return operators.add_norm(h, added, *how, _read_by(following))

    def attention(
        self,
        step: Attention,
        layers: Sequence[Layer] = (),
        growth: Tensor | None = None,
    ) -> Callable[..., Tensor]:
        """``step``'s attention, see `_attend`; ``layers``: without them, heads are normalized and
        rotated. ``growth``: (positions,), what queries are multiplied by.
        """
        return partial(self._attend, step, layers, growth)

    def _attend(
        self,
        step: Attention,
        layers: Sequence[Layer],
        growth: Tensor | None,
        layer: int,
        heads_BHD: Tensor,
        layout: HeadLayout,
        how: Scores,
    ) -> Tensor:
        """Query, key and value heads (B, H + 2 K, D), in the order of ``layout`` -> (B, H * D): by
        one kernel, which normalizes and rotates heads and writes keys and values to the cache.
        """
        decodes, spec = step.decodes, step.spec
        rotary = norms = following = None
        if layers:
            rotary, following = layers[layer].rotary, layers[layer].out
            norms = None if spec.whole_qk_norm else layers[layer].qk_norms
        assert decodes is not None
        assert decodes.block_table is not None
        assert not step.chunks
        weights = (None, None) if norms is None else (norms[0].weight, norms[1].weight)
        return operators.paged_decode(
            *(heads_BHD, list(layout.origins), step.cache.layers[layer][0]),
            *(decodes.lengths, step.slot_mapping, decodes.block_table, step.cache.page_size),
            *(step.slopes, how.window, how.chunk, how.scale, how.softcap, how.sinks),
            *(*weights, 0.0 if norms is None else norms[0].offset, spec.norm_eps),
            *((None, None) if rotary is None else (rotary.cos, rotary.sin)),
            *(spec.interleaved_rotary, growth),
            *(self._space.partials, self._space.counters),
            _read_by(following),
        )

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
