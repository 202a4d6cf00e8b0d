"""What is said of runs that go wrong, once each; and nothing of runs that learn."""

import json
import math

import pytest

from dschat.observability.health import RunHealth, Settings

HEALTHY = {
    "policy/approxkl_avg": 0.004,
    "policy/approxkl_after": 0.004,
    "policy/clipfrac_avg": 0.1,
    "policy/grad_norm": 0.5,
    "policy/learning_rate": 1e-5,
    "objective/entropy": 0.8,
    "objective/scores": 0.4,
    "objective/scores_std": 0.49,
    "objective/scores/right": 0.7,
    "objective/scores/right_std": 0.46,
    "objective/kl": 1.0,
    "objective/clipped_share": 0.1,
    "frac_reward_zero_std": 0.5,
    "completions/clipped_ratio": 0.05,
    "rollout/answer_length": 30.0,
    "rollout/sequences": 512.0,
    "val/explained_variance": 0.3,
    "loss/value_avg": 0.2,
}
# What an iteration shows, in how many in a row a line comes, and what the line says.
WRONG = {
    "far step": ({"policy/approxkl_avg": 0.12}, 1, "--actor_learning_rate"),
    "far step at once": ({"policy/approxkl_avg": 10.6}, 1, "10.6, at first 0.004"),
    "far single step": ({"policy/approxkl_after": 0.6}, 1, "approxkl_after 0.6, at first 0.004"),
    "no entropy": ({"objective/entropy": 1e-5}, 2, "no longer explores"),
    "equal scores": ({"frac_reward_zero_std": 1.0}, 3, "same score, for 100% of the prompts"),
    "no gradient": ({"policy/grad_norm": 0.0}, 3, "gradient is 0"),
    "at the limit": ({"completions/clipped_ratio": 0.73}, 3, "73% of the answers"),
    "far from start": ({"objective/kl": 60.0}, 2, "2 nats a token; raise"),
    "clipped": ({"policy/clipfrac_avg": 0.31}, 3, "31% of the tokens are clipped"),
    "score falls": ({"objective/scores": 0.05}, 3, "objective/scores 0.05, at best 0.4"),
    "critic's loss": ({"loss/value_avg": 4.1}, 2, "loss/value_avg 4.1, val"),
    "critic's values": ({"val/explained_variance": -1.1}, 2, "explained_variance -1.1"),
}


def read(health, start, count, **wrong):
    """All findings of ``count`` iterations."""
    rows = [HEALTHY | wrong for _ in range(count)]
    return [found for i, row in enumerate(rows, start) for found in health.read(i, row)]


def texts(found):
    return [str(finding) for finding in found]


@pytest.mark.parametrize("name", WRONG)
def test_a_line_comes_once_and_again_when_it_returns(name):
    wrong, patience, text = WRONG[name]
    health = RunHealth()
    assert not read(health, 1, 5)
    assert not read(health, 6, patience - 1, **wrong)
    (found,) = read(health, 6 + patience - 1, 20, **wrong)
    assert text in str(found)
    assert f"(since iteration {6})" in str(found)
    assert not read(health, 40, 3)
    (again,) = read(health, 43, 8, **wrong)
    assert again.since == 43


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy/approxkl_avg", 0.05),
        ("policy/approxkl_after", 0.5),  # 0.12 was seen in a run that learned well
        ("objective/entropy", 2e-3),
        ("frac_reward_zero_std", 0.97),
        ("completions/clipped_ratio", 0.5),
        ("objective/kl", 30.0),
        ("policy/clipfrac_avg", 0.3),
        ("objective/scores", 0.31),  # three standard errors of 512 answers are 0.092
        ("loss/value_avg", 4.0),
        ("val/explained_variance", -1.0),
    ],
)
def test_nothing_is_said_up_to_a_bound(name, value):
    health = RunHealth()
    assert not read(health, 1, 5)
    assert not read(health, 6, 9, **{name: value})


def test_a_single_iteration_of_a_patient_rule_says_nothing():
    health = RunHealth()
    for i in range(1, 40):
        wrong = {"frac_reward_zero_std": 1.0} if i % 3 else {}
        assert not read(health, i, 1, **wrong)


