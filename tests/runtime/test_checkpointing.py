"""A loop in which a reward function fails, or a loss is NaN, loses no trained step."""

import json
import random
import signal
import time
from functools import partial, wraps
from types import SimpleNamespace

import pytest
import tiny_models
from program_cases import parity, trainer_of
from quick import slow
from step_rows import PROMPTS

import dschat.distributed as dist
from dschat.checkpoint import manager
from dschat.checkpoint.async_writer import Writing
from dschat.checkpoint.compatibility import model_fingerprint
from dschat.checkpoint.manager import RunState
from dschat.config import SFTConfig, UserError
from dschat.data.batches import PromptTable
from dschat.distributed.stop_signals import TrainingStopped
from dschat.models.checkpoint import Checkpoint
from dschat.models.heads import LanguageModel
from dschat.rewards.scoring import RewardError
from dschat.rlhf.evaluation import HeldOutPrompts
from dschat.rlhf.reporter import Reporter
from dschat.rlhf.run_state import Run
from dschat.runtime.checkpointing import TrainingCheckpointer, training_checkpointer
from dschat.supervised import setup

ITERATIONS = 4


NOBODY = HeldOutPrompts(PromptTable(), 0, 0, gold=False)


def loop(models_folder, out, function, resume=None, held_out=NOBODY, **options):
    """Step 3's loop over ``ITERATIONS``; the metrics of each iteration that it took."""
    options |= {"output_dir": str(out), "resume": resume, "report_to": ["none"]}
    trainer = trainer_of(models_folder, [function], **options)
    report, taken = Reporter(trainer, held_out, ITERATIONS), {}
    run = Run(trainer, report)
    try:
        with training_checkpointer(trainer.args) as checkpointer:
            checkpointer.begin(run.state(), ITERATIONS, run.load_state_dict)
            report.begin()
            while trainer.iteration < ITERATIONS:
                first = 2 * trainer.iteration
                experience = trainer.generate_experience(PROMPTS[first : first + 4])
                trainer.train_rlhf(experience)
                checkpointer.leave()
                report.step(experience, partial(checkpointer.after, state=run.state))
                taken[trainer.iteration] = trainer.metrics["loss/policy_avg"]
            report.evaluate()
    finally:
        report.close()
    return taken


def steps(trainer, *numbers, num_rows=None, then=lambda checkpointer: None):
    """A loop that takes these steps, and what it does ``then``."""
    state = Run(trainer, num_rows=num_rows).state
    with training_checkpointer(trainer.args) as checkpointer:
        values = checkpointer.begin(state(), 4, lambda values: None)
        for step in numbers:
            checkpointer.after(step, state)
        then(checkpointer)
    return values


def raising(error):
    def fail(checkpointer):
        raise error

    return fail


def fails_at(iteration):
    calls = []

    @wraps(parity)
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


@pytest.mark.parametrize("budget", [60, "auto"])
@pytest.mark.slow
def test_a_run_resumes_with_another_token_budget(budget, models_folder, tmp_path):
    whole = loop(models_folder, tmp_path / "whole", parity)
    with pytest.raises(RewardError, match="no more"):
        loop(models_folder, tmp_path, fails_at(3), max_tokens_per_micro_batch=40)
    rest = loop(models_folder, tmp_path, parity, "latest", max_tokens_per_micro_batch=budget)
    assert rest == pytest.approx({3: whole[3], 4: whole[4]}, rel=1e-4, abs=1e-5)


