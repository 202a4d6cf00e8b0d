"""Evaluates the policy on held-out prompts.

Metrics: the score and each of its sources, pass@k, KL to reference and teacher, answer length,
share of answers that end with EOS, turns of episodes, and for the built-in prompts the gold score,
which training never sees.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import dschat.distributed as dist
from dschat.builtin.gold_scorer import answer_metrics
from dschat.config import RLHFConfig
from dschat.config.errors import require
from dschat.data.batches import PromptTable, prompt_columns, prompts_of
from dschat.inference.protocol import Generator, SamplingParams
from dschat.models.continued_text import continued_texts
from dschat.models.training_engine import ModelOrEngine, evaluating
from dschat.rewards.reward_functions import REWARD_MODEL
from dschat.rewards.scoring import SourceScores, any_applies, combine, source_means
from dschat.rlhf.collector import Collector
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.experience import Experience
from dschat.rlhf.forwards import action_logprobs, pieces
from dschat.rlhf.prompts import prompt_table
from dschat.runtime.best_model import NO_HELD_OUT, check_best
from dschat.runtime.gold_eval import EVAL_SEED, gold_knows

logger = logging.getLogger("dschat")

_ROUNDING = 1e-6  # 0.7 + 0.2 + 0.1 is 1 - 1e-16, and scores are fp32


@dataclass
class HeldOutPrompts:
    """This rank's share of the held-out prompts."""

    prompts: PromptTable
    first_index: int  # number of the first prompt among all ranks' prompts
    total: int  # prompts of all ranks
    gold: bool  # whether the gold scorer knows these prompts: the built-in ones

    @classmethod
    def of(cls, table: Sequence[dict[str, Any]], args: RLHFConfig) -> "HeldOutPrompts":
        """This rank's contiguous share of a `prompt_dataset` table."""
        numbers = dist.my_share(list(range(len(table))))
        rows = [table[i] for i in numbers]
        return cls(
            prompts=prompt_table(prompts_of(rows, prompt_columns(table))),
            first_index=numbers[0] if numbers else 0,
            total=len(table),
            gold=gold_knows(args.eval_data_path or args.data_path),
        )


def evaluate_policy(
    engine: DeepSpeedRLHFEngine,
    generator: Generator,
    held_out: HeldOutPrompts,
    collector: Collector,
    show: Callable[[Experience], None] = lambda _: None,
    passes: bool | None = None,
) -> dict[str, float]:
    """Collective. ``eval/...`` means over all ranks' prompts, sampled as in training.

    ``show`` gets this rank's answers with their scores. ``passes``: whether the first evaluation
    had pass@k; None: this one is the first. It has where flags ask, or all scores are 0 or 1.
    """
    args = engine.args
    sampling = SamplingParams.from_config(args, EVAL_SEED, args.eval_num_samples)
    at = held_out.first_index
    e, scoring = collector.answers_of(generator, held_out.prompts, sampling, at)
    sources = collector.sources(e, scoring, args.eval_batch_size)
    every, firsts = e, e.first_rows.nonzero().flatten().tolist()
    if len(firsts) < e.num_sequences:  # of an agent's episodes; their rows have the same score
        picked = [[s.values[row] for row in firsts] for s in sources]
        sources = [replace(s, values=of) for s, of in zip(sources, picked, strict=True)]
        e = e.pick(firsts)
    by_source = source_means("eval/scores", sources)
    logged = collector.functions.logged()
    scores = torch.zeros(e.num_sequences, dtype=torch.float64)
    if sources:
        scores, _ = combine(sources, None)
        scores[~any_applies(sources)] = math.nan
    scored = torch.isfinite(scores)
    show(replace(e, scores=scores, scored=scored))
    partial = scored & (scores.abs() > _ROUNDING) & ((scores - 1).abs() > _ROUNDING)
    sums = {"count": float(e.num_sequences), "scored": float(scored.sum()), "known": 0.0}
    sums["partial"] = float(partial.sum())
    if sources:
        sums["score"] = float(scores[scored].sum())
    if engine.has_reference:
        with engine.reference() as reference:
            sums["kl"] = _kl(engine, reference, every)
    if engine.teacher is not None and not args.teacher_prompt:
        sums["teacher_kl"] = _kl(engine, engine.teacher, every)
    sums |= _answer_sums(engine, e, held_out, sampling.n)
    if args.sets_passing or any(source.name != REWARD_MODEL for source in sources):
        pass_scores = scores
        if args.eval_pass_source:
            pass_scores = _scores_of(args.eval_pass_source, sources)
        least = 1.0 if args.eval_pass_score is None else args.eval_pass_score
        grid = torch.full((len(held_out.prompts.ids) * sampling.n,), math.nan, dtype=torch.float64)
        grid[e.numbers - at * sampling.n] = pass_scores  # failed agents may have left some out
        pass_scores = grid
        passed = (pass_scores >= least - _ROUNDING).reshape(-1, sampling.n)
        known = pass_scores.isfinite().reshape(-1, sampling.n)
        sums["known"] = float(known.sum())
        sums |= _passes(passed.sum(dim=1), known.sum(dim=1), sampling.n)
    totals = dist.sum_named(sums)
    metrics = {
        f"eval/{name}": total / max(totals["known" if "pass@" in name else "count"], 1.0)
        for name, total in list(totals.items())[4:]
    }
    asked = args.sets_passing or "pass@" in (args.keep_best or "")
    if not asked and (totals["partial"] if passes is None else not passes):
        metrics = {name: value for name, value in metrics.items() if "pass@" not in name}
    if sources:
        metrics["eval/score"] = totals["score"] / max(totals["scored"], 1.0)
        if engine.has_reference:
            penalty = args.kl_weight * metrics["eval/kl"]
            metrics["eval/rlhf_reward"] = metrics["eval/score"] - penalty
    # of episodes: turns and the environment's tokens
    metrics |= {n.replace("rollout/", "eval/"): value for n, value in e.metrics.items()}
    metrics |= {f"eval/{name}": value for name, value in logged.items()}
    return metrics | (by_source if len(sources) > 1 else {})


