"""Streamed tokens, and the ways an answer can end."""

import sys
from concurrent.futures import ThreadPoolExecutor, TimeoutError

import pytest
from captures import assert_idle, graphs_of, on_graphs, use
from families import EOS, PROMPTS, VOCAB, assert_same, cache_gib, engine, logprob_gap
from quick import slow

from dschat.config import UserError
from dschat.inference import SamplingParams
from dschat.inference.generators.hf_generator import HuggingFaceGenerator
from dschat.inference.protocol import Rollout


def with_options(**options):
    return SamplingParams(**{"max_new_tokens": 20, "n": 2, "seed": 6, "ignore_eos": True} | options)


FREE = with_options()


@pytest.fixture(scope="module")
def made(module_of):
    return engine(module_of("llama"), page_size=4)


@pytest.fixture(params=["engine", "hugging face"])
def either(request, made, module_of):
    """An engine, and a Hugging Face module with the same weights."""
    module = module_of("llama")
    return made if request.param == "engine" else HuggingFaceGenerator(module, (EOS,))


@pytest.fixture(scope="module")
def free(made):
    """Answers that nothing ends but their length."""
    return made.generate(PROMPTS, FREE)


# Streaming


def test_a_stream_is_the_answer_of_generate(either):
    sampling = with_options(n=1, ignore_eos=False)
    for prompt in (*PROMPTS, tuple(PROMPTS[1])):
        (answer,) = either.generate([list(prompt)], sampling).token_ids
        assert list(either.stream(prompt, sampling)) == answer
        assert either.generate([prompt], sampling).token_ids == [answer]


def test_each_token_comes_with_a_step_of_its_own(made):
    """A stream that decoded the answer first and handed it out afterwards would not be one."""
    stream = made.stream([5, 6, 7], with_options(n=1))
    for count in range(1, 6):
        next(stream)
        assert made.stats.prefill_steps + made.stats.decode_steps == count
        assert made.stats.answer_tokens == count
    stream.close()


@pytest.mark.parametrize("make", [engine, on_graphs])
def test_a_closed_stream_leaves_nothing_behind(make, module_of, free, monkeypatch):
    use(monkeypatch)
    made = make(module_of("llama"), page_size=4)
    stream = made.stream(PROMPTS[2], with_options(n=1))
    for _ in range(4):
        next(stream)
    assert made.cache.num_free < made.cache.num_pages
    stream.close()
    assert_idle(made)
    assert_same(made.generate(PROMPTS, FREE), free)


@pytest.mark.parametrize("make", [*slow([engine]), on_graphs])
def test_streams_and_rollouts_take_turns(make, module_of, free, monkeypatch):
    """They share pages, rows and ring: none writes another's, and each reads its steps before
    another one takes them.
    """
    use(monkeypatch, lag=2)
    made, sampling = make(module_of("llama"), page_size=4), with_options(n=1)
    wholes = [made.generate([p], sampling).token_ids[0] for p in PROMPTS[1:3]]
    streams = [made.stream(p, sampling) for p in PROMPTS[1:3]]
    got = [[next(stream) for _ in range(4)] for stream in streams]
    assert_same(made.generate(PROMPTS, FREE), free)
    for _ in range(3):
        for tokens, stream in zip(got, streams, strict=True):
            tokens.append(next(stream))
    made.stream(PROMPTS[0], sampling).close()
    assert [tokens + list(stream) for tokens, stream in zip(got, streams, strict=True)] == wholes
    assert_idle(made)


@pytest.mark.parametrize("lag", [*slow([0, 1]), 2])
def test_a_stream_is_a_rollout_read_late(lag, monkeypatch, engines):
    use(monkeypatch, lag=lag)
    plain, graphs = engines("llama", page_size=4)
    sampling = with_options(n=1)
    (whole,) = plain.generate([PROMPTS[1]], sampling).token_ids
    stream = graphs.stream(PROMPTS[1], sampling)
    for count, token in enumerate(stream):
        assert token == whole[count]
        if count < 20 - lag:
            assert graphs.stats.decode_steps == (count + lag if count else 0)
    assert count == 19
    assert_idle(graphs)


def test_weights_that_move_under_a_stream(monkeypatch, module_of):
    """Its graphs read freed memory otherwise."""
    use(monkeypatch)
    module = module_of("llama")
    made, plain = on_graphs(module), engine(module)
    sampling = with_options(n=1)
    (whole,) = plain.generate([PROMPTS[1]], sampling).token_ids
    stream = made.stream(PROMPTS[1], sampling)
    got = [next(stream) for _ in range(4)]
    first = graphs_of(made)
    made.borrow_weights({name: p.detach() for name, p in module.named_parameters()})
    assert got + list(stream) == whole
    assert graphs_of(made) is not first


def test_open_streams_that_hold_the_cache_are_an_error(made, module_of):
    gib = cache_gib(made, num_tokens=40)
    made = engine(module_of("llama"), page_size=4, kv_cache_gib=gib)
    stream = made.stream([5] * 24, with_options(n=1, max_new_tokens=8))
    first = next(stream)
    with pytest.raises(UserError, match="no room.*close their streams"):
        made.generate([[6] * 16], with_options(n=1, max_new_tokens=8))
    assert len([first, *stream]) == 8
    assert len(made.generate([[6] * 16], with_options(n=1, max_new_tokens=8)).token_ids[0]) == 8


