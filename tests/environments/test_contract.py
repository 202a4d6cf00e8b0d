"""Classes and functions as environments, and what they return."""

import numpy as np
import pytest

from dschat.config import UserError
from dschat.environments.contract import Environment, Observation
from dschat.environments.sources import load_environment
from dschat.user_code.calls import Fault


class Counts:
    """Ends after the answer that it was told."""

    def reset(self, prompt, seed, last):
        self.prompt, self.seed, self.last = prompt, seed, last

    def step(self, answer):
        return f"{self.prompt}: {answer}", 0.5, answer == self.last


def test_a_class():
    made = Environment(Counts)
    made.reset("add", 3, {"last": "2", "other": 1})
    assert made.step("1") == Observation("add: 1", 0.5, False)
    assert made.step("2") == Observation("add: 2", 0.5, True)
    other = Environment(Counts)
    other.reset("sub", 3, {"last": "9"})
    assert other.step("2").text == "sub: 2"  # of its own


def test_a_function_sees_the_whole_episode():
    seen = []

    def step(observation, action):
        seen.append((observation, action))
        return {"observation": "+", "reward": 1, "done": len(seen) == 2}

    made = Environment(step)
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

    made = Environment(Slow)
    made.reset("p", 0, {})
    assert made.step("a") == Observation("p", 0.0, True)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, "step returned NoneType None; return"),
        (("a", 1), "step returned tuple"),
        ((b"a", 1, True), "step returned tuple"),
        (("a", "1", True), "step returned the reward str '1'"),
        (("a", float("nan"), True), "the reward nan"),
        (("a", 1.0, np.zeros(2)), "step returned tuple"),
        ("x" * 10**6, "step returned str"),
    ],
)
def test_what_is_no_observation(result, said):
    with pytest.raises(Fault, match=said) as caught:
        Environment(lambda observation, action: result).step("a")
    assert len(str(caught.value)) < 200


def test_what_raises():
    def step(observation, action):
        raise SystemExit(3)

    with pytest.raises(Fault, match=r"^called sys.exit\(3\)$"):
        Environment(step).step("a")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nowhere", "--environment nowhere: name it as file.py:NAME"),
        ("nowhere.py:Env", "--environment nowhere.py:Env: not found"),
        ("json:loads_", "--environment json:loads_: not found: .* did you mean loads"),
        ("json:JSONDecoder", "has no step.*; its decode cannot be described"),
        (3, "is not a class or a function"),
    ],
)
def test_what_is_no_environment(spec, said):
    with pytest.raises(UserError, match=said):
        load_environment(spec)


@pytest.mark.parametrize("result", [" and more", None, 3, b"x", ["a"]])
def test_what_reset_returns(result):
    """Text is part of the episode."""

    class Tells:
        def reset(self):
            return result

        def step(self, states):
            return states["observation_text"], 0, True

    made = Environment(Tells)
    if not isinstance(result, str | None):
        with pytest.raises(Fault, match="reset returned .*; return a str or None"):
            made.reset("p", 0, {})
        return
    assert made.reset("p", 0, {}) == (result or "")
    assert made.step("a").text == f"p{result or ''}"


def test_an_agent_of_states():
    """OpenRLHF's form: a mapping in, a mapping out, and text that stands as it is."""
    seen = []

    class AgentInstance:
        async def reset(self, states, **kwargs):
            return {"observation": states["prompt"]}

        async def step(self, states, **kwargs):
            seen.append(states)
            done = len(seen) == 2
            return {"rewards": 0.5, "environment_feedback": "\nUser: no\nYou: ", "done": done}

    made = Environment(AgentInstance)
    assert made.reset("p", 0, {"reference": "7"}) == ""
    assert made.step("1") == Observation("\nUser: no\nYou: ", 0.5, False, is_raw=True)
    assert made.step("2").done
    assert [s["observation_text"] for s in seen] == ["p", "p1\nUser: no\nYou: "]
    assert [s["action_text"] for s in seen] == ["1", "2"]
    assert seen[0]["label"] == "7"


def test_a_function_gets_the_columns_that_it_takes():
    def step(observation, action, label, level=1):
        return f"{label} {level}", 0, True

    made = Environment(step)
    made.reset("p", 0, {"label": "7", "level": 3, "other": 0})
    assert made.step("a").text == "7 3"


def test_the_reward_at_the_end():
    class Env:
        def __init__(self):
            self.answers = 0

        def step(self, answer):
            self.answers += 1
            return "", 0, True

        async def get_reward(self):
            return self.answers / 2

    made = Environment(Env)
    assert not made.rewards_the_end
    made.reset("p", 0, {})
    made.step("a")
    assert made.rewards_the_end
    assert made.final_reward() == 0.5
