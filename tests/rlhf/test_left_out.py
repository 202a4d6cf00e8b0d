"""Tokens that are left out of the policy's loss: by entropy, as torch's quantile says over all
ranks, and by Clip-Cov's covariance, by hand.
"""

import numpy as np
import pytest
import torch
from rank_threads import on_ranks, this_rank

import dschat.distributed as dist
from dschat import losses
from dschat.config import RLHFConfig
from dschat.inference.protocol import Rollout
from dschat.rlhf.experience import Experience, from_rollout
from dschat.rlhf.left_out import leave_out


def experience(count: int = 40, width: int = 30) -> Experience:
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, width + 1, count)
    rollout = Rollout([[5] * n for n in lengths], [[-1.0] * n for n in lengths], ["stop"] * count)
    e = from_rollout([[1, 2]] * count, rollout, pad_id=0)
    mask = e.loss_mask = e.answer_mask
    for name, values in (
        ("entropy", rng.exponential(1.0, mask.shape)),
        ("logprobs", rng.normal(-2, 1.5, mask.shape)),
        ("advantages", rng.normal(0, 1.5, mask.shape)),
    ):
        setattr(e, name, torch.where(mask, torch.tensor(values, dtype=torch.float32), 0.0))
    e.weights = mask.float()
    return e


def on_two_ranks(args: RLHFConfig, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The weights of `experience` where the second rank has its last third."""
    monkeypatch.setattr(dist, "all_reduce_sum", lambda x: this_rank().all_reduce_sum(x))
    monkeypatch.setattr(dist, "gather_objects", lambda x: this_rank().gather_objects(x))
    monkeypatch.setattr(
        dist, "sum_floats", lambda x: this_rank().all_reduce_sum(torch.tensor(x)).tolist()
    )

    def on_rank(member):
        e = experience()
        e = e.pick(list(range(27) if member.rank == 0 else range(27, 40)))
        leave_out(e, args, 4)
        return e.weights[e.answer_mask]

    return torch.cat(on_ranks(2, on_rank))


def test_the_share_of_the_highest_entropy_is_kept(monkeypatch):
    e, args = experience(), RLHFConfig(top_entropy_share=0.2)
    entropies = e.entropy[e.answer_mask]
    kept = entropies >= torch.quantile(entropies, 0.8)
    metrics = leave_out(e, args, 4)
    assert torch.equal(e.weights[e.answer_mask], kept.float())
    assert kept.float().mean().item() == pytest.approx(0.2, abs=0.01)
    assert metrics["policy/top_entropy_from"] == pytest.approx(
        float(entropies[kept].min()), rel=0.1
    )
    assert torch.equal(on_two_ranks(args, monkeypatch), kept.float())


def test_clip_cov_leaves_out_as_many_as_its_share_of_the_covariant(monkeypatch):
    e, args = experience(), RLHFConfig(policy_loss="clip_cov", seed=7)
    mask = e.answer_mask
    a, p = e.advantages[mask].double().numpy(), e.logprobs[mask].double().numpy()
    product = (a - a.mean()) * (p - p.mean())
    candidates = (product > 1) & (product < 5)
    sums = torch.tensor([len(a), p.sum(), a.sum()])
    found = losses.is_covariant(e.logprobs, e.advantages, mask, sums)[mask]
    assert found.numpy().tolist() == candidates.tolist()
    monkeypatch.setattr("dschat.rlhf.left_out.CLIP_COV_SHARE", 0.05)
    metrics = leave_out(e, args, 4)
    out = (e.weights[mask] == 0).numpy()
    assert candidates[out].all()
    assert 0.03 < out.mean() < 0.07
    assert metrics["policy/clip_cov_share"] == pytest.approx(out.mean())
    again = experience()
    leave_out(again, args, 5)
    assert not torch.equal(again.weights, e.weights)  # another draw in the next iteration
    assert torch.equal(on_two_ranks(args, monkeypatch) == 0, torch.from_numpy(out))
