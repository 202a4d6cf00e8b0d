"""Gradients in ZeRO's flat partition against DeepSpeed's own treatment, parameter by parameter."""

import pytest
import torch
from torch import nn
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from dschat.runtime import deepspeed_engine
from dschat.runtime.deepspeed_engine import ZeroSettings, initialize_training
from dschat.runtime.optimizer_step import OptimizerStep

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class Net(nn.Module):
    """Tied embeddings, a frozen layer, one that never runs and one that runs in every other pass;
    recomputed layers, of which one is used twice.
    """

    def __init__(self, num_layers=2, reentrant=False, twice=True):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 30)
        self.layers = nn.ModuleList(nn.Linear(30, 30) for _ in range(num_layers))
        self.frozen, self.unused, self.rare = (nn.Linear(30, 30) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(30, 40, bias=False)
        self.head.weight = self.embed.weight
        self.reentrant, self.order = reentrant, [*range(num_layers), *[0] * twice]

    def forward(self, ids):
        x = self.embed(ids)
        for index in self.order:
            x = x + checkpoint(self.layers[index], x, use_reentrant=self.reentrant).tanh()
        x = self.frozen(x)
        return self.head(self.rare(x) if ids[0] % 2 else x)


def engine_of(dtype, clip=0.0, stage=2, offload=False, net=Net, **overrides):
    zero = ZeroSettings(stage, dtype, offload, False, clip, overrides)
    return initialize_training(net().to(dtype), zero, 1e-2, 0.1, [0.9, 0.95], "constant", 0, 10)


def sums_of(engine, rows, spoil=1.0):
    step = OptimizerStep(engine, len(rows), denominator=1e4)
    for ids in rows:
        step.backward(engine(ids).float().square().sum() * spoil)
    return step


ROWS = [[torch.arange(10) + 3 * step + row for row in range(2)] for step in range(3)]


def trained(*args, **options):
    """Masters, moments and norms of three steps of two micro-batches; a bad one is between them."""
    engine, norms = engine_of(*args, **options), []
    for number, rows in enumerate(ROWS):
        if number == 1:
            assert not sums_of(engine, rows, spoil=float("inf")).finish()
        step = sums_of(engine, rows)
        assert step.is_finite()
        assert step.finish()
        norms.append(step.grad_norm)
    zero = engine.optimizer
    states = [state[key] for state in zero.optimizer.state.values() for key in sorted(state)]
    return [*zero.single_partition_of_fp32_groups, *zero.bit16_groups_flat, *states], norms


FILE = {"zero_optimization": {"reduce_bucket_size": 500}}  # with buckets, as in several processes
CASES = {
    "bf16": (BF16, 0, {}),
    "fp32": (FP32, 0, {}),
    "fp16": (FP16, 0, {}),
    "clipped bf16": (BF16, 1e-6, {"clip": 0.05}),  # the rounding of the norm
    "clipped fp32": (FP32, 1e-6, {"clip": 0.05}),
    "reentrant": (BF16, 0, {"net": lambda: Net(reentrant=True, twice=False)}),
    "buckets, ZeRO-1": (FP32, 0, FILE | {"stage": 1}),
    "buckets, ZeRO-2": (BF16, 0, FILE | {"stage": 2}),
    "offloaded": (BF16, 0, {"offload": True}),
}


@pytest.mark.parametrize(("dtype", "tolerance", "options"), CASES.values(), ids=CASES)
@pytest.mark.usefixtures("fp16_works")
def test_states_are_deepspeed_s(dtype, tolerance, options, monkeypatch):
    states, norms = trained(dtype, **options)
    for way in ("work_on_partitions", "sum_in_place"):
        monkeypatch.setattr(deepspeed_engine, way, lambda zero: None)
    expected, expected_norms = trained(dtype, **options)
    assert norms == pytest.approx(expected_norms, rel=1e-6)
    for ours, theirs in zip(states, expected, strict=True):
        allowed = 2**-8 if tolerance and ours.dtype == BF16 else tolerance  # one rounding
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=allowed)


def test_a_layer_that_reentrant_recomputation_runs_twice():
    """Its gradients are complete twice in a backward pass, which DeepSpeed refuses."""
    states, norms = trained(FP32, net=lambda: Net(reentrant=True))
    expected, expected_norms = trained(FP32)
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    for ours, theirs in zip(states, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_no_bucket_is_allocated_in_one_process():
    engine = engine_of(BF16)
    sums_of(engine, ROWS[0])
    assert not any(bucket.buffer for bucket in engine.optimizer.ipg_buckets.values())
    sums = engine.optimizer.averaged_gradients[0]
    assert all(part.data_ptr() >= sums.flat_partition.data_ptr() for part in sums)
    assert [part.shape for part in sums] == [p.shape for p in engine.optimizer.bit16_groups[0]]
    assert all(p.grad is None for p in engine.module.parameters())


def test_replaced_weights_are_those_of_the_partition_after_a_step():
    engine = engine_of(BF16)
    weight = engine.module.layers[1].weight
    weight.data = torch.zeros_like(weight)
    assert sums_of(engine, ROWS[0]).finish()
    flat = engine.optimizer.bit16_groups_flat[0]
    assert flat.data_ptr() <= weight.data_ptr() < flat.data_ptr() + flat.nbytes
    assert weight.abs().sum() > 0


def launches(function, args):
    """Operators that compute: all but views."""
    return not function.is_view


def launches_of(counting, num_layers, **options):
    """Those of a backward pass and of the step that follows, and those of plain torch."""
    engine = engine_of(BF16, clip=0.1, net=lambda: Net(num_layers), **options)
    assert sums_of(engine, ROWS[0]).finish()  # AdamW makes its states
    step = OptimizerStep(engine, 1, denominator=10.0)
    loss = engine(ROWS[0][0]).float().square().sum()
    with counting(launches) as backward:
        step.backward(loss)
    with counting(launches) as update:
        assert step.finish()
    plain = Net(num_layers).to(BF16)
    loss = plain(ROWS[0][0]).float().square().sum()
    with counting(launches) as alone:
        loss.backward()
    return backward.total - alone.total, update.total


@pytest.mark.parametrize("file", [{}, {"zero_optimization": {"reduce_bucket_size": 10**6}}])
def test_a_step_has_no_operators_for_each_parameter(file, counting):
    backward, update = launches_of(counting, 10, **file)
    more_backward, more_update = launches_of(counting, 30, **file)
    assert more_update == update
    per_parameter = (more_backward - backward) / 40
    assert per_parameter <= (4 if file else 1)


def test_layers_compute_the_same_where_nothing_is_recorded():
    """Without DeepSpeed's autograd function, which takes longer than a small product."""
    engine, outputs, by_function = engine_of(FP32, stage=3), [], []
    for with_gradients in (True, False):
        with torch.set_grad_enabled(with_gradients), profile() as profiled:
            outputs.append(engine(torch.arange(8)))
        by_function.append({"LinearFunctionForZeroStage3"} & {e.name for e in profiled.events()})
    assert torch.equal(*outputs)
    assert list(map(len, by_function)) == [1, 0]
