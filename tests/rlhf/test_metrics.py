"""Metrics under the names that TRL's users know, each recomputed from the experience; rates of
generation over ranks of which some were idle.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from families import empty_engine
from float64_step import answer_logprobs
from program_cases import trainer_of, weights_of
from step_rows import PROMPTS
from tiny_models import CONFIGS

from dschat.hybrid.rollout_form import Refresh
from dschat.inference.requests.stats import GenerationStats
from dschat.rlhf.metrics import generation_metrics
from dschat.runtime.deepspeed_engine import unwrap


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


@pytest.mark.slow
def test_the_kl_of_a_single_step(models_folder, monkeypatch):
    """In float64, of the answers to every eighth prompt; measured before the step it is 0. Weights
    and the next rollout are those of a run that does not measure it.
    """
    options = {"ppo_epochs": 1, "gradient_accumulation_steps": 2, "actor_learning_rate": 1e-2}
    trainer = trainer_of(models_folder, temperature=0.8, **options)
    e = trainer.generate_experience(PROMPTS[:8])
    trainer.train_rlhf(e)
    model = copy.deepcopy(unwrap(trainer.engine.actor)).double()
    with torch.no_grad():
        tables = answer_logprobs(model, e, 0.8)
    log_ratios = []
    for i in range(2):
        ids = e.input_ids[i, e.prompt_lengths[i] : e.lengths[i]]
        logprobs = tables[i].gather(1, ids.unsqueeze(1)).squeeze(1)
        log_ratios.append((logprobs - e.logprobs[i, : len(ids)])[e.loss_mask[i, : len(ids)]])
    expected = float(torch.cat(log_ratios).square().mean()) / 2
    assert trainer.metrics["policy/approxkl_after"] == pytest.approx(expected, rel=1e-4)
    assert expected > 1e-3
    assert trainer.metrics["policy/approxkl_avg"] == 0.0
    monkeypatch.setattr("dschat.rlhf.trainer.update_kl", lambda *_: {})
    other = trainer_of(models_folder, temperature=0.8, **options)
    other.train_rlhf(other.generate_experience(PROMPTS[:8]))
    weights = zip(weights_of(trainer.engine.actor), weights_of(other.engine.actor), strict=True)
    assert all(torch.equal(*pair) for pair in weights)
    rollouts = (t.generate_experience(PROMPTS[8:12]) for t in (trainer, other))
    assert torch.equal(*(e.rollout_logprobs for e in rollouts))


def test_no_kl_of_an_update_that_was_not_made(models_folder):
    options = {"advantage_estimator": "gae", "critic_warmup_steps": 1}
    trainer = trainer_of(models_folder, **options)
    trainer.train_rlhf(trainer.generate_experience(PROMPTS[:4]))
    assert "policy/approxkl_after" not in trainer.metrics
    e = trainer.generate_experience(PROMPTS[:4])
    e.loss_mask[:] = False
    trainer.train_rlhf(e)
    assert "policy/approxkl_after" not in trainer.metrics


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
