"""Captured steps of several positions: the same rollouts, whatever is guessed and however late."""

import random
from dataclasses import replace

import pytest
from captures import LateQueue, again, assert_idle, on_graphs, use
from families import PROMPTS, answered, assert_same, cache_gib, engine
from hypothesis import given, settings
from hypothesis import strategies as st
from soft_graph import soft_capture
from test_device_loop import FAMILIES, FREE, rollouts
from test_tensor_parallel import SAMPLING as TP_SAMPLING
from test_tensor_parallel import cut, shared_rollout

from dschat.inference import SamplingParams
from dschat.inference.cuda_graphs import DecodeGraphs
from dschat.inference.decode_state import DecodeState
from dschat.inference.draft_costs import Costs
from dschat.inference.partial import OpenPrompt, advance, rollout_of
from dschat.inference.scheduler import Scheduler
from dschat.inference.speculation import Drafter

GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)


def remember(made, prompts, rollout, changed, seed=0):
    """Put answers into the history, of which a share ``changed`` of the tokens is another."""
    draw = random.Random(seed)
    n = len(rollout) // len(prompts)
    answers = [
        [draw.randrange(1, 60) if draw.random() < changed else t for t in ids]
        for ids in rollout.token_ids
    ]
    made.speculation.history.add(
        answered(prompts[i // n], answer) for i, answer in enumerate(answers)
    )


def check(case, engines, lag, late, changed, capture=again):
    """A rollout without guesses, and one whose history is the first with some tokens changed."""
    name, sampling, chosen, limits, knobs = case
    if tokens := knobs.pop("tokens", None):
        plain, _ = engines(name)
        knobs["kv_cache_gib"] = cache_gib(plain, tokens)
    plain, graphs = engines(name, capture, speculate="history", **knobs)
    plain.speculation = None
    graphs.speculation.history._answers.clear()
    prompts = [PROMPTS[i] for i in chosen]
    expected = plain.generate(prompts, sampling, chosen, limits)
    remember(graphs, prompts, expected, changed)
    with pytest.MonkeyPatch.context() as patch:
        use(patch, lag, LateQueue() if late else None, fewest_tokens=8)
        got = graphs.generate(prompts, sampling, chosen, limits)
    assert_same(got, expected)
    assert_idle(graphs)
    stats = graphs.stats
    assert stats.answer_tokens == got.num_tokens
    assert 0 <= stats.accepted_tokens <= stats.drafted_tokens


CASES = rollouts(), st.sampled_from([0, 1, 2]), st.booleans(), st.sampled_from([0.0, 0.1, 0.5])


@settings(max_examples=30, deadline=None)
@given(*CASES)
def test_any_rollout_is_that_without_guesses(engines, case, lag, late, changed):
    check(case, engines, lag, late, changed)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(*CASES)
def test_any_rollout_at_length(engines, case, lag, late, changed):
    check(case, engines, lag, late, changed)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(*CASES)
def test_any_rollout_with_frozen_operators(engines, case, lag, late, changed):
    check(case, engines, lag, late, changed, soft_capture)


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES[1:])]
)
@pytest.mark.parametrize("capture", [again, soft_capture])
def test_known_text_takes_few_steps(name, capture, monkeypatch, engines):
    plain, graphs = engines(name, capture, speculate="history", page_size=4)
    plain.speculation = None
    use(monkeypatch)
    expected = plain.generate(PROMPTS[:2], GREEDY)
    remember(graphs, PROMPTS[:2], expected, 0.0)
    assert_same(graphs.generate(PROMPTS[:2], GREEDY), expected)
    assert graphs.stats.decode_steps <= 7
    assert graphs.stats.accepted_tokens >= 2 * 17
    assert not graphs._runner._graphs.failed


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("queue", [None, LateQueue])
def test_preempted_sequences(lag, queue, monkeypatch, module_of):
    """Few pages: some steps have room for the newest tokens and none for guesses."""
    module = module_of("llama")
    use(monkeypatch, lag, queue and queue())
    sampling = SamplingParams(max_new_tokens=20, n=2, seed=6, stop_token_ids=(3,))
    plain = engine(module)
    expected = plain.generate(PROMPTS, sampling)
    sizes = {"kv_cache_gib": cache_gib(plain, 56), "page_size": 4, "max_num_seqs": 6}
    made = on_graphs(module, speculate="history", **sizes)
    preemptions = 0
    for changed in (0.0, 0.2, 0.5):
        remember(made, PROMPTS, expected, changed)
        assert_same(made.generate(PROMPTS, sampling), expected)
        preemptions += made.stats.preemptions
        assert made.stats.accepted_tokens > 20
        assert_idle(made)
    assert preemptions > 0


def test_a_stream_and_an_interrupted_call(monkeypatch, module_of):
    """Another call takes the rows in the middle of a stream."""
    use(monkeypatch)
    module = module_of("llama")
    plain, made = engine(module), on_graphs(module, speculate="history")
    expected, other = plain.generate([[3]], GREEDY), plain.generate(PROMPTS[:3], FREE)
    remember(made, [[3]], expected, 0.1)
    stream = made.stream([3], GREEDY)
    tokens = [next(stream) for _ in range(5)]
    assert_same(made.generate(PROMPTS[:3], FREE), other)
    assert tokens + list(stream) == expected.token_ids[0]


