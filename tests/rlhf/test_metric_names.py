"""Metrics under the names that TRL's users know, each recomputed from the experience."""

import pytest
from program_cases import trainer_of
from step_rows import PROMPTS


def test_a_rollouts_metrics(models_folder):
    trainer = trainer_of(models_folder)
    e = trainer.generate_experience(PROMPTS[:8])
    lengths = e.answer_mask.sum(1)
    by_prompt = {}
    for number, score in zip(e.numbers.tolist(), e.scores.tolist(), strict=True):
        by_prompt.setdefault(number // 2, set()).add(score)
    metrics = trainer.metrics
    equal = sum(len(scores) == 1 for scores in by_prompt.values())
    assert 0 < equal < len(by_prompt)
    finished = lengths[e.finished].double()
    expected = {
        "frac_reward_zero_std": equal / len(by_prompt),
        "completions/min_length": int(lengths.min()),
        "completions/max_length": int(lengths.max()),
        "completions/clipped_ratio": 1 - float(e.finished.double().mean()),
        "completions/mean_terminated_length": float(finished.mean()) if len(finished) else 0.0,
        "objective/scores/parity_std": float(e.scores.double().std(correction=0)),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_an_updates_metrics(models_folder):
    trainer = trainer_of(
        models_folder,
        advantage_estimator="gae",
        ppo_epochs=4,
        actor_learning_rate=3e-2,
        cliprange=[0.05],
    )
    e = trainer.generate_experience(PROMPTS[:8])
    trainer.train_rlhf(e)
    metrics, mask = trainer.metrics, e.scored_mask
    returns, values = e.returns[mask].double(), e.values[mask].double()
    unexplained = (returns - values).square().mean() / returns.var(correction=0)
    assert metrics["val/explained_variance"] == pytest.approx(1 - float(unexplained))
    sides = metrics["clip_ratio/low_mean"], metrics["clip_ratio/high_mean"]
    assert min(sides) > 0
    assert sum(sides) == pytest.approx(metrics["policy/clipfrac_avg"])
