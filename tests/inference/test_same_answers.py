"""An answer does not depend on the rest of its batch, on pages or on chunks.

In fp32 sampled answers are the same ids, and their log-probs the same to rounding, whatever the
batch, the order, the pages and the budget: see also test_any_call. The reference is one prompt at a
time.
"""

from dataclasses import replace

import pytest
from families import EOS, PROMPTS, assert_same, engine
from quick import each_once

from dschat.inference import SamplingParams, core
from dschat.inference.protocol import Rollout
from dschat.inference.sequence import Request

SAMPLING = SamplingParams(max_new_tokens=20, n=4, seed=9, top_p=0.98)

LAYOUTS = {
    "3 slots": {"max_num_seqs": 3},
    "16 slots": {"max_num_seqs": 16},
    "more slots than samples": {"max_num_seqs": 100},
    "pages of 4": {"page_size": 4},
    "7 tokens a step": {"max_num_batched_tokens": 7, "page_size": 4},
}


@pytest.fixture(scope="module")
def expected(module_of):
    """Every prompt by itself, in an engine with one slot for each of its samples."""
    alone = engine(module_of("llama"), max_num_seqs=4)
    parts = [alone.generate([p], SAMPLING, indices=[i]) for i, p in enumerate(PROMPTS)]
    return Rollout.joined(parts)


@pytest.mark.parametrize(
    ("layout", "drawn_together"),
    each_once(["3 slots", "pages of 4", "more slots than samples"], [1, 1 << 22]),
)
def test_samples_are_one_row_until_they_differ(layout, drawn_together, module_of, monkeypatch):
    """At a low temperature, for a while; the reference has each sample as a request of its own."""
    monkeypatch.setattr(core, "_DRAWN_TOGETHER", drawn_together)
    sampling = replace(SAMPLING, temperature=0.4, ignore_eos=True, top_p=1.0)
    made, alone = engine(module_of("llama"), **LAYOUTS[layout]), engine(module_of("llama"))
    got = made.generate(PROMPTS, sampling)
    requests = [
        Request(ids, replace(sampling, n=1), i, first_sample=sample)
        for i, ids in enumerate(PROMPTS)
        for sample in range(SAMPLING.n)
    ]
    batch = alone.core()
    for request in requests:
        batch.add(request)
    assert sum(event.is_last for event in batch.events()) == len(requests)
    assert_same(got, Rollout.joined(request.rollout() for request in requests))
    assert made.stats.decoded_rows < 0.95 * made.stats.decode_tokens
    assert made.cache.num_free == made.cache.num_pages


@pytest.mark.parametrize("layout", ["3 slots", "16 slots", "7 tokens a step"])
def test_nor_does_prefill_apart_from_decodes(layout, module_of, expected):
    made = engine(module_of("llama"), **LAYOUTS[layout])
    made._separate_prefill = True  # as on CUDA
    assert_same(made.generate(PROMPTS, SAMPLING), expected)
    stats = made.stats  # the first token of each prompt is drawn in a prefill step, or with it
    assert stats.decode_tokens >= stats.answer_tokens - len(PROMPTS) * SAMPLING.n


def test_the_order_of_prompts(module_of, expected):
    made = engine(module_of("llama"), page_size=4)
    order = [3, 0, 7, 5, 1, 6, 2, 4]
    got = made.generate([PROMPTS[i] for i in order], SAMPLING, indices=order)
    back = [order.index(i) for i in range(len(order))]
    answers = [[got.token_ids[4 * i + s] for s in range(4)] for i in back]
    assert [ids for group in answers for ids in group] == expected.token_ids


def test_the_first_of_n_samples_is_the_only_one_of_1(module_of, expected):
    one = SamplingParams(max_new_tokens=20, n=1, seed=9, top_p=0.98)
    got = engine(module_of("llama")).generate(PROMPTS, one)
    assert got.token_ids == expected.token_ids[::4]


def test_answers_depend_on_seed_prompt_number_and_sample(module_of):
    """The other way round: what should make a difference does."""
    made = engine(module_of("llama"))
    ids = {}
    for seed in (0, 1):
        for number in (0, 1):
            sampling = SamplingParams(max_new_tokens=8, n=2, seed=seed, ignore_eos=True)
            rollout = made.generate([PROMPTS[1]], sampling, indices=[number])
            for s in (0, 1):
                ids[seed, number, s] = tuple(rollout.token_ids[s])
    assert len(set(ids.values())) == len(ids)


def test_answers_longer_than_the_random_numbers_drawn_at_once(module_of):
    """They are drawn ahead in blocks of 128; the numbers beyond continue the same sequence."""
    module = module_of("bloom")  # no bound on positions
    sampling = SamplingParams(max_new_tokens=150, n=2, seed=4, ignore_eos=True)
    whole = engine(module, max_seq_len=160).generate([[5], [6, 7]], sampling)
    again = engine(module, max_seq_len=160, page_size=8, max_num_seqs=1)
    assert again.generate([[5], [6, 7]], sampling).token_ids == whole.token_ids
    prompt, answer = [6, 7], whole.token_ids[2]
    for cut in (127, 128, 129):  # against the same position, drawn by the oracle of positions
        assert drawn_at(module, prompt + answer[:cut], 4, 1, 0, cut) == answer[cut]


def drawn_at(module, context, seed, prompt, sample, position):
    """The token of one position, from one forward and the definition of its random number."""
    import torch

    from dschat.inference.sampling import inverse_cdf, uniforms

    with torch.no_grad():
        probs = module(torch.tensor([context])).logits[:, -1].softmax(-1)
    key = (torch.tensor([x]) for x in (prompt, sample, position))
    return int(inverse_cdf(probs, uniforms(seed, *key)))


def test_eos_in_a_prompt_is_a_token_like_any_other(module_of):
    made = engine(module_of("llama"))
    sampling = SamplingParams(max_new_tokens=5, temperature=0, ignore_eos=True)
    with_eos = made.generate([[40, EOS, 41], [EOS], [40, 41]], sampling)
    assert [len(ids) for ids in with_eos.token_ids] == [5, 5, 5]
    assert with_eos.token_ids[0] != with_eos.token_ids[2]
