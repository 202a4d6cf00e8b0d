"""Decodes tokens one by one into text that no later token changes."""

import unicodedata
from typing import Any


class StreamDecoder:
    """Tokens one by one into text that is final: no half characters, and spaces where they belong.

    A token's text depends on its neighbours: byte-level tokens end within a character, and
    SentencePiece tokens lose their leading space where they stand first. So tokens are decoded
    together with those of the piece before, and held back while they end within a character. The
    pieces joined are the text of all tokens decoded at once, special tokens left out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the last piece's tokens, then those not out yet
        self._num_out = 0

    def push(self, token: int) -> str:
        """What is certain now that ``token`` has come; often one word, sometimes nothing."""
        self._ids.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        """What was held back; a character that never became whole shows as U+FFFD."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before, now = self._decode(self._ids[: self._num_out]), self._decode(self._ids)
        # NOTE a special token has no text and may not be all of the piece before: the next token
        # would then stand first and lose its space.
        if len(now) <= len(before) or (now.endswith("\ufffd") and not final):
            return ""
        self._ids = self._ids[self._num_out :]
        self._num_out = len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def printable(said: str, piece: str) -> tuple[str, str]:
    """``said`` with ``piece`` after it, and the piece fit to be shown.

    The space that opens an answer is no part of it, and control characters would command the
    terminal: they show as U+FFFD.
    """
    piece = (piece if said else piece.lstrip()).replace("\r", "")
    shown = "".join(
        c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in piece
    )
    return said + shown, shown
