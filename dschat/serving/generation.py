"""Follows the answers of one HTTP request, from the engine's tokens to pieces of text."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.inference.requests.sequence import Request
from dschat.models.continued_text import StreamDecoder
from dschat.serving.patience import Ended, Stopping, TimedOut
from dschat.serving.worker import Handle, ServedModel, Token


class EngineFailure(Ended):
    """A step of the engine failed; the server's log has the cause."""


class Event(NamedTuple):
    """A token of choice number ``choice``, and the text that it makes final. ``offset``: where in
    the answer the token's own text begins, in characters.
    """

    choice: int
    text: str
    token: Token
    finish_reason: str | None
    offset: int


class Generation:
    """The answers to ``requests``, which have the same ``n``: choice ``i * n + sample`` for the
    i-th.

    Args:
        stops: strings that end an answer, which does not have them.
        echoes: answers begin with their requests' ``ids`` and ``forced``: the prompt.
        began: when the HTTP request did, on the clock of `time.perf_counter`.

    Raises:
        UserError: a prompt that the model cannot answer.
        Overloaded: too many answers wait.
    """

    def __init__(
        self,
        model: ServedModel,
        requests: list[Request],
        stops: list[str],
        began: float,
        echoes: bool = False,
    ) -> None:
        self.model, self.began, engine = model, began, model.worker.engine
        sampling = requests[0].sampling
        if (problem := engine.problem(requests)) is not None:
            raise UserError(problem)
        self._tokens: asyncio.Queue[Token | Exception] = asyncio.Queue()
        self._first: dict[Handle, int] = {}
        ends = sampling.end_ids(engine.stop_ids)
        self._shape = requests[0].shape  # of all of them
        self.num_choices = len(requests) * sampling.n
        self._texts = [
            AnswerText(model.tokenizer, stops, ends, r.ids if echoes else [], len(r.forced))
            for r in requests
            for _ in range(sampling.n)
        ]
        self._open = set(range(self.num_choices))
        self.prompt_tokens = sum(len(r.ids) + len(r.forced) for r in requests)
        try:
            for i, request in enumerate(requests):
                handle = model.worker.submit(self._tokens, request)
                self._first[handle] = i * sampling.n
        except BaseException:
            self.close()
            raise

    @property
    def completion_tokens(self) -> int:
        return sum(max(0, text.num_drawn) for text in self._texts)

    @property
    def usage(self) -> dict[str, int]:
        """OpenAI's counts of tokens."""
        completion = self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
        }

    def close(self) -> None:
        """Stop all answers that go on."""
        for handle in self._first:
            self.model.worker.cancel(handle)

    def stop(self) -> None:
        """End the answers with `Stopping`."""
        self._tokens.put_nowait(Stopping())

    async def events(self, timeout_s: float) -> AsyncGenerator[list[Event], None]:
        """The events since the last ones, until all choices have ended.

        Raises:
            TimedOut: ``timeout_s`` after the request began.
            Stopping: after `stop`.
            UserError: no answer can follow the format.
            EngineFailure: the engine failed.
        """
        loop = asyncio.get_running_loop()
        left_s = timeout_s - (time.perf_counter() - self.began)
        timer = loop.call_later(left_s, self._tokens.put_nowait, TimedOut())
        try:
            while self._open:
                items = [await self._tokens.get()]
                while not self._tokens.empty():
                    items.append(self._tokens.get_nowait())
                if events := [event for item in items for event in self._follow(item)]:
                    yield events
        finally:
            timer.cancel()
            self.close()

    def _follow(self, item: Token | Exception) -> list[Event]:
        if isinstance(item, Ended):
            raise item
        if isinstance(item, Exception):
            raise EngineFailure(str(item)) from item
        if problem := getattr(self._shape, "problem", ""):
            raise UserError(problem)
        index = self._first[item.handle] + item.sample
        if index not in self._open:  # drawn before the engine knew of a stop string
            return []
        answer = self._texts[index]
        given, answer.given = answer.given, []
        items = [item._replace(id=i, logprob=None, top=[], finish_reason=None) for i in given]
        events = []
        for token in (*items, item):
            offset = answer.num_chars
            text, reason = answer.push(token)
            events.append(Event(index, text, token, reason, offset))
        if reason is not None:
            self._open.discard(index)
            if item.finish_reason is None:
                self.model.worker.cancel(item.handle, item.sample)
        return events


@dataclass
class AnswerText:
    """The text of one answer, without end tokens and without what follows a stop string.

    Text that may be the beginning of a stop string is held back until that is decided. The text of
    an echo begins with the prompt, where stop strings end nothing: its first tokens are ``given``,
    its other ``num_forced`` are the first that the engine tells.
    """

    tokenizer: PreTrainedTokenizerBase
    stops: list[str]
    end_ids: frozenset[int]
    given: list[int] = field(default_factory=list)
    num_forced: int = 0
    num_chars: int = 0  # of the text decoded so far, also where it is held back
    num_drawn: int = field(init=False)  # negative within the prompt
    _held: str = ""
    _decoder: StreamDecoder = field(init=False)

    def __post_init__(self) -> None:
        self.num_drawn = -len(self.given) - self.num_forced
        self._decoder = StreamDecoder(self.tokenizer, continues=not self.given)

    def push(self, token: Token) -> tuple[str, str | None]:
        """The text that is final after ``token``, and the finish reason: "stop" if it completes a
        stop string.
        """
        self.num_drawn += 1
        is_end = token.finish_reason == "stop"
        text = "" if is_end and token.id in self.end_ids else self._decoder.push(token.id)
        if token.finish_reason is not None:
            text += self._decoder.finish()
        self.num_chars += len(text)
        if self.num_drawn <= 0:
            return text, token.finish_reason
        self._held += text
        found = [i for i in map(self._held.find, self.stops) if i >= 0]
        if found:
            return self._held[: min(found)], "stop"
        num_held = 0 if token.finish_reason is not None else self._num_undecided()
        end = len(self._held) - num_held
        final, self._held = self._held[:end], self._held[end:]
        return final, token.finish_reason

    def _num_undecided(self) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        longest = max(map(len, self.stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self.stops):
                return length
        return 0
