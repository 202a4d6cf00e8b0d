"""Drawing tokens against exact distributions worked out in float64, and what is asked for."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import some
from sampling_oracle import (
    ALMOST_ONE,
    DRAWS,
    EVERY_WAY,
    FEW,
    MANY,
    assert_drawn_from,
    counters,
    exact,
    log_softmax,
    rows_of,
)

from dschat.config import UserError
from dschat.inference.protocol import SamplingParams
from dschat.inference.sampling import inverse_cdf, sample, truncate, uniforms

KNOBS = [
    {},
    {"temperature": 0.7},
    {"top_k": 3},
    {"top_k": 1},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 6, "top_p": 0.9, "min_p": 0.3},
]
MORE_KNOBS = [
    {"temperature": 1.5},
    {"top_k": 9999},
    {"top_p": 1e-9},
    {"top_k": 6, "top_p": 0.8},
    {"top_p": 0.9, "min_p": 0.3},
]


LOGITS = {"few": FEW, "many": MANY}
OVER_MANY = ({}, KNOBS[-1])  # in the quick suite


@pytest.mark.parametrize(
    ("name", "options"),
    some(
        product(LOGITS, (*KNOBS, *MORE_KNOBS)),
        [("many" if options in OVER_MANY else "few", options) for options in KNOBS],
    ),
    ids=str,
)
def test_draws_follow_the_exact_distribution(name, options):
    logits, uniform = LOGITS[name], uniforms(1, *counters(DRAWS))
    ids, logprobs = sample(rows_of(logits), SamplingParams(**options), uniform)
    assert_drawn_from(ids, exact(logits, **options))
    raw = log_softmax(logits, options.get("temperature", 1.0))
    np.testing.assert_allclose(logprobs.numpy(), raw[ids.numpy()], atol=1e-6)


@pytest.mark.parametrize("options", [{}, *KNOBS[2:], *MORE_KNOBS], ids=str)
def test_forbidden_ids_leave_the_rest_renormalized(options):
    """In the rows named, and before any truncation; log-probs stay those of the raw logits."""
    without = [0, 2, 8]  # the best one, too
    rows = torch.arange(DRAWS) % 2 == 0
    uniform = uniforms(2, *counters(DRAWS))
    ids, logprobs = sample(
        rows_of(FEW), SamplingParams(**options), uniform, (rows, torch.tensor([*without, -1, -1]))
    )
    assert_drawn_from(ids[rows], exact(FEW, **options, without=without))
    assert_drawn_from(ids[~rows], exact(FEW, **options))
    raw = log_softmax(FEW, options.get("temperature", 1.0))
    np.testing.assert_allclose(logprobs.numpy(), raw[ids.numpy()], atol=1e-6)


def test_forbidden_ids_change_no_other_row():
    logits = torch.randn(8, 5003, generator=torch.Generator().manual_seed(3))
    uniform = uniforms(4, *counters(8))
    rows = torch.tensor([True, False] * 4)
    for options in ({}, {"top_k": 20}, {"temperature": 0}):
        params = SamplingParams(**options)
        plain = sample(logits, params, uniform)
        some = sample(logits, params, uniform, (rows, torch.tensor([1, 4999])))
        none = sample(logits, params, uniform, (rows & False, torch.tensor([1, 4999])))
        empty = sample(logits, params, uniform, (rows, torch.tensor([], dtype=torch.int64)))
        for a, b, c, d in zip(plain, some, none, empty, strict=True):
            assert torch.equal(a[~rows], b[~rows])
            assert torch.equal(a, c)
            assert torch.equal(a, d)


def test_a_forbidden_id_may_hold_all_the_mass():
    """Everything else underflows beside it and must be told apart all the same."""
    logits = torch.tensor([[1.0, 300.0, 3.0, 2.0]])
    forbidden = (torch.tensor([True]), torch.tensor([1]))
    raw = log_softmax(logits.numpy())[0]
    for u, token in ((0.0, 0), (0.5, 2), (ALMOST_ONE, 3)):
        uniform = torch.tensor([u], dtype=torch.float64)
        ids, logprobs = sample(logits, SamplingParams(), uniform, forbidden)
        assert ids.item() == token
        assert logprobs.item() == pytest.approx(raw[token], rel=1e-6)
    ids, logprobs = sample(logits, SamplingParams(temperature=0), None, forbidden)
    assert (ids.item(), logprobs.item()) == (2, pytest.approx(raw[2], rel=1e-6))


def test_greedy_takes_the_best_and_reports_it_at_temperature_one():
    ids, logprobs = sample(torch.from_numpy(FEW)[None], SamplingParams(temperature=0), None)
    assert ids.tolist() == [0]
    assert logprobs.item() == pytest.approx(log_softmax(FEW)[0], abs=1e-6)


def test_a_large_vocabulary_follows_the_distribution_too():
    """The two-level walk as it is shipped: 40 blocks and a rest."""
    logits = np.random.default_rng(6).normal(size=5200) * 2
    ids = []
    for chunk in range(10):
        uniform = uniforms(chunk, *counters(DRAWS // 10))
        ids.append(sample(rows_of(logits, DRAWS // 10), SamplingParams(), uniform)[0])
    assert_drawn_from(torch.cat(ids), exact(logits.astype(np.float32)))


# From 4,097 on in two levels, of blocks of 128: the last one may be whole, or shorter.
SIZES = [1, 2, 7, 1000, 4096, 4097, 4223, 4224, 4225, 5000, 50_257]


@pytest.mark.parametrize("size", SIZES)
def test_inverse_cdf_is_the_token_where_the_mass_passes_the_uniform(size):
    generator = torch.Generator().manual_seed(size)
    probs = torch.randn(24, size, generator=generator).mul(3).exp()
    probs[torch.rand(24, size, generator=generator) < 0.3] = 0
    probs[:, -1] += 1e-3
    probs[:4] = 0
    probs[:4, -1] = 1e-30  # everything on the last token
    uniform = torch.rand(24, generator=generator, dtype=torch.float64)
    uniform[::3], uniform[1::3] = 0.0, ALMOST_ONE
    ids = inverse_cdf(probs, uniform)
    assert ids[:4].tolist() == [size - 1] * 4
    assert (probs.gather(1, ids[:, None]) > 0).all()
    for row, token in enumerate(ids.tolist()):
        cdf = np.concatenate([[0], np.cumsum(probs[row].numpy().astype(np.float64))])
        cdf /= cdf[-1]
        assert cdf[token] - 1e-6 <= uniform[row].item() <= cdf[token + 1] + 1e-6
    first = (probs > 0).int().argmax(1)
    assert torch.equal(ids[::3], first[::3])


@pytest.mark.parametrize("size", [5120, 5003])
def test_rounding_in_a_block_leads_to_no_token_without_mass(size):
    """The last mass ends before its block does; in half of the rows the fp32 sum of the block is
    more than its tokens have.
    """
    probs = torch.zeros(200, size)
    start = (size - 1) // 128 * 128
    length = (size - start) * 3 // 4
    generator = torch.Generator().manual_seed(size)
    probs[:, start : start + length] = torch.rand(200, length, generator=generator) + 0.1
    probs[::2, 0] = 1e-6
    ids = inverse_cdf(probs, torch.full((200,), ALMOST_ONE, dtype=torch.float64))
    assert (ids == start + length - 1).all()


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-8, 0.1, 1.0]), min_size=1, max_size=40),
    uniform=st.one_of(st.sampled_from([0.0, ALMOST_ONE]), st.floats(0, 1, exclude_max=True)),
    repeat=st.sampled_from([1, 331]),
)
def test_never_a_token_of_probability_zero(weights, uniform, repeat):
    probs = torch.tensor([weights]).repeat(1, repeat)
    if not probs.sum() > 0:
        return
    token = inverse_cdf(probs, torch.tensor([uniform], dtype=torch.float64)).item()
    assert probs[0, token] > 0


@pytest.mark.parametrize("size", [65, 4097, 5003, 50_257])
def test_a_row_does_not_depend_on_its_batch(size):
    """To the last bit: answers must not change with the batch they are generated in."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(9, size, generator=generator) * torch.linspace(0.3, 8, 9)[:, None]
    uniform = uniforms(6, *counters(9))
    rows = torch.arange(9) % 3 == 0
    for options in EVERY_WAY:
        params = SamplingParams(**options)
        for forbidden in (None, (rows, torch.tensor([3, 60]))):
            ids, logprobs = sample(logits, params, uniform, forbidden)
            for part in ([0], [4], [8], [7, 2], [5, 6, 3, 0, 1]):
                banned = forbidden and (forbidden[0][part], forbidden[1])
                alone = sample(logits[part].clone(), params, uniform[part], banned)
                assert torch.equal(alone[0], ids[part])
                assert torch.equal(alone[1], logprobs[part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1000, 5003])
