"""Prompts continued over several calls; each call stops when enough of them are complete."""

import pytest
from captures import on_graphs
from families import PROMPTS, engine, rollout_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tensor_parallel import on_ranks

from dschat.inference import SamplingParams
from dschat.inference.partial import OpenPrompt, advance

SAMPLING = SamplingParams(max_new_tokens=16, n=3, seed=3)
NUMBERS = list(range(len(PROMPTS)))


def opened():
    return [OpenPrompt(ids) for ids in PROMPTS]


def complete(prompts):
    return [i for i, p in enumerate(prompts) if p.is_complete]


@pytest.mark.parametrize("make", [engine, on_graphs])
@pytest.mark.parametrize("wanted", [1, 3, 8])
def test_calls_continue_what_the_one_before_left(make, wanted, module_of):
    """With one seed the answers are those of one call, however it is cut."""
    module = module_of("llama")
    expected = engine(module).generate(PROMPTS, SAMPLING)
    made, prompts = make(module, max_num_seqs=8), opened()
    calls = 0
    while len(complete(prompts)) < len(PROMPTS):
        before = complete(prompts)
        tokens = [p.num_tokens for p in prompts]
        advance(made, prompts, SAMPLING, NUMBERS, min(len(before) + wanted, len(PROMPTS)))
        assert len(complete(prompts)) >= min(len(before) + wanted, len(PROMPTS))
        assert all(p.num_tokens >= n for p, n in zip(prompts, tokens, strict=True))
        assert made.cache.num_free == made.cache.num_pages
        calls += 1
    assert calls > 1 or wanted == 8
    got = rollout_of(prompts)
    assert got.token_ids == expected.token_ids
    assert got.finish_reasons == expected.finish_reasons
    for one, other in zip(got.logprobs, expected.logprobs, strict=True):
        assert one == pytest.approx(other, abs=5e-5)


def test_what_is_due_is_completed(module_of):
    made = engine(module_of("llama"))
    for num_due in range(len(PROMPTS) + 1):
        prompts = opened()
        advance(made, prompts, SAMPLING, NUMBERS, wanted=1, num_due=num_due)
        assert all(p.is_complete for p in prompts[:num_due])
        assert len(complete(prompts)) >= 1


def test_nothing_runs_where_enough_is_complete(module_of):
    made, prompts = engine(module_of("llama")), opened()
    advance(made, prompts, SAMPLING, NUMBERS, wanted=0)
    assert made.stats.answer_tokens == 0
    assert prompts == opened()


def test_staleness_counts_from_the_first_token(module_of):
    """One slot: the second prompt has no token before the first is complete."""
    made, prompts = engine(module_of("llama"), max_num_seqs=1), opened()[:2]
    for wanted, staleness in ((1, [0, 0]), (2, [1, 0]), (2, [2, 1])):
        advance(made, prompts, SAMPLING, NUMBERS[:2], wanted)
        assert sorted((p.staleness for p in prompts), reverse=True) == staleness


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_cut_under_pressure(module_of, data):
    """Few pages and slots, preemption, chunks; --speculate, which drafts nothing here."""
    sizes = {
        "page_size": data.draw(st.sampled_from([1, 3, 8])),
        "max_num_seqs": data.draw(st.integers(1, 4)),
        "max_num_batched_tokens": data.draw(st.sampled_from([5, 64])),
        "speculate": data.draw(st.sampled_from(["off", "history"])),
    }
    module = module_of("llama")
    n, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 16))
    sampling = SamplingParams(max_new_tokens=length, n=n, seed=data.draw(st.integers(0, 9)))
    expected = engine(module).generate(PROMPTS, sampling)
    made, prompts = engine(module, **sizes), opened()
    while len(complete(prompts)) < len(PROMPTS):
        wanted = data.draw(st.integers(len(complete(prompts)) + 1, len(PROMPTS)))
        advance(made, prompts, sampling, NUMBERS, wanted, data.draw(st.integers(0, 3)))
    assert rollout_of(prompts).token_ids == expected.token_ids


def test_tensor_parallel_ranks_wait_for_each_other(module_of):
    module = module_of("llama")
    expected = engine(module).generate(PROMPTS, SAMPLING).token_ids
    wanted = [(2, 0), (1, 3)]

    def work(member):
        made = engine(module, group=member)
        mine = opened()[5 * member.rank :][: 5 - 2 * member.rank]
        numbers = [5 * member.rank + i for i in range(len(mine))]
        advance(made, mine, SAMPLING, numbers, *wanted[member.rank])
        return mine

    parts = on_ranks(2, work)
    for part, (number, num_due) in zip(parts, wanted, strict=True):
        assert len(complete(part)) >= number
        assert all(p.is_complete for p in part[:num_due])
    for i, prompt in enumerate(parts[0] + parts[1]):
        for answer, whole in zip(prompt.token_ids, expected[3 * i :], strict=False):
            assert whole[: len(answer)] == answer
