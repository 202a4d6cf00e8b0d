"""pass@k, scores by source, and the best actor, on held-out prompts."""

from itertools import combinations

import pytest
import torch
from program_cases import parity, sums_of, trainer_of
from step_cases import PROMPTS
from transformers import AutoModelForCausalLM

from dschat.builtin_eval import EVAL_SEED
from dschat.config import UserError
from dschat.data.batches import Prompts
from dschat.rlhf import collect
from dschat.rlhf.evaluation import HeldOutPrompts, evaluate_policy, pass_at
from dschat.rlhf.run import Reporter


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_draws_that_hold_one(n):
    for right in range(n + 1):
        answers = [True] * right + [False] * (n - right)
        for k in range(1, n + 1):
            draws = list(combinations(answers, k))
            assert pass_at(k, n, right) == pytest.approx(sum(map(any, draws)) / len(draws))


def held_out(count=6):
    prompts = collect.Prompts.of(Prompts(PROMPTS[:count], texts=[str(i) for i in range(count)]))
    return HeldOutPrompts(prompts, [""] * count, 0, count, gold=False)


def half(answers):
    return [0.5] * len(answers)


def test_scores_by_source_and_passes(models_folder):
    trainer = trainer_of(models_folder, [parity, (half, 2.0)], eval_num_samples=5)
    trainer.args.eval_pass_score = 2.0
    seen = []
    with trainer.engine.rollout_mode() as generator:
        answers_of = trainer.collector.answers_of
        trainer.collector.answers_of = lambda *args: seen.append(answers_of(*args)) or seen[0]
        metrics = evaluate_policy(trainer.engine, generator, held_out(), trainer.collector)
    (collected,) = seen
    e = collected.experience
    assert e.num_sequences == 30
    even = (sums_of(e) % 2 == 0).float().reshape(6, 5)
    assert metrics["eval/scores/parity"] == pytest.approx(float(even.mean()))
    assert metrics["eval/scores/half"] == pytest.approx(0.5)
    assert metrics["eval/score"] == pytest.approx(float(even.mean()) + 1)
    assert metrics["eval/pass@1"] == pytest.approx(float(even.mean()))
    assert metrics["eval/pass@5"] == pytest.approx(float(even.any(1).float().mean()))
    by_hand = sum(pass_at(2, 5, int(right)) for right in even.sum(1)) / 6
    assert metrics["eval/pass@2"] == pytest.approx(by_hand)
    assert set(metrics) >= {"eval/kl", "eval/answer_length", "eval/eos_share", "eval/pass@4"}
    assert "eval/gold" not in metrics


def test_the_same_draws_every_time(models_folder):
    trainer = trainer_of(models_folder)
    both = []
    for _ in range(2):
        with trainer.engine.rollout_mode() as generator:
            both.append(evaluate_policy(trainer.engine, generator, held_out(), trainer.collector))
        trainer.iteration += 1
    assert both[0] == both[1]
    assert trainer.sampling().seed != EVAL_SEED


def test_the_best_actor_is_kept(models_folder, monkeypatch, tmp_path):
    scores = iter([0.2, 0.5, 0.4, float("nan"), 0.5])
    monkeypatch.setattr(
        "dschat.rlhf.run.evaluate_policy", lambda *args: {"eval/score": next(scores)}
    )
    options = {"keep_best": True, "output_dir": str(tmp_path), "enable_tensorboard": False}
    trainer = trainer_of(models_folder, **options)
    saved = []
    monkeypatch.setattr(trainer.engine, "save_actor", saved.append)
    report = Reporter(trainer, held_out(), 3)
    for _ in range(5):
        report.evaluate()
    assert saved == [tmp_path / "actor_best"] * 2
    report._args.best_metric = "eval/gold"
    scores = iter([1.0])
    with pytest.raises(UserError, match="--best_metric eval/gold is none of eval/score"):
        report.evaluate()
    report.close()


def test_the_actor_kept_is_a_model(models_folder, tmp_path):
    trainer = trainer_of(models_folder)
    trainer.engine.save_actor(tmp_path / "actor_best")
    trainer.train_rlhf(trainer.generate_experience(PROMPTS[:8]))
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "actor_best")
    first = AutoModelForCausalLM.from_pretrained(models_folder / "llama")
    for ours, theirs in zip(kept.parameters(), first.parameters(), strict=True):
        assert torch.equal(ours, theirs)
