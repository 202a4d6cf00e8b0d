"""Accumulates micro-batches into one optimizer step; skips non-finite steps on all ranks.

The gradient is of "sum over tokens / tokens of the whole step" under every ZeRO stage and any
division into micro-batches.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

import dschat.distributed as dist
from dschat.models.training_engine import TrainingEngine, attributes_replaced

logger = logging.getLogger("dschat")

# overflow: fp16's dynamic loss scale was too high and has been lowered, as happens at the start.
# aligned: skipped with the other model's step. bad: the loss or gradient is not finite, and no loss
# scale explains it.
Outcome = Literal["applied", "overflow", "aligned", "bad"]


class OptimizerStep:
    """One optimizer step on (sum of losses over all micro-batches and ranks) / ``denominator``.

    DeepSpeed averages gradients over ranks, hence the factor of the world size. Use::

        step = OptimizerStep(engine, num_micro_batches=k, denominator=tokens_of_all_ranks)
        for batch in micro_batches:
            step.backward(loss_sum(batch))   # exactly k times, after one forward each
        applied = step.finish()

    `finish` returns False where a loss or the gradient is not finite on any rank: all ranks skip
    the step then, and ``outcome`` is the reason.
    """

    def __init__(self, engine: TrainingEngine, num_micro_batches: int, denominator: float):
        assert num_micro_batches >= 1
        self._engine = engine
        self._remaining = num_micro_batches
        self._scale = dist.world_size() / max(denominator, 1.0)
        self._losses_finite: Tensor | None = None  # on this rank so far, 0-d bool
        self.grad_norm = 0.0
        self.outcome: Outcome | None = None

    def backward(self, loss_sum: Tensor) -> None:
        """Collective. Accumulate the gradient of one micro-batch's ``loss_sum`` (0-d)."""
        self._remaining -= 1
        assert self._remaining >= 0, "more micro-batches than announced"
        finite = torch.isfinite(loss_sum.detach())
        before = self._losses_finite
        self._losses_finite = finite if before is None else before & finite
        self._engine.set_gradient_accumulation_boundary(self._remaining == 0)
        self._engine.backward(loss_sum * self._scale, scale_wrt_gas=False)

    def is_finite(self) -> bool:
        """Collective. Whether losses and gradient are finite on every rank, after the last
        `backward`.
        """
        if not self._has_finite_losses:
            return False
        stage, optimizer = self._engine.zero_optimization_stage(), self._engine.optimizer
        if stage == 0:
            return math.isfinite(self._stage_0_norm())
        norms = optimizer._get_norm_groups() if stage == 3 else [optimizer.scaled_global_norm()]
        return all(0 <= float(norm) < math.inf for norm in norms)  # DeepSpeed's -1: not finite

    @cached_property
    def _has_finite_losses(self) -> bool:
        """Collective at the first use. NOTE a loss may be infinite and its gradient not: log 0 of a
        softmax.
        """
        assert self._remaining == 0, "fewer micro-batches than announced"
        return dist.max_int(not bool(self._losses_finite)) == 0

    def finish(self, skip: bool = False) -> bool:
        """Collective. Clip, update, advance the schedule; returns whether the step was applied.

        With ``skip``, or where a loss or the gradient is not finite, weights, optimizer and
        schedule stay unchanged on all ranks. A dynamic loss scale falls where this gradient
        overflowed; not where the unscaled loss did, nor with ``skip``.
        """
        requested, skip = skip, skip or not self._has_finite_losses
        if self._engine.zero_optimization_stage() == 0:
            applied = self._finish_stage_0(skip)
        else:
            may_fall = _scale_may_fall(self._engine)
            with _forced_skip(self._engine.optimizer, skip):
                self._engine.step()
            self.grad_norm = float(self._engine.get_global_grad_norm() or 0.0)
            applied = bool(self._engine.was_step_applied())
            if not applied:
                _forget_gradients(self._engine.optimizer)
        if applied:
            self.outcome = "applied"
        elif skip:
            self.outcome = "aligned" if requested and self._has_finite_losses else "bad"
        else:
            stage = self._engine.zero_optimization_stage()
            self.outcome = "overflow" if stage > 0 and may_fall else "bad"
        return applied

    def _finish_stage_0(self, skip: bool) -> bool:
        """`finish` under ZeRO 0, where torch's optimizer would write NaN into every weight."""
        self.grad_norm = self._stage_0_norm()
        if skip or not math.isfinite(self.grad_norm):
            self._engine.optimizer.zero_grad()
            return False
        for p in self._engine.module.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)  # as the reduction over several processes does
        self._engine.step()
        return True

    def _stage_0_norm(self) -> float:
        gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        return float(nn.utils.get_total_norm(gradients))


