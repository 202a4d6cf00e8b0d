"""Holds a conversation with a model: history, prompts formatted as in training, streaming."""

import logging
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Optional

from dschat.config import UserError
from dschat.data.segments import prompt_text_ids
from dschat.inference.protocol import SamplingParams
from dschat.models.continued_text import StreamDecoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dschat.inference import InferenceEngine
    from dschat.inference.hf_generator import HuggingFaceGenerator

logger = logging.getLogger("dschat")


def check_system(tokenizer: "PreTrainedTokenizerBase", system: Optional[str]) -> None:
    """Raise ``UserError`` if the tokenizer's chat template refuses this system message."""
    prompt_text_ids(tokenizer, Conversation(system).messages("?"))


class Conversation:
    """A system message and the exchanges (prompt, answer) so far, oldest first."""

    def __init__(self, system: Optional[str] = None) -> None:
        self.system = system
        self.exchanges: list[tuple[str, str]] = []

    def messages(self, text: str) -> list[dict[str, str]]:
        """The conversation as chat messages, with ``text`` as the last user message."""
        turns = [("system", self.system)] if self.system else []
        for prompt, answer in self.exchanges:
            turns += [("user", prompt), ("assistant", answer)]
        return [{"role": role, "content": content} for role, content in [*turns, ("user", text)]]

    def fit(
        self, tokenizer: "PreTrainedTokenizerBase", text: str, max_len: int
    ) -> tuple[list[int], int]:
        """The ids of `messages` within ``max_len`` tokens, without as many of the oldest exchanges
        as needed; and the number of those left out. With all of them left out the ids may still
        exceed ``max_len``. ``UserError`` where the chat template refuses the messages.
        """
        recent = Conversation(self.system)
        for num_dropped in range(len(self.exchanges) + 1):
            recent.exchanges = self.exchanges[num_dropped:]
            ids = prompt_text_ids(tokenizer, recent.messages(text))
            if len(ids) <= max_len:
                break
        return ids, num_dropped


class Chat:
    """Conversation with a model.

    Args:
        generator: streams the tokens of an answer.
        stop_ids: tokens that end an answer and are not shown.
        sampling: sampling parameters; every answer gets another seed.
    """

    def __init__(
        self,
        generator: "InferenceEngine | HuggingFaceGenerator",
        tokenizer: "PreTrainedTokenizerBase",
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
        """Start a new conversation with the same system message."""
        self.conversation = Conversation(self.conversation.system)

    def set_system(self, system: Optional[str]) -> None:
        """Set or remove the system message; ``UserError`` if the chat template refuses it."""
        check_system(self._tokenizer, system)
        self.conversation.system = system

    def reply(self, text: str) -> Iterator[str]:
        """Yields the answer to ``text`` in pieces, then adds both to the conversation.

        Closing the iterator stops the answer. The part generated so far is added; without any, the
        conversation is unchanged.

        Raises:
            UserError: ``text`` leaves no position for an answer, or the chat template refuses it.
        """
        ids, sampling = self._request(text)
        conversation = self.conversation  # `reset` may replace it while the answer streams
        decoder, answer, complete = StreamDecoder(self._tokenizer), "", False
        try:
            with closing(self._generator.stream(ids, sampling)) as tokens:
                for token in tokens:
                    piece = "" if token in self._stop_ids else decoder.push(token)
                    answer, piece = printable(answer, piece)
                    if piece:
                        yield piece
            answer, piece = printable(answer, decoder.finish())
            complete = True
            if piece:
                yield piece
        finally:
            if answer.strip() or complete:
                conversation.exchanges.append((text, answer.strip()))

    def _request(self, text: str) -> tuple[list[int], SamplingParams]:
        """The prompt ids, and sampling parameters within the model's positions.

        Drops the oldest exchanges so that ``max_new_tokens`` positions, or half of all if that is
        less, are left for the answer.
        """
        longest, positions = self._sampling.max_new_tokens, self._generator.max_positions
        limit = sys.maxsize if positions is None else positions - min(longest, positions // 2)
        ids, num_dropped = self.conversation.fit(self._tokenizer, text, limit)
        if positions is not None:
            if len(ids) >= positions:
                raise UserError(
                    f"too long: {len(ids)} tokens, and the model has {positions} positions"
                )
            longest = min(longest, positions - len(ids))
        if num_dropped:
            logger.warning("conversation too long: dropped its %d oldest exchanges", num_dropped)
            del self.conversation.exchanges[:num_dropped]
        # As in training: every answer has its own random numbers, reproducible from the seed.
        seed = self._sampling.seed * 1_000_003 + self._num_answers
        self._num_answers += 1
        return ids, replace(self._sampling, seed=seed, max_new_tokens=longest)


def printable(answer: str, piece: str) -> tuple[str, str]:
    """``answer`` + ``piece``, and ``piece``, made safe for a terminal.

    Drops white space before an answer's first character and carriage returns; replaces control
    characters, which a terminal would execute, by U+FFFD.
    """
    piece = (piece if answer else piece.lstrip()).replace("\r", "")
    safe = "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in piece)
    return answer + safe, safe
