"""Defines what steps 1 and 2 train on: next-token cross entropy, pairwise reward modelling."""

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from dschat.data.micro_batches import RankedBatch, WeightedBatch, collate_pairs, collate_sft
from dschat.losses import pairwise_loss
from dschat.models.routing import METRIC, add_router_loss
from dschat.models.training_engine import ModelOrEngine
from dschat.runtime.optimizer_step import DeviceSums

Rows = list[dict[str, Any]]


class Task(Protocol):
    """Batches rows and computes their loss and metrics, for `dschat.supervised.loop`."""

    columns: tuple[str, ...]  # metrics in the console line

    def collate(self, rows: Rows) -> Any: ...

    def longest_row(self, num_tokens: int) -> dict[str, Any]:
        """A synthetic row of sequences of ``num_tokens`` that takes the most memory."""
        ...

    def weight(self, batch: Any) -> float:
        """This batch's part of the step's denominator: its target tokens, or its pairs."""
        ...

    def prepare(self, model: ModelOrEngine, batches: list[Any]) -> list[Any]:
        """Collective. The micro-batches of an optimizer step or an evaluation, with values added
        that their losses need from all of them or from another model. Without gradient.
        """
        return batches

    def loss(self, model: ModelOrEngine, batch: Any) -> tuple[Tensor, DeviceSums]:
        """The sum of losses over the batch (0-d), and sums for the metrics; reads nothing from the
        device.
        """
        ...

    def summarize(self, sums: dict[str, float]) -> dict[str, float]:
        """Means from the sums over all ranks and micro-batches."""
        ...


class SFTTask(Task):
    """Next-token cross entropy on the tokens that the loss mask selects, by their weights."""

    columns = ("loss", "perplexity")

    def collate(self, rows: Rows) -> WeightedBatch:
        return collate_sft(rows)

    def longest_row(self, num_tokens: int) -> dict[str, Any]:
        return {"input_ids": [0] * num_tokens, "loss_mask": [True] * num_tokens}

    def weight(self, batch: WeightedBatch) -> float:
        return batch.weight

    def loss(self, model: ModelOrEngine, batch: WeightedBatch) -> tuple[Tensor, DeviceSums]:
        logprobs, _ = model(batch.rows)
        weights = torch.ones_like(logprobs) if batch.weights is None else batch.weights
        total = -(logprobs * weights).sum()
        sums = {"loss": total.detach(), "tokens": weights.sum()}
        return add_router_loss(model, total, sums, batch.rows, batch.weight)

    def summarize(self, sums: dict[str, float]) -> dict[str, float]:
        loss = sums["loss"] / max(sums["tokens"], 1.0)
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 100.0))}
        return metrics | _router_metrics(sums, sums["tokens"])


class RewardTask(Task):
    """-log sigmoid of the difference of two last-token scores, as the mean over a row's pairs of
    answers (InstructGPT, eq. 1): however many answers a row ranks, it weighs as much as a pair.

    Args:
        most_answers: of a row, for `longest_row`.
    """

    columns = ("loss", "accuracy", "margin")

    def __init__(self, most_answers: int = 2) -> None:
        self._most_answers = most_answers

    def collate(self, rows: Rows) -> RankedBatch:
        return collate_pairs(rows)

    def longest_row(self, num_tokens: int) -> dict[str, Any]:
        chosen, rejected, *others = [[0] * num_tokens] * self._most_answers
        row: dict[str, Any] = {"chosen_ids": chosen, "rejected_ids": rejected}
        return row | {"other_ids": others, "ranks": list(range(self._most_answers))}

    def weight(self, batch: RankedBatch) -> int:
        return batch.num_real

    def loss(self, model: ModelOrEngine, batch: RankedBatch) -> tuple[Tensor, DeviceSums]:
        # NOTE: all answers in one forward. Two forwards before their backwards break ZeRO-3's
        # gradients.
        scores = model(batch.rows)
        total, metrics = pairwise_loss(scores[batch.better], scores[batch.worse], batch.weights)
        rows = total.new_full((), batch.num_real)
        metrics |= {"loss": total.detach(), "rows": rows}
        return add_router_loss(model, total, metrics, batch.rows, batch.num_real)

    def summarize(self, sums: dict[str, float]) -> dict[str, float]:
        pairs = max(sums["pairs"], 1.0)
        return {
            "loss": sums["loss"] / max(sums["rows"], 1.0),
            "accuracy": sums["correct"] / pairs,
            "margin": sums["margin"] / pairs,
            "chosen_score": sums["chosen"] / pairs,
            "rejected_score": sums["rejected"] / pairs,
        } | _router_metrics(sums, sums["rows"])


def _router_metrics(sums: dict[str, float], weight: float) -> dict[str, float]:
    return {METRIC: sums[METRIC] / max(weight, 1.0)} if METRIC in sums else {}
