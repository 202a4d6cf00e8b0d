"""Cuts an experience into micro-batches, and moves answers to the ranks that have fewer tokens.

A micro-batch has a number of rows or, with ``--max_tokens_per_micro_batch``, of tokens. Every rank
runs the same number of forwards. The rank that generated an answer also runs the reward functions
on it; their scores follow.
"""

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

import dschat.distributed as dist
from dschat.config import RLHFConfig
from dschat.config.fields import AUTO
from dschat.data.micro_batches import MicroBatchSize, RowTokens, shares_of_ranks
from dschat.models.packing import PackedRows, pack
from dschat.models.packing.model import packed_model
from dschat.rewards.scoring import SourceScores
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.experience import Experience, joined
from dschat.runtime.token_budget import measure_budget


def micro_batch_size(engine: DeepSpeedRLHFEngine, rows: int) -> MicroBatchSize:
    """``rows`` or, if set, the engine's token budget; padding counts where one model pads."""
    all_models = (engine.actor, engine.ref, engine.teacher, engine.critic, engine.reward)
    models = [packed_model(model) for model in all_models if model is not None]
    pads, by_row = any(m.pads for m in models), any(m.by_row for m in models)
    ranks = engine.args.sequence_parallel_size
    return MicroBatchSize(rows, engine.token_budget, pads, ranks, by_row)


def micro_batches(
    engine: DeepSpeedRLHFEngine, e: Experience, rows: list[int], size: int
) -> list[list[int]]:
    """Collective. ``rows`` of ``e`` in micro-batches of ``size`` or, if set, within the engine's
    token budget; equally many on every rank.
    """
    parts = micro_batch_size(engine, size).split(row_tokens(e, rows))
    return [[rows[i] for i in part] for part in parts]


def row_tokens(e: Experience, rows: list[int]) -> list[RowTokens]:
    """What ``rows`` of ``e`` take in a micro-batch."""
    lengths, prompts = e.lengths.tolist(), e.prompt_lengths.tolist()
    ids = e.input_ids.numpy()
    return [
        RowTokens(lengths[i], lengths[i], 1, ids[i, : prompts[i]].tobytes(), prompts[i])
        for i in rows
    ]


def settle_token_budget(engine: DeepSpeedRLHFEngine, args: RLHFConfig) -> None:
    """Collective. Measure the budget if it is auto and not yet known.

    NOTE: after the first rollout, whose KV cache may stay in memory while the models train.
    """
    if args.max_tokens_per_micro_batch != AUTO or engine.token_budget:
        return
    start, length = (
        -(-n // args.sequence_parallel_size) for n in (args.max_prompt_seq_len, args.longest_row)
    )

    def longest(num_rows: int) -> PackedRows:
        """The longest rows, of different prompts."""
        packed = pack([[0] * length] * num_rows, [range(start - 1, length - 1)] * num_rows)
        return packed.to(dist.device())

    def actor_loss(num_rows: int) -> Tensor:
        with_entropy = args.entropy_coef > 0
        logprobs, entropy = engine.actor(longest(num_rows), args.temperature, with_entropy)
        return logprobs.sum() if entropy is None else logprobs.sum() + entropy.sum()

    def critic_loss(num_rows: int) -> Tensor:
        assert engine.critic is not None
        return engine.critic(longest(num_rows)).sum()

    models = [(engine.actor, actor_loss)]
    if engine.critic is not None:
        models.append((engine.critic, critic_loss))
    most = args.mini_batch_size(1)
    engine.token_budget = measure_budget(models, length, most, args.align_overflow)


@dataclass
class Moves:
    """Where the answers of a rollout go, all ranks together."""

    sent: list[list[int]]  # by receiving rank: rows of this rank, as they were generated
    order: list[int]  # of the received rows, rank 0's first: into ascending numbers

    def experience(self, e: Experience) -> Experience:
        """Collective. The rows of ``e`` that this rank receives, in the order of their numbers."""
        received = joined(dist.exchange_objects([e.pick(rows) for rows in self.sent]))
        return replace(received.pick(self.order), metrics=e.metrics)

    def scores(self, source: SourceScores) -> SourceScores:
        """Collective. The scores of the answers that this rank receives."""
        parts = dist.exchange_objects([[source.values[i] for i in sent] for sent in self.sent])
        received = [value for part in parts for value in part]
        return replace(source, values=[received[i] for i in self.order])


def plan_moves(e: Experience, mini_batch: np.ndarray, samples: int, budget: int) -> Moves:
    """Collective. Moves that give every rank about equal tokens of each mini-batch, where answers
    to one prompt share it.

    Args:
        e: this rank's part of the rollout.
        mini_batch: (S,) of its sequences.
        samples: sequence k is an answer to prompt k // ``samples``.
        budget: most tokens of a micro-batch.
    """
    prompts = (e.numbers // samples).tolist()
    columns = (mini_batch.tolist(), e.numbers.tolist(), prompts)
    local = zip(*columns, e.lengths.tolist(), e.prompt_lengths.tolist(), strict=True)
    by_rank = dist.gather_objects(list(local))
    by_mini_batch: dict[int, list[tuple[int, RowTokens]]] = {}
    for number_of, number, prompt, length, prompt_length in sorted(sum(by_rank, [])):
        tokens = RowTokens(length, length, 1, prompt.to_bytes(8, "big"), prompt_length)
        by_mini_batch.setdefault(number_of, []).append((number, tokens))
    taker: dict[int, int] = {}  # number -> rank
    for turn, rows in enumerate(by_mini_batch.values()):
        shares = shares_of_ranks([tokens for _, tokens in rows], budget, len(by_rank))
        # The largest share first: to the first rank and the last one in turn.
        for rank, share in enumerate(shares if turn % 2 == 0 else reversed(shares)):
            taker |= {rows[i][0]: rank for i in share}
    sent: list[list[int]] = [[] for _ in by_rank]
    for row, number in enumerate(e.numbers.tolist()):
        sent[taker[number]].append(row)
    here = [row[1] for of_rank in by_rank for row in of_rank if taker[row[1]] == dist.rank()]
    return Moves(sent, sorted(range(len(here)), key=here.__getitem__))
