"""Moves answers between ranks, so that all have about as many tokens to score and to train on.

The rank that generated an answer also runs the reward functions on it; their scores follow.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

import dschat.distributed as dist
from dschat.data.micro_batches import RowTokens, shares_of_ranks
from dschat.rewards.combine import joined_scores
from dschat.rewards.scoring import SourceScores
from dschat.rlhf.experience import Experience, joined


@dataclass
class Moves:
    """Where the answers of a rollout go, all ranks together."""

    sent: list[list[int]]  # by receiving rank: rows of this rank, as they were generated
    order: list[int]  # of the received rows, those of rank 0 first: into ascending numbers

    def experience(self, e: Experience) -> Experience:
        """Collective. The rows of ``e`` that this rank receives, in the order of their numbers."""
        return joined(dist.exchange_objects([e.pick(rows) for rows in self.sent])).pick(self.order)

    def scores(self, sources: list[SourceScores]) -> list[SourceScores]:
        """Collective. The scores of the answers that this rank receives."""
        parts = [[_picked(source, rows) for source in sources] for rows in self.sent]
        received = joined_scores(dist.exchange_objects(parts))
        return [_picked(source, self.order) for source in received]


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


def _picked(source: SourceScores, rows: list[int]) -> SourceScores:
    index = torch.tensor(rows, dtype=torch.int64)
    by_token = source.token_scores
    return replace(
        source,
        scores=source.scores[index],
        token_scores=None if by_token is None else [by_token[row] for row in rows],
        applies=None if source.applies is None else source.applies[index],
    )
