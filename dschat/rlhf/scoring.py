"""Computes an experience's log-probs, entropies, values and reward-model scores.

Sequences go through the models in micro-batches; every rank runs the same number of forwards.
"""

from collections.abc import Iterator
from typing import Literal, overload

import torch
from torch import Tensor

import dschat.distributed as dist
from dschat.config import RLHFConfig
from dschat.models.eval_mode import evaluating
from dschat.models.training_engine import ModelOrEngine
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.experience import Experience, chunks


@overload
def action_logprobs(
    model: ModelOrEngine, batch: Experience, temperature: float, with_entropy: Literal[True]
) -> tuple[Tensor, Tensor]: ...


@overload
def action_logprobs(
    model: ModelOrEngine, batch: Experience, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]: ...


def action_logprobs(
    model: ModelOrEngine,
    batch: Experience,
    temperature: float,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the actions, and entropies if asked for, by one forward: (B, A) fp32 each.

    Both carry a gradient, unless under ``no_grad``.
    """
    logprobs, entropy = model(batch.rows, temperature, with_entropy)
    return batch.by_action(logprobs), None if entropy is None else batch.by_action(entropy)


def action_values(critic: ModelOrEngine, batch: Experience) -> Tensor:
    """The critic's value before each action: (B, A) fp32."""
    return batch.by_action(critic(batch.rows))


@torch.no_grad()
def fill_in(engine: DeepSpeedRLHFEngine, e: Experience, args: RLHFConfig) -> None:
    """Collective. Fill in the log-probs of actor and reference, entropies and values of ``e``.

    With ``old_logprobs`` "rollout" the actor runs no forward: its log-probs are the generator's,
    entropies stay 0.
    """
    recompute = args.old_logprobs == "recompute"
    if not recompute:
        e.logprobs = e.rollout_logprobs.clone()
    with evaluating(engine.actor, engine.critic):
        for part, batch in pieces(e, args.per_device_training_batch_size):
            filled: dict[str, Tensor] = {}
            if recompute:
                filled["logprobs"], filled["entropy"] = action_logprobs(
                    engine.actor, batch, args.temperature, with_entropy=True
                )
            if engine.has_reference:
                with engine.reference() as reference:
                    filled["ref_logprobs"], _ = action_logprobs(reference, batch, args.temperature)
            if engine.critic is not None:
                filled["values"] = action_values(engine.critic, batch)
            width = batch.answer_mask.shape[1]
            for name, value in filled.items():
                if part:
                    masked = torch.where(batch.answer_mask, value, 0.0)
                    getattr(e, name)[part, :width] = masked.cpu()


@torch.no_grad()
def reward_model_scores(engine: DeepSpeedRLHFEngine, e: Experience, size: int) -> Tensor:
    """Collective. The reward model's score of every sequence, ``size`` at a time: (S,) fp32."""
    scores = torch.zeros(e.num_sequences)
    for part, batch in pieces(e, size):
        value = engine.score(batch)
        if part:
            scores[part] = value.cpu()
    return scores


# Fields of an experience that must be finite, with their names in messages.
_MUST_BE_FINITE = {
    "scores": "scores",
    "rollout_logprobs": "log-probs of the rollout",
    "logprobs": "log-probs of the actor",
    "ref_logprobs": "log-probs of the reference",
    "values": "values of the critic",
}


def not_finite(e: Experience) -> str:
    """Collective. A message that counts NaN and infinity in a scored experience, over all ranks;
    "" where all is finite.
    """
    counts = []
    for name in _MUST_BE_FINITE:
        values = getattr(e, name)
        values = values if values.dim() == 1 else values[e.answer_mask]
        counts.append(float((~torch.isfinite(values)).sum()))
    totals = zip(_MUST_BE_FINITE.values(), dist.sum_floats(counts), strict=True)
    named = [f"{count:.0f} {words}" for words, count in totals if count]
    return f"{', '.join(named)} not finite" if named else ""


def pieces(e: Experience, size: int) -> Iterator[tuple[list[int], Experience]]:
    """Collective. Yield (rows, micro-batch on the device); every rank yields the same number."""
    rows = list(range(e.num_sequences))
    for part in chunks(rows, size, dist.max_int(-(-len(rows) // size))):
        yield part, e.take(part, dist.device())
