"""Optimizer steps under DeepSpeed against plain torch: gradients, offload, bad steps, precision."""

import logging

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from quick import slow, some
from torch import nn

from dschat.config import UserError
from dschat.hybrid.weight_stream import weight_stream
from dschat.runtime.deepspeed_engine import (
    ZeroSettings,
    initialize_training,
    resolve_dtype,
    unwrap,
)
from dschat.runtime.optimizer_step import (
    OptimizerStep,
    SkippedSteps,
    finish_together,
    learning_rate,
    loss_scale,
)

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SIZE = 16
# Stage, and what is offloaded: o(ptimizer), p(arameters).
LAYOUTS = [(0, ""), (1, ""), (2, ""), (3, ""), (2, "o"), (3, "o"), (3, "p"), (3, "op")]
QUICK = [layout for layout in LAYOUTS if layout in ((0, ""), (2, "o"), (3, "p"))]
by_layout = pytest.mark.parametrize(
    ("stage", "offload"), some(LAYOUTS, QUICK), ids=lambda v: str(v)
)


def net(dtype=FP32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)).to(dtype)


def inputs(count, dtype=FP32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, SIZE, generator=generator).to(dtype) for _ in range(count)]


def engine_of(
    module,
    stage,
    dtype=FP32,
    clip=0.0,
    decay=0.0,
    schedule="constant",
    warmup=0,
    total=10,
    offload="",
    **overrides,
):
    zero = ZeroSettings(stage, dtype, "o" in offload, "p" in offload, clip, overrides)
    return initialize_training(module, zero, 1e-2, decay, [0.9, 0.95], schedule, warmup, total)


def take_step(engine, batches, bad=None, scale=1.0):
    step = OptimizerStep(engine, len(batches), denominator=3.0 * len(batches))
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


def plain_norm(dtype, batches):
    """Of the gradient in float64 torch, with the weights of ``dtype``."""
    module = net(dtype).double()
    for x in batches:
        (module(x.double()).square().sum() / (3 * len(batches))).backward()
    return float(nn.utils.get_total_norm([p.grad for p in module.parameters()]))


@by_layout
@pytest.mark.parametrize(("clip", "decay"), [*slow([(0.0, 0.0)]), (0.05, 0.3)])
def test_steps_are_those_of_torch(stage, offload, clip, decay):
    batches = inputs(3)
    engine = engine_of(net(), stage, clip=clip, decay=decay, offload=offload)
    expected, norms = plain_steps(3, batches, clip, decay)
    for norm in norms:
        applied, grad_norm = take_step(engine, batches)
        assert applied
        assert grad_norm == pytest.approx(norm, rel=1e-5)
    for name, p in expected.named_parameters():
        torch.testing.assert_close(weights(engine)[name].double(), p.data, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [FP32, *slow([BF16])], ids=["fp32", "bf16"])
@by_layout
def test_a_bad_step_changes_nothing(stage, offload, dtype):
    batches = inputs(3, dtype)
    engine = engine_of(net(dtype), stage, dtype, offload=offload)
    calm = engine_of(net(dtype), stage, dtype, offload=offload)
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


@pytest.mark.parametrize("stage", [1, *slow([3])])
def test_bf16_sums_its_gradients_in_fp32(stage):
    """256 micro-batches: a bf16 sum would round away what the late ones add."""
    batches = inputs(256, BF16)
    _, grad_norm = take_step(engine_of(net(BF16), stage, BF16), batches)
    assert grad_norm == pytest.approx(plain_norm(BF16, batches), rel=1.5e-3)


@pytest.mark.parametrize("stage", some([0, 2, 3], [3]))
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


def test_stages_that_have_what_was_asked_for():
    """At stage 0 there is neither anything to offload nor an fp32 sum of 16-bit gradients."""
    for dtype, offload, used in ((FP32, "", 0), (FP32, "o", 2), (BF16, "", 2)):
        engine = engine_of(net(dtype), 0, dtype, offload=offload)
        assert engine.zero_optimization_stage() == used


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
    step = OptimizerStep(engine, 2, denominator=1.0)
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
    if not get_accelerator().is_fp16_supported():
        with pytest.raises(UserError, match="--dtype fp16 does not work on this device"):
            resolve_dtype("fp16")