def test_threads_may_share_an_engine(module_of):
    """The first calls of all threads also allocate its cache."""
    sampling = with_options(seed=9)
    expected = engine(module_of("llama"), page_size=4).generate(PROMPTS, sampling).token_ids
    shared = engine(module_of("llama"), page_size=4)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(shared.generate, PROMPTS, sampling) for _ in range(8)]
            calls.append(pool.submit(lambda: list(shared.stream(PROMPTS[0], with_options(n=1)))))
            answers = [call.result() for call in calls]
    finally:
        sys.setswitchinterval(interval)
    assert [rollout.token_ids for rollout in answers[:8]] == [expected] * 8
    (streamed,) = shared.generate(PROMPTS[:1], with_options(n=1)).token_ids
    assert answers[8] == streamed
    assert shared.cache.num_free == shared.cache.num_pages


# Ends


def test_stop_tokens_end_an_answer_and_stay_in_it(either, free):
    stops = (17, 40, 3)
    got = either.generate(PROMPTS, with_options(stop_token_ids=stops))
    for ids, logprobs, reason, whole, all_logprobs in zip(
        got.token_ids,
        got.logprobs,
        got.finish_reasons,
        free.token_ids,
        free.logprobs,
        strict=True,
    ):
        end = next((i + 1 for i, token in enumerate(whole) if token in stops), 20)
        assert ids == whole[:end]
        assert logprobs == pytest.approx(all_logprobs[:end], abs=5e-5)
        assert reason == ("stop" if ids[-1] in stops else "length")
    assert set(got.finish_reasons) == {"stop", "length"}


def test_eos_ends_an_answer_unless_it_is_ignored(module_of, free):
    """The model's own stop, made to be a token that comes often."""
    common = max(range(VOCAB), key=lambda t: sum(ids.count(t) for ids in free.token_ids))
    made = engine(module_of("llama"), stop_ids=(common,))
    assert made.generate(PROMPTS, FREE).token_ids == free.token_ids
    got = made.generate(PROMPTS, with_options(ignore_eos=False, stop_token_ids=(EOS,)))
    ends = {common, EOS}
    for ids, whole in zip(got.token_ids, free.token_ids, strict=True):
        end = next((i + 1 for i, token in enumerate(whole) if token in ends), 20)
        assert ids == whole[:end]


def test_a_stop_token_last_of_all_is_a_stop(either, free):
    """Length and stop at once: the answer is complete."""
    limit = 7
    stop = free.token_ids[0][limit - 1]
    got = either.generate([PROMPTS[0]], with_options(max_new_tokens=limit, stop_token_ids=(stop,)))
    first = free.token_ids[0].index(stop) + 1
    assert got.token_ids[0] == free.token_ids[0][:first]
    assert got.finish_reasons[0] == "stop"


def test_before_min_new_tokens_no_end_is_drawn(either, module_of):
    """Half the vocabulary ends an answer: hardly one would live to see its eighth token."""
    stops = tuple(range(0, VOCAB, 2))
    short = with_options(stop_token_ids=stops)
    assert sum(map(len, either.generate(PROMPTS, short).token_ids)) < 4 * 2 * len(PROMPTS)
    got = either.generate(PROMPTS, with_options(stop_token_ids=stops, min_new_tokens=8))
    assert min(map(len, got.token_ids)) == 9  # and at once thereafter
    for ids, reason in zip(got.token_ids, got.finish_reasons, strict=True):
        assert not set(ids[:8]) & set(stops)
        assert (ids[-1] in stops) == (reason == "stop")
    assert "stop" in got.finish_reasons
    # The log-probs are those of the model, which knows of no prohibition.
    assert logprob_gap(module_of("llama"), PROMPTS, got) < 5e-5


def test_no_prompts_no_answers(either, made):
    assert either.generate([], FREE) == Rollout()
    assert made.generate([], FREE, indices=[], max_new_tokens=[]) == Rollout()
    assert made.stats.prompts == 0


def test_a_prompt_may_be_extended_while_its_answer_streams(module_of):
    made, history = engine(module_of("llama")), [5, 6, 7]
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    (expected,) = made.generate([list(history)], sampling).token_ids
    for token in made.stream(history, sampling):
        history.append(token)
    assert history[3:] == expected


@pytest.mark.parametrize("change", ["release_cache", "release_weights", "forget_prefixes"])
def test_what_steps_use_is_not_taken_away_within_one(change, module_of):
    own = engine(module_of("llama"), page_size=4)
    own.generate(PROMPTS[:1], with_options())
    with own.lock, ThreadPoolExecutor(1) as thread:
        changing = thread.submit(getattr(own, change))
        with pytest.raises(TimeoutError):
            changing.result(0.3)
        own.lock.release()
        changing.result(30)
        own.lock.acquire()


def test_a_least_length_where_every_token_ends_an_answer(made):
    ends = {"stop_token_ids": tuple(range(VOCAB)), "ignore_eos": False}
    with pytest.raises(UserError, match="min_new_tokens: every token ends an answer"):
        made.generate(PROMPTS[:1], with_options(min_new_tokens=2, **ends))
    rollout = made.generate(PROMPTS[:1], with_options(**ends))
    assert [len(answer) for answer in rollout.token_ids] == [1, 1]
