"""oneDNN's linear layers against NumPy in float64, and which layers become one."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from dschat.models.cpu_matmul import VARIABLE
from dschat.models.linear import OneDnnConv1D, OneDnnLinear, use_fastest_products

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN"
)


@pytest.fixture(autouse=True)
def _onednn(monkeypatch):
    monkeypatch.setenv(VARIABLE, "onednn")


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer_of(kind, bias=True):
    layer = nn.Linear(20, 33, bias=bias) if kind == "linear" else Conv1D(33, 20)
    holder = nn.ModuleList([layer])
    use_fastest_products(holder)
    return holder[0]


def exact(tensor):
    return tensor.detach().numpy().astype(np.float64)


def assert_close(got, expected):
    assert got.shape == expected.shape
    assert np.abs(exact(got) - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize("size", [(7,), (1,), (2, 5), (1, 1)])
def test_forward_and_gradients(kind, size):
    layer = layer_of(kind)
    assert type(layer) is (OneDnnLinear if kind == "linear" else OneDnnConv1D)
    x = drawn(*size, 20).requires_grad_()
    nn.init.normal_(layer.bias)
    y = layer(x)
    grad = drawn(*size, 33, seed=1)
    y.backward(grad)
    weight = exact(layer.weight) if kind == "linear" else exact(layer.weight).T
    rows, grads = exact(x).reshape(-1, 20), exact(grad).reshape(-1, 33)
    assert_close(y, (rows @ weight.T + exact(layer.bias)).reshape(*size, 33))
    assert_close(x.grad, (grads @ weight).reshape(*size, 20))
    assert_close(layer.bias.grad, grads.sum(0))
    expected = grads.T @ rows
    assert_close(layer.weight.grad, expected if kind == "linear" else expected.T)


def test_strided_inputs_and_gradients():
    layer = layer_of("linear", bias=False)
    x = drawn(20, 6).T.requires_grad_()
    y = layer(x)
    y.backward(drawn(33, 6, seed=1).T)
    assert_close(y, exact(x) @ exact(layer.weight).T)
    assert_close(layer.weight.grad, exact(drawn(33, 6, seed=1)) @ exact(x))


def test_only_what_trains_gets_a_gradient():
    layer = layer_of("linear")
    layer.weight.requires_grad_(False)
    x = drawn(4, 20)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is None
    assert_close(layer.bias.grad, np.full(33, 4.0))


def test_other_precisions_and_empty_inputs_are_left_to_torch():
    layer = layer_of("linear")
    assert layer(torch.empty(0, 20)).shape == (0, 33)
    assert layer.bfloat16()(drawn(3, 20).bfloat16()).dtype == torch.bfloat16
    mixed = layer_of("linear")
    with torch.autocast("cpu", torch.bfloat16):
        assert mixed(drawn(3, 20)).dtype == torch.bfloat16


def test_subclasses_are_left_alone():
    """They may compute something else."""

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    holder = nn.ModuleList([Doubled(4, 4), nn.Linear(4, 4)])
    use_fastest_products(holder)
    assert [type(layer) for layer in holder] == [Doubled, OneDnnLinear]


def test_a_choice_of_torch_changes_nothing(monkeypatch):
    monkeypatch.setenv(VARIABLE, "plain")
    assert type(layer_of("linear")) is nn.Linear
