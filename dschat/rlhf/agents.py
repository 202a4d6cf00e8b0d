"""Collects rollouts of agents: a function or a command of the user asks the actor over HTTP."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import dschat.distributed as dist
from dschat.config import RLHFConfig, UserError
from dschat.config.errors import require
from dschat.data.batches import PromptTable
from dschat.data.sources.adapters import Content
from dschat.environments.agents import Agent, Outcome, load_agent, played
from dschat.environments.conversations import Conversations
from dschat.inference.generators.engine import InferenceEngine
from dschat.inference.protocol import Generator, SamplingParams
from dschat.models.continued_text import whole_texts
from dschat.rewards.reward_functions import RewardFunctions
from dschat.rewards.samples import Samples
from dschat.rewards.scoring import RewardError, SourceScores
from dschat.rlhf.collector import Collector, Group, RolloutPolicy
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.episodes import rollout_of
from dschat.rlhf.experience import Experience

if TYPE_CHECKING:  # needs the extra serve
    from dschat.environments.agent_server import AgentServer

logger = logging.getLogger("dschat")

AGENT = "agent"  # the name of its rewards
_SENT = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")


def agent_of(
    args: RLHFConfig, agent: Any = None, environment: Any = None, tools: Sequence[Any] = ()
) -> Agent | None:
    """The agent given in Python, or named by ``args``; None without one.

    Raises:
        UserError: it does not exist, a library is missing, or there is an environment too.
    """
    if played(environment):
        agent, environment = environment, None
    agent = args.agent_spec if agent is None else agent
    if agent is None:
        return None
    require(
        not (environment or tools or args.tools or args.environment not in (None, agent)),
        "--agent excludes --environment and --tools: an agent runs its own; leave one out",
    )
    return load_agent(agent)


class AgentCollector(Collector):
    """`Collector` whose answers are the conversations of ``agent``."""

    cuts_rounds = False

    def __init__(
        self,
        engine: DeepSpeedRLHFEngine,
        args: RLHFConfig,
        functions: RewardFunctions,
        policy: RolloutPolicy,
        agent: Agent,
    ) -> None:
        super().__init__(engine, args, functions, policy, (AGENT,))
        self._agent = agent
        self._server: AgentServer | None = None

    def answers(
        self,
        generator: Generator,
        prompts: PromptTable,
        sampling: SamplingParams,
        numbers: list[int],
        add: Callable[[Group], None],
    ) -> dict[str, float]:
        """Collective. See `Collector.answers`.

        Raises ``RewardError`` on all ranks where an agent failed and flags do not say otherwise.
        """
        from dschat.environments.agent_episodes import AgentRunner
        from dschat.environments.agent_server import AgentServer

        if not isinstance(generator, InferenceEngine):
            raise UserError("--agent needs the hybrid engine, which does not run this model")
        if self._server is None:
            self._server = AgentServer(self._engine.tokenizer)
        runner = AgentRunner(
            *(generator, self._server.encoder, self._agent, self.args),
            *(sampling, self._server.address, self._server.open),
        )
        columns = [
            {name: values[i] for name, values in prompts.columns.items()}
            for i in range(len(prompts.ids))
        ]
        given = [_sendable(prompt) for prompt in prompts.sources or self.prompt_texts(prompts)]
        episodes = runner.run(
            given, columns, numbers, partial(self._group, prompts, numbers, sampling.n, add)
        )
        failed = [e for e in episodes if e.outcome is None and not _outgrew(e)]
        told = dist.gather_objects((len(failed), next((e.problem for e in failed), "")))
        if any(count for count, _ in told):
            first = next(problem for _, problem in told if problem)
            if self.args.on_agent_error == "error":
                raise RewardError(
                    f"the agent {first}; fix it, or pass --on_agent_error zero or drop"
                )
            total = sum(count for count, _ in told)
            logger.warning("%d agents failed; the first %s", total, first)
        return self._metrics(episodes, len(failed), runner.num_left)

    def _group(
        self,
        prompts: PromptTable,
        numbers: list[int],
        n: int,
        add: Callable[[Group], None],
        row: int,
        episodes: list[Conversations],
    ) -> None:
        """Add the episodes of a prompt that are trained."""
        kept = [e for e in episodes if e.rows and (e.outcome or self._scores_zero(e))]
        pairs = [(e, of) for e in kept for of in e.rows]
        table = prompts.pick([row] * len(pairs))
        table.ids = [of.prompt for _, of in pairs]
        group = Group(numbers[row], table, rollout_of([of for _, of in pairs]))
        group.numbers = [numbers[row] * n + e.key[1] for e, _ in pairs]
        group.agents = prompts.pick([row] * len(kept)), kept
        add(group)

    def _scores_zero(self, episode: Conversations) -> bool:
        return self.args.on_agent_error == "zero" or _outgrew(episode)

    def _samples(self, group: Group) -> Samples:
        """One sample for each episode: its last answer, to the conversation before it."""
        assert group.agents is not None
        prompts, episodes = group.agents
        lasts = [e.last for e in episodes if e.last is not None]
        before = [of.prompt + of.tokens[: -of.last_length] for of in lasts]
        answers = [of.tokens[-of.last_length :] for of in lasts]
        chats = [list(of.messages) for of in lasts]
        return Samples(
            prompts=self.prompt_texts(prompts),
            answers=whole_texts(self._engine.tokenizer, before, answers),
            prompt_ids=prompts.ids,
            answer_ids=answers,
            finish_reasons=[of.finish_reason for of in lasts],
            columns=prompts.columns,
            chats=[of[:-1] if of and of[-1]["role"] == "assistant" else of for of in chats],
            decode=partial(self._engine.tokenizer.decode, clean_up_tokenization_spaces=False),
        )

    def _scores_of(self, groups: list[Group]) -> list[SourceScores]:
        """What the agents returned, and 0 where one failed."""
        episodes = [e for group in groups if group.agents for e in group.agents[1]]
        failed = Outcome(0.0)
        return [SourceScores(AGENT, 1.0, [(e.outcome or failed).reward for e in episodes])]

    def _experience(self, groups: list[Group], first: int) -> Experience:
        e = super()._experience(groups, first)
        numbers = [number for group in groups for number in group.numbers or ()]
        if numbers:
            e.numbers[:] = e.numbers.new_tensor(numbers)
            agents = [group.agents for group in groups if group.agents is not None]
            rows = [row for _, kept in agents for of in kept for row in of.rows]
            e.sources = [row.source for row in rows]  # as agents asked, not as the data does
            e.inputs = [dict(row.inputs) for row in rows]
        return e

    def _metrics(
        self, episodes: list[Conversations], num_failed: int, num_left: int
    ) -> dict[str, float]:
        """Collective. Means over all ranks' episodes; what agents logged, over those that did."""
        rows = [row for episode in episodes for row in episode.rows]
        turns = sum(row.num_answers for row in rows)
        added = sum(row.drawn.count(False) for row in rows)
        counts = [len(episodes), len(rows), turns, added, num_failed, num_left]
        count, *sums = dist.sum_floats(list(map(float, counts)))
        names = ("rows_per_episode", "turns", "environment_tokens", "agent_failures")
        metrics = {f"rollout/{n}": v / max(count, 1.0) for n, v in zip(names, sums, strict=False)}
        metrics["rollout/abandoned_answers"] = sums[-1]
        told = [e.outcome.logged or {} for e in episodes if e.outcome is not None]
        every = [logged for of_rank in dist.gather_objects(told) for logged in of_rank]
        for name in sorted({name for logged in every for name in logged}):
            values = [logged[name] for logged in every if name in logged]
            metrics.setdefault(f"rollout/{name}", sum(values) / len(values))
        return metrics


def _sendable(prompt: Content) -> Content:
    """A prompt without marks of ours in its turns, as a request may have it."""
    if isinstance(prompt, str):
        return prompt
    return [{name: v for name, v in turn.items() if name in _SENT} for turn in prompt]


def _outgrew(episode: Conversations) -> bool:
    """Whether an agent failed because the model's answers left no room: its reward is 0."""
    return episode.outcome is None and episode.is_cut and bool(episode.rows)
