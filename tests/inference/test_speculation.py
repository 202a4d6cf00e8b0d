"""Drafted tokens are kept exactly where they are what would have been drawn."""

import random
from dataclasses import replace

import pytest
import torch
from families import PROMPTS as TP_PROMPTS
from families import (
    answered,
    assert_same,
    assert_same_but_for_ties,
    cache_gib,
    engine,
    every_family,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tensor_parallel import SAMPLING, cut, shared_rollout

from dschat.inference import SamplingParams, speculation
from dschat.inference.partial import OpenPrompt, advance
from dschat.inference.sequence import Request
from dschat.inference.speculation import Acceptance, AnswerHistory
from dschat.inference.step_runner import StepRunner

PROMPTS = [[5, 6, 7], [9, 8, 9, 8, 9], [3], [4, 5, 6, 7] * 5]


def remember(made, prompts, rollout, changed, seed=0):
    """Put answers into the history, of which a share ``changed`` of the tokens is another."""
    draw = random.Random(seed)
    n = len(rollout) // len(prompts)
    made.speculation.history.add(
        answered(
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
    history.add([answered([1], [5, 6, 7]), answered([1], [5, 6]), answered([2], [4] * 4)])
    assert [list(a) for a in history.of([1])] == [[5, 6, 7], [5, 6]]
    history.add([answered([1], [8])])
    assert [list(a) for a in history.of([1])] == [[8]]
    assert history.num_tokens == 5
    history.add([answered([3], [9] * 6)])  # 11: the prompt that was answered longest ago goes
    assert history.of([2]) == []
    assert history.num_tokens == 7


def test_acceptance_is_that_of_the_place():
    """Of answers that begin as before every time, end as before half the time, and hardly ever come
    back after a wrong token.
    """
    acceptance = Acceptance()
    for i in range(400):
        for run in range(4):
            acceptance.add(True, run, run in (0, 2) or (run == 3 and i % 2 == 0))
    assert acceptance.chances(True, 0)[:3] == pytest.approx([1.0, 1.0, 0.5], abs=0.03)
    assert acceptance.chances(True, 1)[0] == pytest.approx(0.0, abs=0.03)
    assert acceptance.chances(True, 2)[:2] == pytest.approx([1.0, 0.5], abs=0.03)
    assert acceptance.chances(False, 2)[:2] == pytest.approx([0.7, 0.49])  # nothing is known
    chances = acceptance.chances(True, 16)
    assert len(chances) == 16
    assert sorted(chances, reverse=True) == chances


def test_a_sequence_is_in_the_places_that_chances_go_through(module_of, monkeypatch):
    """Of an answer that is right up to a token, wrong there, and right again."""
    made, runs = engine(module_of("llama"), speculate="history"), []
    sampling = SamplingParams(max_new_tokens=8, seed=3, ignore_eos=True)
    (answer,) = engine(module_of("llama")).generate(PROMPTS[:1], sampling).token_ids
    other = answer[:3] + [answer[3] % 40 + 5] + answer[4:]
    made.speculation.history.add([answered(PROMPTS[0], other)])
    add = Acceptance.add
    monkeypatch.setattr(
        Acceptance, "add", lambda self, *seen: (runs.append(seen[1:]), add(self, *seen))
    )
    assert made.generate(PROMPTS[:1], sampling).token_ids == [answer]
    right = [(0, True), (2, True), (3, True), (4, False), (1, True), (2, True), (3, True)]
    assert runs[: len(right)] == right


def test_a_known_answer_is_computed_with_its_prompt(module_of):
    """All of it in the prefill of a single sample; not where all samples draw from one row."""
    made, plain = engine(module_of("llama"), speculate="history"), engine(module_of("llama"))
    sampling = SamplingParams(max_new_tokens=12, seed=3, ignore_eos=True)
    for _ in range(40):  # it learns that earlier answers are right
        made.generate(PROMPTS, sampling)
    assert made.stats.decode_steps == 0
    assert made.stats.accepted_tokens == len(PROMPTS) * 11
    assert made.speculation.acceptance.chances(True, 0)[10] > 0.9
    assert_same(made.generate(PROMPTS, sampling), plain.generate(PROMPTS, sampling))
    group = replace(sampling, n=3)
    assert_same(made.generate(PROMPTS, group), plain.generate(PROMPTS, group))
    assert made.stats.decode_steps > 0


def test_partial_rollouts_draft_nothing(module_of):
    """Which of them are complete would depend on earlier calls, which no checkpoint holds."""
    sampling = SamplingParams(max_new_tokens=9, ignore_eos=True)
    left = []
    for mode in ("off", "history"):
        made = engine(module_of("llama"), speculate=mode)
        for _ in range(2):
            made.generate(PROMPTS, sampling)
        opened = [OpenPrompt(ids) for ids in PROMPTS]
        advance(made, opened, sampling, list(range(len(PROMPTS))), wanted=1)
        left.append([prompt.token_ids for prompt in opened])
        assert made.stats.drafted_tokens == 0
    assert left[0] == left[1]


@pytest.mark.parametrize("mode", ["history", "auto"])
def test_answers_that_were_begun_go_on_without_new_prompts(mode, module_of):
    made = engine(module_of("llama"), speculate=mode)
    sampling = SamplingParams(max_new_tokens=9, seed=3, ignore_eos=True)
    (expected,) = made.generate(PROMPTS[:1], sampling).token_ids
    request = Request(PROMPTS[0], sampling)
    request.resume([(expected[:4], [0.0] * 4, False)])
    core = made.core(drafts=True)
    core.add(request)
    assert [event.token for event in core.events()] == expected[4:]


def test_what_samples_have_in_common_is_learned_from_once(module_of, monkeypatch):
    """By the row that drew it, not again by those that part from it."""
    learned = []
    monkeypatch.setattr(Acceptance, "add", lambda *args: learned.append(args))
    made = engine(module_of("llama"), speculate="history")
    sampling = SamplingParams(max_new_tokens=30, n=8, temperature=0.3, seed=3, ignore_eos=True)
    made.generate(PROMPTS, sampling)
    stats = made.stats
    assert len(learned) <= stats.decoded_rows + len(PROMPTS) + stats.accepted_tokens


def test_limits_of_a_prompt_and_of_a_step(module_of, monkeypatch):
    """A limit of a prompt above the sampling's; and few rows for drafts."""
    made, plain = engine(module_of("llama"), speculate="history"), engine(module_of("llama"))
    short, limits = SamplingParams(max_new_tokens=2, seed=3, ignore_eos=True), [20] * len(PROMPTS)
    expected = plain.generate(PROMPTS, short, max_new_tokens=limits)
    remember(made, PROMPTS, expected, 0.0)
    assert_same(made.generate(PROMPTS, short, max_new_tokens=limits), expected)
    assert made.stats.accepted_tokens > 20
    monkeypatch.setattr(speculation, "MAX_DRAFTED", 5)
    sizes = []
    logits = StepRunner.logits
    monkeypatch.setattr(
        StepRunner,
        "logits",
        lambda self, schedule: (
            sizes.append(sum(len(s.draft) for s in schedule.ready)) or logits(self, schedule)
        ),
    )
    assert_same(made.generate(PROMPTS, short, max_new_tokens=limits), expected)
    assert max(sizes) == 5


def test_auto_drafts_only_what_is_likely(module_of):
    """Half of an earlier answer's tokens are wrong: too many of them for ``auto``."""
    sampling, drafted = SamplingParams(max_new_tokens=20, n=2, seed=3, ignore_eos=True), {}
    expected = engine(module_of("llama")).generate(PROMPTS, sampling)
    for mode in ("history", "auto"):
        made = engine(module_of("llama"), speculate=mode)
        for changed in (0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0):
            remember(made, PROMPTS, expected, changed)
            assert_same(made.generate(PROMPTS, sampling), expected)
            drafted.setdefault(mode, []).append(made.stats.drafted_tokens)
    assert drafted["auto"][2] < 0.5 * drafted["history"][2]
    assert drafted["auto"][-1] > 100  # they have become better


@pytest.mark.parametrize("mode", ["history", "auto"])
def test_tensor_parallel_ranks_draft_alike(mode, module_of):
    """Both have the answers of one engine that drafts nothing."""
    module = module_of("llama")

    def prepare(made):
        for _ in range(3):  # until earlier answers are known to be right
            made.generate(TP_PROMPTS if made.group.rank == 0 else [], SAMPLING)

    expected = engine(module).generate(TP_PROMPTS, SAMPLING)
    shares = [range(3), range(3, len(TP_PROMPTS))]
    ranks = shared_rollout(module, 2, shares, prepare, speculate=mode)
    for (rollout, made), share in zip(ranks, shares, strict=True):
        assert rollout.token_ids == cut(expected, share)
        assert made.stats.accepted_tokens > 50
    first, second = (made.stats.drafted_tokens for _, made in ranks)
    assert first == second
