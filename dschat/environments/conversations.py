"""Keeps the tokens of an agent's conversations with the model.

A request whose messages continue a conversation continues its very tokens: the drawn ones stay, and
only what the agent added is tokenized. Any other request begins a row of its own: the agent has
summarised, dropped a thought, branched, or asked something else.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeVar

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.config import RLHFConfig, UserError
from dschat.data.segments import end_of, prompt_text_ids
from dschat.data.sources.adapters import Content
from dschat.data.sources.turns import Turn
from dschat.environments.agents import Outcome
from dschat.environments.template_text import ObservationTokens
from dschat.inference.protocol import FinishReason
from dschat.models.continued_text import continued_ids, continued_texts
from dschat.models.tokenizer import text_ids
from dschat.user_code.calls import Fault

T = TypeVar("T", str, list[int])

_ROW_POSITIONS = 1 << 24  # between the random numbers of two rows of an episode


@dataclass(eq=False)
class Row:
    """A sequence of tokens that is trained: a prompt, and what followed it.

    Attributes:
        number: among the rows of its episode.
        prompt: P ids. ``source``: its text or messages; None where only ids are known.
        messages: the conversation so far; empty of text and ids.
        inputs: what the chat template gets beside the messages.
        tokens, drawn, logprobs: (A,) after the prompt; see `Episode`.
        experts: (P + A, routers, k), see `Rollout`.
        is_ended: whether the last token ends the last answer.
        asked: ids behind ``tokens`` that the agent added, until they are answered.
        text: of the prompt and what followed it, where the agent sends text and no messages.
    """

    number: int
    prompt: list[int]
    messages: list[Turn]
    source: Content | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    experts: Tensor | None = None
    finish_reason: FinishReason = "stop"
    is_ended: bool = False
    num_answers: int = 0
    last_length: int = 0  # of the last answer
    asked: list[int] = field(default_factory=list)
    text: str = ""

    @property
    def ids(self) -> list[int]:
        """What the next answer follows."""
        return self.prompt + self.tokens + self.asked

    @property
    def num_used(self) -> int:
        """Tokens behind the prompt."""
        return len(self.tokens) + len(self.asked)

    @property
    def first_position(self) -> int:
        """Of the next answer, on which its random numbers depend."""
        return self.number * _ROW_POSITIONS + self.num_used

    def add(self, answer: list[int], logprobs: list[float], is_trained: bool = True) -> None:
        """Add what was asked, and the answer; ``is_trained``: it was drawn as training samples."""
        self.tokens += self.asked + answer
        self.logprobs += [0.0] * len(self.asked)
        self.logprobs += logprobs if is_trained else [0.0] * len(answer)
        self.drawn += [False] * len(self.asked) + [is_trained] * len(answer)
        self.asked, self.last_length = [], len(answer)
        self.num_answers += 1


class TooLong(UserError):
    """A conversation has no room for an answer."""


class Conversations:
    """The conversations of one episode, and how it ended.

    Attributes:
        key: prompt and sample, on which the draws depend.
        row: of the prompt in the rollout's call.
        is_over: takes no more answers.
        outcome: what the agent returned; None: it failed, and ``problem`` says why.
        is_cut: a request was refused because its conversation had no room left.
    """

    def __init__(
        self, row: int, key: tuple[int, int], tokenizer: PreTrainedTokenizerBase, args: RLHFConfig
    ) -> None:
        self.row, self.key = row, key
        self.outcome: Outcome | None = None
        self.problem, self.is_cut, self.is_over = "", False, False
        self._lock = threading.Lock()  # answers arrive in the server's thread, the end in another
        self.last: Row | None = None  # that was answered
        self._tokenizer, self._args = tokenizer, args
        self._rows: list[Row] = []
        self._idle: dict[bytes, Row] = {}  # by their conversation so far

    @property
    def rows(self) -> list[Row]:
        """The rows that are trained."""
        return [row for row in self._rows if any(row.drawn)]

    def chat(
        self, observations: ObservationTokens, turns: list[Turn], inputs: Mapping[str, Any]
    ) -> Row:
        """The row that a conversation continues, or a new one.

        Raises:
            UserError: its messages cannot be rendered, or there is no room for an answer.
        """
        digest, found = _digest(inputs), None
        for count, turn in enumerate(turns[:-1], 1):
            digest.update(_said(turn))
            if turn["role"] == "assistant" and digest.digest() in self._idle:
                found = digest.digest(), count
        if found is not None:
            row = self._idle[found[0]]
            try:
                answer, added = turns[found[1] - 1], turns[found[1] :]
                ids = observations.turns(answer, added, **inputs)
            except (UserError, Fault):  # the template has no such place: it renders all of them
                pass
            else:
                if not row.is_ended:
                    ids = end_of(self._tokenizer, True, "tool_calls" in answer) + ids
                return self._continued(found[0], ids, turns)
        row = self._begun(prompt_text_ids(self._tokenizer, turns, **inputs), turns)
        row.source, row.inputs = turns, inputs
        return row

    def continued(self, ids: list[int]) -> Row:
        """The row that ``ids`` continue, or a new one.

        Raises:
            UserError: there is no room for an answer.
        """
        found = self._longest(lambda row: row.ids, ids)
        if found is not None:
            return self._continued(found, ids[len(self._idle[found].ids) :], [])
        return self._begun(ids, [])

    def continued_text(self, text: str) -> Row:
        """The row whose text ``text`` continues, or a new one. Raises as `continued` does."""
        found = self._longest(lambda row: "" if row.is_ended else row.text, text)
        if found is not None:
            row = self._idle[found]
            row.text, pair = text, (row.text, text[len(row.text) :])
            return self._continued(found, continued_ids(self._tokenizer, [pair])[0], [])
        row = self._begun(text_ids(self._tokenizer, [text])[0], [])
        row.text = row.source = text
        return row

    def _longest(self, known: Callable[[Row], T], asked: T) -> bytes | None:
        """The key of the row without messages of which ``asked`` continues the most."""
        rows = [(len(known(row)), key) for key, row in self._idle.items() if not row.messages]
        for length, key in sorted(rows, reverse=True):
            if 0 < length < len(asked) and known(self._idle[key]) == asked[:length]:
                return key
        return None

    def answered(self, row: Row, turn: Turn | None, inputs: Mapping[str, Any]) -> None:
        """Remember an answer: the conversation may continue after it. ``turn``: None of ids."""
        row.messages = [*row.messages, turn] if turn else []
        if row.text:
            row.text += continued_texts(self._tokenizer, [row.tokens[-row.last_length :]])[0]
        digest = _digest(inputs if turn else row.number)
        for said in row.messages:
            digest.update(_said(said))
        self._idle[digest.digest()] = row

    def take(self, row: Row, answer: list[int], logprobs: list[float], **ended: Any) -> bool:
        """Add an answer to ``row``, whose attributes ``ended`` say how, unless the episode is over.

        ``ended``: also ``is_trained``, see `Row.add`.
        """
        with self._lock:
            if not self.is_over:
                row.add(answer, logprobs, ended.pop("is_trained"))
                vars(row).update(ended)
                self.last = row
            return not self.is_over

    def close(self) -> None:
        """Take no more answers."""
        with self._lock:
            self.is_over = True

    def room(self, row: Row) -> int:
        """Tokens that the next answer may have."""
        return self._args.max_answer_seq_len - row.num_used

    def _continued(self, key: bytes, ids: list[int], messages: list[Turn]) -> Row:
        row = self._idle[key]
        if row.num_used + len(ids) >= self._args.max_answer_seq_len:
            raise self._too_long(row.num_used + len(ids), "--max_answer_seq_len")
        del self._idle[key]
        row.asked, row.messages = ids, messages
        return row

    def _begun(self, ids: list[int], messages: list[Turn]) -> Row:
        if len(ids) > self._args.max_prompt_seq_len:
            raise self._too_long(len(ids), "--max_prompt_seq_len")
        if len(self._rows) >= self._args.agent_max_rows:
            most = self._args.agent_max_rows
            self.problem = f"began more than {most} conversations (--agent_max_rows)"
            raise UserError(f"this episode {self.problem}")
        row = Row(len(self._rows), ids, messages)
        self._rows.append(row)
        return row

    def _too_long(self, count: int, name: str) -> TooLong:
        self.is_cut = True
        return TooLong(f"the conversation has {count} tokens, which leaves no room ({name})")


def _digest(start: Any) -> Any:
    return blake2b(json.dumps(start, sort_keys=True, default=str).encode(), digest_size=16)


def _said(turn: Turn) -> bytes:
    """What tells a turn from another one: not the numbers of calls, nor names."""
    calls: Sequence[Any] = [call["function"] for call in turn.get("tool_calls", ())]
    told = turn["role"], turn["content"], calls
    return json.dumps(told, sort_keys=True).encode(errors="replace")