def test_logprobs_are_exact_for_any_dtype_and_layout(dtype, size):
    generator = torch.Generator().manual_seed(8)
    logits = (torch.randn(6, size, generator=generator) * 4 + 30).to(dtype)
    layouts = [logits, logits.t().contiguous().t(), torch.stack([logits, -logits], -1)[..., 0]]
    layouts.append(logits.repeat(1, 2)[:, :size])
    uniform = uniforms(9, *counters(6))
    for options in EVERY_WAY:
        params = SamplingParams(**options)
        golden = log_softmax(logits.float().numpy(), params.logprob_temperature)
        results = []
        for layout in layouts:
            before = layout.clone()
            forbidden = (torch.ones(6, dtype=torch.bool), torch.tensor([5]))
            for banned in (None, forbidden):
                ids, logprobs = sample(layout, params, uniform, banned)
                assert ids.dtype == torch.int64
                assert logprobs.dtype == torch.float32
                expected = golden[np.arange(6), ids.numpy()]
                np.testing.assert_allclose(logprobs.numpy(), expected, rtol=2e-7, atol=1e-6)
                results.append((ids, logprobs))
            assert torch.equal(layout, before), "the caller's logits changed"
        for which in (0, 1):
            for ids, logprobs in results[which::2]:
                assert torch.equal(ids, results[which][0])
                assert torch.equal(logprobs, results[which][1])


