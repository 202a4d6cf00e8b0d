"""Chooses how an iteration gets its answers: one rollout, dynamic sampling or partial rollouts."""

from collections.abc import Sequence
from typing import Any

from dschat.config import RLHFConfig
from dschat.environments.sources import EnvironmentSource, load_environment
from dschat.rewards.reward_functions import RewardFunctions
from dschat.rlhf.dynamic_sampling import DynamicSampler
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.episode_collector import ENVIRONMENT, EpisodeCollector
from dschat.rlhf.partial_rollouts import PartialRollouts
from dschat.rlhf.prompt_queue import PromptQueue
from dschat.rlhf.rollout_collector import RolloutCollector, RolloutSource
from dschat.rlhf.rollout_scorer import RolloutScorer


def rollout_collector(
    engine: DeepSpeedRLHFEngine,
    args: RLHFConfig,
    functions: RewardFunctions,
    environment: EnvironmentSource | None,
) -> RolloutCollector:
    """Collects answers, or with an environment episodes.

    Raises:
        UserError: nothing scores.
    """
    if environment is None:
        return RolloutCollector(engine, RolloutScorer(engine, args, functions))
    others = (ENVIRONMENT,) if environment.rewards else ()
    scorer = RolloutScorer(engine, args, functions, others)
    return EpisodeCollector(engine, scorer, environment)


def environment_of(
    args: RLHFConfig, environment: Any = None, tools: Sequence[Any] = ()
) -> EnvironmentSource | None:
    """The environment and tools given in Python, or those of ``args``; None for single answers.

    Raises:
        UserError: one does not exist.
    """
    environment = args.environment if environment is None else environment
    tools = tools or args.tools or ()
    return load_environment(environment, tools) if environment is not None or tools else None


def rollout_source(
    engine: DeepSpeedRLHFEngine, collector: RolloutCollector, args: RLHFConfig, more: PromptQueue
) -> RolloutSource:
    """The source that the flags ask for. ``more``: prompts in addition to an iteration's."""
    if args.dynamic_sampling:
        return DynamicSampler(collector, args.max_sampling_rounds, more)
    if args.partial_rollout:
        return PartialRollouts(engine, collector, args.oversample, args.staleness_bound, more)
    return collector