@by_layout
def test_offload_is_what_was_asked_for(stage, offload):
    """On a CPU nothing can move; that DeepSpeed keeps its CPU copies shows all the same."""
    engine = engine_of(net(), stage, offload=offload)
    assert engine.zero_optimization_stage() == stage
    away = getattr(engine.optimizer, "offload_optimizer" if stage == 3 else "cpu_offload", False)
    assert away == ("o" in offload)
    assert getattr(engine.optimizer, "offload_param", False) == ("p" in offload)


@pytest.mark.gpu
@pytest.mark.parametrize(("stage", "offload"), [(2, "o"), (3, "o"), (3, "op")])
def test_offloaded_states_lie_in_cpu_memory(stage, offload):
    engine = engine_of(net(BF16).cuda(), stage, BF16, offload=offload)
    x = [batch.cuda() for batch in inputs(1, BF16)]
    assert take_step(engine, x)[0]
    states = engine.optimizer.optimizer.state.values()
    tensors = [t for state in states for t in state.values() if torch.is_tensor(t) and t.dim()]
    assert tensors
    assert all(t.device.type == "cpu" for t in tensors)
    shards = [p.ds_tensor for p in unwrap(engine).parameters() if hasattr(p, "ds_tensor")]
    assert len(shards) == (4 if stage == 3 else 0)
    where = "cpu" if "p" in offload else "cuda"
    assert all(shard.device.type == where for shard in shards)


def test_a_user_s_settings_reach_the_engine():
    engine = engine_of(net(), 3, zero_optimization={"stage3_param_persistence_threshold": 3})
    assert engine.zero_param_persistence_threshold() == 3
    assert engine_of(net(), 3).zero_param_persistence_threshold() > 3


@pytest.mark.parametrize("stage", [0, 2])
def test_a_step_does_not_wait_for_the_device(stage, monkeypatch):
    """DeepSpeed's throughput timer would, in every forward pass."""
    engine, waits = engine_of(net(), stage), []
    monkeypatch.setattr(type(get_accelerator()), "synchronize", lambda *_: waits.append(1))
    for _ in range(3):  # the timer starts at its second step
        take_step(engine, inputs(4))
    assert waits == []


def num_copied(function, args):
    """The elements that an operator copies to other memory."""
    if function is torch.ops.aten.copy_.default and args[0].data_ptr() != args[1].data_ptr():
        return args[0].numel()
    if function is torch.ops.aten.cat.default:
        return sum(t.numel() for t in args[0])
    return 0


@pytest.mark.parametrize("stage", [0, 2])
def test_one_process_copies_no_gradient(stage, counting):
    engine = engine_of(net(), stage)
    step = OptimizerStep(engine, 2, denominator=6.0)
    for x in inputs(2):
        loss = engine(x).square().sum()
        with counting(num_copied) as copied:
            step.backward(loss)
        assert copied.total == 0
    assert step.finish()


@pytest.mark.parametrize("stage", [0, 2])
def test_a_weight_without_gradient_decays(stage):
    """As in several processes, whose reduction makes its gradient zero."""
    module = nn.ModuleList([net(), nn.Linear(SIZE, SIZE)])
    module.forward = lambda x: module[0](x)
    unused = module[1].weight.detach().clone()
    engine = engine_of(module, stage, decay=0.3)
    take_step(engine, inputs(1))
    torch.testing.assert_close(weights(engine)["1.weight"], unused * (1 - 1e-2 * 0.3))


def backward_only(engine, batches, spoil=lambda loss: loss):
    step = OptimizerStep(engine, len(batches), denominator=3.0 * len(batches))
    for x in batches:
        step.backward(spoil(engine(x).float().square().sum()))
    return step


@by_layout
@pytest.mark.parametrize(
    "spoil",
    [*slow([lambda loss: loss * float("inf")]), lambda loss: loss + float("inf")],
    ids=["gradient", "loss alone"],
)
def test_an_aligned_step_changes_nothing(stage, offload, spoil):
    """The finite step is skipped with the other; the next ones are as without both."""
    batches = inputs(3)
    good, calm, bad = (engine_of(net(), stage, clip=0.1, offload=offload) for _ in range(3))
    for engine in (good, calm, bad):
        take_step(engine, batches)
    before, rate = weights(good), learning_rate(good)
    steps = [backward_only(good, batches), backward_only(bad, batches, spoil)]
    assert [step.is_finite() for step in steps] == [True, False]
    assert finish_together(steps) == [False, False]
    assert [step.outcome for step in steps] == ["aligned", "bad"]
    assert all(torch.equal(before[n], t) for n, t in weights(good).items())
    assert learning_rate(good) == rate
    # Two good ones: applied, bit by bit as alone.
    steps = [backward_only(good, batches), backward_only(bad, batches)]
    assert finish_together(steps) == [True, True]
    assert take_step(calm, batches)[1] == steps[0].grad_norm
    assert all(torch.equal(t, weights(calm)[n]) for n, t in weights(good).items())


