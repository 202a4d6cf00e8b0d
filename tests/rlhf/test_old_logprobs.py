"""--old_logprobs auto: which log-probs the ratio and the KL in the reward use."""

import pytest
import torch
from program_cases import around_fill_in, ppo_trainer
from step_rows import PROMPTS

import dschat.distributed as dist
from dschat.models.training_engine import attributes_replaced
from dschat.rlhf import forwards
from dschat.rlhf.collector import Collector

ONE_STEP = {"ppo_epochs": 1, "gradient_accumulation_steps": 2}  # 16 sequences in one step


@pytest.fixture
def iteration(models_folder, monkeypatch):
    """``iteration(gap, **options)``: an experience trained on, and its trainer; the generator's
    log-probs are ``gap`` too low.
    """

    def run(gap=0.0, **options):
        trainer = ppo_trainer(models_folder, **options)

        def before(e, args):
            e.rollout_logprobs = e.rollout_logprobs - gap * e.answer_mask

        around_fill_in(monkeypatch, before)
        e = trainer.generate_experience(PROMPTS[:8])
        trainer.train_rlhf(e)
        return e, trainer

    return run


def test_the_rollouts_own_where_an_eighth_agrees(iteration, caplog):
    caplog.set_level("INFO", "dschat")
    e, trainer = iteration(old_logprobs="auto")
    assert e.num_sequences == 16
    assert e.recomputed.tolist() == [i % 8 == 0 for i in range(16)]
    assert torch.equal(e.logprobs[~e.recomputed], e.rollout_logprobs[~e.recomputed])
    assert "old log-probs: the rollout's (--old_logprobs auto)" in caplog.text
    all_of_them, _ = iteration(old_logprobs="recompute")
    assert all_of_them.recomputed.all()
    torch.testing.assert_close(e.logprobs, all_of_them.logprobs, atol=1e-5, rtol=1e-5)
    share = all_of_them.entropy[e.recomputed][all_of_them.answer_mask[e.recomputed]].mean()
    assert trainer.metrics["objective/entropy"] == pytest.approx(float(share), rel=1e-5)
    assert trainer.metrics["rollout/logprob_gap"] < 1e-5


@pytest.mark.parametrize("options", [{}, ONE_STEP], ids=["two steps", "KL in the reward"])
def test_all_are_recomputed_where_they_disagree(options, iteration, caplog):
    caplog.set_level("INFO", "dschat")
    e, trainer = iteration(gap=1e-3, old_logprobs="auto", **options)
    assert e.recomputed.all()
    assert (e.logprobs - e.rollout_logprobs)[e.answer_mask].min() > 5e-4
    assert "old log-probs: recomputed by the training model" in caplog.text
    assert trainer.metrics["rollout/logprob_gap"] == pytest.approx(1e-3, rel=0.02)


def test_a_single_step_divides_by_its_own_log_probs(iteration):
    """Without a KL in the reward nothing reads the old log-probs, whatever the gap."""
    e, trainer = iteration(gap=0.3, old_logprobs="auto", kl_coef=0.0, **ONE_STEP)
    assert trainer.args.takes_one_step
    assert e.recomputed.sum() == 2
    assert trainer.metrics["val/ratio"] == 1.0
    assert trainer.metrics["val/ratio_abs_dev"] == 0.0
    gradient = trainer.metrics["policy/grad_norm"]
    _, exact = iteration(old_logprobs="recompute", kl_coef=0.0, **ONE_STEP)
    assert gradient == pytest.approx(exact.metrics["policy/grad_norm"], rel=1e-4)


def test_all_are_recomputed_where_none_was_compared(iteration, monkeypatch):
    """Numbers of a rollout may be missing, here every eighth."""
    generated = Collector.collect

    def collect(self, *args):
        collected = generated(self, *args)
        e = collected.experience
        e.numbers = e.numbers + e.numbers // 7 + 1  # 1 to 7, 9 to 15, ...
        return collected

    monkeypatch.setattr(Collector, "collect", collect)
    e, _ = iteration(old_logprobs="auto", advantage_estimator="gae")
    assert not (e.numbers % 8 == 0).any()
    assert e.recomputed.all()


def test_all_are_recomputed_where_they_disagree_on_another_rank(iteration, monkeypatch):
    filled = forwards.fill_in

    def fill_in(*args):
        with attributes_replaced(dist, sum_floats=lambda mine: [mine[0] + 1.0, mine[1] + 8.0]):
            return filled(*args)

    monkeypatch.setattr(forwards, "fill_in", fill_in)
    e, _ = iteration(old_logprobs="auto")
    assert e.recomputed.all()


@pytest.mark.parametrize("option", [{"rollout_is": "tis"}, {"partial_rollout": True}], ids=str)
def test_weights_and_tokens_of_older_policies_need_all(option, iteration):
    e, _ = iteration(old_logprobs="auto", **option)
    assert e.recomputed.all()


def test_a_teacher_is_compared_with_the_actors_own(iteration, models_folder):
    """Also in a single step without a KL in the reward: its advantages read the log-probs."""
    teacher = {"teacher_model_name_or_path": str(models_folder / "gpt2")}
    e, _ = iteration(gap=0.3, old_logprobs="auto", kl_coef=0.0, **ONE_STEP, **teacher)
    assert e.recomputed.all()
