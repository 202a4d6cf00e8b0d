"""Requests that arrive, end and are cancelled while others run."""

import random

import numpy as np
import pytest
import torch
from families import PROMPTS, VOCAB, engine

from dschat.config import UserError
from dschat.inference import SamplingParams
from dschat.inference.open_batch import OpenBatch


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
    """The tokens of each sample, and log-probs."""
    found = {}
    for sequence, _, finished in events:
        if sequence.prompt is request and finished:
            found[sequence.sample] = (sequence.answer, sequence.logprobs)
    return [found[i] for i in sorted(found)]


@pytest.mark.parametrize("sizes", [{}, {"max_num_seqs": 3, "page_size": 4}])
@pytest.mark.parametrize("seed", [0, 1])
def test_answers_are_those_of_requests_alone(sizes, seed, module_of):
    rng, module = random.Random(seed), module_of("llama")
    made, alone = engine(module, **sizes), engine(module)
    batch, events, arriving = OpenBatch(made), [], 30
    kept, cancelled = [], []
    while arriving or batch.has_work:
        if arriving and rng.random() < 0.6:
            arriving -= 1
            ids, sampling = rng.choice(PROMPTS), random_sampling(rng)
            request = batch.add(ids, sampling)
            (cancelled if rng.random() < 0.3 else kept).append(request)
        for request in [r for r in cancelled if rng.random() < 0.2]:
            batch.cancel(request)
        if batch.has_work:
            events += batch.step()
    assert made.cache.num_free == made.cache.num_pages
    assert len(kept) > 10
    for request in kept:
        expected = alone.generate([request.ids], request.sampling)
        got = answers_of(request, events)
        assert [tokens for tokens, _ in got] == expected.token_ids
        for (_, logprobs), others in zip(got, expected.logprobs, strict=True):
            assert logprobs == pytest.approx(others, abs=5e-5)


def test_one_sample_is_cancelled(module_of):
    made = engine(module_of("llama"), max_num_seqs=2)
    batch = OpenBatch(made)
    sampling = SamplingParams(max_new_tokens=10, n=4, seed=1, ignore_eos=True)
    request = batch.add(PROMPTS[0], sampling)
    events = batch.step()
    for sample in (0, 3):  # one that runs, one that waits
        batch.cancel(request, sample)
    while batch.has_work:
        events += batch.step()
    expected = engine(module_of("llama")).generate([PROMPTS[0]], sampling).token_ids
    assert [tokens for tokens, _ in answers_of(request, events)] == expected[1:3]
    assert made.cache.num_free == made.cache.num_pages


def test_likeliest_tokens(module_of):
    module = module_of("llama")
    batch = OpenBatch(engine(module))
    request = batch.add(PROMPTS[0], SamplingParams(3, temperature=0.5, seed=2), num_top=4)
    plain = batch.add(PROMPTS[1], SamplingParams(3, temperature=0.5, seed=2))
    while batch.has_work:
        for sequence, *_ in batch.step():
            answer = sequence.answer if sequence.prompt is request else []
    assert not plain.top
    with torch.no_grad():
        logits = module(torch.tensor([PROMPTS[0] + answer])).logits[0].double().numpy() / 0.5
    for i, top in enumerate(request.top[0]):
        row = logits[len(PROMPTS[0]) - 1 + i]
        logprobs = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        best = np.argsort(-logprobs)[:4]
        assert [token for token, _ in top] == best.tolist()
        assert [value for _, value in top] == pytest.approx(logprobs[best], abs=1e-4)


def test_a_prompt_that_cannot_be_answered(module_of):
    batch = OpenBatch(engine(module_of("llama")))
    with pytest.raises(UserError, match="prompt 0 is empty"):
        batch.add([], SamplingParams(3))
    with pytest.raises(UserError, match="exceeds"):
        batch.add([1] * 10, SamplingParams(10**6))
    assert not batch.has_work