def test_nothing_is_said_of_the_warm_up_or_of_numbers_that_are_not_there():
    """Of the learning rate, and of the critic: then the actor takes no step."""
    assert not read(RunHealth(), 1, 20, **{"policy/grad_norm": 0.0, "policy/learning_rate": 0.0})
    waiting = {"policy/grad_norm": 0.0, "val/ratio": 0.0, "policy/approxkl_avg": 0.0}
    health = RunHealth()
    assert not read(health, 1, 5, **waiting)
    assert not read(health, 6, 5, **{"policy/approxkl_avg": 0.06})
    assert not read(RunHealth(), 1, 5, **{"val/explained_variance": -50.0})
    teacher = {"frac_reward_zero_std": 1.0, "objective/teacher_kl": 0.4, "objective/scores": 0.0}
    assert not read(RunHealth(), 1, 9, **teacher)
    needed = ("objective/scores", "completions/clipped_ratio", "rollout/answer_length")
    few = {name: HEALTHY[name] for name in needed}
    health = RunHealth()
    assert not [f for i in range(20) for f in health.read(i, few)]


def test_a_run_that_is_bad_from_the_start_is_not_quoted_as_usual():
    """Nor has it an older value to return to."""
    health = RunHealth()
    bad = {"policy/approxkl_avg": 0.351, "policy/approxkl_after": 0.351}
    assert not read(health, 1, 4, **bad)
    (found,) = read(health, 5, 1, **{"policy/approxkl_avg": 2.0})
    assert "at first" not in found.text


def test_a_small_step_may_grow():
    health = RunHealth()
    read(health, 1, 5, **{"policy/approxkl_avg": 1e-4})
    assert not read(health, 6, 5, **{"policy/approxkl_avg": 0.04})


# -- settings --------------------------------------------------------------------------------------


def test_entropy_by_the_temperature():
    none = {"objective/entropy": 1e-4}
    for wrong in (none, {"policy/approxkl_after": 33.8}, {"frac_reward_zero_std": 1.0}):
        (cold,) = read(RunHealth(Settings(temperature=0.01)), 1, 9, **wrong)
        assert "; raise --temperature, which is 0.01, or " in cold.text
    (ended,) = read(RunHealth(), 1, 9, **none)
    assert "--temperature" not in ended.text


def test_sequences_are_clipped_whole():
    settings = Settings(most_clipped=0.4)
    assert not read(RunHealth(settings), 1, 9, **{"policy/clipfrac_avg": 0.4})
    (found,) = read(RunHealth(settings), 1, 9, **{"policy/clipfrac_avg": 0.44})
    assert "44% of the tokens" in found.text


# -- solved or collapsed ---------------------------------------------------------------------------

STANDSTILL = {"frac_reward_zero_std": 1.0, "policy/grad_norm": 0.0, "objective/entropy": 1e-4}
PASSED = {"eval/answer_length": 9.0, "eval/pass@1": 0.97}


def test_a_solved_task_is_no_collapse():
    """One line, although some iterations still have a gradient."""
    health = RunHealth()
    read(health, 1, 5)
    solved = STANDSTILL | {"objective/scores": 1.0, "objective/scores_std": 0.0}
    found = []
    for i in range(6, 60):
        found += read(health, i, 1, **({"objective/scores": 0.99} if i % 7 == 0 else solved))
    (line,) = found
    assert line.text.startswith("solved: the score is at its highest, 1,")
    assert (line.since, line.kind, health.is_doubtful) == (8, "warning", False)
    lost = read(health, 60, 3, **solved | {"objective/scores": 0.5})
    assert [f.since for f in lost if "gradient is 0" in f.text] == [60]
    assert health.is_doubtful


def test_solved_before_training():
    """By the held-out answers: the score has nowhere to rise."""
    health = RunHealth()
    health.read(0, PASSED)
    solved = STANDSTILL | {"objective/scores": 0.99}
    (line,) = read(health, 1, 9, **solved)
    assert line.text.startswith("solved")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"frac_reward_zero_std": 1.0}, {"objective/scores": 0.6}),  # prompts differ, not answers
        ({}, {}),  # it never rises
        ({}, {"objective/scores": 0.45}),  # nor by more than chance
        ({"objective/scores": 0.9}, {"objective/scores": 0.5}),  # it has fallen
    ],
)
def test_a_constant_reward_or_a_fall_is_a_collapse(before, after):
    health = RunHealth()
    read(health, 1, 3, **before)
    found = read(health, 4, 9, **STANDSTILL | after)
    kinds = {finding.kind for finding in found if "gradient is 0" in finding.text}
    assert kinds == {"collapse"}
    assert not [f for f in found if "solved" in f.text]
    assert health.is_doubtful


def test_answers_that_passed_once_excuse_no_fall():
    health = RunHealth()
    health.read(0, PASSED)
    read(health, 1, 3, **{"objective/scores": 0.98})
    found = texts(read(health, 4, 9, **STANDSTILL | {"objective/scores": 0.1}))
    assert any("gradient is 0" in text for text in found)
    assert not any("solved" in text for text in found)


