"""Collects rollouts of episodes: answers in several turns with an environment."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import dschat.distributed as dist
from dschat.config import RLHFConfig, UserError
from dschat.data.batches import PromptTable
from dschat.data.rendering import RefusedChat
from dschat.data.segments import prompt_text_ids
from dschat.data.sources.adapters import Content
from dschat.data.sources.turns import BEGINS
from dschat.environments.agents import played
from dschat.environments.contract import Environment
from dschat.environments.conversations import Row
from dschat.environments.episodes import Episode, EpisodeRunner
from dschat.environments.sources import EnvironmentSource, load_environment
from dschat.environments.template_text import ObservationTokens
from dschat.inference.generators.engine import InferenceEngine
from dschat.inference.protocol import Generator, Rollout, SamplingParams
from dschat.models.continued_text import whole_texts
from dschat.rewards.reward_functions import RewardFunctions
from dschat.rewards.samples import Samples
from dschat.rewards.scoring import RewardError, SourceScores
from dschat.rlhf.collector import Collector, Group, RolloutPolicy
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.prompts import PromptQueue
from dschat.rlhf.rollout_policies import policy_of
from dschat.user_code.calls import Fault

ENVIRONMENT = "environment"  # the name of its rewards


class EpisodeCollector(Collector):
    """`Collector` whose answers are episodes with environments of ``source``."""

    cuts_rounds = False

    def __init__(
        self,
        engine: DeepSpeedRLHFEngine,
        args: RLHFConfig,
        functions: RewardFunctions,
        policy: RolloutPolicy,
        source: EnvironmentSource,
    ) -> None:
        others = (ENVIRONMENT,) if source.rewards else ()
        super().__init__(engine, args, functions, policy, others)
        self._source, feedback = source, args.on_tool_error == "feedback"
        self._make: Callable[[], Environment] = source.maker(engine.tokenizer, feedback)
        if args.environment_pool == "process":
            self._make = source.processes(
                engine.tokenizer, feedback, args.environment_workers, args.environment_timeout_s
            )

    def answers(
        self,
        generator: Generator,
        prompts: PromptTable,
        sampling: SamplingParams,
        numbers: list[int],
        add: Callable[[Group], None],
    ) -> dict[str, float]:
        """Collective. See `Collector.answers`.

        Raises ``RewardError`` on all ranks where an environment failed on one of them.
        """
        if not isinstance(generator, InferenceEngine):
            raise UserError("--environment needs the hybrid engine, which does not run this model")

        def answered(row: int, episodes: list[Episode]) -> None:
            rewards = [episode.rewards for episode in episodes]
            own = own_prompts(prompts, episodes)
            add(Group(numbers[row], own, rollout_of(episodes), rewards))

        runner = EpisodeRunner(
            generator,
            self._engine.tokenizer,
            self._make,
            self._observations_of(prompts),
            self.args,
            partial(self._appended, prompts),
            partial(_begun, prompts),
        )
        columns = [
            {name: values[i] for name, values in prompts.columns.items()}
            for i in range(len(prompts.ids))
        ]
        episodes = runner.run(
            prompts.ids, self.prompt_texts(prompts), columns, sampling, numbers, answered
        )
        problems = dist.gather_objects(next((e.problem for e in episodes if e.problem), ""))
        if problem := next(filter(None, problems), ""):
            raise RewardError(f"the environment failed: {problem}")
        return _metrics(episodes, bool(self._source.tools))

    def _samples(self, group: Group) -> Samples:
        """With tools, ``answers`` are the last ones of the episodes, which a user would see."""
        samples = super()._samples(group)
        if self._source.tools:
            starts = [
                len(drawn) - drawn[::-1].index(False) if False in drawn else 0
                for drawn in group.answers.drawn or []
            ]
            parts = list(zip(group.prompts.ids, group.answers.token_ids, starts, strict=True))
            before = [prompt + ids[:start] for prompt, ids, start in parts]
            last = [ids[start:] for _, ids, start in parts]
            samples.answers = whole_texts(self._engine.tokenizer, before, last)
        return samples

    def _scores_of(self, groups: list[Group]) -> list[SourceScores]:
        """The rewards of every turn, at its last token."""
        if not self._source.rewards:
            return []
        rewards = [row for group in groups for row in group.rewards or ()]
        return [SourceScores(ENVIRONMENT, 1.0, rewards)]

    def _appended(self, prompts: PromptTable, row: int, text: str) -> list[int]:
        """The ids of the prompt ``row`` with ``text`` after it, in a chat in its last turn.

        Raises:
            Fault: it is too long, or only its ids are known.
        """
        if prompts.sources is None:
            raise Fault("reset returned text, but of the prompts only ids are known")
        source = _with_text(prompts.sources[row], text)
        limit = self.args.max_prompt_seq_len
        inputs = prompts.inputs[row] if prompts.inputs else {"tools": self._source.schemas}
        try:
            ids = prompt_text_ids(self._engine.tokenizer, source, **inputs)
        except RefusedChat as error:
            raise Fault(str(error)) from None
        if len(ids) > limit:
            raise Fault(
                f"reset's text makes a prompt of {len(ids)} tokens; raise --max_prompt_seq_len "
                f"{limit}"
            )
        return ids

    def _observations_of(self, prompts: PromptTable) -> ObservationTokens:
        if prompts.sources is None:
            is_chat = bool(self._engine.tokenizer.chat_template)
        else:
            is_chat = any(not isinstance(source, str) for source in prompts.sources)
        observations = ObservationTokens(self._engine.tokenizer, is_chat)
        if self._source.tools:
            observations.require_tools()
        return observations


def environment_of(
    args: RLHFConfig, environment: Any = None, tools: Sequence[Any] = ()
) -> EnvironmentSource | None:
    """The environment and tools given in Python, or named by ``args``; None for single answers.

    Raises:
        UserError: one does not exist.
    """
    environment = args.environment if environment is None else environment
    tools = tools or args.tools or ()
    if played(environment) or (environment is None and not tools):
        return None
    return load_environment(environment, tools, args.environment_timeout_s)


def collector_of(
    engine: DeepSpeedRLHFEngine,
    args: RLHFConfig,
    functions: RewardFunctions,
    environment: EnvironmentSource | None,
    more: PromptQueue,
) -> Collector:
    """Collects answers, or with an environment episodes, by the policy of ``args``.

    Raises:
        UserError: nothing scores.
    """
    policy = policy_of(args, more)
    if environment is None:
        return Collector(engine, args, functions, policy)
    return EpisodeCollector(engine, args, functions, policy, environment)


def own_prompts(prompts: PromptTable, episodes: list[Episode]) -> PromptTable:
    """The prompt of each episode: environments may have added to what ``prompts`` has."""
    table = prompts.pick([episode.row for episode in episodes])
    sources, texts = table.sources, table.texts
    if sources is not None:
        pairs = zip(sources, episodes, strict=True)
        sources = [_with_text(source, e.appended) for source, e in pairs]
    if texts is not None:
        texts = [text + e.appended for text, e in zip(texts, episodes, strict=True)]
    ids = [episode.prompt for episode in episodes]
    return replace(table, ids=ids, sources=sources, texts=texts)


def _begun(prompts: PromptTable, row: int) -> str | None:
    """The text of a prompt's last turn, if it is the beginning of the answer."""
    last = prompts.sources[row][-1] if prompts.sources else {}
    return last["content"] if isinstance(last, dict) and BEGINS in last else None


