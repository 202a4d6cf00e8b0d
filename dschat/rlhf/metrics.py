"""Computes the metrics of an RLHF iteration: rollout, updates, throughput.

Each function reduces this rank's sums to the numbers of metrics.jsonl over all ranks. Names are
TRL's where TRL has one.
"""

import logging
import math
from collections.abc import Mapping

import torch
from torch import Tensor

import dschat.distributed as dist
from dschat.config import UserError
from dschat.distributed.memory import peak_memory_gib
from dschat.hybrid.rollout_form import Refresh
from dschat.inference import InferenceEngine
from dschat.inference.protocol import Generator
from dschat.losses import group_has_variance, group_stats, kl_penalty
from dschat.losses.advantages import mean_and_variance
from dschat.models.routing import METRIC
from dschat.observability.flops import rlhf_iteration_flops, shape_of, tflops_per_s
from dschat.rlhf.advantages import episode_rewards, source_stats
from dschat.rlhf.engine import DeepSpeedRLHFEngine, base_of
from dschat.rlhf.experience import Experience
from dschat.runtime.optimizer_step import DeviceSums

logger = logging.getLogger("dschat")

_OTHER_MODEL = 1.0  # nats per token: no rounding, nor dropout, is as much

# Statistics of the inference engine that are summed over ranks.
_COUNTED = (
    *("prefill_tokens", "decode_tokens", "preemptions", "cached_tokens"),
    *("occupancy", "cache_use"),
)
# Already the same on every rank; the other sums of an update are this rank's.
_GLOBAL = {
    *("actor_grad_norm", "actor_steps", "critic_grad_norm", "critic_steps"),
    *("bad_steps", "overflow_steps"),
}


def experience_metrics(
    e: Experience,
    rewards: Tensor,
    corrected: dict[str, float],
    engine: DeepSpeedRLHFEngine,
    clip: float | None,
    weights: Mapping[str, float],
) -> dict[str, float]:
    """Collective. Means over all sequences or all actions of a rollout; NaN over none.

    Means of scores, rewards and returns leave out answers without a score. KL, values and entropy
    are reported where their model ran.

    Args:
        rewards: (S, A).
        corrected: this rank's sums of importance weights, see `dschat.losses.rollout_weights`.
        clip: the bound that rewards clip scores to; the scores reported here are not clipped.
        weights: by name, of the sources that have one.
    """
    mask, args = e.answer_mask, engine.args
    firsts = e.first_rows  # an agent's episode, of several rows, counts once
    scores = e.scores[e.scored & firsts].double()

    of_episodes = episode_rewards(e, args, rewards, clip)

    def total(per_action: Tensor) -> float:
        return float(per_action[mask].double().sum())

    sums = {
        "sequences": float(firsts.sum()),
        "rows": float(e.num_sequences),
        "scored": float(len(scores)),
        "scored_tokens": float(e.scored_mask.sum()),
        "tokens": float(mask.sum()),
        "prompt_tokens": float(e.prompt_lengths.sum()),
        "kl": total(e.logprobs - e.ref_logprobs),
        "teacher_kl": total(e.logprobs - e.teacher_logprobs),
        "scores": float(scores.sum()),
        "scores_sq": float(scores.square().sum()),
        "clipped": 0.0 if clip is None else float((scores.abs() > clip).sum()),
        "rewards": float(of_episodes[e.scored & firsts].double().sum()),
        "entropy": total(e.entropy),  # 0 where it was not computed
        "recomputed": float((mask & e.recomputed.unsqueeze(1)).sum()),
        "values": total(e.values),
        "returns": float(e.returns[e.scored_mask].double().sum()),
        "returns_sq": float(e.returns[e.scored_mask].double().square().sum()),
        "errors_sq": float((e.returns - e.values)[e.scored_mask].double().square().sum()),
        "finished_tokens": float(mask[e.finished].sum()),
        "finished": float(e.finished.sum()),
        "gap": total((e.rollout_logprobs - e.logprobs).abs()),
        "mismatch_kl": total(kl_penalty(e.rollout_logprobs, e.logprobs, "k3")),
        **corrected,
    }
    totals = dist.sum_named(sums)
    n, tokens, scored = (totals[name] or math.nan for name in ("sequences", "tokens", "scored"))
    rows = totals["rows"] or math.nan
    mean_score = totals["scores"] / scored
    metrics = {
        "objective/scores": mean_score,
        "objective/scores_std": math.sqrt(max(totals["scores_sq"] / scored - mean_score**2, 0.0)),
        "objective/rlhf_reward": totals["rewards"] / scored,
        "rollout/answer_length": totals["tokens"] / n,
        "rollout/prompt_length": totals["prompt_tokens"] / rows,
        "rollout/eos_share": totals["finished"] / rows,
        "completions/clipped_ratio": 1 - totals["finished"] / rows,
        "rollout/sequences": totals["sequences"],
        "rollout/tokens": totals["tokens"],
    }
    finished = max(totals["finished"], 1.0)  # TRL has 0 where none is
    metrics["completions/mean_terminated_length"] = totals["finished_tokens"] / finished
    metrics |= _extremes(mask.sum(1)) | _zero_std(e, args.num_samples_per_prompt)
    metrics |= _spread_by_source(e, weights, args.num_samples_per_prompt)
    if clip is not None:
        metrics["objective/clipped_share"] = totals["clipped"] / scored
    if engine.has_reference:
        metrics["objective/kl"] = totals["kl"] / n
    if args.has_teacher:
        metrics["objective/teacher_kl"] = totals["teacher_kl"] / n
    if engine.critic is not None:
        metrics["val/values"] = totals["values"] / tokens
        actions = totals["scored_tokens"] or math.nan
        metrics["val/returns"] = mean = totals["returns"] / actions
        variance = totals["returns_sq"] / actions - mean**2
        unexplained = totals["errors_sq"] / actions / variance if variance else 1.0
        metrics["val/explained_variance"] = 1 - unexplained
    if args.old_logprobs != "rollout":  # else the training passes measure the gap
        recomputed = totals["recomputed"] or math.nan
        metrics["objective/entropy"] = totals["entropy"] / recomputed
        metrics["rollout/logprob_gap"] = totals["gap"] / recomputed
        metrics["rollout/mismatch_kl"] = totals["mismatch_kl"] / recomputed
    if args.rollout_is != "off":
        metrics["rollout/is_weight"] = totals["is_weight"] / tokens
        metrics["rollout/is_cut_share"] = totals["is_cut"] / tokens
        metrics["rollout/is_dropped_share"] = totals["is_dropped"] / rows
    return metrics


