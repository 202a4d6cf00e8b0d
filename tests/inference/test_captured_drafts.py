"""Captured steps of several positions: the same rollouts, whatever is drafted and however late."""

import random
from dataclasses import replace

import pytest
from captures import LateQueue, again, assert_idle, on_graphs, use
from families import PROMPTS, answered, assert_same, cache_gib, engine, rollout_of
from hypothesis import given, settings
from hypothesis import strategies as st
from soft_graph import soft_capture
from test_captured_core import FAMILIES, FREE, rollouts
from test_tensor_parallel import SAMPLING as TP_SAMPLING
from test_tensor_parallel import cut, shared_rollout

from dschat.inference import SamplingParams
from dschat.inference.cuda_graphs import DecodeGraphs
from dschat.inference.decode_state import DecodeState
from dschat.inference.partial import OpenPrompt, advance
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
    """A rollout without drafts, and one whose history is the first with some tokens changed."""
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
def test_any_rollout_is_that_without_drafts(engines, case, lag, late, changed):
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
    """Few pages: some steps have room for the newest tokens and none for drafts."""
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
def test_tensor_parallel_ranks_draft_alike(mode, module_of, monkeypatch):
    """Both have the answers of one engine without drafts."""
    use(monkeypatch)
    module = module_of("llama")

    def prepare(made):
        made._capture = again
        made.generate(PROMPTS if made.group.rank == 0 else [], TP_SAMPLING)

    expected = engine(module).generate(PROMPTS, TP_SAMPLING)
    shares = [range(3), range(3, len(PROMPTS))]
    ranks = shared_rollout(module, 2, shares, prepare, speculate=mode)
    for (rollout, made), share in zip(ranks, shares, strict=True):
        assert rollout.token_ids == cut(expected, share)
        assert made.stats.accepted_tokens > 30
    first, second = (made.stats.drafted_tokens for _, made in ranks)
    assert first == second


def test_partial_rollouts_are_captured_without_drafts(monkeypatch, module_of):
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
    """Drafts go to pages that their sequence does not have."""
    load = DecodeState.load_drafts

    def roomy(self, rows):
        load(self, [r._replace(room=999) for r in rows])

    monkeypatch.setattr(DecodeState, "load_drafts", roomy)


def one_off(monkeypatch):
    """Drafts are of the positions before."""
    load = DecodeState.load_drafts

    def later(self, rows):
        load(self, [r._replace(first=r.first + 1) for r in rows])

    monkeypatch.setattr(DecodeState, "load_drafts", later)


def always_right(monkeypatch):
    """All drafts are accepted."""
    advanced = DecodeState.advance_drafted
    monkeypatch.setattr(
        DecodeState,
        "advance_drafted",
        lambda self, tokens, logprobs, kind, rows: advanced(
            *(self, tokens, logprobs, kind),
            rows._replace(drafted=tokens.view(len(rows.drafted), -1)[:, :-1]),
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


def test_widths_have_room_for_what_is_worth_it(monkeypatch, module_of):
    """The smallest step that takes the tokens worth a draft, on average over the rows."""
    use(monkeypatch)
    made, worth = on_graphs(module_of("llama"), speculate="history"), [0]
    monkeypatch.setattr(Drafter, "_length", lambda self, chances: worth[0])
    expected = made.generate(PROMPTS[:2], GREEDY)
    for worth[0], width in ((0, 1), (1, 4), (3, 4), (4, 8), (16, 8)):
        made.release_cache()
        widths, step = set(), DecodeGraphs.step

        def named(self, size, pages, kind, width, step=step, widths=widths):
            run = step(self, size, pages, kind, width)
            return lambda: (widths.add(width), run())

        with monkeypatch.context() as patch:
            patch.setattr(DecodeGraphs, "step", named)
            assert_same(made.generate(PROMPTS[:2], GREEDY), expected)
        assert max(widths) == width


def test_large_batches_have_no_drafts(module_of):
    made = on_graphs(module_of("llama"), speculate="history")
    graphs = made.step_runner().graphs(50)
    assert isinstance(graphs, DecodeGraphs)
    assert [graphs.widths(size) for size in (1, 32, 64, 65)] == [[1, 4, 8]] * 2 + [[1, 4], [1]]
