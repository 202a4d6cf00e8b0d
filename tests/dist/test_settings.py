"""DeepSpeed's settings change where and when numbers are computed, but not the numbers.

Offload, gradient checkpointing, a user's DeepSpeed file, actor and critic under different stages;
in all three steps, with and without LoRA, on one process and two. Each run is compared with the
plain one: one process, ZeRO 0, whole batches. The saved model is loaded and compared too.
"""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from quick import slow
from step_cases import GLOBAL_BATCH, Case, build_supervised, build_trainer, my_prompts, ppo_config
from test_same_losses import by_name, close, flat
from test_saved import check_saved

from dschat.data.micro_batches import MicroBatchSize
from dschat.runtime.deepspeed_engine import unwrap
from dschat.supervised import loop

LORA = {"lora_dim": 4}
LORA_BOTH = {"actor_lora_dim": 4, "critic_lora_dim": 4}
OFFLOAD, PARAMETERS = {"offload": ("auto",)}, {"offload": ("params",)}
OPTIMIZER = {"offload": ("optimizer",)}
CHECKPOINTED = {"gradient_checkpointing": True}
CHECKPOINTED_BOTH = {
    "actor_gradient_checkpointing": True,
    "critic_gradient_checkpointing": True,
}
FROZEN = {"offload": ("frozen",)}
FILE = {"deepspeed_config": "settings.json"}
CHANGES_NUMBERS = {*LORA, *LORA_BOTH, "only_optimize_lora"}


def case(step, zero, micro, *options, **more):
    """``zero``: the stage, or those of actor and critic."""
    merged = {name: value for part in options for name, value in part.items()}
    away = [word for part in options for word in part.get("offload", ())]
    merged |= {"offload": tuple(away)} if away else {}
    if isinstance(zero, tuple):
        merged |= {"actor_zero_stage": zero[0], "critic_zero_stage": zero[1]}
        zero = 0
    return Case(step, zero, micro, options=tuple(merged.items()), **more)


def plain(case):
    """The same run in one process, ZeRO 0, whole batches; only what changes numbers stays."""
    kept = tuple((name, v) for name, v in case.options if name in CHANGES_NUMBERS)
    return replace(case, zero=0, micro=GLOBAL_BATCH, shares=(), options=kept)


ONE = {"iterations": 1}
HERE = [case("sft", 3, 4, PARAMETERS, FILE)]
SLOW_TWO = [
    case("ppo", (2, 3), 4, OPTIMIZER, LORA_BOTH, FILE, {"align_overflow": True}, **ONE),
    case("ppo", (3, 0), 4, OFFLOAD, CHECKPOINTED_BOTH, FROZEN, **ONE),
    case("sft", 2, 2, OPTIMIZER, FILE),
    case("sft", 3, 4, OFFLOAD, LORA, CHECKPOINTED),
    case("reward", 3, 2, PARAMETERS, CHECKPOINTED, FILE),
]
MIXED = list(itertools.permutations((0, 1, 2, 3), 2))
SLOW = [
    case(step, zero, 2, away, lora, saved)
    for step, zero, away, lora, saved in itertools.product(
        ("sft", "reward"), (2, 3), (OFFLOAD, OPTIMIZER), ({}, LORA), ({}, CHECKPOINTED)
    )
]
SLOW += [
    case("ppo", zero, 4, away, lora, FROZEN, **ONE)
    for zero, away, lora in itertools.product(
        ((2, 2), (3, 3), (3, 0), (0, 3)), (OFFLOAD, OPTIMIZER), ({}, LORA_BOTH)
    )
]
SLOW += [case("ppo", zero, 4, **ONE) for zero in MIXED]
SLOW += [case("ppo", (3, 3), 4, PARAMETERS, FILE, {"enable_hybrid_engine": False}, **ONE)]
SLOW_HERE = [  # whole batches, which two processes cannot share
    case("reward", 2, 8, OPTIMIZER, LORA),
    case("ppo", (2, 3), 8, OFFLOAD, FROZEN, FILE, **ONE),
]


