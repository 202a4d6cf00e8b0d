"""Tensor parallelism with a thread for each rank: heads, MLP and vocabulary are shared.

Tests each rank's share of the weights, for every layout, and that ranks with different prompts run
the same steps. Real collectives are tested in tests/dist.
"""

import copy
import threading

import pytest
import torch
from captures import again, captured_by, graphs_of
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

from dschat.config import UserError
from dschat.inference import SamplingParams
from dschat.inference import engine as engine_module
from dschat.inference.kernels.cuda.dispatch import StepKernels
from dschat.inference.protocol import Rollout
from dschat.models.lora import adapters, add_lora

SAMPLING = SamplingParams(max_new_tokens=12, n=2, seed=3)


def shared_rollout(module, size, shares, prepare=lambda made: None, **knobs):
    """Every rank's rollout of its share of ``PROMPTS``, and its engine."""

    def work(member):
        made = empty_engine(module.config, group=member, **knobs)
        made.weights.load(stream(module))
        prepare(made)
        mine = list(shares[member.rank])
        return made.generate([PROMPTS[i] for i in mine], SAMPLING, indices=mine), made

    return on_ranks(size, work)


def cut(rollout, share):
    keep = [2 * i + s for i in share for s in (0, 1)]
    return [rollout.token_ids[i] for i in keep]


@every_family()
def test_two_ranks_answer_as_one(name, module_of):
    module = module_of(name)
    expected = engine(module).generate(PROMPTS, SAMPLING)
    shares = [range(0, 3), range(3, 8)]
    for (got, made), share in zip(shared_rollout(module, 2, shares), shares, strict=True):
        assert got.token_ids == cut(expected, share)
        assert logprob_gap(module, [PROMPTS[i] for i in share], got) < 5e-5
        assert made.stats.prompts == len(PROMPTS)


def test_three_ranks_and_a_vocabulary_that_does_not_divide(module_of):
    """64 tokens by three: the last rank's share is padded, and one rank brings no prompts."""
    module = module_of("bloom")
    expected = engine(module).generate(PROMPTS, SAMPLING)
    shares = [range(0, 5), range(0), range(5, 8)]
    results = shared_rollout(module, 3, shares)
    assert [got.token_ids for got, _ in results] == [cut(expected, share) for share in shares]
    assert results[1][0] == Rollout()
    assert [made.weights.vocab_size for _, made in results] == [22, 22, 22]


def test_ranks_preempt_alike(module_of):
    """Page pressure on a pooled cache: ranks that planned differently would hang or disagree."""
    module = module_of("llama")
    expected = engine(module).generate(PROMPTS, SAMPLING)
    gib = cache_gib(engine(module), POSITIONS) / 2
    shares = [range(0, 6), range(6, 8)]
    results = shared_rollout(module, 2, shares, page_size=4, kv_cache_gib=gib)
    assert [got.token_ids for got, _ in results] == [cut(expected, share) for share in shares]
    assert all(made.stats.preemptions > 0 for _, made in results)
    assert results[0][1].stats.preemptions == results[1][1].stats.preemptions


@pytest.mark.parametrize("page_size", [None, 4])
def test_ranks_with_other_memory_have_the_same_pages(page_size, module_of, monkeypatch):
    """The first one's would hold whole sequences, all at once; the second's a few small pages."""
    module, of_rank = module_of("llama"), threading.local()
    plain = engine(module)
    expected, token_bytes = plain.generate(PROMPTS, SAMPLING), plain.bytes_per_token()
    monkeypatch.setattr(engine_module, "free_bytes", lambda device: of_rank.bytes)

    def work(member):
        of_rank.bytes = [2**30, 3 * POSITIONS * token_bytes][member.rank]
        made = empty_engine(
            module.config, group=member, kv_cache_gib=None, max_num_seqs=8, page_size=page_size
        )
        made.weights.load(stream(module))
        mine = [range(0, 6), range(6, 8)][member.rank]
        got = made.generate([PROMPTS[i] for i in mine], SAMPLING, indices=list(mine))
        return got.token_ids, made.page_size, made.cache.num_pages

    (first, *sizes), (second, *others) = on_ranks(2, work)
    assert [first, second] == [cut(expected, range(0, 6)), cut(expected, range(6, 8))]
    assert sizes == others
    assert sizes[1] < 8 * POSITIONS / sizes[0]


