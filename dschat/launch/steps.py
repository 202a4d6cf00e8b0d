"""Selects the steps of a run, and the inputs of its last step.

All three steps; steps 1 and 2 if step 2 trains the policy on pairs (DPO, IPO, KTO); steps 1 and 3
if functions or an endpoint score, or a teacher is all that step 3 learns from. Which of them are
finished already is up to `run_plan`.
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
    """The steps of the run by number, and a line for the user if there are fewer than three.

    Raises:
        UserError: --step or --reward_model does not fit the run.
    """
    pairs = RewardConfig(**values[2])
    if pairs.trains_policy:
        return _two_steps(config, pairs.loss)
    rlhf = RLHFConfig(**values[3])
    needs_no_model = rlhf.has_reward_functions or rlhf.has_teacher
    if not needs_no_model or rlhf.reward_model_name_or_path:
        return dict(STEPS), []
    if config.reward_model or 2 in (config.step or ()):
        return dict(STEPS), []
    if values[2].get(BASE) and not config.step:
        return dict(STEPS), [
            "step 3 also scores with the reward model of step 2; --step 1 3 leaves it out"
        ]
    without = {n: step for n, step in STEPS.items() if n != 2}
    scores = "--reward_fn or --reward_url scores"
    if not rlhf.has_reward_functions:
        scores = "--teacher_model_name_or_path alone is learned from"
    return without, [f"{scores}: no reward model, so no step 2"]


def _two_steps(config: TrainConfig, loss: str) -> tuple[dict[int, TrainingStep], list[str]]:
    """Steps 1 and 2, with step 2 writing the policy into step 3's folder."""
    if config.reward_model:
        raise UserError(
            f"--reward_model {config.reward_model} is not used with --loss {loss}, which trains "
            "the policy itself; leave it out"
        )
    if 3 in (config.step or ()):
        raise UserError(
            f"--step 3 does not exist with --loss {loss}: step 2 trains the policy itself; leave "
            "one of them out"
        )
    policy = replace(STEPS[2], title=loss.upper(), folder=STEPS[3].folder)
    notes = [] if config.step else [f"step 2 trains the policy itself (--loss {loss}): no step 3"]
    return {1: STEPS[1], 2: policy}, notes


def inputs_of(steps: Mapping[int, TrainingStep], values: Values) -> dict[int, tuple[str, ...]]:
    """For each earlier step, the fields of the last step that name a model it could train. Its
    output goes into the first; a value in any of them makes the earlier step unnecessary.
    """
    if 3 not in steps:
        return {1: (BASE,)}
    inputs: dict[int, tuple[str, ...]] = {1: (ACTOR,)}
    if 2 in steps:
        # With reward functions, naming a critic does not name a reward model.
        has_functions = RLHFConfig(**values[3]).has_reward_functions
        inputs[2] = (REWARD,) if has_functions else (CRITIC, REWARD)
    return inputs
