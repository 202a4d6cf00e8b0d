"""Decodes a stream of tokens into pieces of text that later tokens do not change."""

from typing import TYPE_CHECKING

from dschat.models.continued_text import anchor_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StreamDecoder:
    """Incremental decoding: the pieces joined equal `continued_texts` of all tokens; without
    special tokens, unless ``with_special``.

    A token's text depends on its neighbours: a byte-level token may end within a character, and a
    SentencePiece token loses its leading space at the start of a text. So tokens are decoded
    together with those of the previous piece, at first an anchor, and held back while they end
    within a character.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", with_special: bool = False) -> None:
        self._tokenizer, self._with_special = tokenizer, with_special
        self._ids = [*anchor_ids(tokenizer)]  # the tokens of the last piece, then the pending ones
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
