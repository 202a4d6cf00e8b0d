"""Sampling against exact distributions worked out here in float64, and its random numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dschat.config import UserError
from dschat.rollout import SamplingParams
from dschat.sampling import inverse_cdf, sample, truncate, uniforms

DRAWS = 40_000
LOGITS = np.array([2.0, 1.5, 1.4, 0.3, 0.0, -0.5, -1.0, -3.0, -9.0, 1.45])


def exact(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution after temperature, then top-k, top-p and min-p, token by token."""
    p = np.exp(logits / temperature - np.max(logits / temperature))
    p /= p.sum()
    order = np.argsort(-p)
    kept = list(order[:top_k] if top_k else order)
    mass = sum(p[kept])
    nucleus, total = [], 0.0
    for token in kept:
        if total >= top_p * mass and nucleus:
            break
        nucleus.append(token)
        total += p[token]
    best = max(p[nucleus])
    result = np.zeros_like(p)
    for token in nucleus:
        if p[token] >= min_p * best:
            result[token] = p[token]
    return result / result.sum()


def counters(count):
    index = torch.arange(count)
    return index // 100, index % 10, index // 10 % 10


def draw(seed=0, **options):
    params = SamplingParams(seed=seed, **options)
    uniform = uniforms(seed, *counters(DRAWS))
    logits = torch.tensor(LOGITS, dtype=torch.float32).expand(DRAWS, -1)
    return sample(logits, params, uniform)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 6, "top_p": 0.9, "min_p": 0.3},
        {"top_p": 1e-9},
        {"top_k": 1},
        {"top_k": 99},
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(options):
    expected = exact(LOGITS, **options)
    ids, logprobs = draw(seed=1, **options)
    counts = np.bincount(ids.numpy(), minlength=len(LOGITS))
    assert counts[expected == 0].sum() == 0, "drew a token that was excluded"
    kept = expected > 0
    chi_squared = ((counts - DRAWS * expected)[kept] ** 2 / (DRAWS * expected[kept])).sum()
    # 99.9% quantile of chi-squared with 9 degrees of freedom, the most there are.
    assert chi_squared < 27.9
    raw = np.log(exact(LOGITS, temperature=options.get("temperature", 1.0)))
    np.testing.assert_allclose(logprobs.numpy(), raw[ids.numpy()], atol=1e-5)


def test_greedy_takes_the_best_and_reports_it_at_temperature_one():
    ids, logprobs = sample(torch.from_numpy(LOGITS)[None], SamplingParams(temperature=0), None)
    assert ids.tolist() == [0]
    assert logprobs.item() == pytest.approx(np.log(exact(LOGITS))[0], abs=1e-6)


def test_ties_keep_at_most_k():
    kept = truncate(torch.full((2, 8), 0.125), SamplingParams(top_k=3))
    assert (kept > 0).sum(1).tolist() == [3, 3]


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-8, 0.1, 1.0]), min_size=1, max_size=40),
    uniform=st.one_of(st.sampled_from([0.0, 1 - 2.0**-53]), st.floats(0, 1, exclude_max=True)),
)
def test_never_a_token_of_probability_zero(weights, uniform):
    probs = torch.tensor([weights])
    if not probs.sum() > 0:
        return
    token = inverse_cdf(probs, torch.tensor([uniform], dtype=torch.float64)).item()
    assert probs[0, token] > 0


def test_a_vocabulary_of_fifty_thousand_with_most_of_it_excluded():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 50_000, generator=generator)
    params = SamplingParams(top_k=5)
    for uniform in (0.0, 0.5, 1 - 2.0**-53):
        ids, _ = sample(logits, params, torch.full((64,), uniform, dtype=torch.float64))
        assert (logits.topk(5).indices == ids.unsqueeze(1)).any(1).all()


def test_uniforms_are_uniform_and_independent_across_counters():
    size = 24
    axes = torch.meshgrid(*[torch.arange(size)] * 3, indexing="ij")
    values = uniforms(17, *(axis.reshape(-1) for axis in axes)).reshape(size, size, size)
    flat = values.flatten().numpy()
    assert 0 <= flat.min() < flat.max() < 1
    assert len(np.unique(flat)) == size**3
    counts, _ = np.histogram(flat, bins=64, range=(0, 1))
    expected = size**3 / 64
    assert ((counts - expected) ** 2 / expected).sum() < 103.4  # 99.9% of chi-squared, 63 degrees
    limit = 4 / np.sqrt(size**3)
    for axis in range(3):  # neighbours along every counter are uncorrelated
        a, b = (
            values.narrow(axis, 0, size - 1).flatten(),
            values.narrow(axis, 1, size - 1).flatten(),
        )
        assert abs(np.corrcoef(a, b)[0, 1]) < limit
    for other in (18, 17 + (1 << 40), -17):
        again = uniforms(other, *(axis.reshape(-1) for axis in axes)).numpy()
        assert abs(np.corrcoef(flat, again)[0, 1]) < limit
    swapped = (
        values.permute(1, 0, 2).flatten().numpy()
    )  # prompt 1 sample 2 is not prompt 2 sample 1
    off_diagonal = swapped != flat
    assert off_diagonal.mean() > 0.9


def test_uniforms_depend_on_nothing_else():
    prompt, number, position = counters(50)
    whole = uniforms(5, prompt, number, position)
    assert torch.equal(whole[7:9], uniforms(5, prompt[7:9], number[7:9], position[7:9]))


def test_training_seeds_are_accepted():
    """Step 3's seed grows with every iteration; a large one must not overflow."""
    large = uniforms(2**31 * 1_000_003 + 5, *counters(10))
    assert large.dtype == torch.float64


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1},
        {"n": 0},
    ],
)
def test_bad_parameters_are_named(options):
    with pytest.raises(UserError, match=next(iter(options))):
        SamplingParams(**options)
