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
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat.config import RLHFConfig
from dschat.environments.agents import Agent
from dschat.environments.conversations import Conversations
from dschat.inference.generators.engine import InferenceEngine
from dschat.inference.protocol import SamplingParams
from dschat.inference.requests.sequence import Request
from dschat.openai_api.answer_text import Token
from dschat.openai_api.delivery import Delivery, Handle
from dschat.openai_api.patience import Stopping
from dschat.user_code.calls import Fault, Pool, fault_of

_WAIT_S = 0.02  # between two looks at other ranks, while no answer decodes

_Key = tuple[int, int, int]  # of a request, in the whole group


def _key(request: Request) -> _Key:
    return request.number, request.first_sample, request.first_position


class AgentRunner(Delivery):
    """Answers the agents of a rollout's prompts with ``engine``.

    Args:
        encoder: the tokenizer of the server's thread.
        address: of the HTTP server; an episode's own is ``address/KEY/v1``.
        open: the episodes that run, by their keys; the server's thread reads it.

    Attributes:
        num_left: answers that nobody awaited.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        encoder: PreTrainedTokenizerBase,
        agent: Agent,
        args: RLHFConfig,
        sampling: SamplingParams,
        address: str,
        open: "dict[str, tuple[AgentRunner, Conversations]]",
    ) -> None:
        super().__init__(engine)
        self.encoder, self.agent, self.args, self.sampling = encoder, agent, args, sampling
        self.num_left = 0
        self._address, self._open_episodes = address, open
        self._core = engine.core(streaming=True)
        self._asked: list[Request] = []  # since the last step
        self._unended: set[Request] = set()  # of this rank
        self._over: list[_Key] = []  # requests that have ended since the last step
        self._decoding: dict[_Key, Request] = {}  # of all ranks of the group
        self._num_running, self._is_over = 0, False

    def submit(self, tokens: "asyncio.Queue[Token | Exception]", request: Request) -> Handle:
        """See `Delivery`; after the rollout, nothing is answered."""
        handle = super().submit(tokens, request)
        if self._is_over:
            tokens.put_nowait(Stopping())
        return handle

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
        n = self.sampling.n
        groups = [
            [Conversations(row, (number, i), self.encoder, self.args) for i in range(n)]
            for row, number in enumerate(numbers)
        ]
        episodes = [episode for group in groups for episode in group]
        pool = Pool(min(self.args.agent_workers, max(1, len(episodes))))

        def ended(episode: Conversations, future: Future) -> None:
            self._end_episode(episode, future)
            if all(of.is_over for of in groups[episode.row]):
                answered(episode.row, groups[episode.row])

        def tell(episode: Conversations, future: Future) -> None:
            self.commands.put(partial(ended, episode, future))

        self._num_running = len(episodes)
        try:
            for episode in episodes:
                given = prompts[episode.row], columns[episode.row]
                future = pool.submit(self._live, episode, *given)
                future.add_done_callback(partial(tell, episode))
            while self._step():
                pass
        finally:
            self._is_over = True
            self._core.close()
            pool.close()
            self._open_episodes.clear()
            self._obey(False)
            self.fail(Stopping())
        return episodes

    # -- the agent's thread ------------------------------------------------------------------------

    def _live(self, episode: Conversations, prompt: Any, columns: Mapping[str, Any]) -> None:
        """Run the agent of an episode. Raises ``Fault``."""
        if self._is_over:
            raise Fault("did not begin: the rollout has failed")
        key, limit_s = secrets.token_urlsafe(24), self.args.agent_timeout_s
        self._open_episodes[key] = self, episode
        try:
            url, given = f"{self._address}/{key}/v1", copy.deepcopy((prompt, columns))
            episode.outcome = self.agent.run(url, key, *given, limit_s)
        finally:
            self._open_episodes.pop(key, None)

    # -- the engine's thread -----------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        self._asked.append(request)
        self._unended.add(request)

    def end(self, request: Request, sample: int | None) -> None:
        """``sample``: its answer has met a stop string; None: nobody awaits it any more."""
        if request not in self._unended:
            return
        self._unended.discard(request)
        self._over.append(_key(request))
        self.num_left += sample is None and not request.is_complete

    def _step(self) -> bool:
        """Collective in the group. Take a step, begin and end requests; whether more follow."""
        if self._core.has_work:
            self.tell(self._core.step())
        self._obey(self._num_running > 0 and not self._core.has_work)
        given = self._num_running > 0, self._over
        by_rank = self._core.add_all(self._asked, given)
        self._asked, self._over = [], []
        # The ranks of a group take the same steps: they end a request between the same two.
        self._decoding |= {_key(request): request for part, _ in by_rank for request in part}
        for key in [key for _, (_, over) in by_rank for key in over]:
            self._core.cancel(self._decoding.pop(key))
        return self._core.has_work or any(runs for _, (runs, _) in by_rank)

    def _obey(self, waits: bool) -> None:
        """Carry out what the other threads have sent; ``waits``: for the first, if there is none.
        A rank of a group looks at the others, too.
        """
        try:
            if waits:
                timeout = None if self.engine.group.size == 1 else _WAIT_S
                self.commands.get(timeout=timeout)()
            while True:
                self.commands.get_nowait()()
        except queue.Empty:
            return

    def _end_episode(self, episode: Conversations, future: Future) -> None:
        """Note how an agent ended, and end what it still asks for."""
        self._num_running -= 1
        episode.close()
        if (error := future.exception()) is not None:
            episode.problem = episode.problem or str(fault_of(error))
        if not (episode.rows or episode.problem):
            episode.problem = "ended without an answer that can be trained"
        if episode.problem:
            episode.outcome = None
        own = [h for r, h in self.handles.items() if (r.number, r.first_sample) == episode.key]
        self.fail(Stopping(), own)
