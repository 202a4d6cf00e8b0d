"""Runs episodes of agents: each asks the model over HTTP, and all answers decode together.

The engine runs in the thread that calls `AgentRunner.run`, agents in threads and processes of their
own, and HTTP in another thread (`agent_server`). Nothing but a queue goes from these to the engine,
which takes requests between two steps, as they come.
"""

import asyncio
import copy
import queue
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat.config import RLHFConfig
from dschat.environments.agents import Agent
from dschat.environments.conversations import Conversations, Row
from dschat.inference.generators.engine import InferenceEngine
from dschat.inference.protocol import FinishReason, SamplingParams
from dschat.inference.requests.sequence import Event, Request
from dschat.openai_api.answer_text import AnswerText, Token
from dschat.openai_api.patience import Stopping
from dschat.user_code.calls import Fault, Pool, fault_of

_WAIT_S = 0.02  # between two looks at other ranks, while no answer decodes


@dataclass(eq=False)
class Ask:
    """A request of an agent for the next answer in ``row``, and where its tokens go."""

    episode: Conversations
    row: Row
    request: Request
    answered: "asyncio.Future[tuple[list[int], list[float], FinishReason]]"
    loop: asyncio.AbstractEventLoop
    stops: AnswerText | None = None  # finds stop strings
    is_left: bool = False  # nobody awaits the answer

    async def result(self) -> tuple[list[int], list[float], FinishReason]:
        """For the event loop: the ids of the answer, their log-probs, and why it ended."""
        return await self.answered

    def settle(self, result: Any) -> None:
        """Give the event loop the answer, or the error in its place."""

        def give() -> None:
            if self.answered.done():
                return
            if isinstance(result, Exception):
                self.answered.set_exception(result)
            else:
                self.answered.set_result(result)

        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(give)