def test_minus_infinity_is_never_drawn():
    logits = torch.full((50, 5003), -torch.inf)
    logits[:, [17, 4000, 5002]] = torch.tensor([0.0, 1.0, 2.0])
    uniform = torch.linspace(0, 1 - 1e-9, 50).double()
    expected = log_softmax(np.array([0.0, 1.0, 2.0]))
    for options in EVERY_WAY:
        ids, logprobs = sample(logits, SamplingParams(**options | {"top_p": 1.0}), uniform)
        assert set(ids.tolist()) <= {17, 4000, 5002}
        if not options:
            drawn = np.searchsorted([17, 4000, 5002], ids.numpy())
            assert set(drawn) == {0, 1, 2}
            np.testing.assert_allclose(logprobs.numpy(), expected[drawn], atol=1e-6)


@pytest.mark.parametrize("size", [7, 5003])
def test_a_row_of_nan_stays_in_the_vocabulary_and_shows(size):
    """So that training's check for non-finite numbers is reached, not an index out of range."""
    logits = torch.randn(3, size, generator=torch.Generator().manual_seed(1))
    uniform = uniforms(0, *counters(3))
    good = sample(logits, SamplingParams(), uniform)
    logits[1] = torch.nan
    for options in EVERY_WAY:
        ids, logprobs = sample(logits, SamplingParams(**options), uniform)
        assert 0 <= ids[1] < size
        assert logprobs[1].isnan()
        assert logprobs[[0, 2]].isfinite().all()
    ids, logprobs = sample(logits, SamplingParams(), uniform)
    assert torch.equal(ids[[0, 2]], good[0][[0, 2]])


def test_one_token_is_drawn_with_certainty():
    for options in EVERY_WAY:
        uniform = torch.tensor([0.0, ALMOST_ONE], dtype=torch.float64)
        ids, logprobs = sample(torch.tensor([[3.0], [-2.0]]), SamplingParams(**options), uniform)
        assert ids.tolist() == [0, 0]
        assert logprobs.tolist() == [0.0, 0.0]


# Truncation


