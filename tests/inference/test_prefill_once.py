"""A prompt is computed once for all its answers, and the statistics count every token.

Some prompts share their first 16 tokens.
"""

import pytest
from families import POSITIONS, VOCAB, cache_gib, engine

from dschat.inference import SamplingParams

# 16 prompts of 1 to 40 tokens: some fill their last page exactly, some leave one token over.
LENGTHS = [1, 2, 7, 15, 16, 17, 31, 32, 33, 40, 16, 16, 5, 8, 24, 3]
PROMPTS = [[(7 * i + j) % (VOCAB - 1) + 1 for j in range(n)] for i, n in enumerate(LENGTHS)]
SLOW = pytest.mark.slow
SAMPLING = SamplingParams(max_new_tokens=12, n=4, seed=2)


@pytest.mark.parametrize("page_size", [4, pytest.param(16, marks=SLOW), POSITIONS])
@pytest.mark.parametrize("max_num_seqs", [2, *(pytest.param(s, marks=SLOW) for s in (7, 64, 80))])
@pytest.mark.parametrize("max_num_batched_tokens", [13, pytest.param(2048, marks=SLOW)])
def test_sixteen_prompts_by_four(page_size, max_num_seqs, max_num_batched_tokens, module_of):
    made = engine(
        module_of("llama"),
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    rollout = made.generate(PROMPTS, SAMPLING)
    stats = made.stats
    assert stats.preemptions == 0
    assert stats.prefill_tokens + stats.cached_tokens == sum(LENGTHS)
    assert stats.answer_tokens == rollout.num_tokens
    assert stats.prompts == 16
    assert 0 < stats.occupancy <= 1
    assert 0 < stats.cache_use <= 1


def test_samples_take_no_more_pages_than_they_must(module_of):
    """32 prompt tokens in two shared pages, and a page of its own for each of four answers."""
    made = engine(module_of("llama"), page_size=16)
    made.generate([[3] * 32], SamplingParams(max_new_tokens=8, n=4, ignore_eos=True))
    assert made.stats.peak_pages == 2 + 4


def test_steps_are_counted(module_of):
    """Two prompts of five tokens: one step computes them and draws, seven more decode both."""
    made = engine(module_of("llama"), max_num_seqs=4)
    made.generate([[3] * 5, [4] * 5], SamplingParams(max_new_tokens=8, ignore_eos=True))
    stats = made.stats
    assert (stats.prefill_steps, stats.prefill_tokens) == (1, 10)
    assert (stats.decode_steps, stats.decode_tokens) == (7, 14)
    assert stats.occupancy == pytest.approx(0.5)
    assert stats.cache_use == pytest.approx(0.5)
    assert stats.prefill_s > 0
    assert stats.decode_s > 0


def test_a_finished_sequence_leaves_at_once(module_of):
    """Eight answers of lengths 1 to 8 on two slots: 36 tokens, and no slot idles until the last."""
    made = engine(module_of("llama"), max_num_seqs=2)
    limits = [3, 8, 1, 6, 4, 7, 2, 5]
    prompts = [[5 + i] for i in range(8)]
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
    rollout = made.generate(prompts, sampling, max_new_tokens=limits)
    assert [len(ids) for ids in rollout.token_ids] == limits
    steps = made.stats.prefill_steps + made.stats.decode_steps
    assert steps <= 36 / 2 + 4


def test_what_is_computed_again_is_counted_again(module_of):
    module = module_of("llama")
    gib = cache_gib(engine(module), 96)
    made = engine(module, page_size=4, kv_cache_gib=gib, max_num_seqs=16)
    made.generate(PROMPTS, SAMPLING)
    assert made.stats.preemptions > 0
    assert made.stats.prefill_tokens > sum(LENGTHS)
