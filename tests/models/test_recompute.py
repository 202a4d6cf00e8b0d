"""Recomputed layers: gradients of long streams in pieces, inputs in host memory."""

import pytest
import torch
from quick import each_once
from tiny_models import causal_lm
from torch.testing import assert_close

from dschat.models import long_rows
from dschat.models.heads import LanguageModel
from dschat.models.lora import prepare_for_training
from dschat.models.packing import pack

ROWS = pack([list(range(2, 40)), list(range(30, 60))], [range(37), range(29)])


def gradients(name, lora, checkpointing, on_host=False):
    torch.manual_seed(0)
    args = (lora, 8.0, ["all-linear"], True, "--lora_modules", on_host)
    model = LanguageModel(prepare_for_training(causal_lm(name), checkpointing, *args)).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    logprobs, _ = model(ROWS)
    logprobs.sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        assert_close(model(ROWS)[0], logprobs)
    return grads


@pytest.mark.parametrize(
    ("name", "lora"), each_once(["llama", "qwen3_moe", "gpt_neox", "bloom"], [4, 0])
)
def test_gradients_of_pieces(name, lora, monkeypatch):
    """Where an MLP runs in pieces of 8 tokens, and where it cannot: experts, two inputs."""
    expected = gradients(name, lora, checkpointing=False)
    sizes, run = [], long_rows.checkpoint
    monkeypatch.setattr(long_rows, "PIECE", 8)
    monkeypatch.setattr(
        long_rows,
        "checkpoint",
        lambda forward, piece, **how: sizes.append(piece.shape[-2]) or run(forward, piece, **how),
    )
    for on_host in (False, True):
        actual = gradients(name, lora, True, on_host)
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert_close(actual[key], value, rtol=1e-4, atol=1e-5, msg=key)
    assert bool(sizes) == (name in ("llama", "gpt_neox"))
    assert set(sizes) <= {8, 4}


def test_only_inputs_of_layers_go_to_host_memory(monkeypatch):
    sent = []
    to_host = long_rows._to_host
    monkeypatch.setattr(long_rows, "_to_host", lambda x: sent.append(x.shape) or to_host(x))
    gradients("llama", 0, True, on_host=True)
    assert [shape for shape in sent if shape.numel()] == [(1, 68, 32)] * 2
