"""Norms and MLPs by Liger's kernels."""

import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiny_models import causal_lm
from transformers.models.llama import modeling_llama

from dschat.models.linear import use_liger
from dschat.models.long_rows import recompute_activations, runs_in_pieces

HERE = Path(__file__).parent
REASON = "needs Liger: pip install 'dschat[kernels]'"


@pytest.fixture
def liger(monkeypatch, tmp_path):
    """``liger(apply)``: it is installed, and this is what it does to a model."""
    (tmp_path / "liger_kernel").mkdir()
    (tmp_path / "liger_kernel" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("DSCHAT_CUDA_KERNELS", raising=False)
    return partial(monkeypatch.setattr, "transformers.integrations.liger.apply_liger_kernel")


@pytest.mark.parametrize(
    ("asked", "device", "applied"),
    [(None, "cpu", 0), ("0", "cuda", 0), ("norm", "cuda", 0), ("1", "cuda", 1), (None, "cuda", 1)],
)
@pytest.mark.parametrize("installed", [True, False])
def test_by_default_on_cuda_where_liger_is(asked, device, applied, installed, liger, monkeypatch):
    models = []
    liger(lambda model, _: models.append(model))
    if asked is not None:
        monkeypatch.setenv("DSCHAT_CUDA_KERNELS", asked)
    if not installed:
        monkeypatch.setitem(sys.modules, "liger_kernel", None)
    model = causal_lm("llama")
    use_liger(model, torch.device(device))
    assert models == [model] * applied * installed


def test_recomputed_layers_still_run_in_pieces(liger):
    """Liger gives each MLP a forward of its own. Models made later have none of its classes."""
    model, norm = causal_lm("llama"), modeling_llama.LlamaRMSNorm
    recompute_activations(model)

    def apply(model, _):
        modeling_llama.LlamaRMSNorm = None
        for layer in model.model.layers:
            layer.mlp.forward = lambda x, mlp=layer.mlp: mlp.down_proj(mlp.up_proj(x))

    liger(apply)
    use_liger(model, torch.device("cuda"))
    assert modeling_llama.LlamaRMSNorm is norm
    for layer in model.model.layers:
        assert runs_in_pieces(layer.mlp)
        assert not runs_in_pieces(layer.self_attn)
        x = torch.ones(1, 3, 32)
        torch.testing.assert_close(layer.mlp(x), layer.mlp.down_proj(layer.mlp.up_proj(x)))


@pytest.mark.parametrize("fails", [False, True])
def test_experts_and_models_on_which_liger_fails_stay(fails, liger, caplog):
    model = causal_lm("mixtral")

    def apply(model, _):
        for layer in model.model.layers:
            layer.input_layernorm.forward = layer.mlp.experts.forward = lambda *_: None
        if fails:
            raise AttributeError("no gate_proj\nmore")

    liger(apply)
    with caplog.at_level("WARNING", "dschat"):
        use_liger(model, torch.device("cuda"))
    own = {type(m).__name__ for m in model.modules() if "forward" in vars(m)}
    assert own == (set() if fails else {"MixtralRMSNorm"})
    assert caplog.messages == fails * [
        "without Liger's kernels, which fail on this model: no gate_proj"
    ]


# Of two more, deepseek_v4 and qwen3_5_moe, a router's gradient is rounding: it moves by 1e-3 when
# weights move by 1e-7.
FAMILIES = (
    *("deepseek_v2", "deepseek_v3", "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3_text"),
    *("gemma4_text", "glm4", "gpt_oss", "granite", "hunyuan_v1_dense", "hunyuan_v1_moe", "llama"),
    *("llama4_text", "ministral", "mistral", "mixtral", "olmo2", "olmo3", "phi3", "qwen2"),
    *("qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next", "smollm3"),
)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("liger_kernel") is None, reason=REASON)
def test_losses_and_gradients_are_those_of_transformers():
    path = os.pathsep.join(filter(None, [*sys.path, str(HERE.parents[1] / "benchmarks")]))
    done = subprocess.run(
        [sys.executable, str(HERE / "liger_losses.py"), *FAMILIES],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    gaps = dict(line.split() for line in done.stdout.splitlines())
    assert tuple(gaps) == FAMILIES
    assert {family: gap for family, gap in gaps.items() if not float(gap) < 1e-4} == {}
