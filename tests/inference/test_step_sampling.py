"""A captured step's draws against those of the plain loop, which are tested against float64."""

from dataclasses import replace

import pytest
import torch

from dschat.distributed import RankGroup
from dschat.inference.protocol import SamplingParams
from dschat.inference.sampler import Sampler, StepSampling
from dschat.inference.sequence import Prompt, Sequence

CPU = torch.device("cpu")
VOCAB, NUM_TOKENS = 5000, 4990  # drawn on two levels; the head has more rows than the tokenizer
KINDS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"top_k": 9},
    {"top_p": 0.7},
    {"min_p": 0.3, "temperature": 1.4},
    {"top_k": 40, "top_p": 0.6, "min_p": 0.02, "temperature": 0.8},
]
MANY = tuple(range(1, VOCAB, 7)) + (VOCAB + 5, -1)


def drawn(sampling, stops, step, logits):
    """What both draw for rows of different prompts, samples and ages."""
    sequences = [
        Sequence(Prompt([1, 2], 1000 * row, 3, 50), row % 3, answer=[4] * (row % 11))
        for row in range(len(logits))
    ]
    plain = Sampler(sampling, frozenset(stops), NUM_TOKENS, CPU, RankGroup())
    kind = step.load(sampling, plain.stops, lambda work: work())
    prompt, sample, age = (
        torch.tensor(x)
        for x in (
            [s.prompt.number for s in sequences],
            [s.sample for s in sequences],
            [len(s.answer) for s in sequences],
        )
    )
    too_short = age < sampling.min_new_tokens
    got = step.draw(logits, kind, (prompt, sample, age), too_short, NUM_TOKENS)
    ends = step.is_stop(got[0], kind).tolist() if kind.num_stops else None
    return [x.tolist() for x in got], plain.draw(logits, [(s, 0) for s in sequences]), ends


@pytest.mark.parametrize("stops", [(), (3, 17), MANY])
@pytest.mark.parametrize("options", KINDS)
def test_draws_are_those_of_the_plain_loop(options, stops):
    logits = 3 * torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[:, [3, 17, 8]] += 9  # stop ids are drawn, or would be
    step = StepSampling(CPU)
    for seed, least in ((5, 0), (6, 7)):
        sampling = SamplingParams(seed=seed, min_new_tokens=least, **options)
        (tokens, logprobs), expected, ends = drawn(sampling, stops, step, logits)
        assert tokens == expected[0]
        assert logprobs == pytest.approx(expected[1], abs=2e-6)
        assert ends == ([token in stops for token in tokens] if stops else None)
        if stops:
            assert any(ends) == (least == 0 or any(row % 11 >= 7 for row in range(40)))


def test_numbers_are_data():
    """Samplings that differ in numbers share a kind; those that take other operators do not."""
    step, stops = StepSampling(CPU), [1, 2]
    base = SamplingParams(temperature=0.7, top_p=0.9, min_p=0.1, min_new_tokens=2)

    def kind(ids=stops, **changes):
        return step.load(replace(base, **changes), ids, lambda work: work())

    same = {"seed": 9}, {"temperature": 1.6}, {"top_p": 0.3}, {"min_p": 0.4}, {"min_new_tokens": 5}
    assert {kind(**changes) for changes in same} == {kind([4, 5, 6])} == {kind()}
    others = [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 1.0}, {"min_p": 0.0}]
    others += [{"top_k": 3}, {"top_k": 4}, {"min_new_tokens": 0}, {"ids": []}]
    kinds = {kind(**changes) for changes in others}
    assert len(kinds) == len(others)
    assert kind() not in kinds
