"""A step that is killed at any instant, and gone on with, records what one that is not records."""

import pytest
from runs import Case, finish, make_models, rows, survive

PPO = "--enable_ema --actor_zero_stage 3 --critic_zero_stage 2 --actor_lora_dim 4"
GRPO = "--advantage_estimator grpo --reward_fn length --reward_args length.target=20"
GRPO += " --normalize_reward --dynamic_sampling"
QUICK = [Case(1, "--zero_stage 0"), Case(3, PPO)]
SLOW = [
    Case(3, GRPO),
    Case(1, "--zero_stage 3 --lora_dim 4"),
    Case(1, "--zero_stage 2", ranks=2),
    Case(2, "--zero_stage 0"),
    Case(2, "--zero_stage 3", ranks=2),
    Case(2, "--loss dpo --precompute_ref_logprobs"),
    Case(3, "--enable_ema", ranks=2),
    Case(3, PPO, ranks=2),
    Case(3, f"{GRPO} --actor_zero_stage 3", ranks=2),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)], ids=lambda c: c.name
)
def test_killed_and_gone_on_with(case, models, tmp_path):
    whole = tmp_path / "whole"
    log = tmp_path / "whole.log"
    assert finish(case.command(models, whole), log) == 0, log.read_text()[-3000:]
    expected = rows(whole)
    steps = [row["step"] for row in expected if not any(name.startswith("eval") for name in row)]
    assert len(set(steps)) == len(steps) >= 6
    assert survive(case, models, tmp_path / "killed", expected, kills=2, seed=case.name) >= 1
