"""Converts the actor's sequences for a reward model with another tokenizer.

Prompt and answer are tokenized as step 2 tokenizes them. Chat messages are rendered by the reward
model's template, with the answer as the assistant's turn. A prompt of which only the ids are known
is decoded: the actor's EOS becomes the reward model's, its other special tokens are dropped. A
finished answer ends as in step 2, an unfinished one with its last word.
"""

import logging
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.data import segments
from dschat.data.segments import Segment
from dschat.data.sources.adapters import Content
from dschat.data.sources.turns import Turn
from dschat.models.continued_text import opened_thought
from dschat.models.tokenizer import stop_ids as end_ids
from dschat.rlhf.experience import Experience

logger = logging.getLogger("dschat")

_MARK = "\ue000"  # a private-use character, which no prompt or template contains


class Retokenizer:
    """Re-tokenizes sequences of the actor for the reward model.

    Args:
        actor_tokenizer, reward_tokenizer: of the two models.
        stop_ids: the actor's tokens that end an answer.
        max_len: positions of the reward model; longer texts lose their beginning, except a BOS.
        template_kwargs: of the run's chat template, for the reward model's too.
    """

    def __init__(
        self,
        actor_tokenizer: PreTrainedTokenizerBase,
        reward_tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        max_len: int | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._actor_tokenizer, self._reward_tokenizer = actor_tokenizer, reward_tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._ends = end_ids(reward_tokenizer)
        self._max_len, self._template_kwargs = max_len, template_kwargs or {}
        self._warnings: set[str] = set()

    def batch(self, e: Experience) -> list[list[int]]:
        """The sequences of ``e`` re-tokenized."""
        sources: Sequence[Content | None] = e.sources or [None] * e.num_sequences
        inputs = e.inputs or [{}] * e.num_sequences
        tensors = e.input_ids, e.lengths, e.prompt_lengths, e.finished
        columns = zip(*(tensor.tolist() for tensor in tensors), sources, inputs, strict=True)
        return [
            self.sequence(ids[:start], ids[start:end], finished, source, more)
            for ids, end, start, finished, source, more in columns
        ]

    def sequence(
        self,
        prompt_ids: list[int],
        answer_ids: list[int],
        finished: bool,
        source: Content | None,
        inputs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Ids of one prompt and answer; ``source``: the prompt's text or messages, if known;
        ``inputs``: what the chat template gets beside the messages.
        """
        if finished and answer_ids and answer_ids[-1] in self._stop_ids:
            answer_ids = answer_ids[:-1]
        if is_chat := isinstance(source, list):
            opened = opened_thought(self._actor_tokenizer, prompt_ids)
            answer = (opened + self._decode(answer_ids)).strip()
            pieces = self._chat(source, answer, finished, self._template_kwargs | (inputs or {}))
        else:
            before = self._decode(prompt_ids)
            both = self._decode([*prompt_ids, *answer_ids])
            # Decoded together: a SentencePiece token loses its space where it comes first.
            answer = both[len(before) :] if both.startswith(before) else self._decode(answer_ids)
            text = self._plain(prompt_ids) if source is None else source
            pieces = [Segment(text, add_special=True), Segment(answer, None, not text, text)]
        *asked, ids = segments.encode(self._reward_tokenizer, pieces)
        if finished:
            end = segments.end_of(self._reward_tokenizer, is_chat)
            ids = segments.through_end([*ids, *end], self._ends)
        return self._fit([*chain(*asked), *ids] or [self._reward_tokenizer.eos_token_id or 0])

    def _decode(self, ids: list[int]) -> str:
        return self._actor_tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _plain(self, ids: list[int]) -> str:
        """The text of a prompt known by ids alone: EOS becomes the reward model's."""
        parts: list[list[int]] = [[]]
        for n, i in enumerate(ids):
            if n and i in self._stop_ids:  # in the first place it is a BOS
                parts.append([])
            else:
                parts[-1].append(i)
        return (self._reward_tokenizer.eos_token or "").join(map(self._decode, parts))

    def _chat(
        self, chat: list[Turn], answer: str, finished: bool, inputs: dict[str, Any]
    ) -> list[Segment]:
        """The ids of ``chat`` and its answer, without the end of a turn unless ``finished``."""
        try:
            return _segments(self._reward_tokenizer, chat, answer, finished, **inputs)
        except UserError as error:
            self._warn_once(f"the reward model gets such chats in the default template: {error}")
        plain = copy(self._reward_tokenizer)
        plain.chat_template = None
        return _segments(plain, chat, answer, finished)

    def _fit(self, ids: list[int]) -> list[int]:
        if self._max_len is None or len(ids) <= self._max_len:
            return ids
        self._warn_once(
            f"a text of {len(ids)} tokens exceeds the reward model's {self._max_len} positions: "
            "such texts are truncated on the left"
        )
        head = ids[:1] if ids[0] == self._reward_tokenizer.bos_token_id else []
        return head + ids[len(ids) - self._max_len + len(head) :]

    def _warn_once(self, message: str) -> None:
        if message not in self._warnings and len(self._warnings) < 3:
            self._warnings.add(message)
            logger.warning("%s", message)


def _segments(
    tokenizer: PreTrainedTokenizerBase,
    chat: list[Turn],
    answer: str,
    finished: bool,
    /,
    **inputs: Any,
) -> list[Segment]:
    # NOTE: searching for the answer would not find its end: "A" is in "Answer: " too.
    last, marked = (
        segments.answer_segment(
            tokenizer, chat, [{"role": "assistant", "content": text}], False, **inputs
        )
        for text in (answer, _MARK)
    )
    after = "" if finished else marked.text.rpartition(_MARK)[2]
    asked = segments.prompt_segments(tokenizer, chat, **inputs)
    return [*asked, replace(last, text=last.text.removesuffix(after))]
