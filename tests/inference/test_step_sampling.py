"""A captured step's draws against those of the plain loop, which are tested against float64."""

import itertools
from dataclasses import replace

import pytest
import torch
from quick import each_once

from dschat.distributed import RankGroup
from dschat.inference.protocol import SamplingParams
from dschat.inference.requests.sampler import Sampler, SamplingKind, StepSampling
from dschat.inference.requests.sequence import Request, Sequence

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
STOPS = [(), (3, 17), MANY]
ROWS = 40


def logits_of_rows():
    logits = 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[:, [3, 17, 8]] += 9  # stop ids are drawn, or would be
    return logits


def drawn(samplings, step, logits):
    """What both draw for rows of different prompts, samples and ages, and which tokens end them."""
    plain = Sampler(NUM_TOKENS, CPU, RankGroup())
    sequences = []
    for row, sampling in enumerate(samplings):
        request = Request([1, 2], replace(sampling, n=3, max_new_tokens=50), 1000 * row)
        plain.prepare(request, ())
        sequences.append(Sequence(request, row % 3, answer=[4] * (row % 11)))
    kind = SamplingKind.of(sequences)
    step.prepare(kind)
    step.load(sequences, kind, lambda work: work())
    prompt, sample, age = torch.tensor(
        [(s.request.number, s.sample, len(s.answer)) for s in sequences]
    ).unbind(1)
    too_short = age < torch.tensor([s.min_new_tokens for s in samplings])
    got = step.draw(logits, kind, (prompt, sample, age), too_short, NUM_TOKENS)
    ends = step.is_stop(got[0], kind).tolist() if kind.num_stops else [False] * len(samplings)
    return [x.tolist() for x in got], plain.draw(logits, [(s, 0) for s in sequences]), ends


def assert_alike(samplings, step, logits):
    (tokens, logprobs), expected, ends = drawn(samplings, step, logits)
    assert tokens == expected[0]
    assert logprobs == pytest.approx(expected[1], abs=2e-6)
    stops = [s.stop_token_ids for s in samplings]
    assert ends == [token in row for token, row in zip(tokens, stops, strict=True)]
    return ends


@pytest.mark.parametrize(("options", "stops"), each_once(KINDS, STOPS))
def test_draws_are_those_of_the_plain_loop(options, stops):
    logits, step = logits_of_rows(), StepSampling(ROWS, CPU)
    for seed, least in ((5, 0), (6, 7)):
        sampling = SamplingParams(
            seed=seed, min_new_tokens=least, stop_token_ids=stops, ignore_eos=True, **options
        )
        ends = assert_alike([sampling] * ROWS, step, logits)
        if stops:
            assert any(ends) == (least == 0 or any(row % 11 >= 7 for row in range(ROWS)))


def mixed(seed):
    """Every kind beside every other, with a seed of its own, in another order for each ``seed``."""
    cases = list(itertools.product(KINDS, STOPS, (0, 7)))
    order = torch.randperm(len(cases), generator=torch.Generator().manual_seed(seed)).tolist()
    return [
        SamplingParams(
            seed=100 * seed + i,
            min_new_tokens=least,
            stop_token_ids=stops,
            ignore_eos=True,
            **options,
        )
        for i, (options, stops, least) in enumerate(cases[k] for k in order[:ROWS])
    ]


def test_rows_of_different_sampling_share_a_step():
    logits, step = logits_of_rows(), StepSampling(ROWS, CPU)
    for seed in range(3):
        assert any(assert_alike(mixed(seed), step, logits))


def test_a_row_keeps_its_stop_ids_where_the_rows_are_others():
    """Rows with one set fill the whole column; later ones with several must not find it there."""
    logits, step = logits_of_rows(), StepSampling(ROWS, CPU)
    same = [SamplingParams(seed=1, stop_token_ids=(3, 17))] * ROWS
    other = [replace(s, stop_token_ids=(8,)) for s in same[: ROWS // 2]]
    for samplings in (same, other, other + same[len(other) :], same[:5], same):
        assert any(assert_alike(samplings, step, logits[: len(samplings)]))


def test_greedy_rows_take_the_first_of_equal_tokens():
    """Beside rows that draw, as in a batch of their own."""
    logits = torch.zeros(4, VOCAB)
    logits[:, [70, 4000]] = 9.0
    greedy, draws = SamplingParams(temperature=0.0), SamplingParams(top_k=3)
    (tokens, _), expected, _ = drawn([greedy, draws] * 2, StepSampling(4, CPU), logits)
    assert tokens[::2] == expected[0][::2] == [70, 70]


def kind_of(*samplings):
    sampler, sequences = Sampler(NUM_TOKENS, CPU, RankGroup()), []
    for sampling in samplings:
        request = Request([1], sampling)
        sampler.prepare(request, ())
        sequences += request.sequences
    return SamplingKind.of(sequences)


BASE = SamplingParams(
    temperature=0.7, top_p=0.9, min_p=0.1, min_new_tokens=2, stop_token_ids=(1, 2)
)


def test_numbers_are_data():
    """Samplings that differ in numbers share a kind; those that take other operators do not."""

    def kind(**changes):
        return kind_of(replace(BASE, **changes))

    same = {"seed": 9}, {"temperature": 1.6}, {"top_p": 0.3}, {"min_p": 0.4}, {"min_new_tokens": 5}
    assert {kind(**changes) for changes in same} == {kind(stop_token_ids=(4, 5, 6))} == {kind()}
    assert kind(top_k=33) == kind(top_k=64)
    others = [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 1.0}, {"min_p": 0.0}]
    others += [{"top_k": 3}, {"top_k": 9}, {"min_new_tokens": 0}, {"stop_token_ids": ()}]
    kinds = {kind(**changes) for changes in others}
    assert len(kinds) == len(others)
    assert kind() not in kinds


def test_batches_of_different_numbers_have_two_kinds():
    plain, greedy = SamplingParams(), SamplingParams(temperature=0.0, top_k=7)
    cool, stops = replace(plain, temperature=0.5), {"stop_token_ids": (1, 2), "ignore_eos": True}
    assert kind_of(plain, greedy) == kind_of(cool, plain) == kind_of(greedy, cool, plain)
    truncated = [replace(plain, top_k=5), replace(plain, top_p=0.5), replace(cool, min_p=0.1)]
    kinds = {kind_of(t, other) for t in truncated for other in (plain, greedy, cool, *truncated)}
    kinds -= {kind_of(t) for t in truncated}
    assert len(kinds) == 1
    assert kind_of(plain, greedy) not in kinds
    assert kind_of(plain, replace(plain, **stops)) == kind_of(replace(plain, **stops))
    assert kind_of(greedy, replace(greedy, top_p=0.5)).params.temperature == 0
