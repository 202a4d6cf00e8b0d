"""Advantages and losses from a teacher, against float64 NumPy over the whole vocabulary."""

import math

import numpy as np
import pytest
import torch
from float64_step import discounted

from dschat.losses import distillation_advantages, top_k_reverse_kl

S, A, V = 3, 4, 9
MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]]).bool()


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def distributions(seed=0):
    """Log-probs (S, A, V) of student and teacher in float64."""
    rng = np.random.default_rng(seed)
    return log_softmax(rng.normal(0, 2, (S, A, V))), log_softmax(rng.normal(0, 2, (S, A, V)))


def kl_by_hand(student, teacher, ids):
    """KL over ``ids`` and the rest, of one position."""
    ids = list(dict.fromkeys(ids))
    p, q = np.exp(student[ids]), np.exp(teacher[ids])
    total = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    if len(ids) < V:
        total += (1 - p.sum()) * math.log((1 - p.sum()) / (1 - q.sum()))
    return total


def ours(student, teacher, candidates):
    ids = torch.tensor(candidates)
    of_candidates = torch.tensor(student).gather(-1, ids).float().requires_grad_()
    kl = top_k_reverse_kl(of_candidates, torch.tensor(teacher).gather(-1, ids), ids, MASK)
    return kl, of_candidates


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_advantages(gamma):
    rng = np.random.default_rng(1)
    student, teacher = rng.normal(-2, 1, (2, S, A))
    student[~MASK], teacher[~MASK] = np.nan, np.inf
    got = distillation_advantages(torch.tensor(student), torch.tensor(teacher), MASK, gamma)
    for i, n in enumerate(MASK.sum(1).tolist()):
        expected = discounted((teacher - student)[i, :n], gamma)
        assert got[i, :n].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
        assert not got[i, n:].any()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_kl_over_candidates_and_the_rest(seed, top_k):
    """Ids that both models find likely are candidates twice, and count once."""
    student, teacher = distributions(seed)
    top = [np.argsort(-model, -1)[..., :top_k] for model in (student, teacher)]
    candidates = np.concatenate(top, -1)
    got, _ = ours(student, teacher, candidates)
    for i, t in np.ndindex(S, A):
        expected = kl_by_hand(student[i, t], teacher[i, t], candidates[i, t].tolist())
        whole = kl_by_hand(student[i, t], teacher[i, t], range(V))
        assert got[i, t].item() == pytest.approx(expected if MASK[i, t] else 0.0, abs=2e-6)
        assert 0 <= expected <= whole + 1e-12


def test_all_ids_give_the_whole_kl_and_its_gradient():
    student, teacher = distributions(7)
    every = np.broadcast_to(np.arange(V), (S, A, V)).copy()
    got, of_candidates = ours(student, teacher, every)
    got.sum().backward()
    for i, t in np.ndindex(S, A):
        if not MASK[i, t]:
            assert got[i, t].item() == 0
            assert not of_candidates.grad[i, t].any()
            continue
        whole = kl_by_hand(student[i, t], teacher[i, t], range(V))
        assert got[i, t].item() == pytest.approx(whole, abs=2e-6)
        # In the logits, by hand: p (log p - log q - KL).
        p, ratio = np.exp(student[i, t]), student[i, t] - teacher[i, t]
        of_logits = of_candidates.grad[i, t] - torch.tensor(p) * of_candidates.grad[i, t].sum()
        np.testing.assert_allclose(of_logits.numpy(), p * (ratio - whole), atol=1e-5)


@pytest.mark.parametrize("ids", [[0, 3, 3], [5, 5, 5], [1, 2, 8]])
def test_gradient_by_differences(ids):
    student, teacher = distributions(3)
    candidates = np.broadcast_to(np.array(ids), (S, A, 3)).copy()
    got, of_candidates = ours(student, teacher, candidates)
    got[0, 0].backward()
    for place, token in enumerate(ids):
        more, less = student[0, 0].copy(), student[0, 0].copy()
        more[token] += 1e-5
        less[token] -= 1e-5
        slope = kl_by_hand(more, teacher[0, 0], ids) - kl_by_hand(less, teacher[0, 0], ids)
        expected = slope / 2e-5 if place == ids.index(token) else 0.0
        assert float(of_candidates.grad[0, 0, place]) == pytest.approx(expected, abs=1e-4)


def test_garbage_outside_the_mask_reaches_nothing():
    student, teacher = distributions(4)
    candidates = np.broadcast_to(np.array([0, 1]), (S, A, 2)).copy()
    expected, _ = ours(student, teacher, candidates)
    student[~MASK], teacher[~MASK] = np.nan, np.inf
    got, of_candidates = ours(student, teacher, candidates)
    got.sum().backward()
    assert torch.equal(got, expected)
    assert torch.isfinite(of_candidates.grad).all()


def test_no_candidates_are_no_loss():
    none = torch.zeros(S, A, 0)
    kl = top_k_reverse_kl(none, none, none.long(), torch.zeros(S, A).bool())
    assert kl.shape == (S, A)
    assert not kl.any()
