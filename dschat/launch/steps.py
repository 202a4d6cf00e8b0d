"""Which steps make up a run: all three; two where step 2 trains the policy on pairs, or where
programs score what step 3 samples.

The steps' given fields come in; steps, and what the last of them starts from, go out. It must not
know folders, nor what is finished: launch.py does.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dschat.config import RewardConfig, RLHFConfig, UserError
from dschat.launch.recipe import STEPS, TrainConfig, TrainingStep

BASE = "model_name_or_path"
ACTOR, CRITIC, REWARD = f"actor_{BASE}", f"critic_{BASE}", f"reward_{BASE}"

Values = Mapping[int, Mapping[str, Any]]


def select_steps(config: TrainConfig, values: Values) -> tuple[dict[int, TrainingStep], list[str]]:
    """The steps of the run by number, and a line about why there are not three.

    Raises:
        UserError: --step or --reward_model asks for what this run has no use for.
    """
    pairs = RewardConfig(**values[2])
    if pairs.trains_policy:
        return _two_steps(config, pairs.loss)
    if not RLHFConfig(**values[3]).has_reward_programs or REWARD in values[3]:
        return dict(STEPS), []
    if config.reward_model or 2 in (config.step or ()):
        return dict(STEPS), []
    if values[2].get(BASE) and not config.step:
        return dict(STEPS), [
            "step 3 scores by the reward model of step 2 besides; --step 1 3 leaves that out"
        ]
    without = {n: step for n, step in STEPS.items() if n != 2}
    return without, ["--reward_fn or --reward_url scores: no reward model, so no step 2"]


def _two_steps(config: TrainConfig, loss: str) -> tuple[dict[int, TrainingStep], list[str]]:
    """Step 2 with a loss of the policy: its product is what step 3's would be."""
    if config.reward_model:
        raise UserError(
            f"--reward_model {config.reward_model} has no use with --loss {loss}, which trains the "
            "policy itself; leave it out"
        )
    if 3 in (config.step or ()):
        raise UserError(
            f"--step 3 has nothing to do with --loss {loss}: step 2 trains the policy itself; "
            "leave one of them out"
        )
    policy = replace(STEPS[2], title=loss.upper(), folder=STEPS[3].folder)
    notes = [] if config.step else [f"step 2 trains the policy itself (--loss {loss}): no step 3"]
    return {1: STEPS[1], 2: policy}, notes


def inputs_of(steps: Mapping[int, TrainingStep], values: Values) -> dict[int, tuple[str, ...]]:
    """Fields of the last step: for each step before it the one that names its product, and others
    that make it unnecessary.
    """
    if 3 not in steps:
        return {1: (BASE,)}
    inputs: dict[int, tuple[str, ...]] = {1: (ACTOR,)}
    if 2 in steps:
        # Beside programs a critic's name makes it no reward model.
        programs = RLHFConfig(**values[3]).has_reward_programs
        inputs[2] = (REWARD,) if programs else (CRITIC, REWARD)
    return inputs
