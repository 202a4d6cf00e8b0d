"""Episodes of several turns on two ranks: those of one process, and the same steps on them.

What an episode draws depends on its prompt and sample alone, on whatever rank it is, and whether
the ranks generate together.
"""

from dataclasses import replace

import pytest
from quick import slow
from step_cases import Case
from test_same_losses import BUDGET, GRPO, TP, by_name, close, reference

EPISODES = (("environment", "Replies"), ("max_answer_seq_len", 28), ("max_turn_tokens", 5))
CRITIC = EPISODES + (("reward_model_weight", 0.5),)
GROUPS = EPISODES + GRPO + (("reward_model_weight", 0.0),)
AS_THEY_COME = (("environment_lag", 0),)
FEEDBACK = (("environment", "Failing"), ("on_environment_error", "feedback"))
SLOWLY = (("critic_learning_rate", 1e-4),)
SMALL_STEPS = (("actor_learning_rate", 1e-4),)  # large ones multiply the rounding of sums by 100

TWO = [
    Case("ppo", 3, 4, "llama_stops", iterations=1, shares=(8, 0), options=GROUPS + TP),
]
SLOW_TWO = [
    Case("ppo", 2, 4, "llama_stops", iterations=1, shares=(3, 5), options=CRITIC),
    Case("ppo", 3, 4, "llama_stops", iterations=1, shares=(5, 3), options=GROUPS),
    Case("ppo", 3, 2, "llama_stops", iterations=2, options=CRITIC),
    Case("ppo", 2, 4, "llama_stops", iterations=2, shares=(8, 0), options=GROUPS + BUDGET),
    Case("ppo", 3, 2, "llama_stops", iterations=2, options=CRITIC + TP + SLOWLY),
    Case("ppo", 0, 4, "llama_stops", iterations=2, shares=(0, 8), options=GROUPS + BUDGET + TP),
    Case("ppo", 2, 4, "llama_stops", shares=(3, 5), options=CRITIC + AS_THEY_COME + TP + SLOWLY),
    Case("ppo", 3, 4, "llama_stops", iterations=1, shares=(5, 3), options=GROUPS + FEEDBACK + TP),
    Case(
        "ppo",
        2,
        4,
        "llama_stops",
        iterations=1,
        shares=(3, 5),
        options=GROUPS + FEEDBACK + SMALL_STEPS,
    ),
]
FAILS = (("environment", "FailingOnce"),)
FAULTS = Case("episode_faults", 3, 4, "llama_stops", options=GROUPS + FAILS + TP)


@pytest.mark.dist
@pytest.mark.parametrize("case", [*TWO, *slow(SLOW_TWO)], ids=by_name)
def test_two_processes(case, two_processes, run_here):
    result, expected = two_processes(case)[0], run_here(reference(case))[0]
    assert result["rollout/turns"] == expected["rollout/turns"]
    assert result["rollout/turns"][0] > 1.5
    assert close(result, expected)


@pytest.mark.slow
def test_the_seed_matters(run_here):
    """So equal episodes are not equal by chance."""
    case = reference(TWO[0])
    other = replace(case, options=case.options + (("seed", 4321),))
    assert run_here(case)[0]["rollouts"] != run_here(other)[0]["rollouts"]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("case", [FAULTS], ids=by_name)
def test_what_fails_on_one_rank_is_said_on_both(case, two_processes):
    result, _ = two_processes(case)
    said = "the environment failed: raised ValueError: no luck with this prompt"
    assert result["environment"] == [said] * 2
    first, second = result["too_long"]
    assert first == second
    assert "with 5 new ones that exceeds" in first
    assert result["whole"] == [8, 8]  # and the ranks can go on
