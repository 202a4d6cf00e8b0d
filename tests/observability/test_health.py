"""What is said of runs that go wrong, once each; and nothing of runs that learn."""

import json

import pytest

from dschat.observability.health import RunHealth

HEALTHY = {
    "policy/approxkl_avg": 0.004,
    "policy/grad_norm": 0.5,
    "policy/learning_rate": 1e-5,
    "objective/entropy": 0.8,
    "objective/scores": 0.4,
    "objective/kl": 1.0,
    "objective/clipped_share": 0.1,
    "frac_reward_zero_std": 0.5,
    "completions/clipped_ratio": 0.05,
    "rollout/answer_length": 30.0,
}
# What an iteration shows, in how many in a row a line comes, and what the line says.
WRONG = {
    "far step": ({"policy/approxkl_avg": 0.12}, 1, "--actor_learning_rate"),
    "far step at once": ({"policy/approxkl_avg": 10.6}, 1, "10.6, at first 0.004"),
    "no entropy": ({"objective/entropy": 1e-5}, 2, "no longer explores"),
    "equal scores": ({"frac_reward_zero_std": 1.0}, 3, "same score, for 100% of the prompts"),
    "no gradient": ({"policy/grad_norm": 0.0}, 3, "gradient is 0"),
    "at the limit": ({"completions/clipped_ratio": 0.97}, 3, "97% of the answers"),
    "cut scores": ({"objective/clipped_share": 0.7}, 3, "--clip_reward cuts 70%"),
    "far from start": ({"objective/kl": 60.0}, 2, "2 nats a token; raise"),
    "hacked": ({"objective/kl": 60.0, "objective/scores": 3.0}, 2, "it may be hacked"),
}


def read(health, start, count, **wrong):
    """All findings of ``count`` iterations."""
    rows = [HEALTHY | wrong for _ in range(count)]
    return [found for i, row in enumerate(rows, start) for found in health.read(i, row)]


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
    teacher = {"frac_reward_zero_std": 1.0, "objective/teacher_kl": 0.4, "objective/scores": 0.0}
    assert not read(RunHealth(), 1, 9, **teacher)
    needed = ("objective/scores", "completions/clipped_ratio", "rollout/answer_length")
    few = {name: HEALTHY[name] for name in needed}
    health = RunHealth()
    assert not [f for i in range(20) for f in health.read(i, few)]


@pytest.mark.parametrize(
    ("name", "values", "is_worse"),
    [
        ("eval/gold", (0.573, 0.62, 0.0003), True),
        ("eval/pass@1", (0.35, 0.3, 0.0), True),
        ("eval/score", (-1.2, 2.0, 8.1), False),
        ("eval/gold", (0.57, 0.52, 0.5), False),
    ],
)
def test_an_evaluation_worse_than_before_training(name, values, is_worse):
    health = RunHealth()
    found = [
        f for i, v in enumerate(values) for f in health.read(i, {name: v, "eval/answer_length": 9})
    ]
    assert [f.since for f in found] == [len(values) - 1] * is_worse


def test_a_resumed_run_goes_on():
    """What was said is not said again, and what began before is known."""
    from dataclasses import asdict

    health = RunHealth()
    read(health, 1, 3)
    read(health, 4, 2, **WRONG["no gradient"][0])
    resumed = RunHealth(**json.loads(json.dumps(asdict(health))))
    (found,) = read(resumed, 6, 4, **WRONG["no gradient"][0])
    assert found.since == 4
    assert found.is_collapse
