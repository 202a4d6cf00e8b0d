"""Decides what happens to an assistant's thoughts before the chat template renders its turn.

A thought is a field of the turn (`turns.THOUGHTS`), or a ``<think>`` block in front of its content.
"""

import re
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from dschat.data.sources.adapters import Content
from dschat.data.sources.turns import THOUGHTS, Turn
from dschat.models.chat_template import MARK, attempt

# The first tag may be a part of the prompt.
THINK = re.compile(r"\s*(?:<think>)?\s*((?:(?!<think>).)*?)\s*</think>\s*", re.DOTALL)


def thought_of(turn: Turn) -> str:
    """A turn's thought, "" without one."""
    found = THINK.match(turn["content"])
    return turn.get(THOUGHTS[0], "").strip() or (found[1] if found else "")


def resolved(tokenizer: PreTrainedTokenizerBase, reasoning: str) -> str:
    """``--reasoning`` for a tokenizer: "field" where its template renders the field, unless another
    way is asked for; "auto" is "inline" where it reads only the tag.
    """
    if reasoning in ("auto", "keep") and _shows(tokenizer, str(tokenizer.chat_template)):
        return "field"
    if reasoning == "auto":
        return "inline" if "</think>" in str(tokenizer.chat_template) else "keep"
    return reasoning


def with_reasoning(content: Content, how: str) -> Content:
    """A chat with its thoughts as fields, in front of the content ("inline"), dropped or kept."""
    if isinstance(content, str) or how == "keep":
        return content
    return [_changed(turn, how) if turn["role"] == "assistant" else turn for turn in content]


def _changed(turn: Turn, how: str) -> Turn:
    thought, is_field = thought_of(turn), THOUGHTS[0] in turn
    if not thought or (how == "inline" and not is_field) or (how == "field" and is_field):
        return turn
    said = THINK.sub("", turn["content"], count=1)
    if how == "field":
        return {**turn, **dict.fromkeys(THOUGHTS, thought), "content": said}
    block = f"<think>\n{thought}\n</think>\n\n" if how == "inline" else ""
    return {k: v for k, v in turn.items() if k not in THOUGHTS} | {"content": block + said}


@lru_cache(maxsize=16)
def _shows(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether the template renders a last answer's thought; ``template`` tells templates apart."""
    answer = {"role": "assistant", "content": "answer", **dict.fromkeys(THOUGHTS, MARK)}
    return MARK in attempt(tokenizer, [{"role": "user", "content": "?"}, answer])
