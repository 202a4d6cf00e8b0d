"""Tensor parallelism with a thread for each rank: heads, MLP and vocabulary are shared.

Tests each rank's share of the weights, for every layout, and that ranks with different prompts run
the same steps. Real collectives are tested in tests/dist.
"""

import copy

import pytest
import torch
from captures import again, captured_by, graphs_of, steps_of
from families import (
    POSITIONS,
    PROMPTS,
    build,
    cache_gib,
    empty_engine,
    engine,
    every_family,
    logprob_gap,
    stream,
)
from quick import slow
from rank_threads import on_ranks
from test_weights import factors, with_adapters

from dschat.config import UserError
from dschat.inference import SamplingParams
from dschat.inference.model.step_kernels import StepKernels
from dschat.inference.protocol import Rollout

SAMPLING = SamplingParams(max_new_tokens=12, n=2, seed=3)


def loaded(module, member, **knobs):
    """The engine of one rank."""
    made = empty_engine(module.config, group=member, **knobs)
    made.weights.load(stream(module))
    return made


def share_answers(module, shares, prepare=lambda made: None, of_rank=None, **knobs):
    """Let each rank answer its share of ``PROMPTS`` as one engine does; rollouts and engines.
    ``of_rank``: knobs of each rank's own.
    """
    expected = engine(module).generate(PROMPTS, SAMPLING)

    def work(member):
        own = of_rank[member.rank] if of_rank else {}
        made, mine = loaded(module, member, **knobs | own), list(shares[member.rank])
        prepare(made)
        return made.generate([PROMPTS[i] for i in mine], SAMPLING, indices=mine), made

    rollouts, engines = zip(*on_ranks(len(shares), work), strict=True)
    wanted = [[expected.token_ids[2 * i + s] for i in share for s in (0, 1)] for share in shares]
    assert [rollout.token_ids for rollout in rollouts] == wanted
    return rollouts, engines


UNEVEN = [range(0, 6), range(6, 8)]


@every_family()
def test_two_ranks_answer_as_one(name, module_of):
    module = module_of(name)
    shares = [range(0, 3), range(3, 8)]
    gap = {"qwen3_5_text": 3e-4, "kimi_linear": 2e-4}.get(name, 5e-5)  # states amplify rounding
    if name == "gpt_bigcode":  # all heads read one key and one value
        with pytest.raises(UserError, match="does not divide the model's 1 key-value heads"):
            share_answers(module, shares)
        return
    for share, got, made in zip(shares, *share_answers(module, shares), strict=True):
        assert logprob_gap(module, [PROMPTS[i] for i in share], got) < gap
        assert made.stats.prompts == len(PROMPTS)


def test_three_ranks_and_a_vocabulary_that_does_not_divide(module_of):
    """64 tokens by three: the last rank's share is padded, and one rank brings no prompts."""
    shares = [range(0, 5), range(0), range(5, 8)]
    rollouts, engines = share_answers(module_of("bloom"), shares)
    assert rollouts[1] == Rollout()
    assert [made.weights.vocab_size for made in engines] == [22, 22, 22]


def test_ranks_preempt_alike(module_of):
    """Page pressure on a pooled cache: ranks that planned differently would hang or disagree."""
    module = module_of("llama")
    gib = cache_gib(engine(module), POSITIONS) / 2
    _, engines = share_answers(module, UNEVEN, page_size=4, kv_cache_gib=gib)
    first, second = (made.stats.preemptions for made in engines)
    assert first == second > 0


@pytest.mark.parametrize("page_size", [None, 4])
def test_ranks_with_other_memory_have_the_same_pages(page_size, module_of):
    """The first one's would hold whole sequences, all at once; the second's a few small pages."""
    few = cache_gib(engine(module_of("llama")), 3 * POSITIONS) / 2
    of_rank = [{"kv_cache_gib": gib, "page_size": page_size} for gib in (0.5, few)]
    _, (first, second) = share_answers(module_of("llama"), UNEVEN, of_rank=of_rank)
    assert first.page_size == second.page_size
    assert first.cache.num_pages == second.cache.num_pages < 8 * POSITIONS / first.page_size


@pytest.mark.parametrize("tokens", [*slow([POSITIONS]), 16 * POSITIONS])
def test_ranks_decode_alike_on_the_device(tokens, module_of):
    """The other rank would draw other tokens, if the step did not take those of the first."""

    def prepare(made):
        captured_by(made, again)
        made.num_tokens -= 32 * made.group.rank

    gib = cache_gib(engine(module_of("llama")), tokens) / 2
    _, engines = share_answers(module_of("llama"), UNEVEN, prepare, page_size=4, kv_cache_gib=gib)
    assert all((made.stats.preemptions > 0) == (tokens == POSITIONS) for made in engines)


@pytest.mark.parametrize("with_kernels", [True, False])
def test_a_step_that_one_rank_cannot_capture_is_none_on_all(with_kernels, module_of):
    """It would be captured again, and so run, on that rank alone."""

    def prepare(made):
        def capture(step):
            step()  # the warm-up, on all ranks
            attempts.append(step)
            if made.group.rank == 1 and len(attempts) <= 2:  # of prompts, and of a decode step
                raise RuntimeError("out of memory")
            return step

        attempts = []
        kernels = StepKernels(torch.device("cpu"), frozenset()) if with_kernels else None
        captured_by(made, capture, kernels)

    _, engines = share_answers(module_of("llama"), UNEVEN, prepare, page_size=4)
    assert [graphs_of(made).failed for made in engines] == [not with_kernels] * 2
    assert [len(steps_of(made)) > 0 for made in engines] == [with_kernels] * 2


@pytest.mark.parametrize("name", ["llama_biases", *slow(["gpt2", "gpt_neox"])])
def test_a_rank_holds_its_share_and_no_more(name, module_of):
    """Matrices, embedding and cache are halved; norms, positions and biases of sums are not."""
    module = module_of(name)
    whole = engine(module)
    whole.generate(PROMPTS, SAMPLING)
    for made in share_answers(module, [range(4), range(4, 8)])[1]:
        assert made.cache.pairs.nbytes * 2 == whole.cache.pairs.nbytes
        small = sum(p.nbytes for n, p in module.named_parameters() if p.dim() == 1)
        small += module.transformer.wpe.weight.nbytes if name == "gpt2" else 0
        large = whole.weights.nbytes - small
        assert large / 2 < made.weights.nbytes <= large / 2 + small


@pytest.mark.parametrize("name", ["gpt2", *slow(["llama", "gpt_neox"])])
def test_adapters_are_shared_out_too(name):
    """LoRA's A is cut where the weight's inputs are, its B where the outputs are."""
    wrapped, base = with_adapters(name, seed=1), build(name)  # NOTE: not in the threads, which
    merged = copy.deepcopy(wrapped).merge_and_unload()  # share the random generator

    def work(member):
        made = loaded(base, member)
        made.weights.load_adapters(factors(wrapped))
        return made.generate(PROMPTS, SAMPLING, indices=list(range(8)))

    for rollout in on_ranks(2, work):
        assert logprob_gap(merged, PROMPTS, rollout) < 8e-5


def test_a_wrong_prompt_of_one_rank_is_heard_by_all(module_of):
    """The others must not wait for it in a collective."""

    def work(member):
        made = loaded(module_of("llama"), member)
        with pytest.raises(UserError, match="prompt 0 is empty"):
            made.generate([[1]] if member.rank == 0 else [[]], SAMPLING)
        return made.cache.num_free == made.cache.num_pages

    assert on_ranks(2, work) == [True, True]
