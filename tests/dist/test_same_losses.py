"""The same data gives the same losses under any ZeRO stage, number of processes and micro-batches.

Each case takes four optimizer steps or more, and is compared with one process at ZeRO 0 with whole
batches. PPO takes two iterations of four steps, or one; those that two processes share in the quick
suite take three among the slow tests.
"""

import itertools
from dataclasses import replace

import pytest
from quick import slow, some
from sequence_parallel_cases import OTHERS
from step_cases import GLOBAL_BATCH, Case
from step_rows import NUM_ITERATIONS

TOLERANCE = 1e-4  # relative
NOISE = {"gap", "rollouts"}  # a rounding error itself, bounded below; token ids, compared exactly


def close(value, expected):
    """Equal to ``TOLERANCE``; near zero, where a loss is a difference of larger numbers,
    absolutely.
    """
    if isinstance(expected, dict):
        assert value["rollouts"] == expected["rollouts"] if "rollouts" in expected else True
        return all(_report(name, value[name], expected[name]) for name in set(expected) - NOISE)
    if isinstance(expected, list) and expected and isinstance(expected[0], list):
        return len(value) == len(expected) and all(map(close, value, expected))
    scale = max(map(abs, expected), default=0.0) or 1.0
    # The first KL is 0 but for rounding.
    near_zero = max(TOLERANCE * min(scale, 0.1), 1e-6)
    return value == pytest.approx(expected, rel=TOLERANCE, abs=near_zero)


def _report(name, value, expected):
    assert close(value, expected), (name, value, expected)
    return True


def reference(case):
    """The same case in one process, ZeRO 0, whole batches, and rows that share nothing."""
    options = tuple(option for option in case.options if option not in BUDGET + AUTO + TP + SP)
    return replace(case, zero=0, micro=GLOBAL_BATCH, shares=(), options=options)


