"""Decides what happens to an assistant's thoughts before the chat template renders its turn.

A thought is a field of the turn (`turns.THOUGHTS`), or a ``<think>`` block in front of its content.
"""

import re
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from dschat.data.sources.adapters import Content
from dschat.data.sources.turns import THOUGHTS, Turn

THINK = re.compile(r"\s*<think>\s*(.*?)\s*</think>\s*", re.DOTALL)
_MARK = "a-thought"  # no template has it


def thought_of(turn: Turn) -> str:
    """A turn's thought, "" without one."""
    found = THINK.match(turn["content"])
    return turn.get(THOUGHTS[0], "").strip() or (found[1] if found else "")


def resolved(tokenizer: PreTrainedTokenizerBase, reasoning: str) -> str:
    """``--reasoning`` for a tokenizer: "auto" is "inline" where its template reads only the tag."""
    if reasoning != "auto":
        return reasoning
    template = str(tokenizer.chat_template)
    return "inline" if "</think>" in template and not _shows(tokenizer, template) else "keep"


def with_reasoning(content: Content, how: str) -> Content:
    """A chat with its thoughts kept as they are, in front of the content ("inline"), or dropped."""
    if isinstance(content, str) or how == "keep":
        return content
    return [_changed(turn, how) if turn["role"] == "assistant" else turn for turn in content]


def _changed(turn: Turn, how: str) -> Turn:
    thought, said = thought_of(turn), THINK.sub("", turn["content"], count=1)
    if not thought or (how == "inline" and THOUGHTS[0] not in turn):
        return turn
    block = f"<think>\n{thought}\n</think>\n\n" if how == "inline" else ""
    return {k: v for k, v in turn.items() if k not in THOUGHTS} | {"content": block + said}


@lru_cache(maxsize=16)
def _shows(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether the template renders a last answer's thought; ``template`` tells templates apart."""
    answer = {"role": "assistant", "content": "answer", **dict.fromkeys(THOUGHTS, _MARK)}
    try:
        turns = [{"role": "user", "content": "?"}, answer]
        return _MARK in tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # a template is a program: it may raise anything
        return False
