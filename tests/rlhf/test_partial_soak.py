"""Two hundred iterations of partial rollouts on a cache far too small: nothing leaks or is lost.

Batches change in size, lengths and limits; weights change in between. Prefix cache and early
scoring are on, other calls interrupt, and the run is resumed several times.
"""

import json
import random
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from families import EOS, POSITIONS, VOCAB, build, cache_gib, empty_engine, stream
from tiny_models import tokenizer

from dschat.config import RLHFConfig
from dschat.data.batches import PromptTable
from dschat.hybrid.rollout_form import Refresh
from dschat.inference import SamplingParams
from dschat.rewards.reward_functions import RewardFunctions
from dschat.rlhf.collector import Collector
from dschat.rlhf.prompts import PromptQueue
from dschat.rlhf.rollout_policies import PartialRollouts

N, LIMIT, STALENESS = 3, 24, 2
SYSTEM = list(range(10, 21))  # most prompts begin with it


def tight_engine(module):
    gib = cache_gib(empty_engine(module.config, max_num_seqs=8), POSITIONS + 16)
    sizes = {"max_num_seqs": 8, "page_size": 4, "max_num_batched_tokens": 21}
    return empty_engine(module.config, kv_cache_gib=gib, **sizes)


def stub_of(made):
    """What partial rollouts use of an RLHF engine."""

    @contextmanager
    def rollout_mode():
        yield made

    return SimpleNamespace(
        rollout_mode=rollout_mode,
        rollout=SimpleNamespace(last_refresh=Refresh()),
        tokenizer=tokenizer(pad_is_eos=True),
        reward=None,
        teacher=None,
    )


def sums(answer_ids):
    return [float(sum(ids)) for ids in answer_ids]


def check_answers(e, sampling):
    assert e.numbers.tolist() == list(range(e.num_sequences))
    for row in range(e.num_sequences):
        first, end = int(e.prompt_lengths[row]), int(e.lengths[row])
        answer = e.input_ids[row, first:end].tolist()
        ends = sampling.end_ids((EOS,))
        assert 1 <= len(answer) <= LIMIT
        assert not ends & set(answer[:-1])
        assert (answer[-1] in ends) == bool(e.finished[row])
        assert e.finished[row] or len(answer) == LIMIT
        assert e.scores[row] == sum(answer)


def under_way(collector):
    (part,) = collector.policy.state_dict()["under_way"]
    return part["open"]


def soak(iterations, seed):
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    module = build("llama")
    made = tight_engine(module)
    stub, fresh = stub_of(made), iter(range(10**6))
    args = RLHFConfig(reward_pool="thread", reward_workers=2)
    functions = RewardFunctions(args, [sums])

    def prompt():
        """Unlike all others, so that answers are known by it."""
        number = next(fresh)
        own = [number // 50 % 50 + 5, number % 50 + 5]
        return draw.choice([SYSTEM, SYSTEM, draw.choices(range(5, VOCAB), k=7), []]) + own

    asked, answered, totals = Counter(), Counter(), Counter()

    def batches():
        while True:
            batch = [prompt() for _ in range(3)]
            asked.update(map(tuple, batch))
            yield batch

    def source(state=None):
        queue = PromptQueue(drawn)
        made = Collector(stub, args, functions, PartialRollouts(0.5, STALENESS, queue))
        if state is not None:
            made.load_state_dict(state)
        return made

    drawn = batches()
    collector = source()
    for i in range(iterations):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        made.weights.load(stream(module))
        wanted = draw.randint(3, 6)
        prompts = [prompt() for _ in range(wanted)]
        asked.update(map(tuple, prompts))
        sampling = SamplingParams(LIMIT, n=N, seed=i, stop_token_ids=(1, 2))
        e, scoring = collector.collect(PromptTable(prompts), sampling)
        assert made.cache.num_free == made.cache.num_pages
        for name in ("preemptions", "cached_tokens"):
            totals[name] += getattr(made.stats, name)
        e = collector.score(e, scoring)
        metrics = e.metrics
        ages = [prompt["staleness"] for prompt in under_way(collector)]
        assert metrics["rollout/staleness_max"] <= STALENESS
        assert max(ages, default=0) <= STALENESS
        assert metrics["rollout/carried_prompts"] == len(ages) <= 3
        totals["stale"] += metrics["rollout/staleness_max"] == STALENESS
        check_answers(e, sampling)
        assert e.num_sequences == wanted * N
        answered.update(
            tuple(e.input_ids[row, : int(e.prompt_lengths[row])].tolist())
            for row in range(0, e.num_sequences, N)
        )
        if i % 3 == 0:  # an evaluation, twice: the second finds pages
            held_out = [SYSTEM + [draw.randrange(VOCAB)] for _ in range(draw.randint(1, 4))]
            asks = SamplingParams(draw.choice([1, 8, 20]), n=draw.choice([1, 2, 4]), temperature=0)
            first, second = (made.generate(held_out, asks) for _ in range(2))
            assert first.token_ids == second.token_ids
            assert made.cache.num_free == made.cache.num_pages
        if i % 40 == 39:
            collector = source(json.loads(json.dumps(collector.state_dict())))
    functions.close()
    lost = asked - answered
    assert answered <= asked  # each prompt once
    waiting = [*under_way(collector), *collector.state_dict()["left"]["ids"]]
    assert lost.total() == len(waiting)
    for name in ("preemptions", "cached_tokens"):
        assert totals[name] > iterations // 4, name
    assert totals["stale"] > 0


def test_a_short_soak():
    soak(10, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_two_hundred_iterations(seed):
    soak(200, seed)
