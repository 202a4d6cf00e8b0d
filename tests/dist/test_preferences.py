"""Step 2 on the policy: equal losses under any ZeRO stage, split and reference; what is saved.

All runs are compared with one process at ZeRO 0 with whole batches and a frozen copy as the
reference. KTO's reference point is that of the whole step in all of them.
"""

from dataclasses import replace

import pytest
from quick import slow
from step_cases import GLOBAL_BATCH, Case
from test_same_losses import by_name, close
from test_saved import assert_logprobs, whole
from transformers import AutoModelForCausalLM, GenerationConfig

LORA = (("lora_dim", 4),)
ALL_TRAINED = (("lora_dim", 4), ("only_optimize_lora", False))  # with adapters, and a copy
BEFORE = (("precompute_ref_logprobs", True),)
BUDGET = (("max_tokens_per_micro_batch", 60),)
AWAY = (("offload", ("reference",)),)
HERE = [Case("dpo", 0, 4, options=LORA + BEFORE)]
TWO = [Case("kto", 2, 2, options=BUDGET)]
SLOW = [
    Case(loss, zero, 2, options=options)
    for loss in ("dpo", "ipo", "kto")
    for zero in (0, 1, 2, 3)
    for options in ((), LORA, BEFORE, LORA + BEFORE)
]
SLOW += [
    Case("ipo", 2, 4, options=BEFORE),
    Case("dpo", 3, 4, options=LORA),
    Case("kto", 0, 2, options=BUDGET + BEFORE),
    Case("kto", 3, 2, options=BUDGET),
    Case("dpo", 0, 1, options=ALL_TRAINED),
    Case("dpo", 1, 2, options=(*LORA, ("load_in_4bit", ("all",)))),
    Case("kto", 3, 1, options=AWAY),
    Case("dpo", 2, 2, options=(("max_tokens_per_micro_batch", "auto"),)),
]
SLOW = [case for case in SLOW if case not in [*HERE, *TWO]]
PARALLEL = (("sequence_parallel_size", 2),)
ACROSS = [Case("kto", 3, 2, options=PARALLEL + BUDGET), Case("dpo", 0, 2, options=PARALLEL + LORA)]
SIGNS = {"rewards/accuracies", "eval/rewards/accuracies"}  # of margins that may be roundings of 0


def plain(case):
    """The same run in one process, ZeRO 0, whole batches, with a frozen copy as the reference."""
    kept = tuple(
        (name, value) for name, value in case.options if "lora" in name or "load_in" in name
    )
    return replace(case, zero=0, micro=GLOBAL_BATCH, options=kept)


def check(case, result, folder, expected):
    assert close(result, {name: value for name, value in expected.items() if name not in SIGNS})
    assert_logprobs(whole(AutoModelForCausalLM, folder / "actor"), result["probe"])
    assert GenerationConfig.from_pretrained(folder / "actor").eos_token_id == 0
    kept = "lora_dim" in dict(case.options) and dict(case.options).get("only_optimize_lora", True)
    assert (folder / "actor" / "adapter").exists() == kept


@pytest.mark.parametrize("case", [*HERE, *slow(SLOW)], ids=by_name)
def test_one_process(case, run_here):
    check(case, *run_here(case), run_here(plain(case))[0])


@pytest.mark.dist
@pytest.mark.parametrize("case", slow(TWO + SLOW + ACROSS), ids=by_name)
def test_two_processes(case, two_processes, run_here):
    check(case, *two_processes(case), run_here(plain(case))[0])


@pytest.mark.parametrize("loss", ["dpo", *slow(["ipo"]), "kto"])
def test_training_prefers_what_people_prefer(loss, run_here):
    result, _ = run_here(plain(Case(loss)))
    start = {"dpo": 0.6931472, "ipo": 25.0, "kto": 0.5}[loss]  # log 2; (1 / 2 beta)^2; weight / 2
    assert result["eval/loss"][0] == pytest.approx(start)
    assert result["eval/rewards/accuracies"][-1] > 0.8  # of pairs that it was trained on
    assert result["eval/rewards/margins"][-1] > 0.3
    assert result["eval/loss"][-1] < start
    if loss == "kto":  # a reference point that moves, and is never negative
        # Policy and reference run in other packs, hence a rounding.
        assert result["kl"][0] == pytest.approx(0.0, abs=1e-5)
        assert min(result["kl"]) <= 1e-5 < max(result["kl"])
    else:
        assert result["eval/rewards/accuracies"][0] == 0.5
