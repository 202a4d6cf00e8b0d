"""The engine on a fake CUDA device: one device, and no host reads in captured steps."""

from collections import Counter
from itertools import product

import pytest
import torch
from fake_cuda import WAITS, fake_cuda, fake_engine
from families import CONFIGS
from quick import some

from dschat.inference import SamplingParams

PROMPTS = [[5], [7, 8, 9, 10, 11, 12, 13], list(range(2, 32)), [20, 21, 22]]
SAMPLED = SamplingParams(max_new_tokens=4, seed=1, ignore_eos=True)
WAYS = {
    "eager": {"cuda_graphs": False},
    "graph": {},
    "fp32": {"dtype": torch.float32},
    "pages": {"page_size": 16},
    "borrowed": {"borrowed": "parts"},
    "views": {"borrowed": "adjacent"},
    "chunks": {"max_num_batched_tokens": 7, "page_size": 4},
}


@pytest.mark.parametrize(("name", "way"), some(product(CONFIGS, WAYS), [("llama", "chunks")]))
def test_every_family_runs_on_one_device(name, way):
    with fake_cuda() as watch:
        made = fake_engine(watch, CONFIGS[name](), **WAYS[way])
        rollout = made.generate(PROMPTS, SAMPLED)
    assert [len(ids) for ids in rollout.token_ids] == [4] * 4
    captured = Counter({name: n for (inside, name), n in watch.counts.items() if inside})
    assert (captured.total() > 0) == (way != "eager")
    assert not captured.keys() & set(WAITS)
