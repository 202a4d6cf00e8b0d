"""A conversation with a model: history, prompts as training makes them, streamed answers."""

import logging
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, Optional, Protocol

from dschat.chat.stream_decoder import StreamDecoder, printable
from dschat.config import UserError
from dschat.data.segments import prompt_text_ids
from dschat.inference.protocol import SamplingParams

logger = logging.getLogger("dschat")


class StreamingGenerator(Protocol):
    """Answers one prompt, token by token."""

    @property
    def max_positions(self) -> int | None: ...

    def stream(self, prompt: list[int], sampling: SamplingParams) -> Iterator[int]: ...


def check_system(tokenizer: Any, system: Optional[str]) -> None:
    """Raise ``UserError`` where the tokenizer's chat template takes no such system message."""
    Conversation(system).prompt_ids(tokenizer, "?")


class Conversation:
    """What was said so far: a system message and exchanges (prompt, answer), oldest first."""

    def __init__(self, system: Optional[str] = None) -> None:
        self.system = system
        self.exchanges: list[tuple[str, str]] = []

    def messages(self, text: str) -> list[dict[str, str]]:
        """The chat messages that ask for an answer to ``text``."""
        turns = [("system", self.system)] if self.system else []
        for prompt, answer in self.exchanges:
            turns += [("user", prompt), ("assistant", answer)]
        return [{"role": role, "content": said} for role, said in [*turns, ("user", text)]]

    def prompt_ids(self, tokenizer: Any, text: str) -> list[int]:
        """The tokens of that, as training would have them.

        Raises:
            UserError: the tokenizer's chat template refuses these messages.
        """
        return prompt_text_ids(tokenizer, self.messages(text))

    def fit(self, tokenizer: Any, text: str, max_len: int) -> tuple[list[int], int]:
        """``prompt_ids`` without the oldest exchanges, as many as must go for ``max_len`` tokens.

        Returns the ids, and how many exchanges to forget. Without any left the ids may still be
        more than ``max_len``.
        """
        kept = Conversation(self.system)
        for num_forgotten in range(len(self.exchanges) + 1):
            kept.exchanges = self.exchanges[num_forgotten:]
            ids = kept.prompt_ids(tokenizer, text)
            if len(ids) <= max_len:
                break
        return ids, num_forgotten


class Chat:
    """A model in conversation.

    Args:
        generator: answers token prompts, one token at a time.
        stop_ids: tokens that end an answer and are no part of it.
        sampling: how to draw; the seed moves on with every answer.
    """

    def __init__(
        self,
        generator: StreamingGenerator,
        tokenizer: Any,
        stop_ids: tuple[int, ...],
        sampling: SamplingParams,
        system: Optional[str] = None,
    ) -> None:
        self.conversation = Conversation(system)
        self._generator = generator
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._sampling = sampling
        self._num_answers = 0

    def reset(self) -> None:
        """Forget what was said; the system message stays."""
        self.conversation = Conversation(self.conversation.system)

    def set_system(self, system: Optional[str]) -> None:
        """Put ``system`` before the conversation, or nothing; ``UserError`` where that can't be."""
        check_system(self._tokenizer, system)
        self.conversation.system = system

    def reply(self, text: str) -> Iterator[str]:
        """The answer to ``text``, in pieces; both join the conversation when it ends.

        Closing the iterator stops the answer: then what came out of it is remembered, and nothing
        at all where nothing came.

        Raises:
            UserError: ``text`` leaves the model no position for an answer, or the template refuses.
        """
        ids, sampling = self._request(text)
        conversation = self.conversation  # a reset meanwhile starts another one
        decoder, said, complete = StreamDecoder(self._tokenizer), "", False
        try:
            with closing(self._generator.stream(ids, sampling)) as tokens:
                for token in tokens:
                    piece = "" if token in self._stop_ids else decoder.push(token)
                    said, piece = printable(said, piece)
                    if piece:
                        yield piece
            said, piece = printable(said, decoder.finish())
            complete = True
            if piece:
                yield piece
        finally:
            if said.strip() or complete:
                conversation.exchanges.append((text, said.strip()))

    def _request(self, text: str) -> tuple[list[int], SamplingParams]:
        """The prompt, and how to answer it within the model's positions.

        History makes room for an answer of ``max_new_tokens``, yet never gets less than half.
        """
        longest, positions = self._sampling.max_new_tokens, self._generator.max_positions
        limit = sys.maxsize if positions is None else positions - min(longest, positions // 2)
        ids, num_forgotten = self.conversation.fit(self._tokenizer, text, limit)
        if positions is not None:
            if len(ids) >= positions:
                raise UserError(
                    f"too long: {len(ids)} tokens, and the model has {positions} positions"
                )
            longest = min(longest, positions - len(ids))
        if num_forgotten:
            logger.warning("the conversation got too long: %d exchanges forgotten", num_forgotten)
            del self.conversation.exchanges[:num_forgotten]
        # As in training: draws differ from answer to answer, and repeat with the seed.
        seed = self._sampling.seed * 1_000_003 + self._num_answers
        self._num_answers += 1
        return ids, replace(self._sampling, seed=seed, max_new_tokens=longest)