def finish_together(steps: list[OptimizerStep]) -> list[bool]:
    """Collective. Finish all ``steps``; where one is not finite, none is applied."""
    if len(steps) == 1:
        return [steps[0].finish()]
    finite = [step.is_finite() for step in steps]
    return [
        step.finish(skip=is_finite and not all(finite))
        for step, is_finite in zip(steps, finite, strict=True)
    ]


class SkippedSteps:
    """Counts the skipped steps of one model, and ends the run after too many in a row.

    fp16's overflows do not count while the loss scale can fall.
    """

    def __init__(self, limit: int, of: str = "") -> None:
        """``limit``: skipped steps in a row; ``of``: "actor" or "critic", for messages."""
        self._limit = limit
        self._of = f" of the {of}" if of else ""
        self.in_a_row = 0

    def take(self, step: OptimizerStep, when: str) -> None:
        """Count a finished ``step``; ``when`` begins its log line.

        Raises ``FloatingPointError`` at the limit.
        """
        if step.outcome == "applied":
            self.in_a_row = 0
        elif step.outcome == "overflow":
            scale = loss_scale(step._engine)
            logger.info("%s%s skipped: fp16 overflowed; loss scale %g", when, self._of, scale)
        elif step.outcome == "aligned":
            logger.info("%s%s skipped with the other model's", when, self._of)
        else:
            self.count(f"{when}{self._of}", "its loss or gradient is not finite")

    def require_some(self, any_applied: bool) -> None:
        """At the end of a run. Raises ``FloatingPointError`` where all steps were skipped."""
        if self.in_a_row and not any_applied:
            raise FloatingPointError(
                f"no step{self._of} was applied: all {self.in_a_row} were skipped, because a loss, "
                "a gradient or an input of them is not finite; no trained model is saved. "
                "Check the models' weights, lower the learning rate, or raise the precision"
            )

    def count(self, name: str, reason: str) -> None:
        """The step ``name`` was skipped. Raises ``FloatingPointError`` at the limit."""
        self.in_a_row += 1
        logger.warning("%s skipped: %s (%d in a row)", name, reason, self.in_a_row)
        if self.in_a_row >= self._limit:
            raise FloatingPointError(
                f"{self.in_a_row} steps{self._of} in a row were skipped (--max_bad_steps), the "
                f"last because {reason}; lower the learning rate, or raise the precision"
            )


def loss_scale(engine: TrainingEngine) -> float:
    """The factor of fp16's losses before backward; 1 in other precisions."""
    return float(getattr(engine.optimizer, "loss_scale", 1.0))


def learning_rate(engine: TrainingEngine) -> float:
    """Learning rate of the next step."""
    return float(engine.get_lr()[0])


def _scale_may_fall(engine: TrainingEngine) -> bool:
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return bool(scaler is not None and scaler.dynamic and scaler.cur_scale > scaler.min_scale)


def _forget_gradients(optimizer: Any) -> None:
    """Drop the gradients that ZeRO 1 and 2 summed for a skipped step.

    NOTE: with the optimizer offloaded in bf16, DeepSpeed 0.19 keeps that sum and adds the next
    step's gradients to its NaN: no later step would be applied.
    """
    sums = getattr(optimizer, "averaged_gradients", {})
    for group in sums:
        sums[group] = None


@contextmanager
def _forced_skip(optimizer: Any, skip: bool) -> Iterator[None]:
    """A scope in which a ZeRO optimizer's ``step`` detects an overflow and keeps its loss scale.

    NOTE: DeepSpeed has no call for skipping a step. This way its own clean-up runs, which handles
    offloaded gradients.
    """
    if not skip:
        yield
        return
    not_finite = torch.tensor(-1.0)
    replaced: dict[str, Callable[..., object]] = {
        "scaled_global_norm": lambda: not_finite,  # stages 1 and 2
        "_get_norm_groups": lambda: [not_finite],  # stage 3
        "_update_scale": lambda has_overflow=False: None,
    }
    with attributes_replaced(optimizer, **replaced):
        yield


# -- metric sums -----------------------------------------------------------------------------------

DeviceSums = dict[str, Tensor]  # 0-d, any dtype, without gradient


def sum_parts(parts: list[DeviceSums]) -> dict[str, float]:
    """Sum of every name over the micro-batches that have it, in float64 and in their order, read
    from the device once: a read in each micro-batch would leave a GPU idle.
    """
    named = [item for part in parts for item in part.items()]
    if not named:
        return {}
    tensors = [tensor for _, tensor in named]
    joined = torch.empty(len(tensors), dtype=torch.float64, device=tensors[0].device)
    values = torch.stack(tensors, out=joined).tolist()
    sums: dict[str, float] = {}
    for (name, _), value in zip(named, values, strict=True):
        sums[name] = sums.get(name, 0.0) + value
    return sums
