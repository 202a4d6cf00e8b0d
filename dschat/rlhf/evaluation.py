"""How good the policy is on held-out prompts, judged by what training uses and by what it never
sees.

A generator and prompts come in; means go out: reward-model score, KL to the reference, length,
share ended by EOS, and the gold score where the prompts are the built-in ones. It must not know how
the policy is trained.
"""

from dataclasses import dataclass
from typing import Any

import torch

from dschat import dist
from dschat.builtin_eval import EVAL_SEED, is_builtin
from dschat.config import RLHFConfig
from dschat.data.batches import Prompts, prompts_of
from dschat.data.gold import answer_metrics
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.experience import chunks, from_rollout
from dschat.rlhf.ppo import action_logprobs
from dschat.rollout import Generator, SamplingParams


@dataclass
class HeldOutPrompts:
    """This rank's share of the held-out prompts."""

    ids: Prompts
    texts: list[str]  # as `gold_score` reads them
    first_index: int  # number of the first one among those of all ranks
    total: int  # of all ranks
    gold: bool  # whether these are the built-in prompts, which the gold scorer knows

    @classmethod
    def of(cls, table: Any, args: RLHFConfig) -> "HeldOutPrompts":
        """This rank's contiguous share of a `prompt_dataset` table."""
        numbers = dist.my_share(list(range(len(table))))
        rows = [table[i] for i in numbers]
        return cls(
            ids=prompts_of(rows),
            texts=[row["prompt_text"] for row in rows],
            first_index=numbers[0] if numbers else 0,
            total=len(table),
            gold=is_builtin(args.eval_data_path or args.data_path),
        )


@torch.no_grad()
def evaluate_policy(
    engine: DeepSpeedRLHFEngine, generator: Generator, prompts: HeldOutPrompts
) -> dict[str, float]:
    """Collective. ``eval/...`` means over all ranks' prompts, one answer each, as in training."""
    args, device = engine.args, dist.device()
    sampling = SamplingParams(
        max_new_tokens=args.max_answer_seq_len,
        min_new_tokens=args.min_answer_seq_len,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=EVAL_SEED,
    )
    indices = range(prompts.first_index, prompts.first_index + len(prompts.ids))
    rollout = generator.generate(prompts.ids, sampling, list(indices))
    pad_id = engine.tokenizer.pad_token_id
    batch = from_rollout(prompts.ids, rollout, pad_id, sources=prompts.ids.sources)
    rows = list(range(batch.num_sequences))
    size = args.eval_batch_size
    sums = {"count": float(len(rows)), "kl": 0.0, "score": 0.0}
    training = engine.actor.training
    engine.actor.eval()
    for part in chunks(rows, size, dist.max_int(-(-len(rows) // size))):
        piece = batch.take(part, device)
        with engine.reference() as reference:
            ref_logprobs, _ = action_logprobs(reference, piece, sampling.temperature)
        scores = engine.score(piece)
        if part:
            difference = (piece.rollout_logprobs - ref_logprobs)[piece.answer_mask]
            sums["kl"] += float(difference.double().sum())
            sums["score"] += float(scores.double().sum())
    engine.actor.train(training)
    if rows:
        answers = engine.tokenizer.batch_decode(rollout.token_ids, skip_special_tokens=True)
        lengths = [len(ids) for ids in rollout.token_ids]
        stopped = [reason == "stop" for reason in rollout.finish_reasons]
        means = answer_metrics(prompts.texts, answers, lengths, stopped, gold=prompts.gold)
        sums |= {name: value * len(rows) for name, value in means.items()}
    names = [
        "count",
        "kl",
        "score",
        "answer_length",
        "eos_share",
        *(["gold"] if prompts.gold else []),
    ]
    totals = dict(zip(names, dist.sum_floats([sums.get(n, 0.0) for n in names]), strict=True))
    return {f"eval/{name}": totals[name] / max(totals["count"], 1.0) for name in names[1:]}
