"""Episodes with a real engine: tokens, draws, order, limits and faults."""

import gc
import time
import weakref
from dataclasses import replace
from itertools import groupby

import pytest
from captures import on_graphs
from episode_runs import (
    LIMITS,
    PROMPTS,
    SAMPLING,
    STOPS,
    Slow,
    Tokenizer,
    assert_same,
    limits_of,
    not_appended,
    run,
)
from families import VOCAB, empty_engine, engine, stream
from quick import slow

from dschat.environments.contract import Environment
from dschat.environments.episodes import EpisodeRunner
from dschat.inference import SamplingParams


@pytest.fixture(scope="module")
def made(module_of):
    return engine(module_of("llama"), page_size=4)


def test_what_is_trained_is_what_was_sampled(made):
    """Every answer ends at its first stop token, and the reply to it stands whole behind it."""
    episodes = run(made)
    assert len(episodes) == 8
    seen_turns = set()
    for episode in episodes:
        place = 0
        while place < len(episode.tokens):
            assert episode.drawn[place]
            end = place
            while end < len(episode.tokens) and episode.drawn[end]:
                end += 1
            answer = episode.tokens[place:end]
            assert not STOPS & set(answer[:-1])
            count = len(answer) - (answer[-1] in STOPS)
            reply = [count % VOCAB, 7 * count % VOCAB]
            after = episode.tokens[end : end + 2]
            assert after in ([], reply)
            place = end + len(after)
        seen_turns.add(episode.num_turns)
        assert len(episode.tokens) == len(episode.logprobs) == len(episode.rewards)
        assert all(v == 0 for v, d in zip(episode.logprobs, episode.drawn, strict=True) if not d)
    assert len(seen_turns) > 1


@pytest.mark.parametrize("lag", [0, 4])
def test_captured_steps_decode_the_same(lag, made, module_of):
    """Answers that follow on from earlier turns, each with a limit of its own."""
    limits, captured = (
        replace(LIMITS, environment_lag=lag),
        on_graphs(module_of("llama"), page_size=4),
    )
    assert_same(run(captured, limits=limits), run(made))
    assert captured.cache.num_free == captured.cache.num_pages
    assert len(captured._runner._graphs._graphs) > 0


def test_logprobs_are_those_of_the_whole_sequence(made, module_of):
    """Against transformers' forward over the episode."""
    import torch

    for episode in run(made):
        ids = torch.tensor([episode.prompt + episode.tokens])
        with torch.no_grad():
            logprobs = module_of("llama")(ids).logits[0].log_softmax(-1)
        for i, token in enumerate(episode.tokens):
            if episode.drawn[i]:
                expected = logprobs[len(episode.prompt) + i - 1, token].item()
                assert episode.logprobs[i] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("sizes", [{"max_num_seqs": 2}, {"page_size": 64}, {"page_size": 3}])
def test_episodes_are_those_alone(sizes, made, module_of):
    """Whatever decodes beside them, in any order of arrival."""
    together = run(made)
    other = engine(module_of("llama"), **sizes)
    for number in reversed(range(len(PROMPTS))):
        alone = run(other, prompts=[PROMPTS[number]], numbers=[number])
        assert_same(alone, together[2 * number : 2 * number + 2])


def test_to_the_bit_whatever_the_environment_takes(made):
    made.forget_prefixes()  # as every rollout does
    expected = run(made)
    for _ in range(3):
        made.forget_prefixes()
        assert_same(run(made, Slow), expected, atol=0)


def test_replies_as_they_come(made):
    limits = limits_of(5, 8, 20.0, 4, lag=0)
    assert_same(run(made, Slow, limits=limits), run(made))


def test_a_single_turn_is_an_answer_of_generate(made):
    class Ends:
        def step(self, answer):
            return None, 1.0, True

    limits = limits_of(3, 36, 20.0, 4)
    episodes = run(made, Ends, limits=limits)
    expected = made.generate(PROMPTS, SAMPLING)
    assert [e.tokens for e in episodes] == expected.token_ids
    assert all(e.rewards[-1] == 1.0 and sum(e.rewards) == 1.0 for e in episodes)


def test_the_reward_of_the_end_adds_to_that_of_the_last_step(made):
    class Both:
        def step(self, answer):
            return None, 0.5, True

        def get_reward(self):
            return 2.0

    for episode in run(made, Both):
        assert episode.rewards == [0.0] * (len(episode.tokens) - 1) + [2.5]


def test_every_answer_of_an_episode_has_the_least_length(made):
    """As far as the episode has room for it."""
    lengths = set()
    for episode in run(made, sampling=replace(SAMPLING, min_new_tokens=6)):
        answers = [len([*group]) for drawn, group in groupby(episode.drawn) if drawn]
        assert min(answers[:-1], default=6) >= 6
        assert answers[-1] >= 6 or len(episode.tokens) == SAMPLING.max_new_tokens
        lengths |= {*answers}
    assert lengths & {6, 7}


