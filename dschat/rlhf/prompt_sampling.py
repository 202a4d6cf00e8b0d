"""Draws prompts by what their answers teach (``--prompt_sampling``).

Prompts that the actor always answers right, or always wrong, have no advantages. How much a prompt
teaches is the variance of the scores of its answers: p (1 - p) where a share p of them scores 1
and the others 0 (learnability, Foster et al. 2025, arXiv 2502.12272; for any scores VCRL, arXiv
2509.19803). Older answers count less, and a prompt is expected to be as others until its answers
say more, as in MoPPS (arXiv 2507.04632).
"""

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np

import dschat.distributed as dist
from dschat.config import UserError
from dschat.data.batches import PromptBatches, PromptTable, RowTable, rows_of
from dschat.losses import clip_scores
from dschat.observability.metrics_log import is_finite
from dschat.rlhf.experience import Experience

_KEPT = 0.5  # weight of earlier answers, each time that a prompt is answered again


def difficulties(prompts: RowTable, column: str) -> np.ndarray:
    """The numbers in ``column`` of the prompts' data: (N,) float64.

    Raises:
        UserError: a prompt has none there.
    """
    flag, found = f"--prompt_sampling curriculum:{column}", list[float]()
    for row in rows_of(prompts, ("columns",)):
        columns = json.loads(row.get("columns", "null")) or {}
        if column not in columns:
            names = ", ".join(columns) or "none"
            raise UserError(f"{flag}: prompts have no such column; choose from: {names}")
        if not is_finite(value := columns[column]):
            raise UserError(f"{flag}: a prompt has {value!r} there; give every prompt a number")
        found.append(float(value))
    return np.array(found)


class AdaptivePrompts(Iterator[PromptTable]):
    """This rank's share of the prompts of endless rollouts, those of ``batches``.

    The prompts of a draw differ. They depend on the seed, the number of the draw and the scores
    of all ranks' answers before it, not on the number of ranks. ``num_samples``: answers per
    prompt, at least 2; ``position``: draws so far.
    """

    def __init__(self, batches: PromptBatches, num_samples: int) -> None:
        self._batches, self._num_samples, self.position = batches, num_samples, 0
        # Of the answers to each prompt: squared distances to their group's mean, and how many of
        # these distances are independent: one less than a group's answers. (2, N)
        self._sums = np.zeros((2, len(batches.dataset)))

    def variances(self) -> np.ndarray:
        """The expected variance of the scores of each prompt's answers, (N,) float64: as if a
        group of average variance had been seen before. Never 0.
        """
        (squares, freedom), before = self._sums, self._num_samples - 1
        mean = squares.sum() / max(freedom.sum(), 1.0)
        expected = (before * mean + squares) / (before + freedom)
        return expected if mean else np.ones_like(expected)

    def __next__(self) -> PromptTable:
        # Without replacement, in proportion to the variances (Efraimidis and Spirakis 2006).
        generator = np.random.default_rng([self._batches.seed, self.position])
        times = generator.exponential(size=len(self._batches.dataset)) / self.variances()
        self.position += 1
        first = np.argsort(times, kind="stable")[: self._batches.global_batch_size]
        return self._batches.at(first.tolist())

    def observe(self, e: Experience, clip: float | None) -> dict[str, float]:
        """Collective. Take in the scores of answers to prompts drawn here; returns metrics.

        ``clip``: the bound of scores in rewards. Answers without a finite score do not count.
        """
        mine = []
        if e.places is not None:  # the prompts may be a caller's own
            scores = clip_scores(e.scores, clip).tolist()
            answers = list(zip(e.numbers.tolist(), e.places, scores, strict=True))
            counts = e.scored & e.scores.isfinite()
            mine = [answers[row] for row in counts.nonzero().flatten().tolist()]
        together = sorted(answer for of_rank in dist.gather_objects(mine) for answer in of_rank)
        groups = mixed = new = 0
        for _, group in groupby(together, key=lambda answer: answer[0] // self._num_samples):
            _, (place, *_), values = zip(*group, strict=True)
            squares = float(np.square(values - np.mean(values)).sum())  # 0 for equal fp32 scores
            groups, mixed = groups + 1, mixed + (squares > 0)
            new += int(self._sums[1, place] == 0)
            self._sums[:, place] = _KEPT * self._sums[:, place] + (squares, len(values) - 1)
        return {"sampling/mixed": mixed / max(groups, 1), "sampling/new": new / max(groups, 1)}

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state that the next draw depends on, beside ``position``."""
        places = self._sums[1].nonzero()[0]
        return {"places": places.tolist(), "sums": self._sums[:, places].tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums[:] = 0.0
        self._sums[:, state["places"]] = state["sums"]