BUDGET = (("max_tokens_per_micro_batch", 38),)
AUTO = (("max_tokens_per_micro_batch", "auto"),)
TP = (("inference_tp_size", 2),)
SP = (("sequence_parallel_size", 2),)
LORA = (("lora_dim", 4),)
# Estimators without a critic, whose groups lie on one rank or another.
GRPO = (("advantage_estimator", "grpo"), ("kl_coef", 0.3), ("loss_aggregation", "sequence"))
RLOO = (("advantage_estimator", "rloo"), ("policy_loss", "cispo"), ("entropy_coef", 0.1))
PP_BASELINE = (("advantage_estimator", "reinforce_pp_baseline"), ("policy_loss", "gspo"))
DR_GRPO = (("advantage_estimator", "dr_grpo"), ("rollout_is", "tis"), ("dual_clip", 3.0))
DAPO = (("advantage_estimator", "grpo"), ("dynamic_sampling", True), ("kl_coef", 0.0))
DAPO += (("reward_model_weight", 0.0), ("reward_fn", "mostly_alike"))
# A teacher of another family, beside PPO's rewards and over the top tokens.
TEACHER = (("teacher_model_name_or_path", "gpt2"), ("distill_coef", 0.2))
TOP = (("teacher_model_name_or_path", "gpt2"), ("distill_top_k", 5))
TOP_LORA = TOP + (("actor_lora_dim", 4), ("advantage_estimator", "rloo"))
REPLAY = BUDGET + (("moe_routing_replay", True), ("old_logprobs", "recompute"))
# Three models on the actor's weights.
SHARED = (("actor_lora_dim", 4), ("critic_lora_dim", 4), ("share_base", True))
# 4 bits: frozen models and those with adapters, of one step.
QUANTIZED = (*LORA, ("load_in_4bit", ("all",)))
ALL_QUANTIZED = (("actor_lora_dim", 4), ("critic_lora_dim", 4), ("load_in_4bit", ("all",)))
ALL_QUANTIZED += (("teacher_model_name_or_path", "llama"), ("distill_coef", 0.2))
GROWN = (("eot_token", "<|endoftext|>"),)  # one token more than the embedding has rows
# A pairwise selection over step, ZeRO stage, micro-batch and shares of prompts; all of it is marked
# slow.
HERE = [
    Case("sft", 3, 2),
]
TWO = [
    Case("sft", 3, 4, options=LORA),
    Case("reward", 3, 4, model="llama_padeos"),
    Case("ppo", 3, 4, reward="opt_350m_reward_reversed", iterations=1, shares=(8, 0)),
    Case("ppo", 0, 4, iterations=1, shares=(8, 0), options=SP),
]
# With quick tests of their own: test_balance.py, rlhf/test_shared_base.py and rlhf/test_trainer.py.
OTHER_TWO = [
    Case("ppo", 0, 4, iterations=1, shares=(3, 5), options=DAPO),
    Case("ppo", 2, 4, reward="llama_adapted", iterations=1, shares=(3, 5), options=SHARED),
    Case("ppo", 3, 4, "qwen3_moe", iterations=1, shares=(3, 5), options=REPLAY),
]
PRODUCT = list(itertools.product(("sft", "reward", "ppo"), (0, 1, 2, 3), (1, 2, 4, 8)))
SLOW_HERE = [
    Case(*point) for point in PRODUCT if Case(*point) not in [*HERE, reference(Case(*point))]
]
SLOW_HERE += [
    Case("reward", 0, 2, rows="ranked", options=LORA),
    Case("ppo", 0, 4, options=BUDGET),
    Case("ppo", 3, 4, iterations=1, options=TOP),
    Case("sft", 3, 8, "qwen3_5", options=(("gradient_checkpointing", True),)),
    Case("sft", 3, 2, "nemotron_h", options=(("gradient_checkpointing", True),)),
    Case("sft", 3, 2, "bamba", options=(("gradient_checkpointing", True),)),
    Case("ppo", 3, 2, options=GRPO),
    Case("ppo", 0, 4, iterations=1, options=DR_GRPO),
    Case("ppo", 0, 4, options=DR_GRPO),
    Case("ppo", 3, 4, options=TEACHER),
    Case("ppo", 0, 2, iterations=1, options=TOP_LORA + BUDGET),
    Case("sft", 2, 4, options=AUTO),
    Case("ppo", 3, 4, iterations=1, options=AUTO + (("align_overflow", True),)),
    Case("ppo", 2, 4, iterations=1, options=GRPO + BUDGET),
    Case("sft", options=BUDGET),
    Case("sft", 0, 4, "opt_350m", options=BUDGET),
    Case("reward", 3, 2, rows="ranked", options=BUDGET),
]
SLOW_TWO = [Case(*point) for point in PRODUCT if point[2] < 8 and Case(*point) not in TWO]
SLOW_TWO += OTHER_TWO
SLOW_TWO += [
    Case("sft", 3, 4, "mistral", options=SP, rows="awkward"),
    Case("reward", 3, 4, rows="ranked"),
    Case("ppo", 3, 4, iterations=1, shares=(3, 5), options=TOP_LORA),
    Case("sft", 2, 2, options=BUDGET),
    Case("sft", 3, 4, options=GROWN),
    Case("ppo", 3, 4, iterations=1, shares=(3, 5)),
    Case("ppo", 2, 2, shares=(3, 5), options=PP_BASELINE),
    Case("ppo", 0, 4, shares=(8, 0), options=AUTO),
    Case("ppo", 0, 4, iterations=1, shares=(3, 5), options=TEACHER),
    Case("ppo", 3, 4, iterations=1, shares=(8, 0), options=TEACHER),
    Case("ppo", 0, 4, iterations=1, shares=(8, 0), options=TOP + BUDGET),
    Case("ppo", 0, 2, shares=(8, 0)),
    Case("ppo", 3, 2, shares=(5, 3), options=GRPO),
    Case("ppo", 0, 4, iterations=2, shares=(8, 0), options=RLOO),  # then roundings grow
    Case("ppo", 3, 4, shares=(3, 5), options=BUDGET),
    Case("reward", 3, 1, options=BUDGET),
    Case("reward", 3, 4, rows="ranked", options=BUDGET),
    Case("reward", 0, 2, rows="ranked", options=(("packing", "off"),)),
    Case("reward", 3, 4, options=AUTO),
    Case("ppo", 0, 4, reward="llama_adapted", shares=(3, 5), options=SHARED),
    Case("ppo", 1, 2, "gpt2", "gpt2_adapted", options=SHARED),
    Case("ppo", 2, 4, reward="llama_adapted", iterations=1, options=SHARED + SP),
    Case("sft", 2, 2, options=QUANTIZED + (("gradient_checkpointing", True),)),
    Case("ppo", 1, 4, iterations=1, shares=(3, 5), options=ALL_QUANTIZED),
]
SLOW_TWO += [Case("sft", 3, 4, model) for model in ("nemotron_h", "mixtral")]
CHECKPOINTED = (("gradient_checkpointing", True),)
SLOW_TWO += [Case(step, zero, 4, options=SP) for step in ("sft", "ppo") for zero in (0, 1, 2, 3)]
SLOW_TWO += [
    Case("sft", 3, 2, options=SP + LORA + CHECKPOINTED),
    Case("sft", 0, 4, "opt", options=SP + BUDGET),
    Case("sft", 3, 4, "mixtral", options=SP + (("router_aux_loss_coef", 0.1),)),
    Case("sft", 0, 4, options=SP, rows="one"),
    Case("sft", 2, 4, "bamba", options=SP + BUDGET),
    Case("ppo", 3, 4, "bamba", iterations=1, shares=(5, 3), options=SP),
    Case("reward", 3, 4, rows="ranked", options=SP),
    Case("reward", 1, 2, options=SP + BUDGET),
    Case("ppo", 3, 2, shares=(5, 3), options=SP + GRPO + BUDGET),
    Case("ppo", 0, 4, shares=(3, 5), options=SP + AUTO),
    Case("ppo", 3, 4, iterations=1, shares=(8, 0), options=SP + TOP_LORA),
    Case("ppo", 2, 4, iterations=1, options=SP + TEACHER),
    Case("ppo", 3, 4, "qwen3_moe", iterations=1, shares=(8, 0), options=SP + REPLAY),
    Case("ppo", 3, 4, "llama_stops", iterations=1, options=SP + TP),
    Case("ppo", 3, 4, "mixtral_heads", iterations=1, shares=(3, 5), options=TP),
    Case("ppo", 3, 4, "qwen3_moe_heads", iterations=1, shares=(5, 3), options=TP + REPLAY),
    # Two steps: roundings grow with this family's gradients.
    Case("ppo", 3, 4, "qwen3_5", iterations=1, shares=(3, 5), options=(("ppo_epochs", 1),)),
]
SLOW_TWO += [Case("ppo", zero, 4, shares=shares) for zero in (2, 3) for shares in ((5, 3), (0, 8))]
FEWER = [c for c in TWO + OTHER_TWO if c.step == "ppo"]
SLOW_TWO += [replace(case, iterations=NUM_ITERATIONS) for case in FEWER]


