"""Metrics under the names that TRL's users know, each recomputed from the experience; rates of
generation over ranks of which some were idle.
"""

from types import SimpleNamespace

import pytest
from families import empty_engine
from program_cases import trainer_of
from step_rows import PROMPTS
from tiny_models import CONFIGS

from dschat.hybrid.rollout_form import Refresh
from dschat.inference.stats import GenerationStats
from dschat.rlhf.metrics import generation_metrics


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


@pytest.mark.parametrize(
    ("theirs", "prefill", "decode"),
    [
        ((0, 0.0, 0, 0.0), 50.0, 20.0),  # idle: the rate of this rank
        ((100, 2.0, 60, 3.0), 100.0, 40.0),  # as fast as this one
        ((100, 4.0, 60, 6.0), 50.0, 20.0),  # as slow as both in turn
    ],
)
def test_rates_are_all_tokens_by_the_time_of_the_busiest(theirs, prefill, decode, monkeypatch):
    tokens, seconds = theirs[::2], theirs[1::2]

    def sums(mine):
        other = dict(zip(("prefill_tokens", "decode_tokens"), tokens, strict=True))
        return {name: value + other.get(name, 0) for name, value in mine.items()}

    ranks = SimpleNamespace(
        world_size=lambda: 2,
        sum_named=sums,
        gather_objects=lambda mine: [mine, tuple(seconds)],
    )
    monkeypatch.setattr("dschat.rlhf.metrics.dist", ranks)
    engine = empty_engine(CONFIGS["llama"]())
    engine.stats = GenerationStats(
        prefill_tokens=100, prefill_s=2.0, decode_tokens=60, decode_s=3.0
    )
    found = generation_metrics(Refresh(), engine)
    assert found["throughput/prefill_tokens_per_s"] == pytest.approx(prefill)
    assert found["throughput/decode_tokens_per_s"] == pytest.approx(decode)
