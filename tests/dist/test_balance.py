"""With a token budget, answers move to the rank with the fewest tokens, with all that belongs to
them.
"""

import pytest
import torch
from quick import slow
from step_cases import Case
from test_same_losses import BUDGET, by_name, flat, reference

from dschat.rewards.scoring import SourceScores
from dschat.rlhf.batching import Moves

PROGRAM = (("reward_fn", "by_token"), ("reward_model_weight", 0.5))
SAMPLED = (("advantage_estimator", "grpo"), ("dynamic_sampling", True), ("kl_coef", 0.0))
SAMPLED += (("reward_fn", "mostly_alike"), ("reward_model_weight", 0.0))


CASES = [
    Case("balance", 0, 4, shares=(3, 5), options=BUDGET + SAMPLED),
]
SLOW = [
    Case("balance", 0, 4, shares=(8, 0), options=BUDGET + PROGRAM),
    Case("balance", 0, 4, shares=(3, 5), options=BUDGET + PROGRAM),
    Case("balance", 3, 4, shares=(8, 0), options=BUDGET + SAMPLED),
]


@pytest.mark.dist
@pytest.mark.parametrize("case", [*CASES, *slow(SLOW)], ids=by_name)
def test_answers_move_with_what_belongs_to_them(case, two_processes, run_here):
    result, expected = two_processes(case)[0], run_here(reference(case))[0]
    ours, theirs = result["rows"], expected["rows"]
    assert [row[:2] for row in ours] == [row[:2] for row in theirs]
    assert flat(ours) == pytest.approx(flat(theirs), rel=1e-5, abs=1e-5)
    for numbers in result["numbers"]:
        assert numbers == sorted(numbers)
    for mini_batch in range(2):
        ranks = [[row for row in rows if row[0] == mini_batch] for rows in result["held"]]
        tokens = [packed(rows) for rows in ranks]
        longest = max(row[3] for rows in ranks for row in rows)
        assert abs(tokens[0] - tokens[1]) <= 2 * longest, tokens  # a prompt's two answers


@pytest.mark.parametrize("last", [3.0, [1.5, 1.5], None])
def test_scores_follow_their_answers(last):
    source = SourceScores("rule", 0.5, [0.1, float("nan"), last])
    moved = Moves(sent=[[2, 0]], order=[1, 0]).scores(source)  # the second is lost
    assert torch.equal(moved.scores, torch.tensor([0.1, 3.0 if last else 0.0]))
    assert moved.token_scores == ([[], last] if isinstance(last, list) else None)
    assert moved.applies.tolist() == [True, last is not None]
    assert (moved.name, moved.weight) == ("rule", 0.5)
    assert Moves(sent=[[]], order=[]).scores(source).scores.tolist() == []


def packed(rows) -> int:
    """Tokens of a rank's sequences, each prompt once."""
    prompts = {number // 2: length for _, length, number, _ in rows}
    return sum(total - length for _, length, _, total in rows) + sum(prompts.values())
