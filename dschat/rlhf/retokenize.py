"""Sequences of the actor as a reward model with another tokenizer reads them.

The actor's ids come in, and what their prompts were made of where that is known; ids of the reward
model's own tokenizer go out, those that it makes of the text by itself. It must not know models or
scores.

A text prompt and its answer are one text, tokenised as a whole. Chat messages are rendered by the
reward model's own template, the answer as the assistant's turn. Of a prompt known by its ids alone
the text is what they decode to: the actor's EOS becomes the reward model's, its other special
tokens are left out. A finished answer ends with the reward model's EOS, an unfinished one with its
last word.
"""

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dschat.config import UserError
from dschat.data.collate import pad_right
from dschat.data.segments import render_chat
from dschat.data.sources.adapters import Content
from dschat.models.chat_template import default_template
from dschat.rlhf.experience import Experience

logger = logging.getLogger("dschat")

_MARK = "\ue000"  # an answer that no prompt or template holds: a character for private use


class Retokenizer:
    """From one tokenizer's sequences to another's.

    Args:
        actors, own: tokenizers of the actor and of the reward model.
        stop_ids: the actor's tokens that end an answer.
        max_len: positions of the reward model; longer texts lose their beginning (a BOS stays).
    """

    def __init__(
        self, actors: Any, own: Any, stop_ids: Sequence[int], max_len: int | None = None
    ) -> None:
        self._actors, self._own = actors, own
        self._stop_ids = frozenset(stop_ids)
        self._max_len = max_len
        self._said: set[str] = set()

    def batch(self, e: Experience) -> tuple[Tensor, Tensor]:
        """The sequences of ``e`` anew: ids (S, U) right-padded, lengths (S,); int64, on the CPU."""
        sources = e.sources or [None] * e.num_sequences
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
        # Any id will do to fill with: scores are taken by length.
        ids, mask = pad_right(rows, 0)
        return ids, mask.sum(1)

    def sequence(
        self, prompt_ids: list[int], answer_ids: list[int], finished: bool, source: Content | None
    ) -> list[int]:
        """Ids of one prompt and answer; ``source``: what the prompt was made of, if known."""
        if finished and answer_ids and answer_ids[-1] in self._stop_ids:
            answer_ids = answer_ids[:-1]
        if isinstance(source, list):
            said = self._decode(answer_ids).strip()
            text, special = self._chat(source, said, finished), False
        else:
            before = self._decode(prompt_ids)
            both = self._decode([*prompt_ids, *answer_ids])
            # Decoded together: a SentencePiece token loses its space where it stands first.
            said = both[len(before) :] if both.startswith(before) else self._decode(answer_ids)
            text = (self._plain(prompt_ids) if source is None else source) + said
            special = True
        return self._fit(self._encode(text, special, finished))

    def _decode(self, ids: list[int]) -> str:
        return self._actors.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _plain(self, ids: list[int]) -> str:
        """The text of a prompt whose making is not known: parts between EOS, joined by our own."""
        parts: list[list[int]] = [[]]
        for n, i in enumerate(ids):
            if n and i in self._stop_ids:  # at the beginning it is a BOS
                parts.append([])
            else:
                parts[-1].append(i)
        return (self._own.eos_token or "").join(map(self._decode, parts))

    def _chat(self, messages: list[dict[str, str]], said: str, finished: bool) -> str:
        """The dialogue by the reward model's template, up to the end of ``said`` or its EOS."""
        try:
            asked, answered, after = self._rendered(messages, said)
        except UserError as error:
            self._say_once(f"the reward model reads such chats by the default template: {error}")
            plain = default_template(self._own)
            asked, answered, after = self._rendered(messages, said, plain)
        if not answered.startswith(asked):
            return asked + said
        end = len(answered) - (len(after) if answered.endswith(after) else 0)
        eos = self._own.eos_token
        if finished and eos and eos in answered[end:]:
            end = answered.index(eos, end) + len(eos)
        return answered[:end]

    def _rendered(
        self, messages: list[dict[str, str]], said: str, template: str | None = None
    ) -> tuple[str, str, str]:
        """The chat up to its answer, with ``said`` as its answer, and what follows any answer."""

        def render(*answer: str) -> str:
            turns = [{"role": "assistant", "content": text} for text in answer]
            return render_chat(self._own, [*messages, *turns], not answer, template)

        # NOTE where the answer ends cannot be found by searching for it: "A" is in "Answer: " too.
        return render(), render(said), render(_MARK).rpartition(_MARK)[2]

    def _encode(self, text: str, special: bool, finished: bool) -> list[int]:
        """Ids of ``text``, ending with EOS exactly where the answer is finished."""
        eos = self._own.eos_token_id
        ids = list(self._own(text, add_special_tokens=special, verbose=False)["input_ids"])
        if special and len(ids) > 1 and ids[-1] == eos and not text.endswith(self._own.eos_token):
            ids.pop()  # the tokenizer's habit, not the text's
        if finished and eos is not None and ids[-1:] != [eos]:
            ids.append(eos)
        return ids or [0 if eos is None else eos]

    def _fit(self, ids: list[int]) -> list[int]:
        if self._max_len is None or len(ids) <= self._max_len:
            return ids
        self._say_once(
            f"a text of {len(ids)} tokens exceeds the reward model's {self._max_len} positions: "
            "such texts lose their beginning"
        )
        head = ids[:1] if ids[0] == self._own.bos_token_id else []
        return head + ids[len(ids) - self._max_len + len(head) :]

    def _say_once(self, message: str) -> None:
        if message not in self._said and len(self._said) < 3:
            self._said.add(message)
            logger.warning("%s", message)
