"""cuDNN's attention is off wherever dschat computes."""

import math

import pytest
import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from families import build, empty_engine

from dschat.distributed import process_group
from dschat.inference.generators.hf_generator import HuggingFaceGenerator
from dschat.startup.performance import avoid_cudnn_attention


@pytest.fixture(autouse=True)
def preferred():
    """As a process begins."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_the_engine_turns_it_off():
    empty_engine(build("llama").config)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_generate_of_transformers_turns_it_off():
    HuggingFaceGenerator(build("llama"), stop_ids=(0,))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_training_on_cuda_turns_it_off(monkeypatch):
    for name in ("is_initialized", "init_process_group"):
        monkeypatch.setattr(torch_dist, name, lambda *args, **options: None)
    monkeypatch.setenv("LOCAL_RANK", "0")  # else `init` sets it for good
    monkeypatch.setattr(process_group, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    process_group.init()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.gpu
@pytest.mark.parametrize("length", [640, 704])
def test_gradients_of_masked_attention_are_finite(length):
    """Scores of about -120, as pytorch#196678 has them: cuDNN's gradient is NaN at 704."""
    size = 64
    q, k, v = torch.randn(3, 1, 1, length, size, device="cuda", dtype=torch.bfloat16) * 0.1
    q[..., 0], k[..., 0] = 1.0, -120 * math.sqrt(size)
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()[None, None]
    avoid_cudnn_attention()
    F.scaled_dot_product_attention(*inputs, attn_mask=mask).sum().backward()
    assert all(t.grad.isfinite().all() for t in inputs)
