"""Tokenizes and decodes text that continues other text.

SentencePiece's tokenizers, and byte-level ones with ``add_prefix_space``, put a space in front of
every text, and drop it when they decode. Behind an anchor, whose ids are cut off again, a text has
the ids that it has within a longer one; no token reaches over the border between both.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dschat.models.tokenizer import stop_ids

_THOUGHT = re.compile(r"[<\[][^<>\[\]\s/]*(think|thought|reason)[^<>\[\]\s/]*[>\]]\s*\Z", re.I)
_TAG_TOKENS = 24  # at most, of a tag and the line breaks behind it


@lru_cache(maxsize=16)
def _anchors(tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """Characters that have tokens of their own; none where no space is put in front of a text."""
    found = {}
    for anchor in ":.,-()0aA\n":
        texts = [anchor, f"{anchor}x", "x"]
        head, both, alone = tokenizer(texts, add_special_tokens=False)["input_ids"]
        is_known = tokenizer.unk_token_id not in both and 0 < len(head) < len(both)
        if is_known and both[: len(head)] == head:
            if both[len(head) :] == alone:
                return {}
            found[anchor] = head
    return found


def continued_ids(
    tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]]
) -> list[list[int]]:
    """The ids of the second text of each pair, as it follows the first."""
    anchors = *_anchors(tokenizer), ""
    tails: list[str] = [anchors[0]] * len(pairs)
    if anchors[0]:
        # Some tokenizers restart after an added token, and some such tokens absorb spaces.
        added = "|".join(map(re.escape, sorted(tokenizer.get_added_vocab(), key=len, reverse=True)))
        found = [re.search(rf"(?:{added})\s*\Z", before[-64:]) for before, _ in pairs]
        tails = [match[0] if match and added else anchors[0] for match in found]
    # Llama 2 puts a space in front of a text: ids("b") is [_b], but "b" in "ab" is [b].
    # Behind the anchor ":" it is not in front: ids(":") is [_:], ids(":b") is [_:, b], less [_:].
    # An anchor that merges with the text, as ":" with ")" into one token, leaves it to the next.
    out: dict[int, list[int]] = {}
    for anchor in (None, *anchors):  # None: each pair's own, in `tails`
        if not (left := [i for i in range(len(pairs)) if i not in out]):
            break
        heads = [tails[i] if anchor is None else anchor for i in left]
        texts = [head + pairs[i][1] for head, i in zip(heads, left, strict=True)]
        ids = tokenizer([*heads, *texts], add_special_tokens=False, verbose=False)["input_ids"]
        for i, head, both in zip(left, ids[: len(left)], ids[len(left) :], strict=True):
            if both[: len(head)] == head:
                out[i] = both[len(head) :]
    return [out[i] for i in range(len(pairs))]


def anchor_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that keep the first space of an answer behind them; none where it is not in danger."""
    return next(iter(_anchors(tokenizer).values()), [])


def whole_texts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
) -> list[str]:
    """`continued_texts` of answers, each behind the thought that its prompt has opened: where a
    generation prompt ends in ``<think>``, the answer has only the other tag.
    """
    texts = continued_texts(tokenizer, answers)
    return [opened_thought(tokenizer, p) + text for p, text in zip(prompts, texts, strict=True)]


def opened_thought(tokenizer: PreTrainedTokenizerBase, prompt: list[int]) -> str:
    """The tag, with the line breaks behind it, that opens a thought at the end of ``prompt``."""
    end = tokenizer.decode(
        prompt[-_TAG_TOKENS:], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    found = _THOUGHT.search(end)
    return found[0] if found else ""


def continued_texts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[list[int]], with_special: bool = False
) -> list[str]:
    """The texts of answers, with the spaces that they start with; without their end and special
    tokens, unless ``with_special``.
    """
    ends = () if with_special else stop_ids(tokenizer)
    texts = [
        tokenizer.decode(
            anchor_ids(tokenizer) + (ids[:-1] if ids and ids[-1] in ends else ids),
            skip_special_tokens=not with_special,
            clean_up_tokenization_spaces=False,
        )
        for ids in ([], *rows)
    ]
    return [text[len(texts[0]) :] for text in texts[1:]]


_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # byte-level names


@lru_cache(maxsize=1 << 16)
def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """UTF-8 of a token within a longer text: part of a character, where the token is."""
    (text,) = continued_texts(tokenizer, [[token]], with_special=True)
    if "\ufffd" in text:
        name = tokenizer.convert_ids_to_tokens(token)
        if re.fullmatch("<0x[0-9A-F]{2}>", name):  # SentencePiece's
            return bytes([int(name[3:5], 16)])
        if all(character in _BYTES for character in name):
            return bytes(_BYTES[character] for character in name)
    return text.encode()


# -- stream decoder --------------------------------------------------------------------------------
#
# Decodes a stream of tokens into pieces of text that later tokens do not change.


class StreamDecoder:
    """Incremental decoding: the pieces joined equal `continued_texts` of all tokens; without
    special tokens, unless ``with_special``. Without ``continues`` they are the start of a text.

    A token's text depends on its neighbours: a byte-level token may end within a character, and a
    SentencePiece token loses its leading space at the start of a text. So tokens are decoded
    together with the previous piece (at first an anchor), and held back while they end within a
    character.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        with_special: bool = False,
        continues: bool = True,
    ) -> None:
        self._tokenizer, self._with_special = tokenizer, with_special
        self._ids = (
            [*anchor_ids(tokenizer)] if continues else []
        )  # the tokens of the last piece, then the pending ones
        self._num_emitted = len(self._ids)

    def push(self, token: int) -> str:
        """The text that is final after ``token``: often a word, sometimes empty."""
        self._ids.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        """The text held back; an incomplete character becomes U+FFFD."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before, now = self._decode(self._ids[: self._num_emitted]), self._decode(self._ids)
        # NOTE: a special token has no text. It must not become the previous piece alone, or the
        # next token would be at the start of the text and lose its space.
        if len(now) <= len(before) or (now.endswith("\ufffd") and not final):
            return ""
        self._ids = self._ids[self._num_emitted :]
        self._num_emitted = len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=not self._with_special, clean_up_tokenization_spaces=False
        )
