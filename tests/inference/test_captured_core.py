"""The device's decode loop: the same rollouts as step by step, whatever is scheduled.

A replay is the step's code run again (`again`) or its frozen operators (`soft_capture`). The work
of the device is done at once or as late as possible (`LateQueue`).
"""

from dataclasses import replace

import pytest
from captures import LateQueue, again, assert_idle, on_graphs, use
from families import EOS, PROMPTS, VOCAB, assert_same, cache_gib, engine
from hypothesis import given, settings
from hypothesis import strategies as st
from soft_graph import soft_capture

from dschat.inference import SamplingParams
from dschat.inference.decode_state import DecodeState

HALF = tuple(range(0, VOCAB, 2))  # stop ids: an answer hardly lives to its eighth token
FREE = SamplingParams(max_new_tokens=20, n=2, seed=6, ignore_eos=True)
KINDS = {
    "sampled": {},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 7, "temperature": 1.3},
    "top-p": {"top_p": 0.8, "temperature": 0.7},
    "top-k and top-p": {"top_k": 9, "top_p": 0.7},
    "min-p": {"min_p": 0.05, "top_p": 0.95},
}
FAMILIES = ["llama", "opt", "bloom", "gpt2", "mistral"]


# Any schedule


@st.composite
def rollouts(draw):
    sampling = SamplingParams(
        max_new_tokens=12,
        seed=draw(st.integers(0, 9)),
        n=draw(st.integers(1, 3)),
        min_new_tokens=draw(st.sampled_from([0, 0, 5])),
        stop_token_ids=draw(st.sampled_from([(), (3, 17, 40), HALF])),
        ignore_eos=draw(st.booleans()),
        **KINDS[draw(st.sampled_from(sorted(KINDS)))],
    )
    chosen = draw(st.lists(st.integers(0, 7), min_size=1, max_size=6))
    limits = [draw(st.sampled_from([12, 12, 1, 2, 7])) for _ in chosen]
    knobs = {
        "page_size": draw(st.sampled_from([4, 16, None])),
        "max_num_seqs": draw(st.sampled_from([2, 5, 8])),
        "max_num_batched_tokens": draw(st.sampled_from([7, 2048])),
    }
    if knobs["page_size"] is not None and draw(st.booleans()):
        knobs["tokens"] = 64
    return draw(st.sampled_from(FAMILIES)), sampling, chosen, limits, knobs


def check(case, engines, lag, late, capture=again):
    name, sampling, chosen, limits, knobs = case
    tokens = knobs.pop("tokens", None)
    if tokens:
        plain, _ = engines(name)
        knobs["kv_cache_gib"] = cache_gib(plain, tokens)
    plain, graphs = engines(name, capture, **knobs)
    prompts = [PROMPTS[i] for i in chosen]
    expected = plain.generate(prompts, sampling, chosen, limits)
    with pytest.MonkeyPatch.context() as patch:
        use(patch, lag, LateQueue() if late else None, fewest_tokens=8)
        got = graphs.generate(prompts, sampling, chosen, limits)
    assert_same(got, expected)
    assert_idle(graphs)
    assert graphs.stats.answer_tokens == sum(map(len, got.token_ids))


@settings(max_examples=30, deadline=None)
@given(rollouts(), st.sampled_from([0, 1, 2]), st.booleans())
def test_any_rollout_is_that_of_the_plain_loop(engines, case, lag, late):
    check(case, engines, lag, late)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(rollouts(), st.sampled_from([0, 1, 2, 5]), st.booleans())
def test_any_rollout_is_that_of_the_plain_loop_at_length(engines, case, lag, late):
    check(case, engines, lag, late)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(rollouts(), st.sampled_from([0, 1, 2]), st.booleans())
def test_any_rollout_with_frozen_operators(engines, case, lag, late):
    check(case, engines, lag, late, soft_capture)


def preempted(monkeypatch, made_of, lag, queue=None):
    """A rollout in a cache too small for its batch, and the engine."""
    use(monkeypatch, lag=lag, queue=queue)
    made = made_of(page_size=4, max_num_seqs=6)
    sampling = SamplingParams(max_new_tokens=20, n=2, seed=6, stop_token_ids=(3,))
    return made, made.generate(PROMPTS, sampling)


@pytest.fixture
def tight(module_of):
    """Engines whose cache holds 80 tokens."""
    module = module_of("llama")
    gib = cache_gib(engine(module), 80)
    return lambda **knobs: on_graphs(module, kv_cache_gib=gib, **knobs)


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("queue", [None, LateQueue])
def test_preempted_sequences(lag, queue, monkeypatch, tight, engines):
    expected = engines("llama")[0].generate(
        PROMPTS, SamplingParams(max_new_tokens=20, n=2, seed=6, stop_token_ids=(3,))
    )
    made, got = preempted(monkeypatch, tight, lag, queue and queue())
    assert made.stats.preemptions > 0
    assert_same(got, expected)
    assert_idle(made)


# Numbers of a step that change


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES[1:])]
)
def test_a_graph_reads_every_number_from_memory(name, monkeypatch, engines):
    """One graph; seed, temperature, top-p, limits, stop ids and prompt numbers change under it."""
    plain, graphs = engines(name, soft_capture, max_num_seqs=2, page_size=4)
    use(monkeypatch)
    for seed, temperature, top_p, stops in ((1, 0.7, 0.9, (3,)), (2, 1.4, 0.6, HALF[:12])):
        sampling = SamplingParams(
            max_new_tokens=9 + seed,
            min_new_tokens=7 + seed,
            seed=seed,
            temperature=temperature,
            top_p=top_p,
            stop_token_ids=stops,
            ignore_eos=True,
        )
        numbers = [seed, 10 * seed]
        expected = plain.generate(PROMPTS[1:3], sampling, numbers)
        assert_same(graphs.generate(PROMPTS[1:3], sampling, numbers), expected)
    assert sorted(size for size, *_ in graphs._runner._graphs._graphs) in ([2], [1, 2])


