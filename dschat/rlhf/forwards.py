"""Computes an experience's log-probs, entropies, values and scores, with forwards of all models."""

from collections.abc import Iterator

import torch
from torch import Tensor

import dschat.distributed as dist
from dschat.config import RLHFConfig
from dschat.models.tokenizer import num_ids
from dschat.models.training_engine import ModelOrEngine, evaluating
from dschat.rlhf.batching import micro_batches
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.experience import Experience


def action_logprobs(
    model: ModelOrEngine, batch: Experience, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the actions, and entropies if asked for, by one forward: (B, A) fp32 each.

    Both carry a gradient, unless under ``no_grad``.
    """
    logprobs, entropy = model(batch.rows, temperature, with_entropy)
    return batch.by_action(logprobs), None if entropy is None else batch.by_action(entropy)


def action_values(critic: ModelOrEngine, batch: Experience) -> Tensor:
    """The critic's value before each action: (B, A) fp32."""
    return batch.by_action(critic(batch.rows))


def pieces(
    engine: DeepSpeedRLHFEngine, e: Experience, size: int, rows: list[int] | None = None
) -> Iterator[tuple[list[int], Experience]]:
    """Collective. Yield (rows, micro-batch on the device); every rank yields the same number.

    ``rows``: of ``e``; default: all.
    """
    rows = list(range(e.num_sequences)) if rows is None else rows
    for part in micro_batches(engine, e, rows, size):
        yield part, e.take(part, dist.device())


# Largest mean difference of the rollout's log-probs from the training form's, in nats, that counts
# as rounding in fp32. Observed: 1e-7 to 1e-5.
_AGREES = 1e-4
_CHECKED_SHARE = 8  # one of so many answers is recomputed to compare, and for the entropy


@torch.no_grad()
def fill_in(engine: DeepSpeedRLHFEngine, e: Experience, args: RLHFConfig) -> bool:
    """Collective. Fill in the log-probs of actor, reference and teacher, entropies and values.

    Returns:
        Whether the actor's log-probs are the generator's, by ``old_logprobs``: then the training
        form computed none, or log-probs of a few answers to compare (``recomputed``).
    """
    e.logprobs = e.rollout_logprobs.clone()
    with evaluating(engine.actor, engine.critic):
        are_rollouts = _fill_in_from_actor(engine, e, args)
        if engine.has_reference or engine.teacher is not None or engine.critic is not None:
            _fill_in_from_others(engine, e, args)
        if args.distill_top_k and not args.teacher_prompt:
            fill_in_candidates(engine, e, e, args)
    return are_rollouts


def _fill_in_from_actor(engine: DeepSpeedRLHFEngine, e: Experience, args: RLHFConfig) -> bool:
    """Collective. Log-probs and entropies as far as ``old_logprobs`` wants them recomputed; whether
    the log-probs remain the generator's.
    """
    if args.old_logprobs == "rollout":
        return True
    rows = list(range(e.num_sequences))
    # Importance weights compare both log-probs of every token; older policies drew other ones.
    needs_all = args.old_logprobs == "recompute" or args.rollout_is != "off" or args.partial_rollout
    needs_all = needs_all or args.top_entropy_share < 1  # of all tokens' entropies
    if not needs_all:
        _recompute(engine, e, args, _checked(e, args))
        if not _reads_old_logprobs(engine, args, e) or _agree(e):
            return True
        rows = [i for i in rows if not e.recomputed[i]]
    _recompute(engine, e, args, rows)
    return False


def _checked(e: Experience, args: RLHFConfig) -> list[int]:
    """The rows that are recomputed to compare: up to four answers to a prompt share its forward."""
    together = min(args.num_samples_per_prompt, 4)
    numbers = (e.numbers // together).tolist()
    return [i for i, number in enumerate(numbers) if number % _CHECKED_SHARE == 0]


def _reads_old_logprobs(engine: DeepSpeedRLHFEngine, args: RLHFConfig, e: Experience) -> bool:
    """Whether a reward, an advantage or a ratio is computed from the old log-probs."""
    in_reward = engine.has_reference and not args.kl_is_in_loss and args.kl_weight != 0
    return in_reward or args.has_teacher or args.ppo_epochs * e.num_mini_batches > 1


def _agree(e: Experience) -> bool:
    """Collective. Whether the generator's log-probs of recomputed answers differ by rounding."""
    mask = e.answer_mask & e.recomputed.unsqueeze(1)
    gap = float((e.rollout_logprobs - e.logprobs)[mask].abs().double().sum())
    gap, count = dist.sum_floats([gap, float(mask.sum())])
    # NOTE: False for NaN, and where no answer was compared: dynamic sampling leaves numbers out.
    return count > 0 and gap <= _AGREES * count


@torch.no_grad()
def update_kl(engine: DeepSpeedRLHFEngine, e: Experience, args: RLHFConfig) -> dict[str, float]:
    """Collective. How far the update on ``e`` moved the policy, as ``policy/approxkl_after``: half
    the mean squared log-ratio to the old log-probs, of an eighth of the answers.

    ``policy/approxkl_avg`` is measured before each step: 0 where there is only one.
    """
    total, count = torch.zeros((), dtype=torch.float64, device=dist.device()), 0
    size = args.per_device_training_batch_size
    with evaluating(engine.actor):
        for _, batch in pieces(engine, e, size, _checked(e, args)):
            logprobs, _ = action_logprobs(engine.actor, batch, args.temperature)
            if logprobs.dim() == 3:  # and log-probs of the teacher's candidates
                logprobs = logprobs[:, :, 0]
            log_ratio = torch.where(batch.loss_mask, logprobs - batch.logprobs, 0.0)
            total += log_ratio.double().square().sum() / 2
            count += int(batch.loss_mask.sum())
    total_kl, tokens = dist.sum_floats([float(total), float(count)])
    return {"policy/approxkl_after": total_kl / tokens} if tokens else {}


def _recompute(
    engine: DeepSpeedRLHFEngine, e: Experience, args: RLHFConfig, rows: list[int]
) -> None:
    """Collective. Log-probs and entropies of ``rows`` by the actor's training form."""
    filled = []
    for part, batch in pieces(engine, e, args.per_device_training_batch_size, rows):
        logprobs, entropy = action_logprobs(engine.actor, batch, args.temperature, True)
        assert entropy is not None
        filled.append((part, {"logprobs": logprobs, "entropy": entropy}))
    _keep(e, filled)
    e.recomputed[rows] = True


def _fill_in_from_others(engine: DeepSpeedRLHFEngine, e: Experience, args: RLHFConfig) -> None:
    """Collective. The log-probs of reference and teacher, and the critic's values."""
    filled = []
    for part, batch in pieces(engine, e, args.per_device_training_batch_size):
        assert batch.rows is not None
        batch.rows.experts = None  # the reference may be the actor without adapters
        values: dict[str, Tensor] = {}
        if engine.has_reference:
            with engine.reference() as reference:
                values["ref_logprobs"], _ = action_logprobs(reference, batch, args.temperature)
        if engine.teacher is not None and not (args.distill_top_k or args.teacher_prompt):
            logprobs, _ = action_logprobs(engine.teacher, batch, args.temperature)
            values["teacher_logprobs"] = logprobs
        if engine.critic is not None:
            values["values"] = action_values(engine.critic, batch)
        filled.append((part, values))
    _keep(e, filled)


def fill_in_teacher(
    engine: DeepSpeedRLHFEngine, teacher: ModelOrEngine, e: Experience, args: RLHFConfig
) -> None:
    """Collective. The log-probs of a teacher that reads other prompts than the actor."""
    filled = []
    for part, batch in pieces(engine, e, args.per_device_training_batch_size):
        logprobs, _ = action_logprobs(teacher, batch, args.temperature)
        filled.append((part, {"teacher_logprobs": logprobs}))
    _keep(e, filled)


def fill_in_candidates(
    engine: DeepSpeedRLHFEngine, e: Experience, view: Experience, args: RLHFConfig
) -> None:
    """Collective. The likeliest ids of actor and teacher, and the teacher's log-probs, which reads
    ``view``: ``e``, or with other prompts in front of the same answers.

    NOTE: last of all, as every forward on ``e`` computes the log-probs of its candidates.
    """
    rows = list(range(e.num_sequences))
    top = args.distill_top_k, num_ids(engine.tokenizer)
    shape = (*e.answer_mask.shape, 2 * min(top))
    candidates, logprobs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    for part in micro_batches(engine, view, rows, args.per_device_training_batch_size):
        batch = e.take(part, dist.device())
        read = batch if view is e else view.take(part, dist.device())
        assert batch.rows is not None
        assert read.rows is not None
        *_, ids = engine.actor(batch.rows, args.temperature, False, *top)
        read.rows.candidates = ids[:, 1:]
        teacher = engine.actor if engine.teacher is None else engine.teacher
        values, _, ids = teacher(read.rows, args.temperature, False, *top)
        if part:
            width = batch.answer_mask.shape[1]
            candidates[part, :width] = batch.by_action(ids[:, 1:]).cpu()
            on_host = batch.by_action(values).cpu()
            logprobs[part, :width] = on_host[:, :, 1:]
            e.teacher_logprobs[part, :width] = on_host[:, :, 0]
    e.candidates, e.teacher_candidates = candidates, logprobs


@torch.no_grad()
def reward_scores(engine: DeepSpeedRLHFEngine, e: Experience, size: int) -> Tensor:
    """Collective. The reward model's scores: (S,) fp32. ``size``: sequences per forward, unless
    there is a token budget.
    """
    scores = torch.zeros(e.num_sequences)
    parts = micro_batches(engine, e, list(range(e.num_sequences)), size)
    values = [engine.score(e.pick_or_dummy(part)) for part in parts]
    on_host = torch.cat(values).cpu().split([len(value) for value in values])
    for part, value in zip(parts, on_host, strict=True):
        if part:
            scores[part] = value
    return scores


def _keep(e: Experience, filled: list[tuple[list[int], dict[str, Tensor]]]) -> None:
    """Write what micro-batches computed, by name (B, A), into their rows of ``e``.

    One copy of all of it: each one waits for the device.
    """
    values = [value for _, named in filled for value in named.values()]
    if not values:
        return
    sizes = [value.numel() for value in values]
    on_host = iter(torch.cat([value.flatten() for value in values]).cpu().split(sizes))
    for part, named in filled:
        for name, value in named.items():
            rows = next(on_host).view(value.shape)
            if part:
                getattr(e, name)[part, : value.shape[1]] = rows


# Fields of an experience that must be finite, with their names in messages.
_MUST_BE_FINITE = {
    "scores": "scores",
    "rollout_logprobs": "log-probs of the rollout",
    "logprobs": "log-probs of the actor",
    "ref_logprobs": "log-probs of the reference",
    "teacher_logprobs": "log-probs of the teacher",
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
