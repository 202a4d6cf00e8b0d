"""Rewards and advantages of an experience, per estimator, against NumPy written as loops."""

import numpy as np
import pytest
import torch
from float64_step import advantages, discounted, recorded, shape
from quick import slow
from rank_threads import on_ranks, this_rank

import dschat.distributed as dist
from dschat.config import RLHFConfig
from dschat.config.methods import ESTIMATORS as ROWS
from dschat.inference.protocol import Rollout
from dschat.rlhf.advantages import fill_in_advantages, token_rewards
from dschat.rlhf.experience import Experience, from_rollout

WIDTH, PROMPTS, SAMPLES = 6, 4, 3
CLIP = 3.0
TEACHER = {"teacher_model_name_or_path": "t", "distill_coef": 0.3}
SOURCES = {"large": 1.0, "small": 0.5}
DECLINED = [1, 6, 7, 8, 9, 11]  # one of prompt 0, all of prompt 2, all but one of prompt 3
ESTIMATORS = tuple(ROWS)


def experience(seed: int = 0, declined: list[int] | None = None) -> Experience:
    """4 prompts x 3 samples; lengths 1 to 6, one group that scores alike. ``declined``: rows that
    nothing scores.
    """
    rng = np.random.default_rng(seed)
    count = PROMPTS * SAMPLES
    lengths = [1, WIDTH, *rng.integers(1, WIDTH + 1, count - 2)]
    ends = ["stop" if n < WIDTH else "length" for n in lengths]
    logprobs = [(-rng.exponential(1.0, n)).tolist() for n in lengths]
    rollout = Rollout([[5] * n for n in lengths], logprobs, ends)
    e = from_rollout([[1, 2]] * count, rollout, pad_id=0)
    for name in ("logprobs", "ref_logprobs", "values"):
        noise = torch.tensor(rng.normal(-1, 0.5, e.answer_mask.shape), dtype=torch.float32)
        setattr(e, name, torch.where(e.answer_mask, noise, 0.0))
    e.scores = torch.tensor(rng.normal(0, 2, count), dtype=torch.float32)
    e.scores[3:6] = 0.5
    small = torch.tensor(rng.integers(0, 2, count) * 0.1)  # a second source, which often declines
    by_source = zip(e.scores - 0.5 * small, small, rng.random(count) < 0.3, strict=True)
    e.source_scores = [
        {"large": float(a)} | ({} if gone else {"small": float(b)}) for a, b, gone in by_source
    ]
    e.scored[declined or []] = False
    e.scores[~e.scored] = 0.0
    noise = rng.normal(-1, 0.5, e.answer_mask.shape)
    e.teacher_logprobs = torch.tensor(noise, dtype=torch.float32)  # garbage outside the answers
    return e


def config(estimator: str, **options) -> RLHFConfig:
    defaults = {"kl_in_loss": False, "kl_estimator": "k1", "num_samples_per_prompt": SAMPLES}
    defaults |= {"max_answer_seq_len": WIDTH, "gamma": 0.9, "lam": 0.8}
    if ROWS[estimator].by_source:
        defaults |= {"kl_in_loss": True, "kl_estimator": "k3"}
        options = {name: value for name, value in options.items() if name != "kl_estimator"}
    args = RLHFConfig(advantage_estimator=estimator, **(defaults | options))
    args.source_weights = SOURCES
    return args


def by_hand(e: Experience, args: RLHFConfig, kl_coef: float, clip: float | None = CLIP):
    """Each answer in float64, one after the other: ``rewards``; ``advantages`` of scored ones. A
    teacher's log-ratio is discounted on its own, after the estimator and its statistics, and
    teaches answers without a score too.
    """
    known = recorded(e, args)
    for answer in known:
        shape(answer, args, kl_coef, clip)
    scored = [row for row, is_scored in enumerate(e.scored) if is_scored]
    advantages([known[row] for row in scored], args)
    log_ratio = (e.teacher_logprobs - e.logprobs).double()
    for row, answer in enumerate(known) if args.has_teacher else ():
        of_teacher = args.distill_coef * discounted(log_ratio[row, : answer.n], args.distill_gamma)
        answer.advantages = of_teacher + (answer.advantages if row in scored else 0.0)
    return known


