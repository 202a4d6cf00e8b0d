"""Tokenizes an environment's text as the chat template would put it between two answers.

The model's own tokens are never decoded and encoded again: only what stands between two answers is
text. The template's pieces around it come from a small chat of placeholders, so they do not depend
on the episode.
"""

from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.data.segments import Segment, encode, render_chat, require_eos

_ASKED, _ANSWERED, _SAID = "question", "answer", "observation"


class ObservationTokens:
    """The tokens of an observation, from after an answer's EOS to where the next answer begins.

    ``is_chat``: whether prompts are chats; else the text is all there is. ``role``: of the
    environment in chats.

    Raises:
        UserError: the chat template has no place for such a turn.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, is_chat: bool, role: str = "user"
    ) -> None:
        self._tokenizer = tokenizer
        self._pieces = ("", "")
        if is_chat:
            self._pieces = _around(tokenizer, role)
        self._encode = lru_cache(maxsize=4096)(self._ids)

    def __call__(self, text: str) -> list[int]:
        before, after = self._pieces
        return list(self._encode(before + text + after))

    def _ids(self, text: str) -> tuple[int, ...]:
        (ids,) = encode(self._tokenizer, [Segment(text)])
        return tuple(ids)


def _around(tokenizer: PreTrainedTokenizerBase, role: str) -> tuple[str, str]:
    """The template's text before and after an observation."""
    require_eos(tokenizer)
    asked = [{"role": "user", "content": _ASKED}]
    answered = [*asked, {"role": "assistant", "content": _ANSWERED}]
    said = [*answered, {"role": role, "content": _SAID}]
    first = render_chat(tokenizer, answered)
    whole = render_chat(tokenizer, said, add_generation_prompt=True)
    end = first.rfind(_ANSWERED) + len(_ANSWERED)
    eos = first.find(tokenizer.eos_token, end)
    end = end if eos < 0 else eos + len(tokenizer.eos_token)
    before, found, after = whole[end:].partition(_SAID)
    if not found or whole[:end] != first[:end]:
        raise UserError(
            "--environment: the chat template does not render a turn after an answer as a "
            "continuation; name another with --chat_template"
        )
    return before, after
