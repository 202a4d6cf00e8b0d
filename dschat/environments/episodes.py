"""Runs episodes: the model answers, its environment replies, until one of them ends it.

Episodes in different turns decode together. An episode is one token sequence: the tokens that were
drawn stay as they are, and only the environment's text is tokenized. The pages of what an episode
has so far are found in the prefix cache, so a turn computes its new tokens.

The ranks of a tensor-parallel group decode the episodes of all of them together. Each rank has the
environments of its own prompts, and before a step it tells the others which answers it needs next.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.config.reward import EnvironmentConfig
from dschat.environments.contract import Environment, Observation, ToolResult
from dschat.environments.template_text import ObservationTokens
from dschat.inference.generators.engine import InferenceEngine
from dschat.inference.protocol import FinishReason, SamplingParams
from dschat.inference.requests.sequence import Event, Request
from dschat.models.continued_text import continued_texts
from dschat.user_code.calls import Fault, Pool, within

_MAX_CHARS = 64  # of a token: a text of more is not tokenized to learn that it does not fit
_WAIT_S = 0.02  # between two looks at other ranks, while no answer decodes


@dataclass(eq=False)
class Episode:
    """A prompt, and what followed it: the model's answers and the environment's replies.

    Attributes:
        prompt: P ids. What the environment's ``reset`` ``appended`` to it is part of it.
        row: of the prompt in the call of `EpisodeRunner.run`.
        key: prompt and sample, on which the draws depend.
        tokens: A tokens after the prompt.
        drawn: (A,) whether the model drew them.
        logprobs: (A,) 0 where it did not.
        rewards: (A,) each turn's at its last drawn token.
        experts: (P + A, routers, k), see `Rollout`.
        is_over: whether it has ended; then its environment may still reward it.
        is_complete: whether its rewards are known too.
        finish_reason: "length" where the last answer has no stop token, or no tokens are left for
            another one; "stop" elsewhere, and wherever the environment ended the episode.
        num_calls, num_failed_calls: of tools.
        problem: why the environment failed; then the episode is over.
    """

    prompt: list[int]
    row: int
    key: tuple[int, int]
    environment: Environment
    appended: str = ""
    tokens: list[int] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    experts: Tensor | None = None
    num_turns: int = 0
    num_calls: int = 0
    num_failed_calls: int = 0
    is_over: bool = False
    is_complete: bool = False
    finish_reason: FinishReason = "stop"
    problem: str = ""

    def add(self, tokens: list[int], logprobs: list[float] | None = None) -> None:
        """Add an answer or, without log-probs, what the environment said."""
        drawn = logprobs is not None
        self.num_turns += drawn
        self.tokens += tokens
        self.logprobs += logprobs or [0.0] * len(tokens)
        self.drawn += [drawn] * len(tokens)
        self.rewards += [0.0] * len(tokens)


class EpisodeRunner:
    """Answers prompts in episodes with ``engine``.

    Args:
        make: a new environment.
        args: bounds of an episode. ``environment_lag``: decode steps after which a reply is awaited
            and taken, neither sooner nor later: then batches do not depend on the environments'
            speed, and log-probs repeat to the bit. 0: replies are taken as they come.
        observations: tokenizes an environment's text.
        appended: the ids of the prompt of a row with a text after it.
        begun: the text of that prompt's last turn, if the answer continues it.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: PreTrainedTokenizerBase,
        make: Callable[[], Environment],
        observations: ObservationTokens,
        args: EnvironmentConfig,
        appended: Callable[[int, str], list[int]],
        begun: Callable[[int], str | None] = lambda row: None,
    ) -> None:
        self._appended, self._begun = appended, begun
        self._core = engine.core()
        self._tokenizer, self._make = tokenizer, make
        self._observations, self._args = observations, args
        self._pool = Pool(args.environment_workers)
        self._asked: dict[Request, Episode] = {}  # answers to decode
        self._decoding: dict[Request, Episode] = {}
        # Replies that environments work on and the steps at which they are taken, as asked for.
        self._replying: dict[Future, tuple[Episode, int]] = {}
        self._steps = 0
        self._due: set[int] = set()  # steps at which a rank of the group takes a reply to an answer
        self.stats = self._core.stats

    def run(
        self,
        prompts: Sequence[list[int]],
        texts: Sequence[str],
        columns: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        numbers: Sequence[int],
        answered: Callable[[int, list[Episode]], None] | None = None,
    ) -> list[Episode]:
        """Collective in the tensor-parallel group. ``sampling.n`` episodes for each prompt,
        prompt-major.

        ``sampling.max_new_tokens`` bounds an episode's tokens after the prompt, the environment's
        included. ``numbers``: of the prompts in the rollout. ``answered``: called with the row of
        each prompt and its episodes, as early as all of these are complete.

        Raises:
            UserError: an episode does not fit into the model or the cache; on all ranks of the
                group.
        """
        episodes: list[Episode] = []
        self._sampling = replace(sampling, n=1)
        left = [sampling.n] * len(prompts)  # episodes
        for row, number in enumerate(numbers):
            for sample in range(sampling.n):
                episode = Episode(prompts[row], row, (number, sample), self._make())
                episodes.append(episode)
                seed = hash((sampling.seed, number, sample)) & (2**31 - 1)  # of ints: no salt
                self._ask(episode, episode.environment.reset, texts[row], seed, columns[row])
        is_open = True
        try:
            while is_open or self._core.has_work:
                if self._core.has_work:
                    self._steps += 1
                    self._take(self._core.step())
                for episode, reply in self._replies():
                    try:
                        self._follow(episode, reply)
                    except Fault as fault:
                        episode.problem = str(fault)
                    if not episode.is_complete:
                        continue
                    row = episode.row
                    left[row] -= 1
                    if answered is not None and not left[row]:
                        answered(row, episodes[row * sampling.n : (row + 1) * sampling.n])
                if self._may_share:
                    is_open = self._share()
        finally:
            self._core.close()
            self._pool.close()
        return episodes

    # -- the model's turn --------------------------------------------------------------------------

    def _decode(self, episode: Episode) -> None:
        """Ask for the episode's next answer."""
        room = self._sampling.max_new_tokens - len(episode.tokens)
        length = min(room, self._args.max_turn_tokens or room)
        shortest = min(self._sampling.min_new_tokens, length)
        sampling = replace(self._sampling, max_new_tokens=length, min_new_tokens=shortest)
        (number, sample), first = episode.key, len(episode.tokens)
        ids = episode.prompt + episode.tokens
        request = Request(ids, sampling, number, first_sample=sample, first_position=first)
        self._asked[request] = episode

    @property
    def _may_share(self) -> bool:
        """Whether a rank may have asked for answers, or may be done: the same on all ranks."""
        return not self._args.environment_lag or self._steps in self._due or not self._core.has_work

    def _share(self) -> bool:
        """Collective in the group. Queue the answers that its ranks asked for; returns whether a
        rank waits for replies.
        """
        by_rank = self._core.add_all(list(self._asked), bool(self._replying))
        self._decoding |= self._asked
        self._asked.clear()
        return any(waits for _, waits in by_rank)

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if not event.is_last:
                continue
            sequence = event.sequence
            self._due.add(self._steps + self._args.environment_lag)
            episode = self._decoding.pop(sequence.request, None)
            if episode is None:
                continue  # another rank's
            episode.add(sequence.answer, sequence.logprobs)
            episode.experts = sequence.experts
            episode.finish_reason = "stop" if sequence.stopped else "length"
            ids = sequence.answer[:-1] if sequence.stopped else sequence.answer
            texts = continued_texts(self._tokenizer, [ids])
            if episode.environment.wants_special_tokens:
                texts += continued_texts(self._tokenizer, [ids], with_special=True)
                begun = self._begun(episode.row) if episode.num_turns == 1 else None
                texts += [] if begun is None else [begun + episode.appended]
            self._ask(episode, episode.environment.step, *texts)

    # -- the environment's turn --------------------------------------------------------------------

    def _ask(self, episode: Episode, method: Callable[..., Any], *args: Any) -> None:
        pool = episode.environment.pool
        if pool is None:
            future = self._pool.submit(within, self._args.environment_timeout_s, method, *args)
        else:  # stops it itself
            future = pool.submit(method, *args)
        self._replying[future] = episode, self._steps + self._args.environment_lag

    def _replies(self) -> Iterator[tuple[Episode, Any]]:
        """The replies that are due: what a method of the environment returned, or its fault."""
        for future in self._settled():
            episode, _ = self._replying.pop(future)
            try:
                yield episode, future.result()
            except Fault as fault:
                # Else the cycle of its traceback and this frame would hold the engine's cache.
                yield episode, fault.with_traceback(None)

    def _settled(self) -> list[Future]:
        """The futures to take now. While no answer decodes, waits for the next."""
        if not self._replying:
            return []
        if self._args.environment_lag:
            due = self._steps
            if not self._core.has_work:
                due = max(due, min(due for _, due in self._replying.values()))
            chosen = [future for future, (_, step) in self._replying.items() if step <= due]
            wait(chosen)
            return chosen
        wait(self._replying, 0.0 if self._core.has_work else _WAIT_S, FIRST_COMPLETED)
        return [future for future in self._replying if future.done()]

    def _follow(self, episode: Episode, reply: Any) -> None:
        """Continue an episode by one of four events. Raises ``Fault`` where it cannot continue."""
        if isinstance(reply, Fault):  # its environment failed
            self._fail(episode, reply)
        elif isinstance(reply, Observation):  # it observed an answer
            self._observe(episode, reply)
        elif isinstance(reply, float):  # it rewarded the end
            episode.rewards[-1] += reply
            episode.is_complete = True
        else:  # it was reset, and may have returned text for the prompt
            if reply:
                episode.prompt, episode.appended = self._appended(episode.row, reply), reply
            self._decode(episode)

    def _fail(self, episode: Episode, fault: Fault) -> None:
        """Tell the model, where flags ask for it and it can answer; else the run fails."""
        environment = episode.environment
        tells = self._args.on_environment_error == "feedback"
        tells |= environment.tells_calls and bool(environment.calls)
        if not (tells and episode.num_turns and not episode.is_over):
            episode.problem = str(fault)
            return
        told = environment.told(fault)
        if told is None:  # a step that hangs still holds the environment
            episode.is_over = episode.is_complete = True
        else:
            self._observe(episode, told)

    def _observe(self, episode: Episode, observation: Observation) -> None:
        episode.rewards[-1] += observation.reward
        tokens = None if observation.done else self._tokens(episode, observation)
        if tokens is not None:
            episode.add(tokens)
            self._decode(episode)
            return
        episode.is_over = True
        if observation.done:
            episode.finish_reason = "stop"
        if episode.environment.rewards_the_end:
            self._ask(episode, episode.environment.final_reward)
        else:
            episode.is_complete = True

    def _tokens(self, episode: Episode, observation: Observation) -> list[int] | None:
        """The tokens of ``observation``; None where no answer can follow."""
        if episode.finish_reason == "length" or episode.num_turns == self._args.max_turns:
            return None
        room = self._sampling.max_new_tokens - len(episode.tokens)
        tokens = self._within(room, observation)
        if tokens is None and observation.results:
            # told to the model: the call is at fault, not the episode
            told = "error: the result is too long, {} characters"
            results = tuple(
                ToolResult(r.name, told.format(len(r.text)), failed=True)
                for r in observation.results
            )
            observation = Observation(results=results)
            tokens = self._within(room, observation)
        episode.num_calls += len(observation.results)
        episode.num_failed_calls += sum(result.failed for result in observation.results)
        if tokens is None:
            episode.finish_reason = "length"
        return tokens

    def _within(self, room: int, observation: Observation) -> list[int] | None:
        """The tokens of ``observation``; None where they leave no room for an answer."""
        texts = [observation.text, *(result.text for result in observation.results)]
        if sum(map(len, texts)) > _MAX_CHARS * room:
            return None
        tokens = self._observations(observation)
        return tokens if len(tokens) < room else None
