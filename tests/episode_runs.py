"""Runs episodes of a few prompts with a real engine; a token's text is its number."""

import random
import time

import pytest
from families import EOS, VOCAB
from process_games import Replies

from dschat.config import RLHFConfig
from dschat.environments.contract import Environment
from dschat.environments.episodes import EpisodeRunner
from dschat.inference import SamplingParams

STOPS = {EOS, *range(1, VOCAB, 3)}
SAMPLING = SamplingParams(36, n=2, seed=5, stop_token_ids=tuple(STOPS - {EOS}))
PROMPTS = [[3, 4, 5], [6], [7, 8], [3, 4, 9, 10, 11, 12]]


def limits_of(turns, turn_tokens, timeout_s, workers, tells=False, lag=4):
    return RLHFConfig(
        max_turns=turns,
        max_turn_tokens=turn_tokens,
        environment_timeout_s=timeout_s,
        environment_workers=workers,
        on_environment_error="feedback" if tells else "error",
        environment_lag=lag,
    )


LIMITS = limits_of(5, 8, 20.0, 4)


class Tokenizer:
    """A token's text is its number."""

    chat_template, eos_token_id, unk_token_id, added_tokens_decoder = None, None, None, {}
    bos_token_id = None

    def __call__(self, texts, **_):
        return {"input_ids": [[*map(ord, text)] for text in texts]}

    def decode(self, ids, **_):
        return " ".join(map(str, ids))


def observation_ids(observation):
    return [int(word) for word in observation.text.split()]


def not_appended(row, text):
    raise AssertionError(f"nothing is appended to prompt {row}")


def run(
    made,
    environment=Replies,
    prompts=PROMPTS,
    numbers=None,
    limits=LIMITS,
    sampling=SAMPLING,
    make=None,
):
    numbers = list(range(len(prompts))) if numbers is None else numbers
    make = make or (lambda: Environment(environment))
    runner = EpisodeRunner(made, Tokenizer(), make, observation_ids, limits, not_appended)
    texts = [" ".join(map(str, ids)) for ids in prompts]
    return runner.run(prompts, texts, [{} for _ in prompts], sampling, numbers)


def assert_same(episodes, expected, atol=5e-5):
    """``atol``: of log-probs, which a step of other answers may round otherwise."""
    for one, other in zip(episodes, expected, strict=True):
        for name in ("prompt", "tokens", "drawn", "rewards", "num_turns", "finish_reason"):
            assert getattr(one, name) == getattr(other, name), name
        assert one.logprobs == pytest.approx(other.logprobs, abs=atol, rel=0)


class Slow(Replies):
    """Replies after a random time."""

    def step(self, answer):
        time.sleep(random.random() / 200)
        return super().step(answer)
