"""Episodes of a tensor-parallel group, with a thread for each rank: those of one process.

Real collectives are tested in tests/dist.
"""

import time
from dataclasses import replace

import pytest
from episode_runs import LIMITS, PROMPTS, Slow, assert_same, run
from families import cache_gib, empty_engine, engine, stream
from process_games import Replies
from quick import each_once, slow
from test_tensor_parallel import on_ranks

from dschat.config import UserError

SHARES = [(range(0, 1), range(1, 4)), (range(0, 4), range(0)), (range(0), range(0, 4))]


def on_two(module, shares, environment=Replies, limits=LIMITS, prompts=PROMPTS, **sizes):
    """Each rank's episodes of its share of ``prompts`` (or its error), and its engine."""

    def work(member):
        made = empty_engine(module.config, group=member, **{"page_size": 4} | sizes)
        made.weights.load(stream(module))
        mine = list(shares[member.rank])
        own = [prompts[i] for i in mine]
        try:
            return run(made, environment, own, mine, limits), made
        except UserError as error:
            return error, made

    return on_ranks(2, work)


def assert_one_process(module, shares, limits):
    alone = engine(module, page_size=4)
    expected = run(alone, limits=limits)
    assert sum(e.num_turns for e in expected) > 1.5 * len(expected)
    ranks = on_two(module, shares, limits=limits)
    assert_same(ranks[0][0] + ranks[1][0], expected)
    for _, made in ranks:
        assert made.stats.prompts == alone.stats.prompts
        assert made.stats.answer_tokens == alone.stats.answer_tokens
        assert made.cache.num_free == made.cache.num_pages
        # else one's replies may not wait for the other's
        if limits.environment_lag and not all(shares):
            steps = made.stats.decode_steps, made.stats.prefill_steps
            assert steps == (alone.stats.decode_steps, alone.stats.prefill_steps)


@pytest.mark.parametrize(("shares", "lag"), each_once(SHARES, [0, 1, 4]))
def test_two_ranks_are_one_process(shares, lag, module_of):
    assert_one_process(module_of("llama"), shares, replace(LIMITS, environment_lag=lag))


@pytest.mark.slow
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("name", ["gpt2", "bloom", "qwen2"])
def test_two_ranks_are_one_process_in_other_families(name, shares, module_of):
    assert_one_process(module_of(name), shares, LIMITS)


@pytest.mark.parametrize("is_short", ["slots", "pages"])
def test_ranks_plan_alike(is_short, module_of):
    """Where episodes wait for a slot, or are preempted."""
    module = module_of("llama")
    expected = run(engine(module, page_size=4))
    gib = cache_gib(engine(module), 44) / 2  # the longest episode has 42 tokens
    sizes = {"max_num_seqs": 2} if is_short == "slots" else {"kv_cache_gib": gib}
    (first, one), (second, other) = on_two(module, SHARES[0], **sizes)
    assert_same(first + second, expected)
    assert (one.stats.preemptions > 0) == (is_short == "pages")
    assert one.stats.preemptions == other.stats.preemptions
    assert one.stats.decode_steps == other.stats.decode_steps


def test_to_the_bit_whatever_the_environment_takes(module_of):
    module = module_of("llama")
    (expected, _), (expected_too, _) = on_two(module, SHARES[0])
    (got, _), (got_too, _) = on_two(module, SHARES[0], Slow)
    assert_same(got + got_too, expected + expected_too, atol=0)


@pytest.mark.parametrize("lag", [4, *slow([0])])
def test_replies_of_one_rank_are_slow(lag, module_of):
    """Nothing decodes meanwhile: the other rank has no episodes, or they are over."""

    class OneIsSlow(Replies):
        def reset(self, prompt, seed):
            super().reset(prompt, seed)
            self.waits = prompt == "6"

        def step(self, answer):
            time.sleep(0.1 * self.waits)
            return super().step(answer)

    module, limits = module_of("llama"), replace(LIMITS, environment_lag=lag)
    expected = run(engine(module, page_size=4))
    for shares in SHARES:
        (first, _), (second, _) = on_two(module, shares, OneIsSlow, limits)
        assert_same(first + second, expected)


class OneFails(Replies):
    """``fault`` is called in the second step of the episodes of one prompt."""

    def reset(self, prompt, seed):
        super().reset(prompt, seed)
        self.turns, self.fails = 3, prompt == "6"

    def step(self, answer):
        if self.fails and self.turns == 2:
            self.turns -= 1
            self.fault()
        return super().step(answer)

    def fault(self):
        raise ValueError("no luck")


class OneHangs(OneFails):
    def fault(self):
        time.sleep(60)


@pytest.mark.parametrize(
    ("case", "lag"),
    each_once([(OneFails, "no luck"), (OneHangs, "did not return within 0.2 s")], [0, 4]),
)
def test_an_environment_fails_on_one_rank(case, lag, module_of):
    """Its episodes end, and the others continue."""
    environment, said = case
    limits = replace(LIMITS, environment_timeout_s=0.2, environment_lag=lag)
    module = module_of("llama")
    expected = run(engine(module, page_size=4), environment, limits=limits)
    (first, _), (second, _) = on_two(module, SHARES[0], environment, limits)
    assert_same(first + second, expected)
    for episode in first + second:
        assert (said in episode.problem) == (episode.prompt == [6] and episode.num_turns > 1)
    assert any(e.problem for e in second)
    assert not any(e.problem for e in first)


def test_what_does_not_fit_fails_on_all_ranks(module_of):
    """In a later turn, of which one rank knows."""
    module = module_of("llama")
    prompts = [*PROMPTS[:3], [3] * 30]
    for shares in SHARES:
        (one, _), (other, _) = on_two(module, shares, prompts=prompts, max_seq_len=40)
        assert isinstance(one, UserError)
        assert str(one) == str(other)
        assert "with 8 new ones that exceeds max_seq_len = 40" in str(one)


def test_a_reply_is_taken_when_it_is_due(module_of):
    """Not only when nothing decodes any more, as after a hundred steps."""

    def steps(lag):
        ((_, made), _) = on_two(
            module_of("llama"), SHARES[0], limits=replace(LIMITS, environment_lag=lag)
        )
        return made.stats.decode_steps + made.stats.prefill_steps

    assert steps(1) < steps(4) < steps(100)