def rows(out):
    """What metrics.jsonl says, but for what a clock decides."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    clocks = ("time/", "throughput/", "memory/")
    return [{k: v for k, v in line.items() if not k.startswith(clocks)} for line in lines]


@pytest.mark.slow
def test_a_reward_that_fails_in_an_evaluation_loses_no_iteration(models_folder, tmp_path):
    """In that after iteration 2, and in the last; each resumes once."""
    held_out = HeldOutPrompts(PromptTable(PROMPTS[:2]), 0, 2, gold=False)
    options = {"held_out": held_out, "eval_steps": 2, "save_steps": 3}
    loop(models_folder, tmp_path / "whole", parity, **options)
    cut = tmp_path / "cut"
    # Calls: an evaluation, two iterations; and after resuming the one that failed, two more.
    for resume, last in ((None, "step_000002"), ("latest", "step_000004")):
        with pytest.raises(RewardError, match="no more"):
            loop(models_folder, cut, fails_at(4), resume, **options)
        assert max(p.name for p in (cut / "checkpoints").iterdir()) == last
    assert loop(models_folder, cut, parity, "latest", **options) == {}
    assert rows(cut) == rows(tmp_path / "whole")
    assert [row["step"] for row in rows(cut)] == [0, 1, 2, 2, 3, 4, 4]


class Habit:
    """Its scores depend on how many answers it has seen. It fails at the call ``fails_at``, its
    state cannot be saved after ``unsaved_at``, or restored where it ``refuses``.
    """

    def __init__(self, fails_at=100, unsaved_at=100, refuses=False):
        self.calls, self.fails_at, self.seen = 0, fails_at, 0
        self.unsaved_at, self.refuses = unsaved_at, refuses

    def __call__(self, answer_ids):
        self.calls += 1
        if self.calls >= self.fails_at:
            raise ValueError("no more")
        self.seen += len(answer_ids)
        return [score * self.seen for score in parity(answer_ids)]

    def state_dict(self):
        if self.calls == self.unsaved_at:
            raise OSError("its file is gone")
        return {"seen": self.seen}

    def load_state_dict(self, state):
        if self.refuses:
            raise ValueError("of another version")
        self.seen = state["seen"]


@pytest.mark.slow
@pytest.mark.parametrize("save_steps", [1, 10])
def test_a_state_that_cannot_be_saved_loses_no_iteration(save_steps, models_folder, tmp_path):
    """The model and the last good state are saved, then the run stops."""
    with pytest.raises(RewardError, match=r"state_dict\(\) raised OSError: its file is gone"):
        loop(models_folder, tmp_path, Habit(unsaved_at=3), save_steps=save_steps)
    last = max((tmp_path / "checkpoints").iterdir())
    assert last.name == "step_000003"
    states = json.loads((last / "values.json").read_text())["rollouts"]["programs"]
    assert [list(ranks) for ranks in states.values()] == [
        [{"seen": 16}]
    ]  # two iterations of 4 x 2 answers
    assert list(loop(models_folder, tmp_path, Habit(), "latest")) == [4]


@pytest.mark.slow
def test_a_refused_resume_has_removed_nothing(models_folder, tmp_path):
    options = {"save_steps": 1, "save_total_limit": 0}
    loop(models_folder, tmp_path, Habit(), **options)
    before = (tmp_path / "metrics.jsonl").read_text()
    named = str(tmp_path / "checkpoints/step_000001")
    with pytest.raises(UserError, match="load_state_dict.. raised ValueError: of another version"):
        loop(models_folder, tmp_path, Habit(refuses=True), named, **options)
    names = [f"step_00000{n}" for n in (1, 2, 3)]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == names
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_a_run_does_not_end_before_its_checkpoint(models_folder, tmp_path):
    trainer = trainer_of(models_folder, output_dir=str(tmp_path), save_steps=1)
    assert steps(trainer, 2) is None
    trainer.args.resume = "latest"
    with training_checkpointer(trainer.args) as checkpointer:
        with pytest.raises(UserError, match="step_000002 is of a run that had taken 2 steps"):
            checkpointer.begin(Run(trainer).state(), 1, lambda values: None)
        checkpointer.begin(Run(trainer).state(), 2, lambda values: None)


@pytest.mark.slow
def test_the_schedule_ends_with_a_run_whose_iterations_take_more_steps(models_folder, tmp_path):
    options = {"lr_scheduler_type": "linear", "actor_learning_rate": 3e-3}
    with pytest.raises(RewardError):
        loop(models_folder, tmp_path, fails_at(3), ppo_epochs=1, **options)
    loop(models_folder, tmp_path, parity, "latest", ppo_epochs=3, **options)
    rates = [row["policy/learning_rate"] for row in rows(tmp_path)]
    assert rates == pytest.approx([3e-3, 2e-3, 1e-3, 0.0])  # the schedule is of 3 iterations


def evaluated(*levels):
    """Evaluations score ``levels``, iterations (None) by `parity`."""
    calls = iter(levels)

    @wraps(parity)
    def score(answer_ids):
        level = next(calls)
        return parity(answer_ids) if level is None else [level] * len(answer_ids)

    return score


@pytest.mark.slow
def test_the_best_actor_of_a_branch_that_is_given_up_is_replaced(models_folder, tmp_path):
    held_out = HeldOutPrompts(PromptTable(PROMPTS[:2]), 0, 2, gold=False)
    options = {"held_out": held_out, "eval_steps": 2, "save_steps": 1, "keep_best": "eval/score"}
    best = str(tmp_path / "actor_best")

    def run(*levels, resume=None):
        loop(models_folder, tmp_path, evaluated(*levels), resume, **options)
        return model_fingerprint(best)

    with pytest.raises(RewardError):
        run(1.0, None, None, 0.5)  # no score is left for the third iteration
    first = model_fingerprint(best)
    second = str(tmp_path / "checkpoints/step_000002")
    assert run(0.5, None, None, 0.2, resume=second) == first  # still the best
    later = run(0.5, None, None, 5.0, resume=second)
    assert later != first
    assert run(0.5, None, None, 0.2, resume=second) not in (first, later)


@pytest.mark.slow
def test_what_a_reward_remembers_comes_back(models_folder, tmp_path):
    whole = loop(models_folder, tmp_path / "whole", Habit())
    with pytest.raises(RewardError, match="no more"):
        loop(models_folder, tmp_path / "cut", Habit(fails_at=3))
    resumed = loop(models_folder, tmp_path / "cut", Habit(), "latest")
    assert resumed == {n: whole[n] for n in (3, 4)}
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")


@pytest.mark.parametrize(("save_steps", "saved"), [(1, ["step_000001"]), (100, [])])
def test_what_fails_after_a_step_does_not_save_the_one_before(
    save_steps, saved, models_folder, tmp_path
):
    """An endpoint that fails in an evaluation: the weights are those of a later step already."""
    trainer = trainer_of(models_folder, output_dir=str(tmp_path), save_steps=save_steps)

    def evaluate(checkpointer):
        checkpointer.leave()
        trainer.engine.version = 7
        raise RewardError("in the evaluation after step 2")

    with pytest.raises(RewardError, match="in the evaluation"):
        steps(trainer, 1, then=evaluate)
    assert [path.name for path in (tmp_path / "checkpoints").glob("*")] == saved
    for path in (tmp_path / "checkpoints").glob("*/values.json"):
        assert json.loads(path.read_text())["version"] == 0


def test_generators_are_those_of_the_boundary(models_folder, tmp_path):
    """A reward function draws from them, then fails."""
    trainer = trainer_of(models_folder, output_dir=str(tmp_path), save_steps=100)
    states = []

    def draw(checkpointer):
        states.append(random.getstate())
        random.random()
        raise RewardError("in step 2")

    with pytest.raises(RewardError, match="in step 2"):
        steps(trainer, 1, then=draw)
    trainer.args.resume = "latest"
    steps(trainer, then=lambda checkpointer: states.append(random.getstate()))
    assert states[0] == states[1]


def test_what_rank_0_has_saved_no_rank_saves_again(monkeypatch):
    """It alone knows; saving is a collective."""
    saved = []
    manager = SimpleNamespace(
        last=None, wait=lambda: None, poll=lambda: None, save=lambda step, _: saved.append(step)
    )
    checkpointer = TrainingCheckpointer(SFTConfig(save_steps=3), manager, None)
    checkpointer.after(2, RunState)
    for on_rank_0, steps in ((1, []), (0, [2])):
        monkeypatch.setattr(dist, "max_int", lambda value, theirs=on_rank_0: max(value, theirs))
        checkpointer.save_last()
        assert saved == steps


def test_a_stop_that_could_not_be_saved_says_so(models_folder, tmp_path, caplog, monkeypatch):
    trainer = trainer_of(models_folder, output_dir=str(tmp_path), save_steps=2)

    def stop(checkpointer):
        checkpointer.checkpoints.wait()
        monkeypatch.setattr(manager, "_make_folders", lambda *_: "No space left on device")
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.2)
        checkpointer.after(3, Run(trainer).state)

    with pytest.raises(TrainingStopped) as stopped:
        steps(trainer, 2, then=stop)
    assert "could not be written" in caplog.text
    assert "step 3 could not be saved" in caplog.text
    assert str(stopped.value).endswith("checkpoints/step_000002")


@pytest.mark.parametrize(("now", "fits"), [(512, True), (511, False), *slow([(None, False)])])
def test_changed_data_is_not_resumed(now, fits, models_folder, tmp_path):
    trainer = trainer_of(models_folder, output_dir=str(tmp_path), save_steps=1)
    steps(trainer, 1, 2, num_rows=512)
    folder = tmp_path / "checkpoints"
    trainer.args.resume = str(folder / "step_000001")
    if fits:
        assert steps(trainer, num_rows=now)["rows"] == 512
    else:
        with pytest.raises(UserError, match=f"the data has {now} rows and had 512 when .*put"):
            steps(trainer, num_rows=now)
    left = {path.name for path in folder.iterdir()}
    assert left == {"step_000001"} | ({"step_000002"} if not fits else set())


def test_numbers_that_went_wrong_are_not_saved(models_folder, tmp_path):
    trainer = trainer_of(models_folder, output_dir=str(tmp_path), save_steps=2)
    last = tmp_path / "checkpoints/step_000002"
    with pytest.raises(FloatingPointError, match=f"nan; the latest checkpoint is {last}"):
        steps(trainer, 1, 2, 3, then=raising(FloatingPointError("nan")))
    assert list(last.parent.iterdir()) == [last]


def test_a_mistake_that_one_process_may_have_met_alone_is_not_waited_for(models_folder, tmp_path):
    """What is being written may still become whole; nothing is begun that takes all processes."""
    trainer = trainer_of(models_folder, output_dir=str(tmp_path), save_steps=2)
    with pytest.raises(UserError, match="mine"):
        steps(trainer, 1, 2, 3, then=raising(UserError("mine")))
    assert not (tmp_path / "checkpoints/step_000003").exists()


def test_what_one_process_alone_has_begun_to_write_is_whole_when_it_fails(
    models_folder, tmp_path, monkeypatch
):
    """A notebook goes on: its next run must find it, and not meet a thread that still writes."""
    complete = Writing._complete

    def slowly(writing):
        time.sleep(0.5)
        return complete(writing)

    monkeypatch.setattr(Writing, "_complete", slowly)
    trainer = trainer_of(models_folder, output_dir=str(tmp_path), save_steps=2)
    with pytest.raises(KeyboardInterrupt):
        steps(trainer, 1, 2, 3, then=raising(KeyboardInterrupt()))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_000002"]


def test_a_signal_waits_until_the_model_is_saved(tmp_path):
    model, tokenizer = tiny_models.causal_lm("llama"), tiny_models.tokenizer()
    save_tokenizer = tokenizer.save_pretrained

    def interrupted(folder):
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.2)
        save_tokenizer(folder)

    tokenizer.save_pretrained = interrupted
    files = setup.HubFiles(model.config, tokenizer)
    setup.save(LanguageModel(model, "off"), SFTConfig(output_dir=str(tmp_path)), files)
    Checkpoint(tmp_path, "--model").check("lm")