# -- fp16 -----------------------------------------------------------------------------------------


@by_layout
def test_an_overflow_lowers_the_scale_and_is_no_bad_step(stage, offload, fp16_works, caplog):
    assert resolve_dtype("fp16") == FP16
    engine = engine_of(net(FP16), stage, FP16, offload=offload, fp16={"initial_scale_power": 20})
    skipped, batches, outcomes = SkippedSteps(limit=2), inputs(2, FP16), []
    with caplog.at_level(logging.INFO, logger="dschat"):
        for number in range(8):
            step = backward_only(engine, batches)
            step.finish()
            skipped.take(step, f"step {number}")
            outcomes.append(step.outcome)
    # DeepSpeed's hysteresis: the first overflow leaves the scale alone, each other one halves it.
    count = outcomes.count("overflow")
    assert 2 <= count <= 6
    assert outcomes == ["overflow"] * count + ["applied"] * (8 - count)
    assert loss_scale(engine) == 2.0 ** (21 - count)
    assert f"step 1 skipped: fp16 overflowed; loss scale {2**19}" in caplog.text
    # The gradient's norm is that of the loss itself, without its scale.
    fresh = engine_of(net(FP16), stage, FP16, offload=offload, fp16={"initial_scale_power": 8})
    assert take_step(fresh, batches)[1] == pytest.approx(plain_norm(FP16, batches), rel=1e-2)


class NaNGradient(torch.autograd.Function):
    """The identity, whose gradient is NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


@pytest.mark.parametrize("stage", [*slow([0]), 3])
@pytest.mark.parametrize(
    ("spoil", "overflows"),
    [(NaNGradient.apply, 3), (lambda loss: loss * float("nan"), 0)],
    ids=["gradient", "loss"],
)
def test_nan_under_a_loss_scale_still_ends_the_run(stage, spoil, overflows, fp16_works):
    """As often as the scale can fall an overflow may explain a gradient; from then on nothing does.
    A loss is not scaled.
    """
    engine = engine_of(net(FP16), stage, FP16, fp16={"initial_scale_power": 3, "hysteresis": 1})
    skipped, before, outcomes = SkippedSteps(limit=3, of="actor"), weights(engine), []

    def train():
        while len(outcomes) < 20:
            (x,) = inputs(1, FP16)
            step = OptimizerStep(engine, 1, denominator=3.0)
            step.backward(spoil(engine(x).float().square().sum()))
            step.finish()
            outcomes.append(step.outcome)
            skipped.take(step, "now")

    with pytest.raises(FloatingPointError, match="3 steps of the actor in a row .*max_bad_steps"):
        train()
    assert outcomes == ["overflow"] * overflows + ["bad"] * 3  # 8 -> 4 -> 2 -> 1
    assert loss_scale(engine) == 8 / 2**overflows
    assert all(torch.equal(before[n], t) for n, t in weights(engine).items())


def test_the_scale_rises_after_its_window(fp16_works):
    scaling = {"initial_scale_power": 4, "loss_scale_window": 3}
    engine = engine_of(net(FP16), 2, FP16, fp16=scaling)
    scales = []
    for _ in range(7):
        assert take_step(engine, inputs(1, FP16))[0]
        scales.append(loss_scale(engine))
    assert scales[0] == 16
    assert scales[-1] == 64


def test_an_aligned_step_leaves_the_other_scale(fp16_works):
    high, low = (
        engine_of(net(FP16), 2, FP16, fp16={"initial_scale_power": power, "hysteresis": 1})
        for power in (24, 4)
    )
    steps = [backward_only(engine, inputs(1, FP16)) for engine in (high, low)]
    assert finish_together(steps) == [False, False]
    assert [step.outcome for step in steps] == ["overflow", "aligned"]
    assert (loss_scale(high), loss_scale(low)) == (2**23, 2**4)
