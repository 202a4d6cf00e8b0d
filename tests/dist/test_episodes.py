"""Episodes of several turns on two ranks: those of one process, and the same steps on them.

What an episode draws depends on its prompt and sample alone, on whatever rank it is.
"""

from dataclasses import replace

import pytest
from step_cases import Case
from test_same_losses import BUDGET, GRPO, by_name, close, reference, slow

EPISODES = (("environment", "Replies"), ("max_answer_seq_len", 28), ("max_turn_tokens", 5))
CRITIC = EPISODES + (("reward_model_weight", 0.5),)
GROUPS = EPISODES + GRPO + (("reward_model_weight", 0.0),)

TWO = [Case("ppo", 2, 4, "llama_stops", iterations=1, shares=(3, 5), options=CRITIC)]
SLOW_TWO = [
    Case("ppo", 3, 4, "llama_stops", iterations=1, shares=(5, 3), options=GROUPS),
    Case("ppo", 3, 2, "llama_stops", iterations=2, options=CRITIC),
    Case("ppo", 2, 4, "llama_stops", iterations=2, shares=(8, 0), options=GROUPS + BUDGET),
]


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
