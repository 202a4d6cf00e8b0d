"""Quantized layers: values, gradients and states against a model with the dequantized weights."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from quick import each_once
from safetensors.torch import load_file, save_file
from step_cases import probe_logprobs, probe_scores
from tiny_models import VOCAB, ensure

from dschat.config import UserError
from dschat.hybrid.weight_stream import weight_bytes, weight_stream
from dschat.models.checkpoint import Checkpoint
from dschat.models.heads import ScoreModel, count_parameters
from dschat.models.lora import add_lora
from dschat.models.quantized import dequantized, finish_loading, is_quantized
from dschat.models.training_engine import full_shape
from dschat.observability.flops import shape_of

CPU, FP32 = torch.device("cpu"), torch.float32
both = pytest.mark.parametrize("bits", [4, 8])


@pytest.fixture
def loaded(tmp_path):
    """name, options -> the model."""

    def load(name="llama", bits=0, dtype=FP32, **options):
        checkpoint = Checkpoint(ensure(tmp_path, name), "--model_name_or_path")
        return checkpoint.language_model(dtype, 0.0, weight_bits=bits, **options).eval()

    return load


def plain(model, twin):
    """``twin``, not quantized, with the weights that ``model`` computes with."""
    result = twin.load_state_dict(dict(weight_stream(model, CPU)), strict=False)
    assert not result.unexpected_keys
    assert set(result.missing_keys) <= {"lm_head.weight"}  # tied
    return twin


@pytest.mark.parametrize(
    ("name", "bits"), each_once(["llama", "llama_tied", "opt_350m", "gpt_neox", "qwen3"], [4, 8])
)
def test_computes_what_dequantized_weights_do(name, bits, loaded):
    model, original = loaded(name, bits), loaded(name)
    twin = plain(model, loaded(name))
    for training in (False, True):
        got = sum(probe_logprobs(model.train(training)), [])
        assert got == pytest.approx(sum(probe_logprobs(twin), []), abs=2e-5)
    # The values are near those on disk: NF4's largest error is 0.15 of a block's largest value.
    whole = dict(original.named_parameters())
    for key, parameter in model.named_parameters():
        assert full_shape(parameter) == whole[key].shape
        error = (dequantized(parameter) - whole[key]).abs().max() / whole[key].abs().max()
        largest = {4: 0.16, 8: 0.005}[bits] if is_quantized(parameter) else 0
        assert (error > 0) == is_quantized(parameter)
        assert error <= largest
    matrices = {key for key, weight in whole.items() if weight.ndim == 2}
    bare = matrices - {key for key, p in model.named_parameters() if is_quantized(p)}
    assert all("embed" in key or "lm_head" in key for key in bare), bare


@both
@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16])
def test_gradients_of_adapters(bits, dtype, loaded):
    model = loaded("llama", bits, dtype)
    twin = plain(model, loaded("llama", 0, dtype))
    gradients = []
    ids = torch.arange(2, 22).view(2, 10)
    for each in (model, twin):
        torch.manual_seed(3)
        wrapped = add_lora(each, 4, 0, ["all-linear"], True, "--lora_modules").to(dtype)
        for name, p in wrapped.named_parameters():
            if "lora_B" in name:
                p.data.normal_(0, 0.2)
        wrapped(input_ids=ids, labels=ids).loss.backward()
        gradients.append({n: p.grad for n, p in wrapped.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        tolerance = (1e-5 if dtype == FP32 else 5e-2) * float(gradients[1][name].abs().max())
        torch.testing.assert_close(gradient, gradients[1][name], atol=tolerance, rtol=0)


@both
def test_a_score_model_keeps_its_head(bits, tmp_path):
    path = ensure(tmp_path, "llama_reward")
    model = Checkpoint(path, "--x").score_model(FP32, 1, weight_bits=bits)
    twin = Checkpoint(path, "--x").score_model(FP32, 1)
    torch.testing.assert_close(model.score.weight, twin.score.weight)
    scores = probe_scores(ScoreModel(model, "auto"))
    assert scores == pytest.approx(probe_scores(ScoreModel(plain(model, twin), "auto")), abs=2e-5)


@both
def test_sizes_are_those_of_the_whole_weights(bits, loaded):
    model, twin = loaded("llama", bits), loaded("llama")
    assert count_parameters(model) == count_parameters(twin)
    assert weight_bytes(model) == weight_bytes(twin)
    assert shape_of(model) == shape_of(twin)
    assert not hasattr(model.config, "quantization_config")
    states = {name for name in model.state_dict() if "weight." in name or "SCB" in name}
    assert not states  # a checkpoint would have them, and leave the weight out


def test_a_grown_vocabulary(loaded):
    model = loaded("llama", 4, num_tokens=VOCAB + 3)
    assert model.get_output_embeddings().weight.shape[0] == VOCAB + 3
    twin = plain(model, loaded("llama", num_tokens=VOCAB + 3))
    assert probe_logprobs(model)[0] == pytest.approx(probe_logprobs(twin)[0], abs=2e-5)


def test_values_that_are_not_finite(tmp_path):
    path = ensure(tmp_path, "llama")
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"NaN or infinite .*mlp.up_proj"):
        Checkpoint(path, "--x").language_model(FP32, weight_bits=4)


def test_without_bitsandbytes(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        UserError, match=r"bitsandbytes is not installed; pip install 'dschat\[qlora"
    ):
        Checkpoint(ensure(tmp_path, "llama"), "--x").check("lm", weight_bits=4)


@pytest.mark.parametrize("shape", [(8, 16), (4, 48), (3, 32), (6, 96), (8, 160), (4, 128), (2, 30)])
def test_four_bits_of_rows_that_are_no_multiple_of_a_block(shape):
    """On a CPU with AVX-512, bitsandbytes takes other blocks' scales for them."""
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    weight, x = torch.randn(shape), torch.randn(5, shape[1], requires_grad=True)
    model = torch.nn.Sequential(
        bnb.nn.Linear4bit(shape[1], shape[0], compute_dtype=FP32, quant_type="nf4")
    )
    model.config = SimpleNamespace(quantization_config=None)
    options = {"requires_grad": False, "quant_type": "nf4", "compress_statistics": False}
    model[0].weight = bnb.nn.Params4bit(weight.clone(), **options)
    model.to("cpu")
    finish_loading(model, FP32)
    got = dequantized(model[0].weight)
    blocks = F.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True)
    code = model[0].weight.quant_state.code
    nearest = code[(blocks / scale).unsqueeze(-1).sub(code).abs().argmin(-1)] * scale
    expected = nearest.flatten()[: weight.numel()].view(shape)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    (model(x) ** 2).sum().backward()
    by_hand = x.detach().requires_grad_()
    y = by_hand @ expected.T + model[0].bias
    torch.testing.assert_close(model(x), y)
    (y**2).sum().backward()
    torch.testing.assert_close(x.grad, by_hand.grad)