# -- parts and comparisons with the best -----------------------------------------------------------


def test_a_part_that_falls_while_the_sum_rises():
    health = RunHealth()
    read(health, 1, 5)
    falls = {"objective/scores": 3.0, "objective/scores/right": 0.07}
    assert not read(health, 6, 2, **falls)
    (found,) = read(health, 8, 9, **falls)
    assert "objective/scores/right 0.07, at first 0.7" in str(found)
    assert found.kind == "hacked"


@pytest.mark.parametrize(
    "change",
    [
        {"objective/scores": 3.0, "objective/scores/right": 0.36},  # it falls by less than half
        {"objective/scores": 0.41, "objective/scores/right": 0.07},  # the sum does not rise
        {"objective/scores": 3.0, "objective/scores/right_std": 1.5, "objective/scores/right": 0.7},
    ],
)
def test_a_part_that_may_be_as_it_was(change):
    health = RunHealth()
    read(health, 1, 5)
    assert not read(health, 6, 9, **change)


@pytest.mark.parametrize(
    ("name", "values", "is_worse"),
    [
        ("eval/gold", (0.573, 0.62, 0.0003), True),
        ("eval/pass@1", (0.35, 0.3, 0.0), True),
        ("eval/pass@1", (0.35, 0.97, 0.4), True),  # no worse than at first
        ("eval/pass@1", (0.35, 0.97, 0.74), False),
        ("eval/score", (-1.2, 2.0, 8.1), False),
        ("eval/gold", (0.57, 0.52, 0.5), False),
    ],
)
def test_an_evaluation_worse_than_the_best(name, values, is_worse):
    health = RunHealth(Settings(num_held_out=500))
    found = [
        f for i, v in enumerate(values) for f in health.read(i, {name: v, "eval/answer_length": 9})
    ]
    assert [f.since for f in found] == [len(values) - 1] * is_worse


@pytest.mark.parametrize(("num_held_out", "is_worse"), [(16, False), (64, False), (256, True)])
def test_chance_is_no_worse_evaluation(num_held_out, is_worse):
    """Three standard errors of a difference, of 0.25 or less: 0.53, 0.27 and 0.13."""
    for name in ("eval/pass@1", "eval/score"):
        health = RunHealth(Settings(num_held_out=num_held_out))
        read(health, 1, 3, **{"objective/scores_std": 0.5})
        found = []
        for value in (0.5, 0.35):
            found += health.read(4, {name: value, "eval/answer_length": 9})
        assert bool(found) == is_worse, name


def test_no_worse_evaluation_before_the_spread_is_known():
    health = RunHealth(Settings(num_held_out=4))
    for done, score in enumerate((0.6, 0.3)):
        assert not health.read(done, {"eval/score": score, "eval/answer_length": 9})
        read(health, done, 1, **{"objective/scores_std": 0.5})


def test_a_held_out_loss_that_rises():
    health = RunHealth(Settings("step"))
    losses = (0.69, 0.658, 0.70, 0.72, 0.761)
    found = [f for i, loss in enumerate(losses) for f in health.read(10 * i, {"eval/loss": loss})]
    (line,) = texts(found)
    assert "eval/loss 0.761, at its lowest 0.658" in line
    assert line.endswith("(since step 40)")
    assert not [*health.read(50, {"eval/loss": 0.001}), *health.read(60, {"eval/loss": 0.01})]


@pytest.mark.parametrize(
    ("values", "is_worse"),
    [((-25, -24, -29), True), ((-25, -25.5, -26.9), False), ((-300, -304, -314), False)],
)
def test_chosen_answers_that_become_less_likely(values, is_worse):
    health = RunHealth(Settings("step"))
    rows = [{"eval/loss": 0.6, "eval/logps/chosen": value} for value in values]
    found = [f for i, row in enumerate(rows) for f in health.read(i, row)]
    assert [f.since for f in found] == [2] * is_worse


def test_a_resumed_run_goes_on():
    """What was said is not said again, and what began before is known."""
    health = RunHealth(Settings(temperature=0.5))
    read(health, 1, 3)
    read(health, 4, 2, **WRONG["no gradient"][0])
    assert not health.read(5, PASSED | {"eval/pass@1": 0.5, "eval/score": math.nan})
    resumed = RunHealth(Settings(), **json.loads(json.dumps(health.state())))
    assert resumed.state() == health.state()
    assert resumed.settings.temperature == 1.0
    (found,) = read(resumed, 6, 4, **WRONG["no gradient"][0])
    assert found.since == 4
    assert found.kind == "collapse"
