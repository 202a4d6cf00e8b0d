"""A run's state is in one place, and checkpoints of 0.2.0 have all of it."""

import json

import pytest
from program_cases import trainer_of

from dschat.checkpoint.manager import CheckpointManager
from dschat.config import UserError
from dschat.data.batches import PromptTable
from dschat.rlhf.evaluation import HeldOutPrompts
from dschat.rlhf.reporter import Reporter
from dschat.rlhf.run_state import Run

# What values.json of 0.2.0 has. A value that is added is refused in older checkpoints, by its name.
VALUES = {
    *("iteration", "version", "kl_coef", "kl_began_at", "updates", "bad", "unsupervised"),
    *("rollouts", "rows", "best", "best_metric", "best_print", "passes", "health", "log"),
}
ROLLOUTS = {"scale", "programs", "left", "taken"}


@pytest.fixture
def run(models_folder, tmp_path):
    trainer = trainer_of(models_folder, output_dir=str(tmp_path), report_to=["none"])
    report = Reporter(trainer, HeldOutPrompts(PromptTable(), 0, 0, gold=False), 3)
    yield Run(trainer, report, num_rows=16)
    report.close()


def test_checkpoints_of_0_2_0_have_every_value(run):
    state = run.state_dict()
    assert set(state) == VALUES
    assert set(state["rollouts"]) == ROLLOUTS


def test_a_value_that_a_checkpoint_lacks_is_named(run, tmp_path):
    checkpoints, state = CheckpointManager(tmp_path, {}), run.state()
    checkpoints.save(1, state)
    checkpoints.wait()
    saved = checkpoints.latest()
    assert checkpoints.load(saved, run.state()) == json.loads(json.dumps(state.values))
    state.values["sampler"] = {}
    with pytest.raises(UserError, match="step_000001: it has no sampler; resume with the settings"):
        checkpoints.load(saved, state)
