"""NaN and infinity in a rollout: it is counted and changes neither weights nor statistics."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from program_cases import around_fill_in, ppo_trainer, weights_of
from quick import some
from step_rows import PROMPTS

import dschat.distributed as dist
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.runtime.optimizer_step import OptimizerStep

ROOT = Path(__file__).parents[2]
NAN, INF = float("nan"), float("inf")


def spoil_scores(monkeypatch):
    scored = DeepSpeedRLHFEngine.score

    def spoilt(self, batch):
        scores = scored(self, batch)
        scores[batch.numbers == 1] = NAN
        return scores

    monkeypatch.setattr(DeepSpeedRLHFEngine, "score", spoilt)


def spoil(name, value):
    def after(e, args):
        getattr(e, name)[1, 0] = value

    return lambda monkeypatch: around_fill_in(monkeypatch, after=after)


PROBLEMS = {
    "1 scores not finite": spoil_scores,
    "1 log-probs of the rollout not finite": spoil("rollout_logprobs", NAN),
    "1 log-probs of the actor not finite": spoil("logprobs", NAN),
    "1 log-probs of the reference not finite": spoil("ref_logprobs", -INF),
    "1 values of the critic not finite": spoil("values", INF),
}


@pytest.mark.parametrize("problem", some(PROBLEMS, ["1 values of the critic not finite"]))
def test_a_non_finite_experience_is_skipped(problem, models_folder, monkeypatch, caplog):
    trainer = ppo_trainer(
        models_folder, kl_target=0.1, kl_horizon=100, normalize_reward=True, max_bad_steps=2
    )
    models = (trainer.engine.actor, trainer.engine.critic)
    before = [weights_of(model) for model in models]
    with monkeypatch.context() as patches:
        PROBLEMS[problem](patches)
        e = trainer.generate_experience(PROMPTS[:4])
    assert e.problem == problem
    policy, value = trainer.train_rlhf(e)
    assert policy != policy
    assert value != value
    for model, old in zip(models, before, strict=True):
        assert all(map(torch.equal, weights_of(model), old))
    assert trainer.kl.value == trainer.args.kl_weight
    assert trainer.metrics["train/bad_steps"] == 1
    assert trainer.metrics["throughput/train_tokens_per_s"] == 0
    assert trainer.iteration == 1
    assert f"iteration 0: the update skipped: {problem} (1 in a row)" in caplog.text
    assert all(value == value for value in trainer.collector.scale.state_dict()["reward_model"])

    e = trainer.generate_experience(PROMPTS[4:8])
    assert e.problem == ""
    policy, value = trainer.train_rlhf(e)
    assert policy == policy
    assert trainer.metrics["train/bad_steps"] == 0
    assert trainer.kl.value != trainer.args.kl_weight


def test_bad_experiences_in_a_row_end_the_run_and_one_that_learned_nothing(
    models_folder, monkeypatch
):
    """Fewer of them than --max_bad_steps, and no other update: an error at the end."""
    trainer = ppo_trainer(models_folder, max_bad_steps=3)

    def iteration():
        trainer.train_rlhf(trainer.generate_experience(PROMPTS[:4]))

    trainer.require_learned()  # nothing was tried yet, or the critic alone was trained
    with monkeypatch.context() as patches:
        spoil_scores(patches)
        iteration()
        iteration()
    with pytest.raises(FloatingPointError, match="no step of the actor was applied: all 2 "):
        trainer.require_learned()
    iteration()
    spoil_scores(monkeypatch)
    iteration()
    trainer.require_learned()  # the last one was skipped, not all
    iteration()
    with pytest.raises(FloatingPointError, match="3 steps of the actor .* 1 scores not finite"):
        iteration()


@pytest.mark.slow
def test_step_3_without_a_finite_update_does_not_end_as_finished(models_folder, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "w{i} w4"}}\n' for i in range(2, 40)))
    (tmp_path / "huge.py").write_text("def score(answers):\n    return [1e38] * len(answers)\n")
    script = [sys.executable, ROOT / "step3_rlhf" / "main.py", "--data_path", data]
    flags = f"--actor_model_name_or_path {models_folder}/llama --reward_fn huge.py:score:1e6 "
    flags += "--max_steps 2 --max_prompt_seq_len 16 --max_answer_seq_len 8 --output_dir out "
    flags += "--advantage_estimator reinforce --per_device_generation_batch_size 2 "
    flags += "--per_device_training_batch_size 2 --report_to none"
    result = subprocess.run(
        [*script, *flags.split()], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 1, result.stderr
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "no step of the actor was applied: all 2 were skipped" in error
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out" / "COMPLETE").exists()
    assert not (tmp_path / "out" / "actor").exists()


def test_groups_with_nan_are_not_resampled_away(models_folder, monkeypatch):
    """Dynamic sampling passes over groups without variance; these have none that is a number."""
    trainer = ppo_trainer(
        models_folder,
        advantage_estimator="grpo",
        num_samples_per_prompt=2,
        dynamic_sampling=True,
    )
    spoil_scores(monkeypatch)
    assert trainer.generate_experience(PROMPTS[:4]).problem.endswith("scores not finite")


@pytest.mark.parametrize("place", some([0, 1, "on another rank"], [1]))
def test_an_infinite_loss_with_a_finite_gradient(place, models_folder, monkeypatch):
    engine = ppo_trainer(models_folder).engine.actor
    if isinstance(place, str):
        monkeypatch.setattr(dist, "max_int", lambda value: max(value, 1))
    before = weights_of(engine)
    step = OptimizerStep(engine, 2, 1.0)
    for i in range(2):
        loss = sum(p.sum() for p in engine.module.parameters())
        step.backward(loss + INF if i == place else loss)
    assert all(torch.isfinite(p.grad).all() for p in engine.module.parameters())
    assert not step.finish()
    assert step.outcome == "bad"
    assert all(map(torch.equal, weights_of(engine), before))