def test_truncation_is_its_definition_however_wide_the_nucleus():
    """Narrow, middling and wide rows side by side: all three looks of top-p, and top-k's."""
    scales = [8.0, 0.01, 3.0, 1.0, 5.0, 0.3]
    logits = np.random.default_rng(7).normal(size=(6, 6000)).astype(np.float32)
    logits *= np.array(scales, dtype=np.float32)[:, None]
    probs = torch.from_numpy(logits).softmax(-1)
    sizes = set()
    for options in (
        {"top_p": 0.9},
        {"top_p": 0.5, "min_p": 0.01},
        {"top_k": 700},
        {"top_k": 700, "top_p": 0.6, "min_p": 0.002},
    ):
        for scale in (1.0, 37.0):  # need not be normalized
            kept = truncate(probs * scale, SamplingParams(**options))
            for row in range(6):
                expected = exact(logits[row], **options) > 0
                assert np.array_equal(kept[row].numpy() > 0, expected)
                sizes.add(int(expected.sum()))
            assert torch.equal(kept[kept > 0], (probs * scale)[kept > 0])
    assert min(sizes) < 128 < 1000 < max(sizes)
    assert max(sizes) > 4096


def test_ties_keep_no_more_than_the_definition_counts():
    kept = truncate(torch.full((2, 8), 0.125), SamplingParams(top_k=3))
    assert (kept > 0).sum(1).tolist() == [3, 3]
    kept = truncate(torch.full((2, 8), 0.125), SamplingParams(top_p=0.5))
    assert (kept > 0).sum(1).tolist() == [4, 4]
    for size in (200, 3000, 8192, 12_000):  # the 128 likeliest are any 128
        kept = truncate(torch.ones(2, size), SamplingParams(top_p=0.625))
        assert (kept > 0).sum(1).tolist() == [size * 5 // 8] * 2
    assert truncate(torch.ones(1, 8), SamplingParams(min_p=0.99)).sum() == 8
    kept = truncate(torch.tensor([[4.0, 1.0, 2.0]]), SamplingParams(min_p=0.5))
    assert kept.tolist() == [[4, 0, 2]]  # what is at the bound stays


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 0.6, 0.9])
def test_ties_are_not_kept_twice_by_a_second_look(share):
    """Which of many equals are among the 128 likeliest is chance; a wider look may see others."""
    probs = torch.randint(1, 4, (8, 9000), generator=torch.Generator().manual_seed(0)).float()
    probs[:4] = 1.0
    kept = truncate(probs, SamplingParams(top_p=share))
    for row in range(8):
        order = np.sort(probs[row].numpy().astype(np.float64))[::-1]
        needed = np.searchsorted(np.cumsum(order), share * order.sum()) + 1  # whole numbers: exact
        assert (kept[row] > 0).sum() == needed


# What is asked for


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
        {"min_new_tokens": -1},
        {"min_new_tokens": 9, "max_new_tokens": 8},
    ],
)
def test_bad_parameters_are_named(options):
    with pytest.raises(UserError, match=next(iter(options))):
        SamplingParams(**options)


def test_what_ends_an_answer():
    assert SamplingParams().end_ids((2, 3)) == {2, 3}
    assert SamplingParams(stop_token_ids=(7, 2)).end_ids((2,)) == {2, 7}
    assert SamplingParams(stop_token_ids=(7,), ignore_eos=True).end_ids((2,)) == {7}


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1000, 50_257])
@pytest.mark.parametrize("options", EVERY_WAY, ids=str)
def test_on_cuda_it_never_waits_and_can_be_captured(options, size):
    """Eager and replayed answers are the CPU's, but for rounding at the border of two tokens."""
    generator = torch.Generator().manual_seed(10)
    batches = [torch.randn(64, size, generator=generator) * 3 for _ in range(2)]
    numbers = [uniforms(seed, *counters(64)) for seed in (1, 2)]
    rows, banned = torch.arange(64) % 2 == 0, torch.tensor([3, 9])
    params = SamplingParams(**options)
    logits, uniform = batches[0].cuda(), numbers[0].cuda()
    forbidden = (rows.cuda(), banned.cuda())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda.set_sync_debug_mode("error")
        try:
            sample(logits, params, uniform, forbidden)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, logprobs = sample(logits, params, uniform, forbidden)
    for batch, number in zip(batches, numbers, strict=True):
        logits.copy_(batch)
        uniform.copy_(number)
        graph.replay()
        expected = sample(batch, params, number, (rows, banned))
        same = ids.cpu() == expected[0]
        assert same.float().mean() > 0.96
        torch.testing.assert_close(logprobs.cpu()[same], expected[1][same], atol=1e-5, rtol=1e-5)
