"""Losses on pairs: against float64 NumPy and numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from loss_rows import check_metrics

from dschat.losses import dpo_loss, ipo_loss, kto_loss, pairwise_loss

BETA = 0.3
CHOSEN = [0.0, 1.5, -2.0, 40.0, -300.0, 0.25]
REJECTED = [0.0, -0.5, 1.0, -40.0, 300.0, 0.25]


def sigmoid(x):
    return 1 / (1 + np.exp(-np.clip(np.asarray(x, dtype=np.float64), -700, 700)))


def by_numpy(name, chosen, rejected, **knobs):
    """The papers' formulas, a pair at a time."""
    total = 0.0
    for w, r in zip(chosen, rejected, strict=True):
        if name == "dpo":
            e, h = knobs.get("label_smoothing", 0.0), BETA * (w - r)
            # -log sigmoid(h) = log(1 + exp(-h))
            total += (1 - e) * np.logaddexp(0, -h) + e * np.logaddexp(0, h)
        elif name == "ipo":
            total += (w - r - 1 / (2 * BETA)) ** 2
        elif name == "pairwise":
            total += np.logaddexp(0, r - w)
        else:
            z0 = max(knobs["kl"], 0.0)
            good, bad = knobs.get("weights", (1.0, 1.0))
            # weight - value, value = weight * sigmoid(beta * distance from z0)
            total += 0.5 * (good - good * sigmoid(BETA * (w - z0)))
            total += 0.5 * (bad - bad * sigmoid(BETA * (z0 - r)))
    return total


def ours(name, chosen, rejected, **knobs):
    if name == "dpo":
        return dpo_loss(chosen, rejected, BETA, knobs.get("label_smoothing", 0.0))
    if name == "ipo":
        return ipo_loss(chosen, rejected, BETA)
    if name == "pairwise":
        return pairwise_loss(chosen, rejected)
    return kto_loss(chosen, rejected, knobs["kl"], BETA, *knobs.get("weights", (1.0, 1.0)))


CASES = [
    ("pairwise", {}),
    ("dpo", {}),
    ("dpo", {"label_smoothing": 0.2}),
    ("ipo", {}),
    ("kto", {"kl": 0.0}),
    ("kto", {"kl": 0.7, "weights": (1.0, 1.5)}),
    ("kto", {"kl": -5.0, "weights": (0.5, 1.0)}),  # a negative estimate counts as 0
]
each_loss = pytest.mark.parametrize(("name", "knobs"), CASES, ids=str)


def pairs(dtype=torch.float32):
    return (torch.tensor(x, dtype=dtype, requires_grad=True) for x in (CHOSEN, REJECTED))


@each_loss
def test_value_and_gradient(name, knobs):
    chosen, rejected = pairs()
    loss, _ = ours(name, chosen, rejected, **knobs)
    assert (loss.ndim, loss.dtype) == (0, torch.float32)
    expected = by_numpy(name, CHOSEN, REJECTED, **knobs)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    for side, grad in enumerate((chosen.grad, rejected.grad)):
        for i, found in enumerate(grad.tolist()):
            moved = [[list(CHOSEN), list(REJECTED)] for _ in range(2)]
            moved[0][side][i] += 1e-4
            moved[1][side][i] -= 1e-4
            up, down = (by_numpy(name, *m, **knobs) for m in moved)
            assert found == pytest.approx((up - down) / 2e-4, rel=1e-3, abs=1e-4), (side, i)


def test_by_hand():
    """One pair, scores or log-ratios 2 and -1, beta 0.5."""
    one = torch.tensor([2.0]), torch.tensor([-1.0])
    assert pairwise_loss(*one)[0].item() == pytest.approx(math.log(1 + math.exp(-3)))
    assert dpo_loss(*one, 0.5)[0].item() == pytest.approx(math.log(1 + math.exp(-1.5)))
    assert ipo_loss(*one, 0.5)[0].item() == 4.0  # (3 - 1)^2
    # z0 = 2: the chosen answer stands at it (1/2), the rejected one 3 below: sigmoid(-1.5)
    expected = 0.5 * 0.5 + 0.5 * 2 / (1 + math.exp(1.5))
    assert kto_loss(*one, 2.0, 0.5, 1.0, 2.0)[0].item() == pytest.approx(expected)


@each_loss
def test_metrics(name, knobs):
    """Of scores, or beta x log-ratio; a tie counts half: of six pairs 2 + 1 are ranked right."""
    _, metrics = ours(name, *pairs(), **knobs)
    beta = 1.0 if name == "pairwise" else BETA
    w, r = beta * np.array(CHOSEN), beta * np.array(REJECTED)
    sums = {"chosen": w.sum(), "rejected": r.sum(), "margins": (w - r).sum(), "accuracies": 3.0}
    expected = {f"rewards/{key}": value for key, value in sums.items()}
    if name == "pairwise":
        expected = {"margin": sums.pop("margins"), "correct": sums.pop("accuracies")} | sums
    check_metrics(metrics, expected | {"pairs": 6.0})


@each_loss
def test_a_sum_over_pairs_adds_up_over_any_cut(name, knobs):
    whole, metrics = ours(name, *pairs(), **knobs)
    parts = []
    for cut in (slice(0, 1), slice(1, 1), slice(1, 6)):
        chosen, rejected = pairs()
        parts.append(ours(name, chosen[cut], rejected[cut], **knobs))
    assert sum(p[0].item() for p in parts) == pytest.approx(whole.item(), rel=1e-6)
    for key, value in metrics.items():
        assert sum(p[1][key].item() for p in parts) == pytest.approx(value.item(), rel=1e-6)


@each_loss
def test_no_pairs(name, knobs):
    none = torch.zeros(0, dtype=torch.bfloat16, requires_grad=True)
    loss, metrics = ours(name, none, none, **knobs)
    loss.backward()
    assert loss.item() == 0.0
    assert set(map(float, metrics.values())) == {0.0}


def test_smoothing_has_its_minimum_where_the_labels_are_right_so_often():
    """Labels that are wrong with probability e: the minimum is where sigmoid(h) = 1 - e."""
    e = 0.2
    best = math.log((1 - e) / e) / BETA
    margins = torch.tensor([best - 0.1, best, best + 0.1])
    losses = [dpo_loss(m[None], torch.zeros(1), BETA, e)[0].item() for m in margins]
    assert losses[1] == min(losses)