def flat(values):
    return [x for v in values for x in flat(v)] if isinstance(values, list) else [values]


def by_name(case):
    return case.name


@pytest.mark.parametrize("case", [*HERE, *slow(SLOW_HERE)], ids=by_name)
def test_one_process(case, run_here):
    assert close(run_here(case)[0], run_here(reference(case))[0])


@pytest.mark.dist
@pytest.mark.parametrize("case", [*TWO, *slow(SLOW_TWO)], ids=by_name)
def test_two_processes(case, two_processes, run_here):
    assert close(two_processes(case)[0], run_here(reference(case))[0])


# Of a full rollout's 8 prompts, which two steps take: half of them, one step, or more, three.
OWN = slow(
    [
        Case("ppo", 3, 4, shares=(4, 0)),
        Case("ppo", 0, 2, shares=(3, 1), options=BUDGET),
        Case("ppo", 2, 4, shares=(9, 3)),
    ]
)


@pytest.mark.dist
@pytest.mark.parametrize("case", OWN, ids=by_name)
def test_two_processes_take_the_steps_of_all_their_prompts(case, two_processes, run_here):
    alone = replace(reference(case), shares=case.shares)
    assert close(two_processes(case)[0], run_here(alone)[0])


# -- a NaN in one micro-batch of one rank: all skip that step and keep their weights ---------------


def assert_step_skipped(result, expected):
    assert result["applied"] == [True, False, True]
    assert result["moved"] == [True, False, True]
    assert close(result["probe"], expected["probe"])


@pytest.mark.parametrize("zero", [*slow([0, 1, 2]), 3])
def test_a_bad_step_of_one_process(zero, run_here):
    assert_step_skipped(run_here(Case("nan", zero, 4))[0], run_here(Case("skip", 0, 8))[0])


BAD = [Case("nan", 3, 2), *slow([Case("nan", 0, 2), Case("nan", 1, 2), Case("nan", 2, 4)])]


@pytest.mark.dist
@pytest.mark.parametrize("case", BAD, ids=by_name)
def test_a_bad_step_of_two_processes(case, two_processes, run_here):
    assert_step_skipped(two_processes(case)[0], run_here(Case("skip", 0, 8))[0])


# -- two ranks that compute each row together ------------------------------------------------------

STATES = ("qwen3_5", "bamba", "nemotron_h")  # families whose layers read whole rows
FAMILIES = ("llama", "mistral", "gpt_oss", "qwen3_moe", *STATES, *OTHERS)
PARALLEL = [Case("sequence_parallel", model=name) for name in FAMILIES]
QUICK = [case for case in PARALLEL if case.model in ("qwen3_5",)]


@pytest.mark.dist
@pytest.mark.parametrize("case", some(PARALLEL, QUICK), ids=by_name)
def test_sequence_parallel_gives_what_one_rank_gives(case, two_processes):
    """Gradients too."""
    gaps, _ = two_processes(case)
    assert len(gaps) == 2
    assert {name: gap for name, gap in gaps.items() if max(gap) > 2e-5} == {}


# -- the rollout -----------------------------------------------------------------------------------


def test_rollout_and_training_form_agree(run_here):
    result, _ = run_here(Case("ppo"))
    assert 0 < max(result["gap"]) < 1e-5
    assert abs(result["objective/kl"][0]) < 1e-5  # the reference is the actor's start
    assert abs(result["objective/kl"][1]) > 0.01  # and not the actor itself
