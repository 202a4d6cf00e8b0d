"""Token rows that the training steps of the tests learn from, and probes of what they learned."""

from collections.abc import Iterator
from typing import Any

import torch
from tiny_models import EOS, VOCAB
from torch.nn.utils.rnn import pad_sequence

import dschat.distributed as dist
from dschat.config import RLHFConfig
from dschat.data.batches import Endless, StepBatches
from dschat.data.micro_batches import MicroBatchSize

NUM_ITERATIONS = 3  # of PPO at most, each four optimizer steps


def random_ids(generator: torch.Generator, low: int, high: int) -> list[int]:
    """Between ``low`` and ``high`` words."""
    length = int(torch.randint(low, high + 1, (1,), generator=generator))
    return torch.randint(2, VOCAB, (length,), generator=generator).tolist()


def sequences(seed: int, count: int, low: int = 1, high: int = 12) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [random_ids(generator, low, high) for _ in range(count)]


PROBES = [
    ids + [EOS] * (i % 2) for i, ids in enumerate(sequences(seed=99, count=6, low=2))
]  # every other one ends


def padded_probes(pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids (B, T), and the mask of those that are no padding."""
    rows = [torch.tensor(row) for row in PROBES]
    mask = pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in rows], True)
    return pad_sequence(rows, True, pad_id), mask


PROMPTS = sequences(seed=7, count=4 * NUM_ITERATIONS, low=1, high=6)


def sft_rows() -> list[dict[str, Any]]:
    """37 examples: five steps an epoch, the last with five rows, which no even cut divides."""
    answers, prompts = sequences(1, 37), sequences(2, 37, high=5)
    return [
        {"input_ids": p + a + [EOS], "loss_mask": [0] * len(p) + [1] * (len(a) + 1)}
        for p, a in zip(prompts, answers, strict=True)
    ]


def pair_rows() -> list[dict[str, Any]]:
    chosen, rejected, prompts = sequences(3, 37), sequences(4, 37), sequences(5, 37, high=5)
    return [
        {"chosen_ids": p + c + [EOS], "rejected_ids": p + r + [EOS], "prompt_length": len(p)}
        for p, c, r in zip(prompts, chosen, rejected, strict=True)
    ]


def ranked_rows() -> list[dict[str, Any]]:
    """Rankings of two to five answers, every other one with a tie."""
    rows = pair_rows()
    texts = iter(sequences(6, 3 * len(rows)))
    for i, row in enumerate(rows):
        prompt = row["chosen_ids"][: row["prompt_length"]]
        others = [prompt + next(texts) + [EOS] for _ in range(i % 4)]
        ranks = [0, 3, *((0, 1, 2) if i % 2 else (1, 2, 2))][: 2 + len(others)]
        row |= {"other_ids": others, "ranks": ranks if others else []}
    return rows


def rows_of(step: str, which: str) -> list[dict[str, Any]]:
    """The rows of "sft" or of pairs: all; "one" alone; eleven "awkward" ones, of one token, or
    of three with or without targets; answers of one token each. Or rows of "ranked" answers.
    """
    if which == "ranked":
        return ranked_rows()
    rows = sft_rows() if step == "sft" else pair_rows()
    if which == "awkward":
        cut = _cut_text if step == "sft" else _cut_pair
        return [cut(row, i) for i, row in enumerate(rows[:11])]
    return rows[:1] if which == "one" else rows


def _cut_text(row: dict[str, Any], number: int) -> dict[str, Any]:
    length = 1 if number % 5 == 0 else 3
    return {name: values[:length] for name, values in row.items()}


def _cut_pair(row: dict[str, Any], number: int) -> dict[str, Any]:
    return row | {side: row[side][: row["prompt_length"] + 1] for side in _SIDES}


_SIDES = ("chosen_ids", "rejected_ids")


def text_steps(config: RLHFConfig) -> Iterator[Any]:
    """The ptx data: blocks of text, every optimizer step the same ones on any number of ranks."""
    blocks = [{"input_ids": ids} for ids in sequences(seed=11, count=24, low=3)]
    world = dist.world_size()
    batches = StepBatches(
        blocks,
        config.mini_batch_size(world),
        MicroBatchSize(config.per_device_training_batch_size),
        dist.rank(),
        world,
        config.seed,
    )
    return Endless(batches)
