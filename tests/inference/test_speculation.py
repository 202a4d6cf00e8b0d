"""Drafted tokens are kept exactly where they are what would have been drawn."""

import random

import pytest
import torch
from families import PROMPTS as TP_PROMPTS
from families import assert_same, assert_same_but_for_ties, cache_gib, engine, every_family
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tensor_parallel import SAMPLING, cut, shared_rollout

from dschat.inference import SamplingParams
from dschat.inference.speculation import AnswerHistory, Drafter, StepCost

PROMPTS = [[5, 6, 7], [9, 8, 9, 8, 9], [3], [4, 5, 6, 7] * 5]


def remember(made, prompts, rollout, changed, seed=0):
    """Put answers into the history, of which a share ``changed`` of the tokens is another."""
    draw = random.Random(seed)
    n = len(rollout) // len(prompts)
    made._history.add(
        (
            prompts[i // n],
            [draw.randrange(3, 50) if draw.random() < changed else t for t in answer],
        )
        for i, answer in enumerate(rollout.token_ids)
    )


@every_family()
def test_answers_are_those_without_it(name, module_of):
    module = module_of(name)
    plain, drafting = engine(module), engine(module, speculate="history")
    sampling = SamplingParams(max_new_tokens=20, n=2, seed=3)
    expected = plain.generate(PROMPTS, sampling)
    for changed in (0.0, 0.1):
        remember(drafting, PROMPTS, expected, changed)
        assert_same(drafting.generate(PROMPTS, sampling), expected)
        assert drafting.stats.accepted_tokens > 20
        assert drafting.stats.drafted_tokens >= drafting.stats.accepted_tokens
        assert drafting.stats.answer_tokens == expected.num_tokens
        assert drafting.stats.decode_steps < plain.stats.decode_steps
        assert drafting.cache.num_free == drafting.cache.num_pages
    assert drafting.stats.drafted_tokens > drafting.stats.accepted_tokens


@pytest.mark.parametrize("name", ["llama", "opt", "gpt2"])
def test_bf16_answers_differ_in_ties_alone(name, module_of):
    module = module_of(name)
    plain, drafting = (
        engine(module, dtype=torch.bfloat16, speculate=s) for s in ("off", "history")
    )
    sampling = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    expected = plain.generate(PROMPTS, sampling)
    remember(drafting, PROMPTS, expected, 0.1)
    assert_same_but_for_ties(drafting.generate(PROMPTS, sampling), expected, 0.05)
    assert drafting.stats.accepted_tokens > 10


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_calls_of_any_kind(module_of, data):
    """Pages are few, sequences preempted, prompts cut into chunks, with any kind of draw."""
    module = module_of(data.draw(st.sampled_from(["llama", "bloom", "mistral", "opt"])))
    sizes = {
        "page_size": data.draw(st.sampled_from([1, 3, 8, 64])),
        "max_num_seqs": data.draw(st.integers(1, 4)),
        "max_num_batched_tokens": data.draw(st.sampled_from([5, 16, 64])),
    }
    if sizes["page_size"] < 64:
        sizes["kv_cache_gib"] = cache_gib(engine(module), data.draw(st.integers(50, 150)))
    plain = engine(module, **sizes)
    drafting = engine(module, speculate=data.draw(st.sampled_from(["history", "auto"])), **sizes)
    for seed in range(3):
        prompts = data.draw(st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=5))
        n = data.draw(st.integers(1, 3))
        sampling = SamplingParams(
            max_new_tokens=data.draw(st.integers(n, 20)),
            n=n,
            temperature=data.draw(st.sampled_from([0.0, 0.3, 1.0])),
            top_p=data.draw(st.sampled_from([1.0, 0.7])),
            min_new_tokens=data.draw(st.integers(0, 1)),
            stop_token_ids=data.draw(st.sampled_from([(), (7, 11, 30)])),
            seed=seed,
        )
        expected = plain.generate(prompts, sampling)
        if data.draw(st.booleans()):
            remember(drafting, prompts, expected, data.draw(st.sampled_from([0.0, 0.1, 0.5])))
        assert_same(drafting.generate(prompts, sampling), expected)
        assert drafting.cache.num_free == drafting.cache.num_pages


def test_a_second_greedy_call_takes_few_steps(module_of):
    """Nothing is put into the history by hand here."""
    made = engine(module_of("llama"), speculate="history")
    sampling = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
    first = made.generate(PROMPTS[:1], sampling)
    again = made.generate(PROMPTS[:1], sampling)
    assert_same(again, first)
    assert made.stats.accepted_tokens >= 30
    assert made.stats.decode_steps <= 9


