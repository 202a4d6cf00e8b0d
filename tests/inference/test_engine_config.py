"""The sizes of an engine, which runs and ``--plan`` both compute with."""

import pytest

from dschat.config import RLHFConfig, UserError
from dschat.inference import EngineConfig


@pytest.mark.parametrize(
    "name", ["max_num_seqs", "max_seq_len", "max_num_batched_tokens", "page_size"]
)
@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_is_refused_by_its_name(name, size):
    with pytest.raises(UserError, match=f"^{name} {size} must be at least 1$"):
        EngineConfig(**{name: size})


@pytest.mark.parametrize(
    ("wanted", "positions", "length"),
    [(None, 512, 512), (100, 512, 100), (1000, 512, 512), (None, None, 2048), (9000, None, 9000)],
)
def test_length(wanted, positions, length):
    assert EngineConfig(max_seq_len=wanted).seq_len(positions) == length


def test_pages_fill_half_of_the_free_memory_but_no_more_than_are_used():
    sizes = EngineConfig(max_num_seqs=4)
    assert sizes.num_pages(100, 30, page_bytes=10, free_bytes=10_000) == 4 * 4  # 100 tokens: 4
    assert sizes.num_pages(100, 30, page_bytes=10, free_bytes=219) == 10
    assert sizes.num_pages(100, 30, page_bytes=10, free_bytes=19) == 0
    fixed = EngineConfig(max_num_seqs=4, kv_cache_gib=0.5)
    assert fixed.num_pages(100, 30, page_bytes=2**28, free_bytes=0) == 2


def test_defaults_follow_the_device():
    sizes = EngineConfig()
    assert (sizes.batched_tokens(on_gpu=True), sizes.batched_tokens(on_gpu=False)) == (8192, 2048)
    memory = {"token_bytes": 10, "free_bytes": 10**9}
    assert sizes.tokens_per_page(300, is_captured=False, **memory) == 300
    assert sizes.tokens_per_page(300, is_captured=True, **memory) == 32
    assert sizes.tokens_per_page(20, is_captured=True, **memory) == 20


@pytest.mark.parametrize(("length", "page"), [(300, 32), (20, 20)])
def test_pages_are_small_where_whole_sequences_do_not_fit(length, page):
    """Half of the free memory holds 64 sequences of ``length``, or a byte less."""
    sizes, enough = EngineConfig(max_num_seqs=64), 2 * 64 * length * 10
    assert sizes.tokens_per_page(length, False, 10, enough) == length
    assert sizes.tokens_per_page(length, False, 10, enough - 2) == page
    fixed = EngineConfig(max_num_seqs=64, kv_cache_gib=(enough / 2 - 1) / 2**30)
    assert fixed.tokens_per_page(length, False, 10, 0) == page
    assert EngineConfig(page_size=7).tokens_per_page(length, False, 10, 0) == 7


@pytest.mark.parametrize(("tp_size", "num_seqs"), [(1, 12), (2, 24), (8, 40)])
def test_rollouts_take_no_more_sequences_than_there_are(tp_size, num_seqs):
    args = RLHFConfig(
        actor_model_name_or_path="a",
        per_device_generation_batch_size=3,
        per_device_training_batch_size=6,
        generation_batches=2,
        num_samples_per_prompt=2,
        eval_batch_size=5,
        max_num_seqs=40,
        inference_tp_size=tp_size,
        kv_page_size=16,
    )
    sizes = EngineConfig.of_rollout(args, (7,), 50)
    assert (sizes.max_num_seqs, sizes.page_size) == (num_seqs, 16)
    assert (sizes.stop_ids, sizes.num_tokens, sizes.max_seq_len) == ((7,), 50, 512)