# How far the host runs ahead


def test_without_stop_ids_the_host_reads_once(monkeypatch, engines):
    queue = LateQueue()
    use(monkeypatch, queue=queue)
    plain, graphs = engines("llama")
    one = SamplingParams(max_new_tokens=30, seed=6, ignore_eos=True)
    assert_same(graphs.generate(PROMPTS, one), plain.generate(PROMPTS, one))
    assert graphs.stats.decode_steps == 29
    assert queue.longest >= 29  # nothing waited in between


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_with_stop_ids_it_reads_some_steps_late(lag, monkeypatch, engines):
    use(monkeypatch, lag=lag)
    _, graphs = engines("llama")
    unread, read = [], DecodeState.read

    def noted(self):
        unread.append(self.num_unread - 1)
        return read(self)

    monkeypatch.setattr(DecodeState, "read", noted)
    graphs.generate([PROMPTS[1]], SamplingParams(max_new_tokens=30, seed=6, stop_token_ids=(999,)))
    assert len(unread) == graphs.stats.decode_steps
    assert max(unread) == min(lag, len(unread) - 1)


def test_a_ring_that_is_full(monkeypatch, module_of):
    """More steps than the ring has slots, from one in its middle on, and a late device."""
    use(monkeypatch, queue=LateQueue())
    sampling = SamplingParams(max_new_tokens=280, seed=3, ignore_eos=True)
    module, prompts, limits = module_of("bloom"), [[6, 7], [5]], [100, 280]
    expected = engine(module, max_seq_len=300).generate(prompts, sampling, None, limits)
    made = on_graphs(module, max_seq_len=300, page_size=16, max_num_seqs=1)
    assert_same(made.generate(prompts, sampling, None, limits), expected)


def test_sequences_are_admitted_as_early_as_step_by_step(monkeypatch, engines):
    use(monkeypatch)
    plain, graphs = engines("llama", page_size=4)
    for name in ("_separate_prefill", "_samples_apart"):
        monkeypatch.setattr(plain, name, True)
    sampling = SamplingParams(max_new_tokens=20, n=3, seed=6, ignore_eos=True)
    limits = [20, 3, 3, 5, 5, 9, 14, 16]
    expected = plain.generate(PROMPTS, sampling, max_new_tokens=limits)
    assert_same(graphs.generate(PROMPTS, sampling, max_new_tokens=limits), expected)
    assert graphs.stats.decode_steps == plain.stats.decode_steps


def test_where_no_page_is_free_the_steps_go_on(monkeypatch, tight):
    """Slots are free, but samples that wait for pages do not interrupt the others."""
    use(monkeypatch)
    made, entered, enter = tight(max_num_seqs=6, page_size=64), [], DecodeState.enter

    def counted(self, *args):
        entered.append(None)
        enter(self, *args)

    monkeypatch.setattr(DecodeState, "enter", counted)
    assert made.cache.num_pages == 1  # each sample waits for the one before
    made.generate(PROMPTS[:2], SamplingParams(max_new_tokens=20, n=2, seed=6, ignore_eos=True))
    assert made.stats.decode_steps == 4 * 19
    assert len(entered) == 4


def test_sizes_shrink_as_sequences_end(monkeypatch, engines):
    use(monkeypatch)
    plain, graphs = engines("llama")
    limits = [20, 3, 3, 5, 5, 9, 14, 16]
    one = SamplingParams(max_new_tokens=20, seed=6, ignore_eos=True)
    expected = plain.generate(PROMPTS, one, max_new_tokens=limits)
    assert_same(graphs.generate(PROMPTS, one, max_new_tokens=limits), expected)
    assert {size for size, *_ in graphs._runner._graphs._graphs} == {1, 2, 4, 8}


@pytest.mark.parametrize("by", ["length", "stop id"])
def test_rows_that_have_ended_write_nothing(by, monkeypatch, engines):
    """The last of four ends early, and the others keep the size of the steps."""
    use(monkeypatch)
    plain, graphs = engines("llama", page_size=4)
    sampling = SamplingParams(max_new_tokens=30, seed=3, ignore_eos=True)
    prompts, limits = [PROMPTS[6], PROMPTS[4], PROMPTS[3], PROMPTS[0]], [30] * 4
    expected = plain.generate(prompts, sampling)
    if by == "length":
        limits[3] = 3
    else:
        *others, last = expected.token_ids
        stop = next(t for t in last[1:] if not any(t in ids for ids in others))
        assert last.index(stop) < 15
        sampling = replace(sampling, stop_token_ids=(stop,))
    expected = plain.generate(prompts, sampling, max_new_tokens=limits)
    assert_same(graphs.generate(prompts, sampling, max_new_tokens=limits), expected)
    assert graphs._runner._graphs.num_captured == 1
    if by == "length":  # each row stays where it drew its last token
        ends = [len(p) + limit - 2 for p, limit in zip(prompts, limits, strict=True)]
        positions = graphs._runner._graphs.state._fields[1, :4].tolist()
        assert sorted(positions) == sorted(ends)


def test_eos_ends_an_answer(monkeypatch, engines):
    use(monkeypatch)
    plain, graphs = engines("gpt2")
    sampling = SamplingParams(max_new_tokens=30, n=4, seed=2)
    got = graphs.generate(PROMPTS, sampling)
    assert_same(got, plain.generate(PROMPTS, sampling))
    assert {"stop", "length"} == set(got.finish_reasons)
    assert any(ids[-1] == EOS for ids in got.token_ids)