@pytest.mark.parametrize("case", [*HERE, *slow(SLOW + SLOW_HERE)], ids=by_name)
def test_one_process(case, run_here):
    result, folder = run_here(case)
    assert close(result, run_here(plain(case))[0])
    check_saved(case, result, folder)


@pytest.mark.dist
@pytest.mark.parametrize("case", slow([*SLOW_TWO, *SLOW]), ids=by_name)
def test_two_processes(case, two_processes, run_here):
    result, folder = two_processes(case)
    assert close(result, run_here(plain(case))[0])
    check_saved(case, result, folder)
    assert max(result.get("gap", [0])) < 1e-5  # the rollout reads what training computes with


# -- gradient checkpointing ------------------------------------------------------------------------

CHECKPOINTING = [case("sft", 0, 8, LORA)]  # step 3: among the two processes' cases
SLOW_CHECKPOINTING = [
    case(step, zero, 8, lora)
    for step, zero, lora in itertools.product(("sft", "reward"), (0, 3), ({}, LORA))
]
SLOW_CHECKPOINTING += [
    case("ppo", zero, 8, lora, **ONE) for zero, lora in itertools.product((0, 3), ({}, LORA_BOTH))
]
REST = [case for case in SLOW_CHECKPOINTING if case not in CHECKPOINTING]


@pytest.mark.parametrize("case", [*CHECKPOINTING, *slow(REST)], ids=by_name)
def test_gradient_checkpointing_changes_no_number(case, run_here):
    on = CHECKPOINTED_BOTH if case.step == "ppo" else CHECKPOINTED
    ours, _ = run_here(replace(case, options=(*case.options, *on.items())))
    expected, _ = run_here(case)
    for name in set(expected) - {"rollouts", "gap"}:
        assert flat(ours[name]) == pytest.approx(flat(expected[name]), rel=1e-5, abs=1e-5), name
    assert ours.get("rollouts") == expected.get("rollouts")


def forwards_of(module):
    """A list that grows by one whenever the first attention of ``module`` is computed."""
    calls = []
    attention = next(m for n, m in module.named_modules() if n.endswith("self_attn"))
    attention.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize(
    ("step", "on"), [("sft", False), ("sft", True), ("reward", True), *slow([("reward", False)])]
)
def test_activations_are_recomputed_in_steps_1_and_2(step, on, models_folder, tmp_path):
    options = {**LORA, "gradient_checkpointing": on}
    engine, task, config, _ = build_supervised(case(step, 0, 8, options), models_folder, tmp_path)
    rows = {
        "sft": [{"input_ids": [5, 6, 0], "loss_mask": [0, 1, 1]}],
        "reward": [{"chosen_ids": [5, 6, 0], "rejected_ids": [7, 0]}],
    }
    engine.train()
    forwards = forwards_of(unwrap(engine))
    loop.train_step(engine, task, rows[step], MicroBatchSize(8))
    assert len(forwards) == (2 if on else 1)


@pytest.mark.parametrize("name", ["actor", *slow(["critic"])])
def test_activations_are_recomputed_in_step_3(name, models_folder):
    options = {f"{name}_gradient_checkpointing": True, "ppo_epochs": 1, "generation_batches": 1}
    trainer = build_trainer(ppo_config(case("ppo", 0, 8, options, **ONE), models_folder))
    experience = trainer.generate_experience(my_prompts(Case("ppo"), 0, trainer.args))
    found = {n: forwards_of(unwrap(getattr(trainer.engine, n))) for n in ("actor", "critic")}
    trainer.train_rlhf(experience)
    forwards = Counter(["actor", "critic", name, "actor"])  # the last one measures the update
    assert {n: len(calls) for n, calls in found.items()} == forwards
