"""Norms and MLPs by Liger's kernels."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiny_models import causal_lm
from transformers.models.llama import modeling_llama

from dschat.models.linear import _with_own_forward, use_liger
from dschat.models.recompute import recompute_activations, runs_in_pieces

HERE = Path(__file__).parent
REASON = "needs Liger: pip install 'dschat[kernels]'"


@pytest.mark.parametrize(
    ("asked", "device", "looked_for"), [("1", "cpu", 0), ("0", "cuda", 0), ("1", "cuda", 1)]
)
def test_off_by_default_on_cpus_and_without_liger(asked, device, looked_for, monkeypatch):
    found = []
    monkeypatch.setenv("DSCHAT_CUDA_KERNELS", asked)
    monkeypatch.setattr("dschat.models.linear.find_spec", found.append)
    model = causal_lm("llama")
    use_liger(model, torch.device(device))
    assert not _with_own_forward(model)
    assert len(found) == looked_for


def test_recomputed_layers_still_run_in_pieces(monkeypatch):
    """Liger gives each MLP a forward of its own. Models made later have none of its classes."""
    model, norm = causal_lm("llama"), modeling_llama.LlamaRMSNorm
    recompute_activations(model)

    def apply(model, _):
        modeling_llama.LlamaRMSNorm = None
        for layer in model.model.layers:
            layer.mlp.forward = lambda x, mlp=layer.mlp: mlp.down_proj(mlp.up_proj(x))

    monkeypatch.setenv("DSCHAT_CUDA_KERNELS", "1")
    monkeypatch.setattr("dschat.models.linear.find_spec", lambda _: True)
    monkeypatch.setattr("transformers.integrations.liger.apply_liger_kernel", apply)
    use_liger(model, torch.device("cuda"))
    assert modeling_llama.LlamaRMSNorm is norm
    for layer in model.model.layers:
        assert runs_in_pieces(layer.mlp)
        assert not runs_in_pieces(layer.self_attn)
        x = torch.ones(1, 3, 32)
        torch.testing.assert_close(layer.mlp(x), layer.mlp.down_proj(layer.mlp.up_proj(x)))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("liger_kernel") is None, reason=REASON)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3"])
def test_losses_and_gradients_are_those_of_transformers(family):
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, str(HERE / "liger_losses.py"), family],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout) < 1e-4
