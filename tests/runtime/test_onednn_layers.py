"""oneDNN's linear layers train and score as torch's do, under ZeRO, LoRA and recomputation."""

import pytest
import torch
from families import build

from dschat.hybrid.weight_stream import weight_stream
from dschat.models.cpu_matmul import VARIABLE
from dschat.models.linear import OneDnnConv1D, OneDnnLinear
from dschat.models.lora import prepare_for_training
from dschat.runtime.deepspeed_engine import (
    ZeroSettings,
    initialize_training,
    unwrap,
)

IDS = torch.arange(2, 42).view(4, 10)


def trained(backend, monkeypatch, name, stage, lora_dim, recompute):
    """Losses of three steps, and the weights after them."""
    monkeypatch.setenv(VARIABLE, backend)
    torch.manual_seed(0)
    model = build(name).train()
    modules = ["all-linear"]
    model = prepare_for_training(model, recompute, lora_dim, 0, modules, lora_dim > 0, "--lora_dim")
    zero = ZeroSettings(stage, torch.float32)
    engine = initialize_training(model, zero, 1e-2, 0.0, [0.9, 0.95], "constant", 0, 10)
    kinds = {type(m) for m in unwrap(engine).modules()} & {OneDnnLinear, OneDnnConv1D}
    assert bool(kinds) == (backend == "onednn")
    losses = []
    for _ in range(3):
        loss = engine(input_ids=IDS, labels=IDS, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = weight_stream(unwrap(engine), torch.device("cpu"))
    return losses, {name: tensor.clone() for name, tensor in weights}


@pytest.mark.parametrize(
    ("name", "lora_dim", "recompute"),
    [("llama", 0, False), ("gpt2", 0, True), ("opt", 2, False), ("llama", 2, True)],
)
@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_training(stage, name, lora_dim, recompute, monkeypatch):
    arguments = (monkeypatch, name, stage, lora_dim, recompute)
    losses, weights = trained("plain", *arguments)
    onednn_losses, onednn_weights = trained("onednn", *arguments)
    assert onednn_losses == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0]
    for key, weight in weights.items():
        # Adam divides a gradient by its size, rounding included: a fraction of the step of 1e-2.
        torch.testing.assert_close(onednn_weights[key], weight, atol=1e-3, rtol=1e-4)
