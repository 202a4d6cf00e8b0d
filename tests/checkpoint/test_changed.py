"""Runs that are resumed in another layout, or with other settings: state stays, settings hold."""

import itertools
import math
from dataclasses import asdict, replace

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state
from quick import slow, some
from small_run import (
    DEFAULT,
    NUM_STEPS,
    ROWS,
    SAVED_AT,
    Settings,
    SmallRun,
    Spec,
    batch_of,
    causal_loss,
    launch,
    taken_up,
)
from transformers import AutoModelForCausalLM

from dschat.checkpoint.manager import CheckpointManager
from dschat.config import UserError
from dschat.runtime.optimizer_step import learning_rate, loss_scale

BF16 = "bfloat16"
MOMENTS = ("exp_avg", "exp_avg_sq")


def name_of(value):
    return value.name if isinstance(value, Spec) else None


def whole_state(engine):
    """fp32 weights, moments and count of steps of every trained parameter, by DeepSpeed's API."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage in (1, 2):
        groups = zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True)
        for group in groups:  # DeepSpeed 0.19 has linked the first one only
            lazy_init_hp_params_optimizer_state(*group, optimizer.optimizer.state)
    found = {}
    for name, p in engine.module.named_parameters():
        if not p.requires_grad:
            continue
        if stage == 0:
            states = optimizer.state[p]
            found[name] = [p.detach().clone(), *(states[m].clone() for m in MOMENTS)]
        else:
            moments = [safe_get_full_optimizer_state(p, m).view(-1).clone() for m in MOMENTS]
            found[name] = [safe_get_full_fp32_param(p).clone(), *moments]
    inner = getattr(optimizer, "optimizer", optimizer)
    steps = {float(states["step"]) for states in inner.state.values()}
    return {name: [t.view(-1) for t in tensors] for name, tensors in found.items()}, steps


@pytest.fixture(scope="module")
def at_save(here):
    """``at_save(spec)``: the state that was saved, of a run that stops there."""
    done = {}

    def run(spec):
        if spec not in done:
            stopped = SmallRun(spec, here(spec)[0])
            stopped.steps(SAVED_AT)
            done[spec] = whole_state(stopped.engine), learning_rate(stopped.engine)
        return done[spec]

    return run


Z0, Z1, Z2, Z3 = map(Spec, range(4))
VARIANTS = [(BF16, False), ("float32", True)]
PLAIN = [Z0, Z1, Z2, Z3]
PLAIN += [Spec(z, dtype, offload=offload) for z in (2, 3) for dtype, offload in VARIANTS]
LORA = [*(Spec(z, lora=True) for z in (0, 2, 3)), Spec(3, BF16, lora=True)]
TIED = [Spec(z, model="llama_tied") for z in (0, 2, 3)]
PAIRS = [pair for specs in (PLAIN, LORA, TIED) for pair in itertools.permutations(specs, 2)]
# From ZeRO-3: with changed settings, below.
LAYOUTS = some(PAIRS, [(Z2, Spec(3, BF16))])


@pytest.mark.parametrize(("saved_by", "spec"), LAYOUTS, ids=name_of)
def test_every_layout_resumes_every_other(saved_by, spec, here, at_save):
    folder, rows = here(saved_by)
    (state, steps), rate = at_save(saved_by)
    run = taken_up(spec, folder, folder / f"{saved_by.name}_1")
    now, steps_now = whole_state(run.engine)
    assert now.keys() == state.keys()
    for name, tensors in state.items():
        assert all(map(torch.equal, now[name], tensors)), name
    assert (steps_now, learning_rate(run.engine)) == (steps, rate) == ({SAVED_AT}, rate)
    tolerance = 1e-5 if spec.dtype == saved_by.dtype else 5e-2
    for row, other in zip(run.steps(), rows[SAVED_AT:], strict=True):
        assert row[:3] == pytest.approx(other[:3], rel=tolerance)
        assert row[3] == other[3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_by", "spec"), [(Z0, Z2), (Z2, Z2), (Z2, Z3), (Z3, Z3), (Z3, Z0)], ids=name_of
)
def test_before_the_first_step(saved_by, spec, here, tmp_path):
    """The actor's state while the critic warms up: there are no moments yet."""
    folder, rows = here(Z0)
    checkpoints = CheckpointManager(tmp_path, {"seed": 7})
    checkpoints.save(1, SmallRun(saved_by, folder).state())
    checkpoints.wait()
    assert losses(taken_up(spec, folder, tmp_path).steps()) == [
        pytest.approx(row, rel=1e-5) for row in losses(rows)
    ]


@pytest.mark.dist
@pytest.mark.slow
def test_layouts_of_one_process_resume_on_two(here):
    """From every stage to every other; both ways, through what the two have saved."""
    stages = [Z0, Z1, Z2, Z3, Spec(3, BF16)]
    cases = [(a, b) for a in stages for b in stages if a != b]
    folder = here(stages[0])[0]
    expected = {spec: here(spec)[1][SAVED_AT:] for spec in stages}
    jobs = [("resumed", b, (1, asdict(a))) for a, b in cases]
    done = launch(folder, [*jobs, *(("saved", spec, ()) for spec in stages)])
    for (a, b), rows in zip(cases, done, strict=False):
        check_losses(rows, expected[a], a, b)
    for a, b in cases:
        rows = taken_up(b, folder, folder / f"{a.name}_2").steps()
        check_losses(rows, expected[a], a, b)


def check_losses(rows, expected, a, b):
    tolerance = 1e-4 if a.dtype == b.dtype == "float32" else 5e-2
    for row, other in zip(rows, expected, strict=True):
        assert row[:4] == pytest.approx(other[:4], rel=tolerance), (a, b)


