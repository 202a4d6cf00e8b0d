"""--old_logprobs auto: which log-probs the ratio and the KL in the reward use."""

import pytest
import torch
from program_cases import around_fill_in, ppo_trainer
from quick import slow
from step_rows import PROMPTS

import dschat.distributed as dist

ONE_STEP = {"ppo_epochs": 1, "gradient_accumulation_steps": 2}  # 16 sequences in one step


@pytest.fixture
def iteration(models_folder, monkeypatch):
    """``iteration(gap, change, **options)``: an experience trained on, and its trainer; the
    generator's log-probs are ``gap`` too low, and the experience ``change``d.
    """

    def run(gap=0.0, change=lambda e: None, **options):
        trainer = ppo_trainer(models_folder, **options)

        def before(e, args):
            e.rollout_logprobs = e.rollout_logprobs - gap * e.answer_mask
            change(e)

        around_fill_in(monkeypatch, before)
        e = trainer.generate_experience(PROMPTS[:8])
        trainer.train_rlhf(e)
        return e, trainer

    return run


def test_the_rollouts_own_where_an_eighth_agrees(iteration, caplog):
    caplog.set_level("INFO", "dschat")
    e, trainer = iteration(old_logprobs="auto")
    assert e.num_sequences == 16
    assert e.recomputed.tolist() == [i < 2 for i in range(16)]  # of two answers to a prompt
    assert torch.equal(e.logprobs[~e.recomputed], e.rollout_logprobs[~e.recomputed])
    assert "old log-probs: the rollout's (--old_logprobs auto)" in caplog.text
    all_of_them, _ = iteration(old_logprobs="recompute")
    assert all_of_them.recomputed.all()
    torch.testing.assert_close(e.logprobs, all_of_them.logprobs, atol=1e-5, rtol=1e-5)
    share = all_of_them.entropy[e.recomputed][all_of_them.answer_mask[e.recomputed]].mean()
    assert trainer.metrics["objective/entropy"] == pytest.approx(float(share), rel=1e-5)
    assert trainer.metrics["rollout/logprob_gap"] < 1e-5


@pytest.mark.parametrize("options", [*slow([{}]), ONE_STEP], ids=["two steps", "KL in the reward"])
def test_all_are_recomputed_where_they_disagree(options, iteration, caplog):
    caplog.set_level("INFO", "dschat")
    e, trainer = iteration(gap=1e-3, old_logprobs="auto", **options)
    assert e.recomputed.all()
    assert (e.logprobs - e.rollout_logprobs)[e.answer_mask].min() > 5e-4
    assert "old log-probs: recomputed by the training model" in caplog.text
    assert trainer.metrics["rollout/logprob_gap"] == pytest.approx(1e-3, rel=0.02)


@pytest.mark.slow
def test_a_single_step_divides_by_its_own_log_probs(iteration):
    """Without a KL in the reward nothing reads the old log-probs, whatever the gap."""
    e, trainer = iteration(gap=0.3, old_logprobs="auto", kl_coef=0.0, **ONE_STEP)
    assert trainer.engine.updates == 1
    assert e.recomputed.sum() == 2
    assert trainer.metrics["val/ratio"] == 1.0
    assert trainer.metrics["val/ratio_abs_dev"] == 0.0
    gradient = trainer.metrics["policy/grad_norm"]
    _, exact = iteration(old_logprobs="recompute", kl_coef=0.0, **ONE_STEP)
    assert gradient == pytest.approx(exact.metrics["policy/grad_norm"], rel=1e-4)


def leave_out_every_eighth(e):
    """Prompts of a rollout, of two answers each, may be missing: 1 to 7, 9 to 15, ..."""
    e.numbers = e.numbers + 2 * (e.numbers // 14 + 1)


@pytest.mark.parametrize(
    "options",
    [
        {"advantage_estimator": "gae", "change": leave_out_every_eighth},  # none was compared
        *slow(
            [
                {"rollout_is": "tis"},  # a weight for every token
                {"partial_rollout": True},  # tokens of older policies
                # In a single step without a KL in the reward too: a teacher's advantages read them.
                {"teacher_model_name_or_path": "gpt2", "gap": 0.3, "kl_coef": 0.0, **ONE_STEP},
            ]
        ),
    ],
    ids=lambda options: next(iter(options)),
)
def test_all_are_recomputed_where_a_few_are_not_enough(options, iteration, models_folder):
    if "teacher_model_name_or_path" in options:
        options = options | {"teacher_model_name_or_path": str(models_folder / "gpt2")}
    e, _ = iteration(old_logprobs="auto", **options)
    assert e.recomputed.all()


def test_all_are_recomputed_where_they_disagree_on_another_rank(iteration, monkeypatch):
    def other_disagrees(e):
        """By a gap of 1 over 8 actions; of other sums the first two change."""
        others = lambda mine: [mine[0] + 1.0, mine[1] + 8.0, *mine[2:]]  # noqa: E731
        monkeypatch.setattr(dist, "sum_floats", others)

    e, _ = iteration(change=other_disagrees, old_logprobs="auto")
    assert e.recomputed.all()
