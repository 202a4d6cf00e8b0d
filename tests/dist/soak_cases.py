"""Many rollouts of one actor, with steps in between."""

import os
import random
from pathlib import Path
from typing import Any

import psutil
from rollout_cases import _actor, _form_options
from step_cases import Case

import dschat.distributed as dist
from dschat.inference.protocol import Rollout, SamplingParams

from families import EOS, POSITIONS, VOCAB, cache_gib  # isort: skip


def differing(got: Rollout, expected: Rollout) -> tuple[int, int]:
    """Answers that differ, and among the others those that differ after log-probs that agree: a
    draw may fall between two roundings of a probability.
    """
    wrong = near = 0
    pairs = zip(got.token_ids, expected.token_ids, got.logprobs, expected.logprobs, strict=True)
    for ours, theirs, our_logprobs, their_logprobs in pairs:
        if ours == theirs:
            continue
        common = len(os.path.commonprefix([ours, theirs]))
        both = zip(our_logprobs[:common], their_logprobs[:common], strict=True)
        agree = all(abs(a - b) < 1e-4 for a, b in both)
        wrong, near = wrong + (not agree), near + agree
    return wrong, near


def run_soak(case: Case, models: Path, out: Path) -> dict[str, Any]:
    """Random rollouts on a cache far too small, steps in between; a second form has room."""
    options = _form_options(case)
    rollouts = options.pop("rollouts")
    actor = _actor(case)
    roomy = actor.form(max_num_seqs=64)
    gib = cache_gib(roomy.enter(0), POSITIONS + 16) / options.get("tp_size", 1)
    pressed = {"page_size": 4, "kv_cache_gib": gib, "max_num_seqs": 6, "max_num_batched_tokens": 21}
    tight = actor.form(**options | pressed)
    alike, mine = random.Random(7), random.Random(dist.rank())  # ranks bring other prompts
    preemptions, wrong, near, reasons, memory = 0, [], 0, set(), []
    for i in range(rollouts):
        for _ in range(alike.choice([0, 0, 1, 2])):
            actor.step()
        sampling, prompts = _random_sampling(alike, i), _random_prompts(mine)
        numbers = mine.sample(range(1000), len(prompts))
        generator = tight.enter(actor.version)
        got = generator.generate(prompts, sampling, numbers)
        preemptions += generator.stats.preemptions
        assert generator.cache.num_free == generator.cache.num_pages
        reasons |= set(got.finish_reasons)
        _check_ends(got, sampling)
        tight.leave()
        expected = roomy.enter(actor.version).generate(prompts, sampling, numbers)
        roomy.leave()
        near += (differ := differing(got, expected))[1]
        if len(got) != len(prompts) * sampling.n or differ[0]:
            wrong.append(i)
        memory.append(psutil.Process().memory_info().rss)
    mine = {"wrong": wrong, "near": near, "preemptions": preemptions, "memory": memory}
    mine |= {"reasons": sorted(reasons)}
    return {"ranks": dist.gather_objects(mine), "steps": actor.version}


def _random_sampling(rng: random.Random, seed: int) -> SamplingParams:
    length = rng.choice([1, 6, 20])
    return SamplingParams(
        length,
        min_new_tokens=rng.choice([0, 0, min(3, length)]),
        n=rng.choice([1, 1, 3]),
        seed=seed,
        temperature=rng.choice([0.0, 0.7, 1.0]),
        top_p=rng.choice([1.0, 0.9]),
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=tuple(rng.sample(range(1, VOCAB), rng.choice([0, 1, 6]))),
    )


def _check_ends(rollout: Rollout, sampling: SamplingParams) -> None:
    """An answer has one end, at its last token, or as many tokens as it may have."""
    ends = sampling.end_ids((EOS,))
    for ids, reason in zip(rollout.token_ids, rollout.finish_reasons, strict=True):
        assert not ends & set(ids[:-1])
        assert (ids[-1] in ends) == (reason == "stop")
        assert reason == "stop" or len(ids) == sampling.max_new_tokens


def _random_prompts(rng: random.Random) -> list[list[int]]:
    return [
        [rng.randrange(VOCAB) for _ in range(rng.randint(1, 36))]
        for _ in range(rng.choice([0, 1, 3, 8]))
    ]


RUNNERS = {"soak": run_soak}
