"""Converts the actor's sequences for a reward model with another tokenizer.

A text prompt and its answer are one text, tokenized as a whole. Chat messages are rendered by the
reward model's template, with the answer as the assistant's turn. A prompt of which only the ids are
known is decoded: the actor's EOS becomes the reward model's, its other special tokens are dropped.
A finished answer ends with the reward model's EOS, an unfinished one with its last word.
"""

import logging
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.data.segments import render_chat
from dschat.data.sources.adapters import Content
from dschat.models.chat_template import default_template
from dschat.rlhf.experience import Experience

logger = logging.getLogger("dschat")

_MARK = "\ue000"  # a private-use character, which no prompt or template contains


class Retokenizer:
    """Re-tokenizes sequences of the actor for the reward model.

    Args:
        actor_tokenizer, reward_tokenizer: of the two models.
        stop_ids: the actor's tokens that end an answer.
        max_len: positions of the reward model; longer texts lose their beginning, except a BOS.
    """

    def __init__(
        self,
        actor_tokenizer: PreTrainedTokenizerBase,
        reward_tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        max_len: int | None = None,
    ) -> None:
        self._actor_tokenizer, self._reward_tokenizer = actor_tokenizer, reward_tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._max_len = max_len
        self._warnings: set[str] = set()

    def batch(self, e: Experience) -> list[list[int]]:
        """The sequences of ``e`` re-tokenized."""
        sources: Sequence[Content | None] = e.sources or [None] * e.num_sequences
        rows = []
        for ids, length, prompt_length, finished, source in zip(
            e.input_ids.tolist(),
            e.lengths.tolist(),
            e.prompt_lengths.tolist(),
            e.finished.tolist(),
            sources,
            strict=True,
        ):
            prompt, answer = ids[:prompt_length], ids[prompt_length:length]
            rows.append(self.sequence(prompt, answer, bool(finished), source))
        return rows

    def sequence(
        self, prompt_ids: list[int], answer_ids: list[int], finished: bool, source: Content | None
    ) -> list[int]:
        """Ids of one prompt and answer; ``source``: the prompt's text or messages, if known."""
        if finished and answer_ids and answer_ids[-1] in self._stop_ids:
            answer_ids = answer_ids[:-1]
        if isinstance(source, list):
            answer = self._decode(answer_ids).strip()
            text, special = self._chat(source, answer, finished), False
        else:
            before = self._decode(prompt_ids)
            both = self._decode([*prompt_ids, *answer_ids])
            # Decoded together: a SentencePiece token loses its space where it comes first.
            answer = both[len(before) :] if both.startswith(before) else self._decode(answer_ids)
            text = (self._plain(prompt_ids) if source is None else source) + answer
            special = True
        return self._fit(self._encode(text, special, finished))

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

    def _chat(self, messages: list[dict[str, str]], answer: str, finished: bool) -> str:
        """The dialogue in the reward model's template, up to the end of ``answer`` or its EOS."""
        try:
            prompt, dialogue, after = self._rendered(messages, answer)
        except UserError as error:
            self._warn_once(f"the reward model gets such chats in the default template: {error}")
            template = default_template(self._reward_tokenizer)
            prompt, dialogue, after = self._rendered(messages, answer, template)
        if not dialogue.startswith(prompt):
            return prompt + answer
        end = len(dialogue) - (len(after) if dialogue.endswith(after) else 0)
        eos = self._reward_tokenizer.eos_token
        if finished and eos and eos in dialogue[end:]:
            end = dialogue.index(eos, end) + len(eos)
        return dialogue[:end]

    def _rendered(
        self, messages: list[dict[str, str]], answer: str, template: str | None = None
    ) -> tuple[str, str, str]:
        """The chat up to the answer, the chat with ``answer``, and the text after any answer."""

        def render(*answers: str) -> str:
            turns = [{"role": "assistant", "content": text} for text in answers]
            return render_chat(self._reward_tokenizer, [*messages, *turns], not answers, template)

        # NOTE: searching for the answer would not find its end: "A" is in "Answer: " too.
        return render(), render(answer), render(_MARK).rpartition(_MARK)[2]

    def _encode(self, text: str, special: bool, finished: bool) -> list[int]:
        """Ids of ``text``, ending with EOS exactly where the answer is finished."""
        tokenizer = self._reward_tokenizer
        eos = tokenizer.eos_token_id
        ids = list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
        if special and len(ids) > 1 and ids[-1] == eos and not text.endswith(tokenizer.eos_token):
            ids.pop()  # appended by the tokenizer, not part of the text
        if finished and eos is not None and ids[-1:] != [eos]:
            ids.append(eos)
        return ids or [0 if eos is None else eos]

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
