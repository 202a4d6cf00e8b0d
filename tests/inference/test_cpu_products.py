"""Our products with packed weights, against float64."""

import platform
import re
import shutil
import threading

import pytest
import torch

from dschat.inference.kernels import cpu

SHAPES = [(1, 1), (7, 5), (32, 512), (33, 513), (130, 1100), (48, 64)]
KERNELS = cpu.load()

pytestmark = pytest.mark.skipif(KERNELS is None, reason="switched off, or no C compiler here")


def weight_of(shape):
    """A weight, and its packed form."""
    weight = torch.randn(shape)
    return weight, KERNELS.pack(weight)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_products(shape, has_bias):
    torch.manual_seed(shape[1])
    weight, packed = weight_of(shape)
    bias = torch.randn(shape[0]) if has_bias else None
    for rows in (0, 1, 2, 3, 5, 6, 7, 12, 13, 119, 120, 121, 250):
        x = torch.randn(rows, 2 * shape[1])[:, : shape[1]]  # rows apart
        expected = x.double() @ weight.double().T
        expected += 0 if bias is None else bias
        y = KERNELS.product(x, packed, shape[0], bias)
        bound = 2e-6 * weight.abs().max() * shape[1] ** 0.5
        torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=float(bound))
        assert torch.equal(y, KERNELS.product(x.T.contiguous().T, packed, shape[0], bias))


def test_a_row_depends_on_neither_other_rows_nor_threads(threads):
    shape = (530, 700)
    _, packed = weight_of(shape)
    x = torch.randn(125, shape[1])
    threads(1)
    whole = KERNELS.product(x, packed, shape[0], None)
    for count in (1, 2):
        threads(count)
        assert torch.equal(KERNELS.product(x, packed, shape[0], None), whole)
        for rows in (1, 8, 11):
            parts = [KERNELS.product(p, packed, shape[0], None) for p in x.split(rows)]
            assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("has_bias", [True, False])
def test_products_of_groups_are_those_of_each(has_bias, threads):
    """Also groups without rows; on one thread and several."""
    shape, counts = (300, 600), [0, 3, 1, 0, 120, 130]
    packed = [weight_of(shape)[1] for _ in counts]
    biases = [torch.randn(shape[0]) for _ in counts] if has_bias else None
    x = torch.randn(sum(counts), shape[1])
    expected = [
        KERNELS.product(part, packed[i], shape[0], biases and biases[i])
        for i, part in enumerate(x.split(counts))
    ]
    for count in (1, 2):
        threads(count)
        y = KERNELS.products(x, counts, packed, shape[0], biases)
        assert torch.equal(y, torch.cat(expected))


def test_a_new_version_is_packed_in_place():
    weight, packed = weight_of((40, 600))
    other = weight.flip(0).contiguous()
    assert KERNELS.pack(other, packed).data_ptr() == packed.data_ptr()
    x = torch.randn(3, 600)
    expected = KERNELS.product(x, KERNELS.pack(other), 40, None)
    assert torch.equal(KERNELS.product(x, packed, 40, None), expected)


@pytest.mark.skipif(platform.system() != "Linux", reason="finds OpenMP in /proc")
def test_threads_are_those_of_torch(threads):
    """One OpenMP runtime in the process; without one, the calling thread computes all."""
    threads(2)
    _, packed = weight_of((512, 512))
    x = torch.randn(64, 512)
    y = KERNELS.product(x, packed, 512, None)
    with open("/proc/self/maps") as lines:
        runtimes = {line.split()[-1] for line in lines if re.search(r"lib([gi]?omp|iomp5)", line)}
    assert len([path for path in runtimes if "sentencepiece" not in path]) == 1  # has its own
    compiler = shutil.which("cc") or shutil.which("gcc")
    alone = cpu.Kernels(cpu.compiled_library(compiler), openmp=None)
    assert torch.equal(alone.product(x, packed, 512, None), y)


def test_callers_on_several_threads(threads):
    threads(2)
    _, packed = weight_of((512, 512))
    inputs = [torch.randn(16, 512) for _ in range(2)]
    expected = [KERNELS.product(x, packed, 512, None) for x in inputs]
    wrong = []

    def call(number):
        for _ in range(10):
            y = KERNELS.product(inputs[number], packed, 512, None)
            if not torch.equal(y, expected[number]):
                wrong.append(number)

    callers = [threading.Thread(target=call, args=(n,)) for n in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
