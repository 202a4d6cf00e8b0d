"""Requests of different sampling, answered by captured decode steps in the engine's thread."""

import asyncio
import random

from captures import on_graphs, use
from families import PROMPTS, engine

from dschat.inference import SamplingParams
from dschat.inference.requests.sequence import Request
from dschat.serving.worker import EngineWorker

STOPS = (3, 17, 40)


def requests(count):
    rng = random.Random(count)
    return [
        Request(
            rng.choice(PROMPTS),
            SamplingParams(
                max_new_tokens=rng.choice([1, 9, 20]),
                n=rng.choice([1, 2]),
                seed=i,
                temperature=rng.choice([0.0, 0.6, 1.0]),
                top_p=rng.choice([1.0, 0.7]),
                stop_token_ids=rng.choice([(), STOPS]),
            ),
        )
        for i in range(count)
    ]


async def answered(worker, asked, cancelled):
    """The tokens of each request's answers; those ``cancelled`` after some tokens get no more."""
    worker.start()
    tokens, got = asyncio.Queue(), {}
    handles = [worker.submit(tokens, request) for request in asked]
    answers = sum(r.sampling.n for r in asked if r not in cancelled)
    try:
        while answers:
            token = await asyncio.wait_for(tokens.get(), 60)
            assert not isinstance(token, Exception)
            request = token.handle.request
            got.setdefault((request, token.sample), []).append(token)
            if request in cancelled:
                worker.cancel(token.handle)
            else:
                answers -= token.finish_reason is not None
    finally:
        for handle in handles:
            worker.cancel(handle)
        worker.close()
    return got


def test_answers_are_those_of_each_alone(monkeypatch, module_of):
    use(monkeypatch)
    plain = engine(module_of("llama"))
    made, asked = on_graphs(module_of("llama"), page_size=4), requests(40)
    worker = EngineWorker(made, max_waiting=100)
    got = asyncio.run(answered(worker, asked, cancelled := asked[::7]))
    for request in asked:
        expected = plain.generate([request.ids], request.sampling)
        for sample, (ids, _, reason) in enumerate(expected):
            tokens = got.get((request, sample), [])
            if request in cancelled:
                assert [t.id for t in tokens] == ids[: len(tokens)]
            else:
                assert [t.id for t in tokens] == ids
                assert [t.finish_reason for t in tokens] == [None] * (len(ids) - 1) + [reason]
    assert made.cache.num_free == made.cache.num_pages
    assert worker.stats.decode_steps > 10
