"""Every backend of the engine's products gives the same answers; each shape has its own."""

from functools import partial
from itertools import cycle

import pytest
import torch
from families import PROMPTS, build, engine, logprob_gap, stream

from dschat.inference import SamplingParams
from dschat.inference.model.linear import backends_for, fastest_backends
from dschat.models import cpu_matmul
from dschat.models.cpu_matmul import VARIABLE

CPU, FP32 = torch.device("cpu"), torch.float32
SAMPLING = SamplingParams(max_new_tokens=12, n=2, seed=9)


@pytest.fixture
def choose_by(monkeypatch):
    """``choose_by(function)``: it takes the place of `choose`."""
    return partial(monkeypatch.setattr, cpu_matmul, "choose")


def assert_agree(made, module):
    rollout = made.generate(PROMPTS, SAMPLING)
    assert logprob_gap(module, PROMPTS, rollout) < 1e-4
    return rollout.token_ids


@pytest.mark.parametrize("name", ["opt", "llama"])  # a tied head with biases; neither
def test_backends_agree(name, module_of, monkeypatch):
    answers = []
    for backend in ("plain", "mkl", "onednn", "panels"):
        monkeypatch.setenv(VARIABLE, backend)
        made = engine(build(name, seed=1))
        assert set(made.weights.backends.values()) == {backend}
        made.weights.load(stream(module_of(name)))  # a new version replaces the packing
        answers.append(assert_agree(made, module_of(name)))
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_each_shape_has_its_own_backend(name, module_of, choose_by):
    """They are dealt out to the shapes in turn."""
    choose_by(lambda _, shapes, __, makers, **___: dict(zip(sorted(set(shapes)), cycle(makers))))  # noqa: B905
    made = engine(module_of(name))
    assert len(set(made.weights.backends.values())) > 1
    for linear in made.weights.linears.values():
        assert linear.packs == (made.weights.backends[linear.shape] != "plain")
    assert_agree(made, module_of(name))


def test_a_part_of_a_large_weight_is_timed(choose_by):
    timed = []

    def choose(use, shapes, dtype, makers, narrow):
        timed.extend(shapes)
        return dict.fromkeys(timed, "onednn")

    choose_by(choose)
    shapes = [(50_272, 768), (768, 768)]
    assert fastest_backends(shapes, FP32, CPU) == dict.fromkeys(shapes, "onednn")
    assert timed == [(10_923, 768), (768, 768)]  # 2^23 elements


@pytest.mark.parametrize("in_bf16", [True, False])
def test_onednn_is_offered_for_what_the_processor_can(in_bf16, monkeypatch):
    """A CPU without AVX512-BW has no bf16 products of oneDNN."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: in_bf16)
    offered = [d for d in (FP32, torch.bfloat16, torch.float16) if "onednn" in backends_for(d)]
    assert offered == [FP32] + [torch.bfloat16] * in_bf16


def test_the_operands_that_are_timed_are_those_of_the_product(choose_by):
    """Every candidate multiplies 16 rows by a weight of the shape."""
    outputs = {}

    def choose(use, shapes, dtype, makers, narrow):
        outputs.update({name: make((48, 32))() for name, make in makers.items()})
        return dict.fromkeys(shapes, "plain")

    choose_by(choose)
    fastest_backends([(48, 32)], FP32, CPU)
    assert next(iter(outputs)) == "plain"  # wins ties
    for y in outputs.values():
        assert torch.equal(y, torch.full((16, 48), 32.0))


def test_devices_other_than_a_cpu_are_not_timed():
    shapes = [(48, 32)]
    assert fastest_backends(shapes, FP32, torch.device("cuda")) == {(48, 32): "plain"}
