"""An answer does not depend on the rest of its batch, on pages or on chunks.

In fp32 sampled answers are the same ids, and their log-probs the same to rounding, whatever the
batch, the order, the pages and the budget: see also test_any_call. The reference is one prompt at a
time.
"""

from dataclasses import replace

import pytest
import torch
from families import PROMPTS, assert_same, engine
from quick import each_once

from dschat.inference import SamplingParams
from dschat.inference.protocol import Rollout
from dschat.inference.requests import core
from dschat.inference.requests.sequence import Request
from dschat.inference.sampling import inverse_cdf, uniforms

SAMPLING = SamplingParams(max_new_tokens=20, n=4, seed=9, top_p=0.98)

LAYOUTS = {
    "3 slots": {"max_num_seqs": 3},
    "more slots than samples": {"max_num_seqs": 100},
    "pages of 4": {"page_size": 4},
}


@pytest.mark.parametrize(
    ("layout", "drawn_together"),
    each_once(LAYOUTS, [1, 1 << 22]),
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
    for cut in (127, 128, 129):  # from one forward and the definition of the random number
        with torch.no_grad():
            logits = module(torch.tensor([prompt + answer[:cut]])).logits[:, -1]
        key = (torch.tensor([x]) for x in (1, 0, cut))  # prompt, sample, position
        assert inverse_cdf(logits.softmax(-1), uniforms(4, *key)).item() == answer[cut]
