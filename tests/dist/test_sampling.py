"""Two ranks draw the prompts that one draws, by the scores of the answers of both."""

import pytest
from quick import slow
from step_cases import Case
from test_same_losses import BUDGET, by_name, reference

ALIKE = (("advantage_estimator", "grpo"), ("kl_coef", 0.0), ("reward_model_weight", 0.0))
ALIKE += (("reward_fn", "mostly_alike"),)
DYNAMIC = (*ALIKE, ("dynamic_sampling", True))
CASES = [Case("sampling", 0, 4, iterations=4, options=BUDGET + DYNAMIC)]
SLOW = [Case("sampling", 0, 4, iterations=4, options=ALIKE)]


@pytest.mark.dist
@pytest.mark.parametrize("case", [*CASES, *slow(SLOW)], ids=by_name)
def test_two_ranks_draw_what_one_draws(case, two_processes, run_here):
    ours, alone = two_processes(case)[0], run_here(reference(case))[0]
    assert ours == alone
    assert len(set(map(tuple, ours["drawn"]))) == 4
    assert len(ours["state"]["places"]) > 8
    assert any(ours["state"]["sums"][0])