def _with_text(source: Content, text: str) -> Content:
    """A prompt with ``text`` after it, in a chat in its last turn."""
    if isinstance(source, str):
        return source + text
    return [*source[:-1], {**source[-1], "content": source[-1]["content"] + text}]


def rollout_of(episodes: Sequence[Episode | Row]) -> Rollout:
    return Rollout(
        [e.tokens for e in episodes],
        [e.logprobs for e in episodes],
        [e.finish_reason for e in episodes],
        [e.drawn for e in episodes],
        [e.experts for e in episodes if e.experts is not None] or None,
    )


def _metrics(episodes: list[Episode], has_tools: bool) -> dict[str, float]:
    """Collective. Means over all ranks' episodes."""
    counts = [
        len(episodes),
        sum(e.num_turns for e in episodes),
        sum(not drawn for e in episodes for drawn in e.drawn),
        sum(e.num_calls for e in episodes),
        sum(e.num_failed_calls for e in episodes),
    ]
    count, turns, tokens, calls, failed = dist.sum_floats(list(map(float, counts)))
    count = max(count, 1.0)
    metrics = {"rollout/turns": turns / count, "rollout/environment_tokens": tokens / count}
    if has_tools:
        metrics |= {"rollout/tool_calls": calls / count}
        metrics |= {"rollout/failed_tool_calls": failed / max(calls, 1.0)}
    return metrics
