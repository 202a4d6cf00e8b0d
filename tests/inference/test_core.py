"""Requests that arrive, end and are cancelled while others run."""

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from captures import LateQueue, on_graphs, steps_of, use
from fake_cuda import WAITS, fake_cuda, fake_engine
from families import CONFIGS, PROMPTS, VOCAB, engine
from quick import some

from dschat.inference import SamplingParams
from dschat.inference.requests.sequence import Request


def random_sampling(rng):
    return SamplingParams(
        max_new_tokens=rng.choice([1, 5, 12]),
        n=rng.choice([1, 1, 3]),
        seed=rng.randrange(2**31),
        temperature=rng.choice([0.0, 0.7, 1.0, 1.0]),
        top_p=rng.choice([1.0, 1.0, 0.8]),
        top_k=rng.choice([0, 0, 5]),
        min_new_tokens=rng.choice([0, 0, 1]),
        stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 4]))),
        ignore_eos=rng.random() < 0.3,
    )


def answers_of(request, events):
    """The tokens of each complete sample, and log-probs, as the events tell them."""
    found = {}
    for event in events:
        if event.sequence.request is request:
            tokens, logprobs = found.setdefault(event.sequence.sample, ([], []))
            tokens.append(event.token)
            logprobs.append(event.logprob)
    over = {e.sequence.sample for e in events if e.sequence.request is request and e.is_last}
    return [found[i] for i in sorted(over)]


def check_requests(made, alone, rng, count, num_top=0):
    """``count`` requests that arrive, end and are cancelled: answers are those of each alone."""
    core, events, arriving = made.core(), [], count
    kept, cancelled = [], []
    while arriving or core.has_work:
        if arriving and rng.random() < 0.6:
            arriving -= 1
            top = num_top if rng.random() < 0.1 else 0
            request = Request(rng.choice(PROMPTS), random_sampling(rng), num_top=top)
            core.add(request)
            (cancelled if rng.random() < 0.3 else kept).append(request)
        for request in [r for r in cancelled if rng.random() < 0.2]:
            core.cancel(request)
        if core.has_work:
            events += core.step()
    assert made.cache.num_free == made.cache.num_pages
    assert len(kept) > count / 3
    for request in kept:
        expected = alone.generate([request.ids], request.sampling)
        got = answers_of(request, events)
        assert [tokens for tokens, _ in got] == expected.token_ids
        for (_, logprobs), others in zip(got, expected.logprobs, strict=True):
            assert logprobs == pytest.approx(others, abs=5e-5)
        for sample, tops in request.top.items():
            assert len(tops) == len(expected.token_ids[sample])
    return core


SIZES = [{}, {"max_num_seqs": 3, "page_size": 4}]


@pytest.mark.parametrize(
    ("sizes", "queue", "lag"),
    some(product(SIZES, [None, LateQueue], [2, 1, 0]), [(SIZES[1], LateQueue, 2)]),
)
def test_answers_are_those_of_requests_alone(sizes, queue, lag, monkeypatch, engines):
    """Step by step, and captured; beside one with ``num_top`` all decode step by step."""
    plain, graphs = engines("llama", **sizes)
    alone, _ = engines("llama")
    use(monkeypatch, lag, queue and queue())
    check_requests(plain, alone, random.Random(lag), 24)
    core = check_requests(graphs, alone, random.Random(lag), 24, num_top=2)
    assert core.stats.decode_steps > 15
    kinds = {kind for *_, kind in steps_of(graphs)}
    assert any(kind.has_greedy for kind in kinds)
    assert sum(kind.has_greedy for kind in kinds) <= 2 * 4  # with stop ids or not, forbidden or not