def joined(known, e: Experience, name: str) -> np.ndarray:
    """An attribute of the answers that have it, in a row."""
    chosen = [a for a in known if getattr(a, name, None) is not None]
    return torch.cat([getattr(a, name) for a in chosen]).numpy()


@pytest.mark.parametrize(
    ("declined", "clip"),
    [(DECLINED, CLIP), ([], None), *slow([(DECLINED, None), ([], CLIP)])],
    ids=["some declined", "no clip", "some declined, no clip", "all scored"],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kl_estimator": "k2"},
        {"kl_estimator": "k3", "missing_eos_penalty": 2.5},
        TEACHER | {"distill_gamma": 0.7},
        *slow([TEACHER | {"distill_gamma": gamma} for gamma in (0.0, 1.0)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimators_by_hand(estimator, options, clip, declined):
    """Answers without a score count in no statistics and have advantage 0, but for a teacher's."""
    e, args = experience(declined=declined), config(estimator, **options)
    known = by_hand(e, args, 0.2, clip)
    rewards, _ = fill_in_advantages(e, args, 0.2, PROMPTS, clip, SOURCES)
    mask = e.answer_mask
    assert not rewards[~mask].any()
    np.testing.assert_allclose(rewards[mask].numpy(), joined(known, e, "rewards"), atol=1e-5)
    taught = mask & (e.scored[:, None] | args.has_teacher)
    expected = joined(known, e, "advantages")
    np.testing.assert_allclose(e.advantages[taught].numpy(), expected, atol=2e-5)
    assert not e.advantages[~taught].any()
    assert torch.equal(e.loss_mask, taught)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("cut", [0, *slow([1, 6]), 4])
def test_a_group_may_be_split_over_ranks(estimator, cut, monkeypatch):
    whole = experience(1, DECLINED)
    fill_in_advantages(whole, config(estimator), 0.1, PROMPTS, CLIP, SOURCES)
    rows = [list(range(cut)), list(range(cut, whole.num_sequences))]
    monkeypatch.setattr(dist, "all_reduce_sum", lambda x: this_rank().all_reduce_sum(x))

    def on_rank(member):
        e = experience(1, DECLINED).pick(rows[member.rank])
        fill_in_advantages(e, config(estimator), 0.1, PROMPTS, CLIP, SOURCES)
        return e.advantages[e.answer_mask]

    got = torch.cat(on_ranks(2, on_rank))
    torch.testing.assert_close(got, whole.advantages[whole.answer_mask], atol=1e-6, rtol=1e-6)


def test_a_penalty_is_not_clipped_away():
    e = experience(2)
    e.finished[:] = torch.arange(e.num_sequences) % 2 == 0
    e.scores[:] = 40.0
    totals = token_rewards(e, config("gae", missing_eos_penalty=2.5), 0.0, CLIP).sum(dim=1)
    assert totals.tolist() == pytest.approx([3.0, 0.5] * (e.num_sequences // 2))


def test_a_kl_that_has_no_weight_may_be_infinite():
    """k3 overflows where the reference, here zeros, is far more likely than the policy."""
    e = experience(2)
    e.logprobs = torch.where(e.answer_mask, -120.0, 0.0)
    e.ref_logprobs = torch.zeros_like(e.logprobs)
    rewards = token_rewards(e, config("grpo", kl_estimator="k3"), 0.0, CLIP)
    np.testing.assert_allclose(rewards.sum(1), e.scores.clamp(-CLIP, CLIP), rtol=1e-6)


def test_token_scores_stay_at_their_tokens():
    """The clip bounds the whole answer's score, and takes what is too much at its end."""
    e = experience(3)
    e.token_scores = torch.where(e.answer_mask, 0.25, 0.0)
    e.token_scores[1, 2] = 8.0
    rest = e.scores.clone()
    e.scores = rest + e.token_scores.sum(dim=1)
    got = token_rewards(e, config("grpo"), 0.0, CLIP)
    for i in range(e.num_sequences):
        n = int(e.answer_mask[i].sum())
        expected = [0.25] * n
        if i == 1:
            expected[2] = 8.0
        bounded = min(max(float(rest[i]) + sum(expected), -3), 3)
        expected[-1] += bounded - sum(expected)
        assert got[i, :n].tolist() == pytest.approx(expected, abs=1e-5)
        assert not got[i, n:].any()


def test_overlong_answers_are_penalized_and_filtered():
    e = experience(4)
    options = {"overlong_buffer_len": 4, "overlong_penalty": 2.0, "overlong_filter": True}
    plain = token_rewards(e, config("grpo"), 0.0, None).sum(dim=1)
    rewards, _ = fill_in_advantages(e, config("grpo", **options), 0.0, PROMPTS)
    lengths = e.answer_mask.sum(dim=1).tolist()
    cost = {1: 0.0, 2: 0.0, 3: 0.5, 4: 1.0, 5: 1.5, 6: 2.0}
    assert (plain - rewards.sum(dim=1)).tolist() == pytest.approx([cost[n] for n in lengths])
    assert torch.equal(e.loss_mask.any(dim=1), e.finished)
    assert torch.equal(e.loss_mask[e.finished], e.answer_mask[e.finished])


@pytest.mark.parametrize(("how", "low", "high"), [("tis", 0.0, 2.0), ("icepop", 0.5, 5.0)])
def test_importance_weights_against_the_rollout(how, low, high):
    e = experience(5)
    _, sums = fill_in_advantages(e, config("grpo", rollout_is=how), 0.0, PROMPTS, CLIP)
    ratio = np.exp((e.logprobs - e.rollout_logprobs).double().numpy())
    kept = (ratio >= low) & (ratio <= high)
    expected = np.minimum(ratio, high) if how == "tis" else np.where(kept, ratio, 0.0)
    expected = expected * e.answer_mask.numpy()
    np.testing.assert_allclose(e.weights.numpy(), expected, rtol=1e-5)
    assert sums["is_weight"] == pytest.approx(expected.sum(), rel=1e-5)
    assert sums["is_cut"] == (~kept & e.answer_mask.numpy()).sum() > 0


def test_a_missing_sample_leaves_its_group_smaller():
    e = experience(6).pick([0, 2, *range(3, 12)])  # sample 1 of prompt 0 has no score
    fill_in_advantages(e, config("rloo"), 0.0, PROMPTS, CLIP)
    a, b = (float(answer.rewards.sum()) for answer in by_hand(e, config("rloo"), 0.0)[:2])
    assert float(e.advantages[0, 0]) == pytest.approx(a - b, abs=1e-5)
    assert float(e.advantages[1, 0]) == pytest.approx(b - a, abs=1e-5)


def in_two_rows(e: Experience) -> tuple[Experience, list[int]]:
    """Every answer of two tokens or more as an episode of two rows; and each row's answer."""
    starts, of = [], []
    for row, length in enumerate(e.answer_mask.sum(1).tolist()):
        half = -(-length // 2)
        parts = [(0, half), (half, length)] if length > 1 else [(0, length)]
        starts += parts
        of += [row] * len(parts)
    tokens = [[5] * (end - start) for start, end in starts]
    rollout = Rollout(tokens, [[0.0] * len(row) for row in tokens], ["stop"] * len(tokens))
    split = from_rollout([[1, 2]] * len(tokens), rollout, pad_id=0)
    for name in ("logprobs", "ref_logprobs", "values", "teacher_logprobs"):
        for row, (start, end) in enumerate(starts):
            getattr(split, name)[row, : end - start] = getattr(e, name)[of[row], start:end]
    split.numbers, split.scores, split.scored = e.numbers[of], e.scores[of], e.scored[of]
    split.source_scores = [e.source_scores[row] for row in of]
    return split, of


@pytest.mark.parametrize("estimator", ["rloo", "grpo", "dr_grpo", "gdpo"], ids=str)
def test_an_episode_of_several_rows_counts_as_one(estimator):
    """Its KL adds up in the reward, and every row has the advantage that one row would have."""
    e = experience(declined=DECLINED)
    split, of = in_two_rows(e)
    options = {"missing_eos_penalty": 0.0, "overlong_penalty": 0.0}
    for given in (e, split):
        fill_in_advantages(given, config(estimator, **options), 0.2, PROMPTS, CLIP, SOURCES)
    assert len(set(of)) < len(of)
    assert torch.allclose(split.advantages[:, 0], e.advantages[of, 0], atol=1e-6)