@pytest.mark.parametrize(
    ("saved_by", "spec", "what"),
    [
        (
            Spec(0),
            Spec(0, lora=True),
            r"lora_A\S* of its model is not trained, here trained .4 x 32",
        ),
        (Spec(2, lora=True), Spec(2), r"lora_A\S* of its model is trained .4 x 32., here not"),
    ],
    ids=name_of,
)
def test_other_trained_weights_are_refused(saved_by, spec, what, here):
    folder, _ = here(saved_by)
    with pytest.raises(UserError, match=f"--resume .*{what}.*LoRA flags.*--restart") as refused:
        taken_up(spec, folder, folder / f"{saved_by.name}_1")
    assert len(str(refused.value).splitlines()) == 1


# -- Settings

CHANGED = Settings(lr=1e-3, decay=0.1, betas=(0.8, 0.9), warmup=1, steps=8, clip=0.3)


def by_hand(folder, after):
    """The run in plain torch: `DEFAULT` until it is saved, then ``after``. [loss, norm] a step."""
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors}])
    rows = []
    for step in range(NUM_STEPS):
        s = DEFAULT if step < SAVED_AT else after
        done = (step - s.warmup) / (s.steps - s.warmup)
        factor = step / s.warmup if step < s.warmup else (1 + math.cos(math.pi * done)) / 2
        for group, decay in zip(optimizer.param_groups, (s.decay, 0.0), strict=True):
            group.update(lr=s.lr * factor, betas=s.betas, weight_decay=decay)
        batch = batch_of(step)
        loss = causal_loss(model, batch) / ROWS / 8
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, s.clip)
        optimizer.step()
        optimizer.zero_grad()
        rows.append([float(loss.detach()), float(norm)])
    return rows


def losses(rows):
    return [row[:2] for row in rows]


SETTINGS = [(Z0, Z0), (Z2, Z2), (Z3, Z2)]
SETTINGS += slow([(Z3, Z3), (Z0, Z3), (Z1, Z1), (Z2, Z0), (Z1, Z3), (Z3, Z1)])
SETTINGS += slow([(Z0, Spec(2, offload=True)), *((Spec(z, offload=True),) * 2 for z in (2, 3))])


@pytest.mark.parametrize(("saved_by", "spec"), SETTINGS, ids=name_of)
def test_changed_settings_hold(saved_by, spec, here):
    folder, rows = here(saved_by)
    assert losses(rows) == [pytest.approx(row, rel=1e-5) for row in by_hand(folder, DEFAULT)]
    expected = by_hand(folder, CHANGED)[SAVED_AT:]
    assert expected[1] != pytest.approx(rows[SAVED_AT + 1][:2], rel=1e-3)  # else nothing is tested
    now = taken_up(spec, folder, folder / f"{saved_by.name}_1", CHANGED).steps()
    assert losses(now) == [pytest.approx(row, rel=1e-5) for row in expected]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lr", "decay", "betas", "warmup", "steps", "clip"])
def test_each_setting_holds(name, here):
    folder, rows = here(Z2)
    changed = replace(DEFAULT, **{name: getattr(CHANGED, name)})
    expected = by_hand(folder, changed)[SAVED_AT:]
    assert expected[2] != pytest.approx(rows[SAVED_AT + 2][:2], rel=1e-4)
    now = taken_up(Z2, folder, folder / "llama_z2_float32_1", changed).steps()
    assert losses(now) == [pytest.approx(row, rel=1e-5) for row in expected]


# -- fp16

FP16 = "float16"
STATE = {"cur_scale": 512.0, "cur_iter": 7, "last_overflow_iter": 5, "cur_hysteresis": 1}


def scale_after(spec, source, **scaling):
    run = taken_up(spec, source.parent, source, Settings(scaling=scaling))
    return {**vars(run.engine.optimizer.loss_scaler), "used": loss_scale(run.engine)}


@pytest.mark.parametrize(
    ("stage", "now"), [(3, 2), *slow([(2, 2), (1, 1), (1, 3), (2, 3), (3, 3)])]
)
def test_the_loss_scale_is_state_and_its_settings_are_not(stage, now, fp16_works, here):
    folder, _ = here(Z2)
    run, fp16, source = SmallRun(Spec(stage, FP16), folder), Spec(now, FP16), folder / "fp16"
    run.steps(1)
    vars(run.engine.optimizer.loss_scaler).update(STATE)
    checkpoints = CheckpointManager(source, {"seed": 7})
    checkpoints.save(1, run.state())
    checkpoints.wait()
    same = scale_after(fp16, source)
    assert same == {**vars(run.engine.optimizer.loss_scaler), "used": 512.0} == same | STATE
    assert scale_after(fp16, source, loss_scale_window=5) == same | {"scale_window": 5}
    assert scale_after(fp16, source, initial_scale_power=4)["used"] == 16.0
    assert scale_after(fp16, source, min_loss_scale=1024)["used"] == 1024.0
    static = scale_after(fp16, source, loss_scale=8)
    assert (static["used"], static["dynamic"]) == (8.0, False)
    assert scale_after(Spec(2, BF16), source)["used"] == 1.0


@pytest.mark.slow
def test_fp16_that_was_bf16_starts_its_scale(fp16_works, here):
    folder, _ = here(Spec(2, BF16))
    run = taken_up(Spec(2, FP16), folder, folder / "llama_z2_bfloat16_1")
    assert loss_scale(run.engine) == 2.0**16