@pytest.mark.slow
def test_such_a_step_waits_for_nothing():
    """On a fake CUDA device: no read and no copy that waits, in or between decode steps."""
    base = SamplingParams(8, min_new_tokens=2)
    samplings = [
        replace(base, temperature=t, top_p=p, seed=i, stop_token_ids=(60 + i,))
        for i, (t, p) in enumerate([(0.0, 1.0), (0.7, 0.9), (1.0, 1.0), (1.3, 0.5)])
    ]
    with fake_cuda() as watch:
        core = fake_engine(watch, CONFIGS["llama"](), page_size=64).core()
        for ids, sampling in zip(PROMPTS, samplings, strict=False):
            core.add(Request(ids, sampling))
        while core.stats.decode_steps < 2:
            core.step()
        watch.counts.clear()
        while core.stats.decode_steps < 6:
            core.step()
    waits = [name for _, name in watch.counts if name in WAITS]
    assert not waits
    assert watch.counts[True, "sort"] + watch.counts[True, "argmax"] > 0


@pytest.mark.slow
def test_a_thousand_requests(engines):
    plain, graphs = engines("gpt2", max_num_seqs=16, page_size=8)
    check_requests(graphs, plain, random.Random(3), 1000)


@pytest.mark.parametrize("make", [engine, on_graphs])
def test_one_sample_is_cancelled(make, module_of):
    made = make(module_of("llama"), max_num_seqs=2)
    core = made.core()
    sampling = SamplingParams(max_new_tokens=10, n=4, seed=1, ignore_eos=True)
    request = Request(PROMPTS[0], sampling)
    core.add(request)
    events = core.step()
    if make is on_graphs:
        events += core.step()  # is under way
    for sample in (0, 3):  # one that runs, one that waits
        core.cancel(request, sample)
    events += core.events()
    expected = engine(module_of("llama")).generate([PROMPTS[0]], sampling).token_ids
    assert [tokens for tokens, _ in answers_of(request, events)] == expected[1:3]
    assert made.cache.num_free == made.cache.num_pages


@pytest.mark.parametrize("sample", [None, 1])
@pytest.mark.parametrize("steps", [2, 4])
def test_nothing_is_heard_of_what_was_cancelled(steps, sample, monkeypatch, module_of):
    """Though its tokens are drawn: captured steps are read late."""
    use(monkeypatch, 2)
    made = on_graphs(module_of("llama"), max_num_seqs=8)
    core = made.core()
    sampling = SamplingParams(max_new_tokens=6, n=2, seed=1, stop_token_ids=(999,))
    gone, kept = Request(PROMPTS[0], sampling), Request(PROMPTS[1], sampling, 1)
    core.add_all([gone, kept], None)
    for _ in range(steps):
        core.step()
    core.cancel(gone, sample)
    later = list(core.events())
    heard = {e.sequence.sample for e in later if e.sequence.request is gone}
    assert heard == (set() if sample is None else {0})
    expected = engine(module_of("llama")).generate([PROMPTS[1]], sampling, [1]).token_ids
    assert kept.rollout().token_ids == expected
    again = Request(PROMPTS[0], sampling)  # in a row of the same number
    core.add(again)
    assert sum(event.is_last for event in core.events()) == 2


def test_likeliest_tokens(module_of):
    module = module_of("llama")
    core = engine(module).core()
    sampling = SamplingParams(3, temperature=0.5, seed=2)
    request, plain = Request(PROMPTS[0], sampling, num_top=4), Request(PROMPTS[1], sampling)
    for each in (request, plain):
        core.add(each)
    assert sum(event.is_last for event in core.events()) == 2
    assert not plain.top
    answer = request.sequences[0].answer
    with torch.no_grad():
        logits = module(torch.tensor([PROMPTS[0] + answer])).logits[0].double().numpy() / 0.5
    for i, top in enumerate(request.top[0]):
        row = logits[len(PROMPTS[0]) - 1 + i]
        logprobs = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        best = np.argsort(-logprobs)[:4]
        assert [token for token, _ in top] == best.tolist()
        assert [value for _, value in top] == pytest.approx(logprobs[best], abs=1e-4)
