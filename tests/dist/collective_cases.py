"""Collectives of two ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from step_cases import Case
from torch import nn

import dschat.distributed as dist
from dschat.hybrid.weight_stream import weight_stream
from dschat.inference.protocol import Rollout
from dschat.models.training_engine import attributes_replaced
from dschat.rlhf.batching import plan_moves
from dschat.rlhf.experience import from_rollout
from dschat.runtime import token_budget
from dschat.runtime.deepspeed_engine import ZeroSettings, initialize_training
from dschat.runtime.optimizer_step import OptimizerStep


def _run(case: Case, models: Path, out: Path) -> dict[str, Any]:
    """``exchanged``: objects of very different sizes, sent to each rank. ``gathered``: whether
    shards of very different sizes arrived whole. ``routed``, ``budgets`` and ``moves``: see
    `_routed`, `_budgets` and `_moves`.
    """
    rank = dist.rank()
    objects = [{"from": rank, "to": to, "text": "x" * 10 ** (3 * rank)} for to in range(2)]
    gathered = []
    for dtype in (torch.float32, torch.bfloat16):
        sizes = [1, 7, 100_001]
        wholes = [torch.arange(2 * size).remainder(251).to(dtype) - 9 for size in sizes]
        parts = [w[rank * n : (rank + 1) * n] for w, n in zip(wholes, sizes, strict=True)]
        found = dist.all_gather_shards(sizes, parts, torch.device("cpu"))
        gathered += [torch.equal(*pair) for pair in zip(found, wholes, strict=True)]
    return {
        "exchanged": dist.exchange_objects(objects),
        "gathered": dist.gather_objects(gathered),
        "routed": _routed(),
        "budgets": _budgets(),
        "moves": _moves(),
    }


class _Mixture(nn.Module):
    """One expert for all rows, which their first value names."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](rows)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.mixture = _Mixture()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.mixture(self.first(rows), int(rows[0, 0]))


def _routed() -> list[Any]:
    """Under ZeRO-3, where rank 0 has rows for expert 1 and rank 1 for 3: how far each rank's output
    is from plain torch's, and which experts took a step.
    """
    torch.manual_seed(0)
    net = _Net()
    rows = torch.full((3, 4), 1.0 + 2 * dist.rank())
    expected = net(rows).detach()
    before = [expert.weight.detach().clone() for expert in net.mixture.experts]
    zero = ZeroSettings(3, torch.float32)
    engine = initialize_training(net, zero, 1e-2, 0.0, [0.9, 0.95], "constant", 0, 10)
    step = OptimizerStep(engine, 1, denominator=1.0)
    output = engine(rows)
    gaps = dist.gather_objects(float((output - expected).abs().max()))
    step.backward(output.square().sum())
    assert step.finish()
    after = dict(weight_stream(net, torch.device("cpu")))
    moved = [
        not torch.equal(after[f"mixture.experts.{number}.weight"], weight)
        for number, weight in enumerate(before)
    ]
    return [gaps, moved]


def _budgets() -> list[Any]:
    """By rank: the token budget, where rank 1 has no memory for the forward of more than 4 rows of
    512 tokens, and the rows that were tried.
    """
    zero, tried = ZeroSettings(2, torch.float32), []
    layer = nn.Linear(4, 4)
    engine = initialize_training(layer, zero, 1e-2, 0.0, [0.9, 0.95], "constant", 0, 10)

    def forward(num_rows: int) -> torch.Tensor:
        tried.append(num_rows)
        if num_rows > 4 and dist.rank() == 1:
            raise torch.OutOfMemoryError
        return engine(torch.ones(num_rows, 4)).sum()

    with attributes_replaced(token_budget, _FASTER=0.0):
        tokens = token_budget.measure_budget([(engine, forward)], 512, 16)
    return dist.gather_objects([tokens, tried])


def _moves() -> list[list[list[int]]]:
    """By the answers that rank 0 has, in mini-batches: those that it sends to each rank."""
    sent = []
    for prompts, mini_batches, samples in (
        # Three prompts of equal lengths in each of two: one rank takes two of them, then one.
        ([[i] for i in range(6)], [0, 0, 0, 1, 1, 1], 1),
        ([[1, 2], [1, 2], [3, 4], [3, 4]], [0] * 4, 2),
    ):
        count = len(prompts) if dist.rank() == 0 else 0
        rollout = Rollout([[5]] * count, [[0.0]] * count, ["stop"] * count)
        e = from_rollout(prompts[:count], rollout, pad_id=0)
        numbers = np.array(mini_batches[:count], dtype=int)
        sent.append(plan_moves(e, numbers, samples=samples, budget=100).sent)
    return sent


RUNNERS = {"collectives": _run}