@pytest.mark.parametrize("mode", ["history", "auto"])
def test_tensor_parallel_ranks_guess_alike(mode, module_of, monkeypatch):
    """Rank 1's clock is another; both have the answers of one engine without guesses."""
    use(monkeypatch)
    module = module_of("llama")

    def prepare(made):
        made._capture = again
        made.generate(PROMPTS if made.group.rank == 0 else [], TP_SAMPLING)
        for rows in (1, 9) * 2:  # a row costs nothing on rank 0, and everything on rank 1
            made.speculation.costs.decode.add(rows, 1e9 if made.group.rank == 0 else 1e9 * rows)

    expected = engine(module).generate(PROMPTS, TP_SAMPLING)
    shares = [range(3), range(3, len(PROMPTS))]
    ranks = shared_rollout(module, 2, shares, prepare, speculate=mode)
    for (rollout, made), share in zip(ranks, shares, strict=True):
        assert rollout.token_ids == cut(expected, share)
        assert made.stats.accepted_tokens > 30
    first, second = (made.stats.drafted_tokens for _, made in ranks)
    assert first == second


def test_partial_rollouts_are_captured_without_guesses(monkeypatch, module_of):
    use(monkeypatch)
    module = module_of("llama")
    sampling = SamplingParams(max_new_tokens=16, n=3, seed=3)
    expected = engine(module).generate(PROMPTS, sampling)
    made = on_graphs(module, speculate="history", max_num_seqs=8)
    remember(made, PROMPTS, expected, 0.1)
    prompts, numbers = list(map(OpenPrompt, PROMPTS)), list(range(len(PROMPTS)))
    for wanted in (2, 5, 8):
        advance(made, prompts, sampling, numbers, wanted)
        assert made.stats.drafted_tokens == 0
        assert_idle(made)
    assert_same(rollout_of(prompts), expected)


# Faults that must show


def room_for_all(monkeypatch):
    """Guesses go to pages that their sequence does not have."""
    guess = DecodeState.guess
    monkeypatch.setattr(
        DecodeState, "guess", lambda self, rows: guess(self, [r._replace(room=999) for r in rows])
    )


def one_off(monkeypatch):
    """Guesses are of the positions before."""
    guess = DecodeState.guess

    def later(self, rows):
        guess(self, [r._replace(first=r.first + 1) for r in rows])

    monkeypatch.setattr(DecodeState, "guess", later)


def always_right(monkeypatch):
    """All guesses are kept."""
    advanced = DecodeState.advance_guessed
    monkeypatch.setattr(
        DecodeState,
        "advance_guessed",
        lambda self, tokens, logprobs, kind, rows: advanced(
            *(self, tokens, logprobs, kind),
            rows._replace(guesses=tokens.view(len(rows.guesses), -1)[:, :-1]),
        ),
    )


def too_few_pages(monkeypatch):
    """Pages for the position that the host has read, not for the farthest one."""
    room_for = Scheduler.room_for
    monkeypatch.setattr(
        Scheduler, "room_for", lambda self, sequence, count: room_for(self, sequence, 0) + count
    )


@pytest.mark.parametrize("fault", [None, room_for_all, one_off, always_right, too_few_pages])
def test_faults_change_the_rollout(fault, monkeypatch, module_of):
    """Few pages, which other sequences had before."""
    module = module_of("llama")
    plain = engine(module, page_size=4)
    free = SamplingParams(max_new_tokens=24, n=3, seed=6, ignore_eos=True)
    answers = plain.generate(PROMPTS, free)
    sampling = replace(free, stop_token_ids=(answers.token_ids[0][6],))
    expected = plain.generate(PROMPTS, sampling)
    if fault is not None:
        fault(monkeypatch)
    use(monkeypatch)
    sizes = {"kv_cache_gib": cache_gib(plain, 72), "page_size": 4, "max_num_seqs": 6}
    made = on_graphs(module, speculate="history", **sizes)
    remember(made, PROMPTS, answers, 0.1)
    try:
        got = made.generate(PROMPTS, sampling)
    except (AssertionError, IndexError, RuntimeError):
        assert fault is not None
        return
    is_right = got.token_ids == expected.token_ids and made.stats.accepted_tokens > 250
    assert is_right == (fault is None)


# Which steps


def test_widths_are_those_that_pay():
    def drafter(start_s, row_s):
        costs = Costs()
        for rows in (1, 50) * 99:
            costs.decode.add(rows, start_s + row_s * rows)
        return Drafter(None, None, costs, is_auto=True)

    widths = [1, 4, 8]
    sure, unsure = ([[rate**i for i in range(1, 33)]] * 4 for rate in (0.95, 0.2))
    none = [[]] * 4
    history = Drafter(None, None, Costs(), is_auto=False)
    assert [history.width(f, widths, 4) for f in (sure, none, [[0.9, 0.8]])] == [8, 1, 4]
    bound_by_weights, bound_by_rows = drafter(5e-3, 1e-6), drafter(1e-6, 1e-5)
    assert bound_by_weights.width(sure, widths, 4) == 8
    assert bound_by_weights.width(none, widths, 4) == 1
    assert bound_by_weights.width(unsure, widths, 4) > 1  # a guess costs nearly nothing
    assert drafter(5e-3, 5e-4).width(unsure, widths, 4) == 1
    assert bound_by_rows.width(sure, widths, 4) == 1
    assert bound_by_weights.may_pay(4, 16)
    assert not bound_by_rows.may_pay(4, 16)  # so that nothing is captured, nor looked up


def test_large_batches_have_no_guesses(module_of):
    made = on_graphs(module_of("llama"), speculate="history")
    graphs = made.step_runner().graphs(50)
    assert isinstance(graphs, DecodeGraphs)
    assert [graphs.widths(size) for size in (1, 32, 64, 65)] == [[1, 4, 8]] * 2 + [[1, 4], [1]]