def test_a_stream_repeats_itself(module_of):
    """Greedy decoding with random weights soon runs in circles, which the draft follows."""
    made = engine(module_of("llama"), speculate="history", max_seq_len=64)
    sampling = SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True)
    plain = engine(module_of("llama"), max_seq_len=64)
    assert list(made.stream([3], sampling)) == list(plain.stream([3], sampling))
    assert made.stats.accepted_tokens > 10


def test_the_history_is_bounded():
    history = AnswerHistory(max_tokens=10)
    history.add([([1], [5, 6, 7]), ([1], [5, 6]), ([2], [4] * 4)])
    assert [list(a) for a in history.of([1])] == [[5, 6, 7], [5, 6]]
    history.add([([1], [8])])
    assert [list(a) for a in history.of([1])] == [[8]]
    assert history.num_tokens == 5
    history.add([([3], [9] * 6)])  # 11: the prompt that was answered longest ago goes
    assert history.of([2]) == []
    assert history.num_tokens == 7


def test_costs_are_fitted():
    cost = StepCost()
    for i in range(200):
        rows = 1 + i % 50
        cost.add(rows, 3e-3 + 2e-5 * rows)
    assert cost.fit() == pytest.approx((3e-3, 2e-5))


def test_a_call_keeps_the_costs_that_it_began_with():
    """Tensor-parallel ranks have those of one clock only at its beginning."""
    cost = StepCost()
    drafter = Drafter(None, None, cost, is_auto=True)
    before = drafter._worth(4)
    cost.add(9, 1.0)
    cost.add_looks(1, 1.0)
    assert drafter._worth(4) == before != Drafter(None, None, cost, is_auto=True)._worth(4)


@pytest.mark.parametrize(
    ("foreseen", "look_s", "looked_at"),
    [
        (0.02, 1e-5, "known"),
        (0.9, 1e-5, "both"),
        (0.9, 1e-2, "known"),  # a look takes longer than a step: once, where one knows most
    ],
)
def test_auto_looks_where_it_pays(foreseen, look_s, looked_at, module_of, monkeypatch):
    """At prompts with earlier answers, new ones, or one of 32 in any case."""
    made, looks = engine(module_of("llama"), speculate="auto"), []
    known, new = PROMPTS[:2], PROMPTS[2:]
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    answers = engine(module_of("llama")).generate(known, sampling)
    remember(made, known, answers, 0.0)
    cost = made._step_cost
    cost.foreseen, cost.look_s, cost.num_new = foreseen, look_s, 1
    for rows in (1, 9):
        cost.add(rows, 1e-3 + 1e-5 * rows)
    catch_up = Drafter._catch_up

    def counted(drafter, follower, sequence):
        looks.append(sequence.prompt.ids)
        catch_up(drafter, follower, sequence)

    monkeypatch.setattr(Drafter, "_catch_up", counted)
    made.generate(known + new, sampling)
    assert all(p in looks for p in known)
    assert any(p in looks for p in new) == (looked_at == "both")
    looks.clear()
    made._step_cost.foreseen, made._step_cost.num_new = 0.02, 1
    made.generate([[i, 9, 8] for i in range(3, 45)], sampling)  # new ones too
    assert {tuple(p) for p in looks} == {(34, 9, 8)}  # the one of 32


def test_samples_that_wait_for_a_place_are_drafted_for(module_of, monkeypatch):
    """They enter a step without a prompt in it, where another one has left: as many as before."""
    made, seen = engine(module_of("llama"), speculate="auto", max_num_seqs=4), set()
    made._step_cost.foreseen = 0.02
    follower = Drafter._follower

    def noted(drafter, sequence):
        seen.add(sequence)
        return follower(drafter, sequence)

    monkeypatch.setattr(Drafter, "_follower", noted)
    made.generate([[5, 6, 7]], SamplingParams(max_new_tokens=12, n=64, ignore_eos=True))
    assert len(seen) == 64


@pytest.mark.parametrize("mode", ["history", "auto"])
def test_tensor_parallel_ranks_draft_alike(mode, module_of):
    """Rank 1's clock is another; both have the answers of one engine that drafts nothing."""
    module = module_of("llama")

    def prepare(made):
        made.generate(TP_PROMPTS if made.group.rank == 0 else [], SAMPLING)
        for rows in (1, 9):  # a row costs nothing on rank 0, and everything on rank 1
            made._step_cost.add(rows, 1.0 if made.group.rank == 0 else float(rows))

    expected = engine(module).generate(TP_PROMPTS, SAMPLING)
    shares = [range(3), range(3, len(TP_PROMPTS))]
    ranks = shared_rollout(module, 2, shares, prepare, speculate=mode)
    for (rollout, made), share in zip(ranks, shares, strict=True):
        assert rollout.token_ids == cut(expected, share)
        assert made.stats.accepted_tokens > 50
    first, second = (made.stats.drafted_tokens for _, made in ranks)
    assert first == second
