"""Classes and functions as environments, and what they return."""

import pytest

from dschat.config import UserError
from dschat.environments.contract import (
    Environment,
    EnvironmentFault,
    Observation,
    load_environment,
)


class Counts:
    """Ends after the answer that it was told."""

    def reset(self, prompt, seed, last):
        self.prompt, self.seed, self.last = prompt, seed, last

    def step(self, answer):
        return f"{self.prompt}: {answer}", 0.5, answer == self.last


def test_a_class():
    made = load_environment(Counts)()
    made.reset("add", 3, {"last": "2", "other": 1})
    assert made.step("1") == Observation("add: 1", 0.5, False)
    assert made.step("2") == Observation("add: 2", 0.5, True)
    other = load_environment(Counts)()
    other.reset("sub", 3, {"last": "9"})
    assert other.step("2").text == "sub: 2"  # of its own


def test_a_function_sees_the_whole_episode():
    seen = []

    def step(observation, action):
        seen.append((observation, action))
        return {"observation": "+", "reward": 1, "done": len(seen) == 2}

    made = load_environment(step)()
    made.reset("p", 0, {})
    assert made.step("a") == Observation("+", 1.0, False)
    assert made.step("b") == Observation("+", 1.0, True)
    assert seen == [("p", "a"), ("pa+", "b")]


def test_coroutines():
    class Slow:
        async def reset(self, **columns):
            self.columns = columns

        async def step(self, answer):
            return self.columns["prompt"], 0, True

    made = load_environment(Slow)()
    made.reset("p", 0, {})
    assert made.step("a") == Observation("p", 0.0, True)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, "step returned NoneType None; return"),
        (("a", 1), "step returned tuple"),
        ((b"a", 1, True), "step returned tuple"),
        (("a", "1", True), "step returned tuple"),
        (("a", float("nan"), True), "the reward nan"),
        ("x" * 10**6, "step returned str"),
    ],
)
def test_what_is_no_observation(result, said):
    with pytest.raises(EnvironmentFault, match=said) as caught:
        Environment(lambda observation, action: result).step("a")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("error", [ValueError("no\nluck"), SystemExit(3), KeyboardInterrupt()])
def test_what_raises(error):
    def step(observation, action):
        raise error

    with pytest.raises(EnvironmentFault) as caught:
        Environment(step).step("a")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nowhere", "--environment nowhere: name it as file.py:NAME"),
        ("nowhere.py:Env", "--environment nowhere.py:Env: not found"),
        ("json:loads_", "--environment json:loads_: not found: .* did you mean loads"),
        ("json:JSONDecoder", "has no method step"),
        (3, "is not a class or a function"),
    ],
)
def test_what_is_no_environment(spec, said):
    with pytest.raises(UserError, match=said):
        load_environment(spec)