def _extremes(lengths: Tensor) -> dict[str, float]:
    """Collective. The shortest and the longest answer; NaN where there is none."""
    own = (int(lengths.min()), int(lengths.max())) if len(lengths) else None
    known = [pair for pair in dist.gather_objects(own) if pair is not None]
    shortest = min((low for low, _ in known), default=math.nan)
    longest = max((high for _, high in known), default=math.nan)
    return {"completions/min_length": shortest, "completions/max_length": longest}


def _zero_std(e: Experience, num_samples: int) -> dict[str, float]:
    """Collective. The share of prompts whose answers all have the same score: group baselines learn
    nothing from them. No metric with one answer per prompt.
    """
    if num_samples == 1:
        return {}
    scored = e.scored & e.first_rows
    groups = (e.numbers // num_samples)[scored]
    num_groups = dist.max_int(int(groups.max()) + 1 if len(groups) else 1)
    stats = dist.all_reduce_sum(group_stats(e.scores[scored], groups, num_groups))
    differ = group_has_variance(stats)[stats[0] > 0].double()
    return {"frac_reward_zero_std": 1 - float(differ.sum()) / max(len(differ), 1)}


def _spread_by_source(
    e: Experience, weights: Mapping[str, float], num_samples: int
) -> dict[str, float]:
    """Collective. ``reward/NAME/std`` of each source: the mean of its standard deviations (n - 1)
    among the answers to a prompt. No metric with one answer per prompt, or one source.
    """
    if num_samples == 1 or len(weights) < 2:
        return {}
    groups = e.numbers // num_samples
    scores = torch.where(e.first_rows.unsqueeze(1), e.by_source(weights), torch.nan)
    stats = source_stats(scores, groups, max(e.num_prompts, 1))
    spreads = {}
    for name, of_source in zip(weights, stats, strict=True):
        _, variance = mean_and_variance(of_source[:, of_source[0] > 0])
        spreads[f"reward/{name}/std"] = float(variance.sqrt().sum()) / max(len(variance), 1)
    return spreads


def generation_metrics(refresh: Refresh, generator: Generator) -> dict[str, float]:
    """Collective. Cost of the weight refresh and use of the inference engine, over all ranks.

    Rates are tokens of all ranks per second of the busiest one. A generator without statistics
    reports the refresh only.
    """
    engine = generator if isinstance(generator, InferenceEngine) else None
    ranks = dist.world_size()
    local = {"seconds": refresh.seconds, "num_bytes": float(refresh.num_bytes)}
    if engine is not None:
        local |= {name: float(getattr(engine.stats, name)) for name in _COUNTED}
    sums = dist.sum_named(local)
    metrics = {"time/refresh_s": sums["seconds"] / ranks}
    metrics["memory/refresh_gib"] = sums["num_bytes"] / ranks / 2**30
    if engine is None:
        return metrics
    prefill, cached = sums["prefill_tokens"], sums["cached_tokens"]
    busy = dist.gather_objects((engine.stats.prefill_s, engine.stats.decode_s))
    prefill_s, decode_s = (max(*seconds, 1e-9) for seconds in zip(*busy, strict=True))
    copies = engine.group.size  # the ranks of a group count the same tokens
    if engine.cache.keeps_prefixes:
        metrics["throughput/cached_prompt_share"] = cached / max(cached + prefill, 1.0)
    return metrics | {
        "throughput/prefill_tokens_per_s": prefill / copies / prefill_s,
        "throughput/decode_tokens_per_s": sums["decode_tokens"] / copies / decode_s,
        "throughput/preemptions": sums["preemptions"] / copies,
        "throughput/occupancy": sums["occupancy"] / ranks,
        "throughput/cache_use": sums["cache_use"] / ranks,
    }


def training_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Collective. Means over the optimizer steps of an iteration, from this rank's sums."""
    local = {name: sums[name] for name in sorted(set(sums) - _GLOBAL)}
    totals = sums | dist.sum_named(local)

    def mean(name: str, count: str) -> float:
        return totals.get(name, 0.0) / max(totals.get(count, 0.0), 1.0)

    metrics = {
        "loss/policy_avg": mean("policy_loss", "policy_count"),
        "policy/approxkl_avg": mean("policy_approxkl", "policy_tokens"),
        "policy/clipfrac_avg": mean("policy_clipped", "policy_tokens"),
        "clip_ratio/low_mean": mean("policy_clipped_low", "policy_tokens"),
        "clip_ratio/high_mean": mean("policy_clipped", "policy_tokens")
        - mean("policy_clipped_low", "policy_tokens"),
        "val/ratio": mean("policy_ratio", "policy_tokens"),
        "val/ratio_abs_dev": mean("policy_ratio_abs_dev", "policy_tokens"),
        "policy/grad_norm": mean("actor_grad_norm", "actor_steps"),
        "train/bad_steps": totals.get("bad_steps", 0.0),
        "train/overflow_steps": totals.get("overflow_steps", 0.0),
    }
    if "value_loss" in totals:
        metrics["loss/value_avg"] = mean("value_loss", "actions")
        metrics["val/clipfrac_avg"] = mean("value_clipped", "actions")
        metrics["val/grad_norm"] = mean("critic_grad_norm", "critic_steps")
    optional = {
        "loss/ptx_avg": ("ptx_loss", "ptx_tokens"),
        "loss/kl_avg": ("kl_loss", "policy_count"),
        "policy/off_policy_share": ("off_policy", "policy_tokens"),
        "loss/distill_avg": ("distill_loss", "policy_count"),
        "loss/entropy_avg": ("entropy", "policy_count"),
        METRIC: (METRIC, "policy_count"),
        "rollout/logprob_gap": ("gap", "gap_actions"),
        "rollout/mismatch_kl": ("mismatch_kl", "gap_actions"),
    }
    for name, (total, number) in optional.items():
        if total in totals:
            metrics[name] = mean(total, number)
    return metrics


def mismatch_sums(logprobs: Tensor, batch: Experience) -> DeviceSums:
    """Difference of training's log-probs (B, A) from the generator's: sums over actions."""
    mask, generator = batch.answer_mask, batch.rollout_logprobs

    def total(per_action: Tensor) -> Tensor:
        # `per_action[mask]` would wait for the device: its length is read.
        return torch.where(mask, per_action, 0.0).double().sum()

    return {
        "gap": total((logprobs - generator).abs()),
        "mismatch_kl": total(kl_penalty(generator, logprobs, "k3")),
        "gap_actions": mask.sum(),
    }


def warn_of_gap(metrics: dict[str, float], dtype: torch.dtype, backend: str) -> bool:
    """Warn where ``rollout/logprob_gap`` is larger than rounding explains; whether it did.

    Raises:
        UserError: vLLM generates with other weights, or computes another model.
    """
    gap, bound = metrics.get("rollout/logprob_gap", 0.0), 0.01 if dtype == torch.float32 else 0.1
    if not gap > bound:
        return False
    if backend == "vllm" and not gap < _OTHER_MODEL:
        raise UserError(
            f"--rollout_backend vllm: its log-probs differ by {gap:.3g} nats per token from those "
            "that training computes: it runs this model otherwise; use --rollout_backend engine"
        )
    logger.warning(
        "rollout/logprob_gap is %.3g nats per token, above %g: answers are sampled from another "
        "distribution than the one that is trained (dropout, low precision, or a model that the "
        "generator computes wrongly). Compare with --enable_hybrid_engine false or --dtype fp32; "
        "--rollout_is tis corrects for it, seq_mask drops the answers that are furthest off; if it "
        "persists, report it with the model's name",
        gap,
        bound,
    )
    return True


def throughput(
    metrics: dict[str, float], e: Experience, engine: DeepSpeedRLHFEngine, train_actor: bool
) -> dict[str, float]:
    """Collective. Seconds, tokens per second, TFLOP/s; the whole iteration includes scoring.
    No TFLOP/s where FLOPs of a model are not known.
    """
    args = engine.args
    epochs = 0 if e.problem else args.ppo_epochs
    parts = [metrics[f"time/{part}_s"] for part in ("generate", "score", "train")]
    generate_s, _, train_s = parts
    iteration_s = sum(parts)
    sequences, answer_tokens = metrics["rollout/sequences"], metrics["rollout/tokens"]
    rows = sequences * metrics.get("rollout/rows_per_episode", 1.0)
    prompt_tokens = rows * metrics["rollout/prompt_length"] if sequences else 0.0
    trained = epochs * (answer_tokens + prompt_tokens)
    rates = {
        "time/iteration_s": iteration_s,
        "throughput/generate_tokens_per_s": answer_tokens / max(generate_s, 1e-9),
        "throughput/train_tokens_per_s": trained / max(train_s, 1e-9),
        "throughput/samples_per_s": sequences / max(iteration_s, 1e-9),
        "memory/peak_gib": peak_memory_gib(dist.device()),
    }
    models = (engine.actor, engine.critic, engine.reward, engine.teacher)
    shapes = [None if model is None else shape_of(base_of(model)) for model in models]
    actor, critic, reward, teacher = shapes
    if actor is None or shapes.count(None) > models.count(None):
        return rates
    flops = rlhf_iteration_flops(
        actor,
        critic,
        reward,
        e.prompt_lengths.tolist(),
        e.answer_mask.sum(1).tolist(),
        actor_forwards=float(e.recomputed.sum()) / max(e.num_sequences, 1) + engine.has_reference,
        teacher=teacher,
        num_samples_per_prompt=args.num_samples_per_prompt,
        ppo_epochs=epochs,
        train_actor=train_actor,
        actor_gradient_checkpointing=args.actor_gradient_checkpointing,
        critic_gradient_checkpointing=args.critic_gradient_checkpointing,
        actor_frozen_base=bool(args.actor_lora_dim) and args.only_optimize_lora,
        critic_frozen_base=bool(args.critic_lora_dim) and args.only_optimize_lora,
    )
    total = dist.sum_named({name: float(number) for name, number in flops.items()})
    devices = dist.world_size()
    return rates | {
        "throughput/generate_tflops": tflops_per_s(total["generate"], generate_s, devices),
        "throughput/train_tflops": tflops_per_s(total["train"], train_s, devices),
        "throughput/effective_tflops": tflops_per_s(total["effective"], iteration_s, devices),
    }
