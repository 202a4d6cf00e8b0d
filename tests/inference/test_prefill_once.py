"""A prompt is computed once for all its answers, and the statistics count every token.

Some prompts share their first 16 tokens.
"""

import pytest
from families import engine

from dschat.inference import SamplingParams


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
