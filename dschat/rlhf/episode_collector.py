"""Collects rollouts of episodes: answers in several turns with an environment."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

import dschat.distributed as dist
from dschat.config import RLHFConfig, UserError
from dschat.environments.contract import Environment
from dschat.environments.episodes import Episode, EpisodeLimits, EpisodeRunner
from dschat.environments.observations import ObservationTokens
from dschat.inference.engine import InferenceEngine
from dschat.inference.protocol import Generator, Rollout, SamplingParams
from dschat.rewards.reward_functions import RewardError, SourceScores
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.prompt_table import PromptTable
from dschat.rlhf.rollout_collector import PendingRollout, RolloutCollector, ScoreCall
from dschat.rlhf.rollout_scorer import RolloutScorer

ENVIRONMENT = "environment"  # the name of its rewards


@dataclass
class _WithRewards:
    """The scores of reward functions, if there are any, and those of the environment."""

    calls: list[ScoreCall]
    scores: SourceScores

    def result(self) -> list[SourceScores]:
        return [score for call in self.calls for score in call.result()] + [self.scores]


class EpisodeCollector(RolloutCollector):
    """`RolloutCollector` whose answers are episodes.

    ``make``: a new environment.
    """

    def __init__(
        self,
        engine: DeepSpeedRLHFEngine,
        scorer: RolloutScorer,
        make: Callable[[], Environment],
    ) -> None:
        super().__init__(engine, scorer)
        self._make, self._limits = make, limits_of(scorer.args)
        self._observations: dict[bool, ObservationTokens] = {}

    def answers_of(
        self,
        generator: Generator,
        prompts: PromptTable,
        sampling: SamplingParams,
        first: int,
        calls: int = 1,
    ) -> PendingRollout:
        """Collective. See `RolloutCollector.answers_of`; all prompts are one call.

        Raises ``RewardError`` on all ranks where an environment failed on one of them.
        """
        if not isinstance(generator, InferenceEngine):
            raise UserError("--environment needs the hybrid engine, which does not run this model")
        tokenizer = self._engine.tokenizer
        observations = self._observations_of(prompts)
        runner = EpisodeRunner(generator, tokenizer, self._make, observations, self._limits)
        decode = tokenizer.batch_decode
        texts = prompts.texts or decode(prompts.ids, skip_special_tokens=True)
        columns = [
            {name: values[i] for name, values in prompts.columns.items()}
            for i in range(len(prompts.ids))
        ]
        numbers = [first + i for i in range(len(prompts.ids))]
        episodes = runner.run(prompts.ids, texts, columns, sampling, numbers)
        problems = dist.gather_objects(next((e.problem for e in episodes if e.problem), ""))
        if problem := next(filter(None, problems), ""):
            raise RewardError(f"the environment failed: {problem}")
        pending = self.pending(prompts, rollout_of(episodes), first)
        pending.calls = [_WithRewards(list(pending.calls), _scores(episodes))]
        turns = dist.sum_floats([float(len(episodes)), *_sums(episodes)])
        count = max(turns[0], 1.0)
        pending.metrics = {
            "rollout/turns": turns[1] / count,
            "rollout/environment_tokens": turns[2] / count,
        }
        return pending

    def _observations_of(self, prompts: PromptTable) -> ObservationTokens:
        if prompts.sources is None:
            is_chat = bool(self._engine.tokenizer.chat_template)
        else:
            is_chat = any(not isinstance(source, str) for source in prompts.sources)
        if is_chat not in self._observations:
            self._observations[is_chat] = ObservationTokens(self._engine.tokenizer, is_chat)
        return self._observations[is_chat]


def limits_of(args: RLHFConfig) -> EpisodeLimits:
    return EpisodeLimits(
        args.max_turns,
        args.max_turn_tokens or args.max_answer_seq_len,
        args.environment_timeout_s,
        args.environment_workers,
        args.on_environment_error == "feedback",
        args.environment_lag,
    )


def rollout_of(episodes: list[Episode]) -> Rollout:
    return Rollout(
        [e.tokens for e in episodes],
        [e.logprobs for e in episodes],
        [e.finish_reason for e in episodes],
        [e.drawn for e in episodes],
    )


def _scores(episodes: list[Episode]) -> SourceScores:
    """The rewards of every turn, at its last token."""
    token_scores = [e.rewards for e in episodes]
    totals = torch.tensor([sum(rewards) for rewards in token_scores], dtype=torch.float32)
    return SourceScores(ENVIRONMENT, 1.0, totals, token_scores)


def _sums(episodes: list[Episode]) -> list[float]:
    turns = sum(e.num_turns for e in episodes)
    return [float(turns), float(sum(not drawn for e in episodes for drawn in e.drawn))]
