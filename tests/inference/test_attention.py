"""The attention of one step: what its layers share is made once."""

import pytest
import torch
from families import PROMPTS, engine
from torch.utils._python_dispatch import TorchDispatchMode

from dschat.inference import SamplingParams
from dschat.inference.model import attention
from dschat.inference.model.attention import Attention


class FromHost(TorchDispatchMode):
    """Counts tensors made of Python numbers; on CUDA, the host waits for each to be copied."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name().startswith("aten::lift_fresh")
        return func(*args, **(kwargs or {}))


def test_no_layer_makes_a_tensor_of_host_numbers(module_of, monkeypatch):
    made = engine(module_of("llama"), max_num_batched_tokens=7, page_size=4)
    attend, seen = Attention.__call__, FromHost()
    later = []

    def watched(attention, *call):
        later.extend(c for c in attention.chunks if c.prefix > 0)
        with seen:
            return attend(attention, *call)

    monkeypatch.setattr(Attention, "__call__", watched)
    made.generate([list(range(2, 32)), [5, 6, 7]], SamplingParams(max_new_tokens=4, seed=1))
    assert len(later) >= 8  # a prompt of 30 in chunks of 7, in two layers
    assert seen.count == 0


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_shared_heads_in_place_are_the_repeated_ones(name, module_of, monkeypatch):
    greedy = SamplingParams(max_new_tokens=4, temperature=0.0)
    expected = engine(module_of(name)).generate(PROMPTS, greedy)
    asked = []

    def in_place(q, bias):
        asked.append(bias is None)
        return bias is None

    monkeypatch.setattr(attention, "_reads_shared_heads", in_place)
    answers = engine(module_of(name)).generate(PROMPTS, greedy)
    assert answers.token_ids == expected.token_ids
    for mine, theirs in zip(answers.logprobs, expected.logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    assert any(asked)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("size", "first"), [(8, 4), (6, 4), (8, 3)])
def test_rows_of_the_cache_are_copied_whole(size, first, dtype):
    """Where heads lie at 8 bytes, and where they do not."""
    heads = torch.randn(5, 12 * size + 1).to(dtype)[:, first * size % 4 :][:, : 12 * size]
    values = heads.unflatten(1, (12, size))[:, first : first + 4].unflatten(1, (2, 2))
    slots = torch.tensor([3, 0, 7, 2, 6])
    rows = torch.zeros(9, 2, 2, size, dtype=dtype)
    expected = rows.clone().index_copy_(0, slots, values)
    attention._copy_rows(rows, slots, values)
    assert torch.equal(rows, expected)