@torch.no_grad()
def _kl(engine: DeepSpeedRLHFEngine, other: ModelOrEngine, e: Experience) -> float:
    """Collective. Sum over this rank's answers of log policy - log ``other``, in nats."""
    total = 0.0
    with evaluating(engine.actor):
        for part, piece in pieces(engine, e, engine.args.eval_batch_size):
            logprobs, _ = action_logprobs(other, piece, engine.args.temperature)
            if part:
                difference = (piece.rollout_logprobs - logprobs)[piece.answer_mask]
                total += float(difference.double().sum())
    return total


def _scores_of(name: str, sources: list[SourceScores]) -> Tensor:
    """The scores of source ``name``: (S,) float64, NaN where it declined."""
    (source,) = (source for source in sources if source.name == name)
    return torch.where(source.applies, source.scores.double(), math.nan)


def check_evaluation(args: RLHFConfig, sources: Sequence[str], num_held_out: int) -> None:
    """Check the evaluation flags before any weight loads.

    Args:
        sources: names of all score sources, in their order.
        num_held_out: held-out prompts, over all ranks.

    Raises:
        UserError: ``keep_best`` without held-out prompts, an unknown metric or source.
    """
    require(
        not args.eval_pass_source or args.eval_pass_source in sources,
        f"--eval_pass_source {args.eval_pass_source} does not score here; choose from "
        f"{', '.join(sources)}",
    )
    check_best(args, _metric_names(args, sources), num_held_out)
    if args.eval_steps and not num_held_out:
        logger.warning("--eval_steps evaluates nothing: %s", NO_HELD_OUT)
    if args.keep_best == "eval/rlhf_reward" and not args.kl_weight:
        logger.warning("--keep_best eval/rlhf_reward: with --kl_coef 0 it is eval/score")


def _metric_names(args: RLHFConfig, sources: Sequence[str]) -> list[str]:
    """The names that `evaluate_policy` may return, less ``eval/``."""
    names = [*(["score"] if sources else []), "answer_length", "eos_share"]
    if args.environment or args.agent:
        names += ["turns", "environment_tokens"]
    if gold_knows(args.eval_data_path or args.data_path):
        names.append("gold")
    if args.needs_reference or (args.actor_lora_dim and args.only_optimize_lora):
        names += ["kl", *(["rlhf_reward"] if sources else [])]
    if args.teacher_model_name_or_path and not args.teacher_prompt:
        names.append("teacher_kl")
    if args.sets_passing or any(name != REWARD_MODEL for name in sources):
        names += _passes(torch.zeros(0), torch.zeros(0), args.eval_num_samples)
    if len(sources) > 1:
        names += [f"scores/{name}" for name in sources]
    return names


def _answer_sums(
    engine: DeepSpeedRLHFEngine, e: Experience, held_out: HeldOutPrompts, n: int
) -> dict[str, float]:
    """Sums over this rank's answers of length, EOS and gold score; the same names on all ranks."""
    names = ["answer_length", "eos_share", *(["gold"] if held_out.gold else [])]
    if not e.num_sequences:
        return dict.fromkeys(names, 0.0)
    lengths = (e.lengths - e.prompt_lengths).tolist()
    ids = [
        row[start : start + length].tolist()
        for row, start, length in zip(e.input_ids, e.prompt_lengths.tolist(), lengths, strict=True)
    ]
    answers = continued_texts(engine.tokenizer, ids)
    known = held_out.prompts.texts or []
    rows = (e.numbers // n - held_out.first_index).tolist()
    texts = [known[row] for row in rows] if known else []
    means = answer_metrics(texts, answers, lengths, e.finished.tolist(), gold=held_out.gold)
    return {name: means[name] * e.num_sequences for name in names}


def _passes(num_right: Tensor, num_known: Tensor, n: int) -> dict[str, float]:
    """``pass@k`` of this rank's prompts for k = 1, 2, 4, ... and n, times the answers with a score.

    ``num_right``, ``num_known`` (P,): how many of each prompt's n answers pass, and have a score.
    Of a prompt with fewer of these than k, all count.
    """
    ks = sorted({k for k in (2**i for i in range(n.bit_length())) if k < n} | {n})
    prompts = [(int(m), int(c)) for m, c in zip(num_known, num_right, strict=True)]
    return {f"pass@{k}": sum(m * pass_at(min(k, m), m, c) for m, c in prompts) for k in ks}


def pass_at(k: int, n: int, num_right: int) -> float:
    """Probability that one of k answers passes, estimated from n of which ``num_right`` pass.

    ``1 - C(n - c, k) / C(n, k)``, unbiased (Chen et al. 2021, arXiv 2107.03374, eq. 1).
    """
    return 1 - math.comb(n - num_right, k) / math.comb(n, k)
