"""Follows the answers of one HTTP request, from the engine's tokens to pieces of text."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.inference.requests.sequence import Request
from dschat.openai_api.answer_text import AnswerText, Event, Token
from dschat.openai_api.delivery import Delivery, Handle
from dschat.openai_api.patience import Ended, EngineFailure, Stopping, TimedOut


@dataclass
class NamedModel:
    """What answers, under a name. ``tokenizer``: of the event loop's thread."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    worker: Delivery


class Generation:
    """The answers to ``requests``, which have the same ``n``: choice ``i * n + sample`` for the
    i-th.

    Args:
        stops: strings that end an answer, which does not have them.
        echoes: answers begin with their requests' ``ids`` and ``forced``: the prompt.
        began: when the HTTP request did, on the clock of `time.perf_counter`.

    Attributes:
        closed: called when it ends.

    Raises:
        UserError: a prompt that the model cannot answer.
        Overloaded: too many answers wait.
    """

    def __init__(
        self,
        model: NamedModel,
        requests: list[Request],
        stops: list[str],
        began: float,
        echoes: bool = False,
    ) -> None:
        self.model, self.began, engine = model, began, model.worker.engine
        self.closed: Callable[[], None] = lambda: None
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
    def model_name(self) -> str:
        return self.model.name

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.model.tokenizer

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
        """Stop all answers that are not complete."""
        for handle in self._first:
            self.model.worker.cancel(handle)
        self.closed()

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
                if events := [event for item in items for event in self.follow(item)]:
                    yield events
        finally:
            timer.cancel()
            self.close()

    def follow(self, item: Token | Exception) -> list[Event]:
        """The events of what the engine sent."""
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
