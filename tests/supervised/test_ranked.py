"""Rows of k ranked answers in reward modelling: loss and gradients, and their pairs one by one."""

from itertools import combinations

import numpy as np
import pytest
import torch
from step_rows import ranked_rows
from tiny_models import score_model

from dschat.models.heads import ScoreModel
from dschat.supervised.loop import RewardTask

TASK = RewardTask()


def ranking(ranks):
    """A row of answers with these ranks: chosen, rejected, others."""
    chosen, rejected, *others = ([1, 2 + i, 0] for i in range(len(ranks)))
    row = {"chosen_ids": chosen, "rejected_ids": rejected, "prompt_length": 1}
    return row | {"other_ids": others, "ranks": list(ranks) if others else []}


def by_definition(rows):
    """Loss, its gradient by score, and the two scores of all pairs, in float64: InstructGPT, eq. 1,
    in sums over rows. ``rows`` are lists of (rank, score).
    """
    loss, slopes, compared = 0.0, [np.zeros(len(row)) for row in rows], []
    for row, slope in zip(rows, slopes, strict=True):
        pairs = [
            (i, j) if row[i][0] < row[j][0] else (j, i)
            for i, j in combinations(range(len(row)), 2)
            if row[i][0] != row[j][0]
        ]
        for better, worse in pairs:
            compared.append((np.float64(row[better][1]), row[worse][1]))
            margin = compared[-1][0] - compared[-1][1]
            loss += np.log1p(np.exp(-margin)) / len(pairs)
            part = 1 / (1 + np.exp(margin)) / len(pairs)
            slope[better] -= part
            slope[worse] += part
    return loss, slopes, np.array(compared)


@pytest.mark.parametrize(
    "ranks",
    [
        [(0, 1)],
        [(0, 1, 1)],
        [(0, 2, 1)],
        [(0, 3, 1, 2, 1)],
        [(0, 4, 1, 2, 3)],
        [(0, 1, 0, 0, 1), (0, 1), (0, 2, 1)],
    ],
)
def test_loss_and_gradients_in_float64(ranks):
    """Of scores that are sometimes equal: a tie counts half as ranked right."""
    rng = np.random.default_rng(5)
    scored = [[(rank, rng.integers(-2, 3) / 2) for rank in row] for row in ranks]
    loss, slopes, compared = by_definition(scored)
    margins = compared[:, 0] - compared[:, 1]
    # the batch's order: all chosen, all rejected, then the others of each row
    places = [(i, a) for a in (0, 1) for i in range(len(ranks))]
    places += [(i, a) for i, row in enumerate(ranks) for a in range(2, len(row))]
    given = [scored[i][a][1] for i, a in places]
    scores = torch.tensor(given, dtype=torch.float32, requires_grad=True)
    batch = TASK.collate([ranking(row) for row in ranks])
    found, sums = TASK.loss(lambda rows: scores, batch)
    found.backward()
    assert found.item() == pytest.approx(loss, rel=1e-6)
    assert scores.grad.tolist() == pytest.approx([slopes[i][a] for i, a in places], abs=1e-6)
    means = TASK.summarize({name: float(value) for name, value in sums.items()})
    assert means["loss"] == pytest.approx(loss / len(ranks), rel=1e-6)
    right = (margins > 0) + 0.5 * (margins == 0)
    expected = {"accuracy": right.mean(), "margin": margins.mean()}
    expected |= zip(("chosen_score", "rejected_score"), compared.mean(0), strict=True)
    assert {name: means[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert TASK.weight(batch) == len(ranks)


def test_no_rows():
    batch = TASK.collate([])
    loss, sums = TASK.loss(lambda rows: torch.zeros(0), batch)
    assert (float(loss), float(sums["pairs"]), TASK.weight(batch)) == (0, 0, 0)


def gradients(rows, weights=None):
    """The loss of ``rows``, each of ``weights``, and the gradients of all parameters."""
    model = ScoreModel(score_model("llama").train())
    total = 0.0
    for row, weight in zip(rows, weights or [1.0] * len(rows), strict=True):
        loss = TASK.loss(model, TASK.collate([row]))[0] * weight
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_a_ranking_is_its_pairs_each_by_one_over_their_number():
    rows = ranked_rows()[:8]
    pairs, weights = [], []
    for row in rows:
        answers = [row["chosen_ids"], row["rejected_ids"], *row["other_ids"]]
        ranked = list(zip(row["ranks"] or (0, 1), answers, strict=True))
        compared = [
            {"chosen_ids": a, "rejected_ids": b, "prompt_length": row["prompt_length"]}
            for rank, a in ranked
            for other, b in ranked
            if rank < other
        ]
        pairs += compared
        weights += [1 / len(compared)] * len(compared)
    loss, found = gradients(rows)
    expected_loss, expected = gradients(pairs, weights)
    assert len(pairs) > 2 * len(rows)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_the_longest_row_has_as_many_answers_as_any():
    batch = RewardTask(4).collate([RewardTask(4).longest_row(8)])
    assert (len(batch.better), batch.rows.num_tokens) == (6, 4 * 8)
    assert RewardTask().collate([RewardTask().longest_row(8)]).rows.num_tokens == 2 * 8
