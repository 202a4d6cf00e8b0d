"""What a loop loses where a reward function fails, or numbers do: nothing that was learned."""

import pytest
from program_cases import parity, trainer_of
from step_cases import PROMPTS

from dschat.config import UserError
from dschat.continuation import boundaries
from dschat.rlhf import collect
from dschat.rlhf.evaluation import HeldOutPrompts
from dschat.rlhf.rewards import RewardError
from dschat.rlhf.run import Reporter

ITERATIONS = 4


def loop(models_folder, out, function, resume=None, **options):
    """Step 3's loop over ``ITERATIONS``; the metrics of each iteration that it took."""
    options |= {"output_dir": str(out), "resume": resume, "enable_tensorboard": False}
    trainer = trainer_of(models_folder, [function], **options)
    nobody = HeldOutPrompts(collect.Prompts(), [], 0, 0, gold=False)
    report, taken = Reporter(trainer, nobody, ITERATIONS), {}
    try:
        with boundaries(trainer.args) as bounds:
            report.begin(bounds)
            while trainer.iteration < ITERATIONS:
                first = 2 * trainer.iteration
                experience = trainer.generate_experience(PROMPTS[first : first + 4])
                trainer.train_rlhf(experience)
                report.step(experience)
                taken[trainer.iteration] = trainer.metrics["loss/policy_avg"]
    finally:
        report.close()
    return taken


def fails_at(iteration):
    calls = []

    def counted(answer_ids):
        calls.append(1)
        if len(calls) >= iteration:
            raise ValueError("no more")
        return parity(answer_ids)

    return counted


def test_a_failing_reward_function_loses_no_iteration(models_folder, tmp_path):
    whole = loop(models_folder, tmp_path / "whole", parity)
    with pytest.raises(RewardError, match="no more"):
        loop(models_folder, tmp_path / "cut", fails_at(4))
    assert [p.name for p in (tmp_path / "cut/checkpoints").iterdir()] == ["step_000003"]
    assert loop(models_folder, tmp_path / "cut", parity, "latest") == {4: whole[4]}


def three_steps(trainer, error):
    with boundaries(trainer.args) as bounds:
        assert bounds.begin(trainer.run_state()) is None
        for step in (1, 2, 3):
            bounds.after(step, trainer.run_state)
        raise error


def test_numbers_that_went_wrong_are_not_saved(models_folder, tmp_path):
    trainer = trainer_of(models_folder, output_dir=str(tmp_path), save_steps=2)
    last = tmp_path / "checkpoints/step_000002"
    with pytest.raises(FloatingPointError, match=f"nan; the last good checkpoint is {last}"):
        three_steps(trainer, FloatingPointError("nan"))
    assert list(last.parent.iterdir()) == [last]


def test_a_mistake_that_one_process_may_have_met_alone_is_not_waited_for(models_folder, tmp_path):
    """What is being written may still become whole; nothing is begun that takes all processes."""
    trainer = trainer_of(models_folder, output_dir=str(tmp_path), save_steps=2)
    with pytest.raises(UserError, match="mine"):
        three_steps(trainer, UserError("mine"))
    assert not (tmp_path / "checkpoints/step_000003").exists()