@pytest.mark.parametrize("tokens", [POSITIONS, 16 * POSITIONS])
def test_ranks_decode_alike_on_the_device(tokens, module_of):
    """The other rank would draw other tokens, if the step did not take those of the first."""
    module = module_of("llama")
    expected = engine(module).generate(PROMPTS, SAMPLING)

    def prepare(made):
        captured_by(made, again)
        made.num_tokens -= 32 * made.group.rank

    knobs = {"page_size": 4, "kv_cache_gib": cache_gib(engine(module), tokens) / 2}
    shares = [range(0, 6), range(6, 8)]
    results = shared_rollout(module, 2, shares, prepare, **knobs)
    assert [got.token_ids for got, _ in results] == [cut(expected, share) for share in shares]
    assert all((made.stats.preemptions > 0) == (tokens == POSITIONS) for _, made in results)


@pytest.mark.parametrize("with_kernels", [True, False])
def test_a_step_that_one_rank_cannot_capture_is_none_on_all(with_kernels, module_of):
    """It would be captured again, and so run, on that rank alone."""
    module = module_of("llama")
    expected = engine(module).generate(PROMPTS, SAMPLING)

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

    shares = [range(0, 6), range(6, 8)]
    results = shared_rollout(module, 2, shares, prepare, page_size=4)
    assert [got.token_ids for got, _ in results] == [cut(expected, share) for share in shares]
    graphs = [graphs_of(made) for _, made in results]
    assert [each.failed for each in graphs] == [not with_kernels] * 2
    assert [len(each._graphs) > 0 for each in graphs] == [with_kernels] * 2


@pytest.mark.parametrize("name", ["llama_biases", "gpt2", "gpt_neox"])
def test_a_rank_holds_its_share_and_no_more(name, module_of):
    """Matrices, embedding and cache are halved; norms, positions and biases of sums are not."""
    module = module_of(name)
    whole = engine(module)
    whole.generate(PROMPTS, SAMPLING)
    for _, made in shared_rollout(module, 2, [range(4), range(4, 8)]):
        assert made.cache.pairs.nbytes * 2 == whole.cache.pairs.nbytes
        small = sum(p.nbytes for n, p in module.named_parameters() if p.dim() == 1)
        small += module.transformer.wpe.weight.nbytes if name == "gpt2" else 0
        large = whole.weights.nbytes - small
        assert large / 2 < made.weights.nbytes <= large / 2 + small


@pytest.mark.parametrize("name", ["llama", "gpt2", *slow(["gpt_neox"])])
def test_adapters_are_shared_out_too(name):
    """LoRA's A is cut where the weight's inputs are, its B where the outputs are."""
    wrapped = add_lora(build(name), 3, 5.0, ["all-linear"], True, "--actor_lora_modules")
    with torch.no_grad():
        for key, parameter in wrapped.named_parameters():
            if ".lora_" in key:
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(key)))
    factors = [
        (weight, wrapped.get_parameter(a.a_name), wrapped.get_parameter(a.b_name), a.scaling)
        for weight, a in adapters(wrapped).items()
    ]
    merged = copy.deepcopy(wrapped).merge_and_unload()
    base = build(name)  # NOTE: not in the threads, which share the random generator

    def work(member):
        made = empty_engine(base.config, group=member)
        made.weights.load(stream(base))
        made.weights.load_adapters(factors)
        return made.generate(PROMPTS, SAMPLING, indices=list(range(8)))

    for rollout in on_ranks(2, work):
        assert logprob_gap(merged, PROMPTS, rollout) < 8e-5


def test_a_wrong_prompt_of_one_rank_is_heard_by_all(module_of):
    """The others must not wait for it in a collective."""

    def work(member):
        made = empty_engine(module_of("llama").config, group=member)
        made.weights.load(stream(module_of("llama")))
        with pytest.raises(UserError, match="prompt 0 is empty"):
            made.generate([[1]] if member.rank == 0 else [[]], SAMPLING)
        return made.cache.num_free == made.cache.num_pages

    assert on_ranks(2, work) == [True, True]
