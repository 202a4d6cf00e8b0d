"""Counts what the captured decode steps of an engine do on a fake CUDA device."""

import dataclasses
from collections import Counter

from fake_cuda import WAITS, fake_cuda, fake_engine

from dschat.inference import SamplingParams

PROMPTS = [[5], [7, 8, 9, 10, 11, 12, 13], list(range(2, 32)), [20, 21, 22]]
SAMPLED = SamplingParams(max_new_tokens=4, seed=1, ignore_eos=True)


def decode_step(config, prompts=PROMPTS, sampling=SAMPLED, **knobs):
    """What one token more costs: the `Counter` of its captured step, and of all around it."""
    counts = []
    with fake_cuda() as watch:
        made = fake_engine(watch, config, **knobs)
        for num_tokens in (2, 2, 3):  # the first one makes decoder and graphs
            watch.counts.clear()
            fewest = num_tokens if sampling.min_new_tokens else 0  # stops are forbidden to the end
            lengths = {"max_new_tokens": num_tokens, "min_new_tokens": fewest}
            made.generate(prompts, dataclasses.replace(sampling, **lengths))
            counts.append(Counter(watch.counts))
    counts[-1].subtract(counts[-2])
    return [
        Counter({name: n for (inside, name), n in counts[-1].items() if inside == captured and n})
        for captured in (True, False)
    ]


def operators(counts):
    return sum(counts.values()) - waits(counts)


def waits(counts):
    return sum(counts[name] for name in WAITS)
