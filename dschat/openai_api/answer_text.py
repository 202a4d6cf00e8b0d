"""Follows the tokens of one answer to pieces of text that are final."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from dschat.inference.protocol import FinishReason
from dschat.models.continued_text import StreamDecoder


class Token(NamedTuple):
    """A token of one of a request's answers."""

    handle: Any  # of the request
    sample: int
    id: int
    logprob: float | None  # None: the first of all, which follows nothing
    top: list[tuple[int, float]]  # likeliest tokens at its position, where asked for
    finish_reason: FinishReason | None  # None: more tokens follow


class Event(NamedTuple):
    """A token of choice number ``choice``, and the text that it makes final. ``offset``: where in
    the answer the token's own text begins, in characters.
    """

    choice: int
    text: str
    token: Token
    finish_reason: str | None
    offset: int


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