@dataclass
class AgentRunner:
    """Answers the agents of a rollout's prompts with ``engine``.

    Attributes:
        tokenizer, encoder: of this thread and of the server's: they are not safe for several.
        address: of the HTTP server; an episode's own is ``address/KEY/v1``.
        open: the episodes that run, by their keys; the server's thread reads it.
        num_left: answers that nobody awaited.
    """

    engine: InferenceEngine
    tokenizer: PreTrainedTokenizerBase
    encoder: PreTrainedTokenizerBase
    agent: Agent
    args: RLHFConfig
    sampling: SamplingParams
    address: str
    open: "dict[str, tuple[AgentRunner, Conversations]]"
    num_left: int = 0
    _news: "queue.SimpleQueue[Ask | Future]" = field(default_factory=queue.SimpleQueue)
    _asked: dict[Request, Ask] = field(default_factory=dict)
    _decoding: dict[Request, Ask] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._core = self.engine.core()
        # NOTE: alone, a rank may cancel answers; the ranks of a group take the same steps.
        self._is_alone = self.engine.group.size == 1
        self._is_over = False

    def send(self, ask: Ask) -> None:
        """For the server's thread: queue a request, or tell that nobody awaits its answer."""
        self._news.put(ask)
        if self._is_over:
            ask.settle(Stopping())

    def run(
        self,
        prompts: Sequence[Any],
        columns: Sequence[Mapping[str, Any]],
        numbers: Sequence[int],
        answered: Callable[[int, list[Conversations]], None],
    ) -> list[Conversations]:
        """Collective in the tensor-parallel group. ``sampling.n`` episodes for each prompt (text or
        messages), prompt-major. ``answered``: called with the row of each prompt and its episodes
        as soon as these have ended.
        """
        args, n = self.args, self.sampling.n
        episodes: list[Conversations] = []
        running: dict[Future, Conversations] = {}
        left, pool = [n] * len(prompts), Pool(min(args.agent_workers, max(1, n * len(prompts))))
        try:
            for row, number in enumerate(numbers):
                for sample in range(n):
                    episode = Conversations(row, (number, sample), self.encoder, args)
                    episodes.append(episode)
                    future = pool.submit(self._live, episode, prompts[row], columns[row])
                    running[future] = episode
                    future.add_done_callback(self._news.put)
            is_open = True
            while is_open or self._core.has_work:
                if self._core.has_work:
                    self._take(self._core.step())
                for news in self._arrived(bool(running)):
                    if isinstance(news, Ask):
                        self._follow(news)
                        continue
                    episode = running.pop(news)
                    self._end(episode, news)
                    left[episode.row] -= 1
                    if not left[episode.row]:
                        first = episode.row * n
                        answered(episode.row, episodes[first : first + n])
                by_rank = self._core.add_all(list(self._asked), bool(running))
                self._decoding |= self._asked
                self._asked.clear()
                is_open = any(runs for _, runs in by_rank)
        finally:
            self._is_over = True
            self._core.close()
            pool.close()
            self.open.clear()
            left_over = [news for news in self._arrived(False) if isinstance(news, Ask)]
            for ask in [*left_over, *self._asked.values(), *self._decoding.values()]:
                ask.settle(Stopping())
        return episodes

    def _arrived(self, waits: bool) -> list[Ask | Future]:
        """What the other threads sent. While no answer decodes, waits for it."""
        news: list[Ask | Future] = []
        try:
            if waits and not self._core.has_work:
                news.append(self._news.get(timeout=None if self._is_alone else _WAIT_S))
            while True:
                news.append(self._news.get_nowait())
        except queue.Empty:
            return news

    # -- the agent's thread ------------------------------------------------------------------------

    def _live(self, episode: Conversations, prompt: Any, columns: Mapping[str, Any]) -> None:
        """Run the agent of an episode. Raises ``Fault``."""
        if self._is_over:
            raise Fault("did not begin: the rollout has failed")
        key, limit_s = secrets.token_urlsafe(24), self.args.agent_timeout_s
        self.open[key] = self, episode
        try:
            url, given = f"{self.address}/{key}/v1", copy.deepcopy((prompt, columns))
            episode.outcome = self.agent.run(url, key, *given, limit_s)
        finally:
            self.open.pop(key, None)

    # -- the engine's thread -----------------------------------------------------------------------

    def _follow(self, ask: Ask) -> None:
        if not ask.is_left:
            self._asked[ask.request] = ask
        elif self._asked.pop(ask.request, None) or self._decoding.pop(ask.request, None):
            self.num_left += 1
            if self._is_alone:
                self._core.cancel(ask.request)

    def _end(self, episode: Conversations, news: Future) -> None:
        """Note how an agent ended, and end what it still asks for."""
        if (error := news.exception()) is not None:
            episode.problem = episode.problem or str(fault_of(error))
        if episode.problem:
            episode.outcome = None
        for ask in [*self._asked.values(), *self._decoding.values()]:
            if ask.episode is episode:
                ask.settle(Stopping())
                self._follow(replace(ask, is_left=True))

    def _take(self, events: list[Event]) -> None:
        for event in events:
            sequence = event.sequence
            if (ask := self._decoding.get(sequence.request)) is None:
                continue  # another rank's, or one that has ended
            reason = sequence.finish_reason if event.is_last else None
            if ask.stops is not None:
                drawn = Token(None, 0, event.token, event.logprob, [], reason)
                _, found = ask.stops.push(drawn)
                reason = "stop" if found == "stop" else reason
            if reason is None:
                continue
            del self._decoding[sequence.request]
            if not event.is_last and self._is_alone:
                self._core.cancel(sequence.request)
            ids, logprobs = list(sequence.answer), list(sequence.logprobs)
            ask.row.add(ids, logprobs)
            ask.episode.last = ask.row
            ask.row.experts, ask.row.finish_reason = sequence.experts, reason
            ask.row.is_ended = event.is_last and sequence.stopped
            ask.settle((ids, logprobs, reason))
