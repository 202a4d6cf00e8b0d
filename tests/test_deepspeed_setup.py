"""Optimizer steps under DeepSpeed against plain torch: gradients, bad steps, precision."""

import pytest
import torch
from torch import nn

from dschat.config import UserError
from dschat.deepspeed_setup import (
    Step,
    ZeroSettings,
    deepspeed_config,
    initialize_training,
    learning_rate,
    resolve_dtype,
    unwrap,
)
from dschat.hybrid.stream import weight_stream

FP32, BF16 = torch.float32, torch.bfloat16
SIZE = 16


def net(dtype=FP32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)).to(dtype)


def inputs(count, dtype=FP32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, SIZE, generator=generator).to(dtype) for _ in range(count)]


def engine_of(
    module, stage, dtype=FP32, clip=0.0, decay=0.0, schedule="constant", warmup=0, total=10
):
    zero = ZeroSettings(stage, dtype, max_grad_norm=clip)
    return initialize_training(module, zero, 1e-2, decay, [0.9, 0.95], schedule, warmup, total)


def take_step(engine, batches, bad=None, scale=1.0):
    step = Step(engine, len(batches), denominator=3.0 * len(batches))
    for number, x in enumerate(batches):
        loss = engine(x).float().square().sum() * scale
        step.backward(loss * float("nan") if number == bad else loss)
    return step.finish(), step.grad_norm


def weights(engine):
    return {n: t.clone() for n, t in weight_stream(unwrap(engine), torch.device("cpu"))}


def plain_steps(count, micro_batches, clip, decay):
    """The same in float64 torch."""
    module = net().double()
    matrices = [p for p in module.parameters() if p.dim() > 1]
    vectors = [p for p in module.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    norms = []
    for _ in range(count):
        optimizer.zero_grad()
        for x in micro_batches:
            (module(x.double()).square().sum() / (3 * len(micro_batches))).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), clip or float("inf"))))
        optimizer.step()
    return module, norms


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("clip", "decay"), [(0.0, 0.0), (0.05, 0.3)])
def test_steps_are_those_of_torch(stage, clip, decay):
    batches = inputs(3)
    engine = engine_of(net(), stage, clip=clip, decay=decay)
    expected, norms = plain_steps(3, batches, clip, decay)
    for norm in norms:
        applied, grad_norm = take_step(engine, batches)
        assert applied
        assert grad_norm == pytest.approx(norm, rel=1e-5)
    for name, p in expected.named_parameters():
        torch.testing.assert_close(weights(engine)[name].double(), p.data, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_bad_step_changes_nothing(stage, dtype):
    batches = inputs(3, dtype)
    engine, calm = engine_of(net(dtype), stage, dtype), engine_of(net(dtype), stage, dtype)
    assert take_step(engine, batches)[0]
    before, rate = weights(engine), learning_rate(engine)
    applied, norm = take_step(engine, batches, bad=1)
    assert not applied
    assert not norm < float("inf")
    after = weights(engine)
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert learning_rate(engine) == rate
    assert take_step(engine, batches)[0]
    assert all(take_step(calm, batches)[0] for _ in range(2))
    calm_weights = weights(calm)
    for name, tensor in weights(engine).items():
        torch.testing.assert_close(tensor, calm_weights[name], atol=0, rtol=0)


@pytest.mark.parametrize("stage", [1, 3])
def test_bf16_sums_its_gradients_in_fp32(stage):
    """256 micro-batches: a bf16 sum would round away what the late ones add."""
    batches = inputs(256, BF16)
    _, grad_norm = take_step(engine_of(net(BF16), stage, BF16), batches)
    module = net(BF16).double()
    for x in batches:
        (module(x.double()).square().sum() / (3 * len(batches))).backward()
    exact = float(nn.utils.get_total_norm([p.grad for p in module.parameters()]))
    assert grad_norm == pytest.approx(exact, rel=1.5e-3)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_bf16_weights_have_fp32_masters(stage):
    """Updates far below bf16's resolution add up."""
    engine = engine_of(net(BF16), stage, BF16)
    engine.optimizer.param_groups[0]["lr"] = engine.optimizer.param_groups[1]["lr"] = 2e-5
    engine.lr_scheduler.base_lrs = [2e-5] * 2
    before = weights(engine)
    for _ in range(40):
        take_step(engine, inputs(1, BF16))
    after = weights(engine)
    moved = (after["0.weight"].float() - before["0.weight"].float()).abs()
    assert moved.mean() > 2e-4
    assert after["0.weight"].dtype == BF16


def test_masters_and_sums_by_configuration():
    assert deepspeed_config(ZeroSettings(0, FP32))["zero_optimization"]["stage"] == 0
    for stage, used in ((0, 2), (1, 2), (2, 2), (3, 3)):
        config = deepspeed_config(ZeroSettings(stage, BF16))
        assert config["zero_optimization"]["stage"] == used
        assert config["data_types"] == {"grad_accum_dtype": "fp32"}
        assert config["bf16"]["check_grad_overflow"]
    offloaded = deepspeed_config(
        ZeroSettings(3, FP32, offload_optimizer=True, offload_parameters=True)
    )
    assert offloaded["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert offloaded["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    # At stage 0 there is nothing that could be offloaded: the flag must not be silently without
    # effect.
    offloaded = deepspeed_config(ZeroSettings(0, FP32, offload_optimizer=True))
    assert offloaded["zero_optimization"]["stage"] == 2
    assert offloaded["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    fp16 = deepspeed_config(ZeroSettings(0, torch.float16))
    assert fp16["fp16"]["enabled"]
    assert fp16["zero_optimization"]["stage"] == 1


@pytest.mark.parametrize("stage", [0, 3])
def test_the_schedule_advances_by_optimizer_steps(stage):
    engine = engine_of(net(), stage, schedule="linear", warmup=2, total=6)
    rates = []
    for _ in range(6):
        rates.append(learning_rate(engine))
        take_step(engine, inputs(2))
    assert rates == pytest.approx([0.0, 0.005, 0.01, 0.0075, 0.005, 0.0025])


def test_micro_batches_must_be_those_announced():
    engine = engine_of(net(), 0)
    step = Step(engine, 2, denominator=1.0)
    step.backward(engine(inputs(1)[0]).sum())
    with pytest.raises(AssertionError, match="fewer"):
        step.finish()
    step.backward(engine(inputs(1)[0]).sum())
    with pytest.raises(AssertionError, match="more"):
        step.backward(engine(inputs(1)[0]).sum())


@pytest.mark.skipif(torch.cuda.is_available(), reason="what holds on a CPU")
def test_precision_on_a_cpu():
    assert resolve_dtype("auto") == FP32
    assert resolve_dtype("bf16") == BF16
    if not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        with pytest.raises(UserError, match="--dtype fp16 does not work on this device"):
            resolve_dtype("fp16")
