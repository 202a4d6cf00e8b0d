"""Samples, and reward functions that are closed after a test."""

import pytest

from dschat.config import RLHFConfig
from dschat.rewards.reward_functions import RewardFunctions
from dschat.rewards.samples import Samples


@pytest.fixture
def samples():
    """``samples(n)``: n samples, two per prompt; answer ai has i % 3 + 1 tokens."""

    def make(n: int, **columns: list) -> Samples:
        return Samples(
            prompts=[f"p{i // 2}" for i in range(n)],
            answers=[f"a{i}" for i in range(n)],
            prompt_ids=[[i // 2] for i in range(n)],
            answer_ids=[list(range(i % 3 + 1)) for i in range(n)],
            finish_reasons=["stop" if i % 2 else "length" for i in range(n)],
            columns=columns,
        )

    return make


@pytest.fixture
def rewards():
    """``rewards([functions], flag=value)``: `RewardFunctions` that live as long as the test."""
    made = []

    def make(functions=(), **flags) -> RewardFunctions:
        made.append(RewardFunctions.of(RLHFConfig(**flags), functions))
        return made[-1]

    yield make
    for one in made:
        one.close()