def test_turns_find_their_pages(module_of):
    """A turn computes its new tokens, and at most a page more."""
    made = empty_engine(module_of("llama").config, page_size=2)
    made.weights.load(stream(module_of("llama")))
    episodes = run(made)
    tokens = sum(len(e.prompt) + len(e.tokens) for e in episodes)
    turns = sum(e.num_turns for e in episodes)
    assert turns > 1.5 * len(episodes)
    assert made.stats.prefill_tokens <= tokens + 2 * turns
    assert made.stats.cached_tokens > 0


class Endless:
    def step(self, answer):
        return "5", 0.0, False


@pytest.mark.parametrize("turns", [2, 5])
def test_an_environment_that_never_ends(made, turns):
    """Its last answer is cut where it has no stop token or no room is left, not by --max_turns."""
    reasons = set()
    for episode in run(made, Endless, limits=limits_of(turns, 8, 20.0, 4)):
        cut = episode.tokens[-1] not in STOPS or episode.num_turns < turns
        assert episode.finish_reason == ("length" if cut else "stop")
        reasons.add(episode.finish_reason)
        assert episode.num_turns <= turns
        assert len(episode.tokens) <= SAMPLING.max_new_tokens
        assert episode.drawn[-1]  # nothing of the environment's is left at the end
    assert reasons == {"stop", "length"}


def test_an_observation_that_leaves_no_token_for_an_answer_is_left_out(made):
    class Fills:
        def step(self, answer):
            rest = SAMPLING.max_new_tokens - len(answer.split()) - 1
            return "9 " * rest, 0.0, False

    for episode in run(made, Fills):
        assert all(episode.drawn)
        assert (episode.num_turns, episode.finish_reason) == (1, "length")


class Hangs:
    def step(self, answer):
        time.sleep(60)


class Raises:
    def step(self, answer):
        raise ValueError("the server is down")


@pytest.mark.parametrize(
    ("environment", "said"),
    [(Hangs, "did not return within 0.2 s"), (Raises, "the server is down")],
)
def test_a_failure_ends_the_episode(environment, said, made):
    limits = limits_of(3, 8, 0.2, 16)
    episodes = run(made, environment, prompts=PROMPTS[:2], limits=limits)
    assert all(said in e.problem for e in episodes)
    assert made.cache.num_free == made.cache.num_pages


@pytest.mark.parametrize("tells", [False, True])
def test_a_failure_keeps_no_memory(tells, module_of):
    """Until garbage is collected, the frames of its traceback would hold the cache."""
    made, limits = engine(module_of("llama"), page_size=4), limits_of(3, 8, 20.0, 4, tells=tells)
    runner = EpisodeRunner(
        made, Tokenizer(), lambda: Environment(Raises), lambda _: [9], limits, not_appended
    )
    gc.collect()
    gc.disable()
    try:
        runner.run(PROMPTS[:2], ["", ""], [{}, {}], SAMPLING, [0, 1])
        cache = weakref.ref(made.cache)
        del runner
        made.release_cache()
        assert cache() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("lag", [4, *slow([0])])
def test_a_queue_for_the_workers_is_not_lateness(lag, made):
    """The time of a step counts from when a thread begins with it."""

    class Takes:
        def step(self, answer):
            time.sleep(0.03)
            return "", 1.0, True

    limits = replace(limits_of(3, 8, 0.3, 1), environment_lag=lag)
    episodes = run(made, Takes, prompts=PROMPTS * 3, limits=limits)
    assert len(episodes) == 24  # 0.7 seconds for the one worker
    assert not any(e.problem for e in episodes)


@pytest.mark.parametrize("lag", [4, *slow([0])])
def test_threads_that_hang_are_replaced(lag, made):
    """More episodes hang than there are workers, and the others are still served."""

    class Some:
        def reset(self, prompt):
            self.hangs = prompt == "6"

        def step(self, answer):
            if self.hangs:
                time.sleep(60)
            return "", 1.0, True

    limits = limits_of(3, 8, 0.2, 1, lag=lag)
    episodes = run(made, Some, limits=limits)
    assert [bool(e.problem) for e in episodes] == [e.prompt == [6] for e in episodes]


def test_a_failure_is_told_to_the_model(made):
    told = []

    class Sometimes:
        def step(self, answer):
            if len(told) < 3:
                raise ValueError("no luck")
            return "", 2.0, True

    def ids(text):
        told.append(text)
        return [9]

    limits = limits_of(30, 8, 20.0, 1, tells=True)
    runner = EpisodeRunner(
        made, Tokenizer(), lambda: Environment(Sometimes), ids, limits, not_appended
    )
    sampling = SamplingParams(36, seed=1, stop_token_ids=tuple(range(1, VOCAB)))
    (episode,) = runner.run([[3]], ["3"], [{}], sampling, [0])
    assert [observation.text for observation in told] == ["error: raised ValueError: no luck"] * 3
    assert episode.problem == ""
    assert episode.num_turns == 4
    assert episode.drawn == [True, False] * 3 + [True]
    assert episode.rewards == [0.0] * 6 + [2.0]
