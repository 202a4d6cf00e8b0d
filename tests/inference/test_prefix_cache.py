"""Answers are the same with and without the prefix cache, which is only faster."""

import copy

import pytest
import torch
from families import PROMPTS as TP_PROMPTS
from families import assert_same, assert_same_but_for_ties, engine, every_family, stream
from quick import slow
from test_tensor_parallel import SAMPLING, share_answers

from dschat.inference import SamplingParams

SYSTEM = [(7 * i) % 50 + 3 for i in range(21)]
PROMPTS = [
    [*SYSTEM, 5, 6, 7],
    [*SYSTEM, 5, 6, 8, 9],
    SYSTEM[:16],  # four pages, of which the last token is computed again
    SYSTEM[:17],
    [9, *SYSTEM[1:]],  # another first token: nothing is shared
    [3],
    [*SYSTEM, 5, 6, 7],
]
PAGE = 4


def without_prefixes(made):
    made.cache.keeps_prefixes = False
    return made


@every_family()
def test_answers_are_those_without_it(name, module_of):
    """Two calls: the second one finds what the first one computed, answers included."""
    module = module_of(name)
    cached, plain = (engine(module, page_size=PAGE, max_num_seqs=3) for _ in range(2))
    if cached.spec.states:
        pytest.skip("pages hold no states of layers")
    without_prefixes(plain)
    sampling = SamplingParams(max_new_tokens=7, n=2, seed=3)
    prompts = PROMPTS
    for _ in range(2):
        one, other = (made.generate(prompts, sampling) for made in (cached, plain))
        assert_same(one, other)
        assert cached.stats.cached_tokens >= 3 * 20
        assert plain.stats.cached_tokens == 0
        total = plain.stats.prefill_tokens
        assert cached.stats.prefill_tokens + cached.stats.cached_tokens == total
        prompts = [(p + a)[:40] for p, a in zip(prompts, one.token_ids[::2], strict=True)]
    assert cached.cache.num_free == cached.cache.num_pages


@pytest.mark.parametrize("name", ["bloom", *slow(["llama", "opt"])])
def test_bf16_answers_differ_in_ties_alone(name, module_of):
    options = {"page_size": PAGE, "max_num_seqs": 3, "dtype": torch.bfloat16}
    cached, plain = (engine(module_of(name), **options) for _ in range(2))
    without_prefixes(plain)
    sampling = SamplingParams(max_new_tokens=7, temperature=0.0)
    for _ in range(2):
        one, other = (made.generate(PROMPTS, sampling) for made in (cached, plain))
        assert_same_but_for_ties(one, other, 0.05)
        assert cached.stats.cached_tokens >= 3 * 20


def test_tensor_parallel_ranks_find_the_same(module_of):
    """The second call, which finds the first one's pages on both ranks."""

    def prepare(made):
        made.generate(TP_PROMPTS if made.group.rank == 0 else [], SAMPLING)

    shares = [range(3), range(3, len(TP_PROMPTS))]
    for made in share_answers(module_of("llama"), shares, prepare, page_size=PAGE)[1]:
        assert made.stats.cached_tokens > 20


def test_other_weights_find_nothing(module_of):
    module = module_of("llama")
    other = copy.deepcopy(module)
    for parameter in other.parameters():
        parameter.data *= 1.5
    made = engine(module, page_size=PAGE)
    sampling = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
    before = made.generate(PROMPTS[:1], sampling)
    made.weights.load(stream(other))
    after = made.generate(PROMPTS[:1], sampling)
    assert made.stats.cached_tokens == 0
    assert_same(after, engine(other).generate(PROMPTS[:1], sampling))
    assert after.logprobs != before.logprobs


def test_weights_changed_in_place_are_to_be_announced(module_of):
    module = module_of("llama")
    made = engine(module, page_size=PAGE)
    sampling = SamplingParams(max_new_tokens=4, temperature=0.0)
    for cached in (0, 20, 0):
        made.generate(PROMPTS[:1], sampling)
        assert made.stats.cached_tokens == cached
        if cached:
            made.forget_prefixes()


def test_a_page_for_a_whole_sequence_keeps_nothing(module_of):
    made = engine(module_of("llama"))
    for _ in range(2):
        made.generate([SYSTEM], SamplingParams(max_new_tokens=2))
        assert made.stats.cached_tokens == 0


def test_a_stream_that_is_closed_leaves_what_it_computed(module_of):
    made = engine(module_of("llama"), page_size=PAGE)
    stream_of = made.stream(SYSTEM, SamplingParams(max_new_tokens=9, ignore_eos=True))
    answer = [next(stream_of) for _ in range(5)]
    stream_of.close()
    assert made.cache.num_free == made.cache.num_pages
    made.generate([SYSTEM + answer], SamplingParams(max_new_tokens=1))
    assert made.stats.cached_tokens >= 20
