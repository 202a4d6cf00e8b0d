"""What one value of a raw row says: text, a chat's turns, or why it is neither.

Comes in: a value as JSON, CSV or Parquet hold it: a text, OpenAI's or ShareGPT's list of turns, a
dialogue written out as text. Goes out: ``Content``, or an ``Unusable`` that says why. Pure
functions; must not know columns, rows, files or tokenizers.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Optional, Union

Turn = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}
Content = Union[str, list[Turn]]  # plain text, or chat messages


@dataclass(frozen=True)
class Unusable:
    """In place of a value that cannot be used: why."""

    why: str


# OpenAI's names, ShareGPT's and Open Assistant's; what is not here (tool, function, observation)
# is no turn that a chat model is trained on.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
}

# What stands before an assistant's words where a whole dialogue is one text.
ASSISTANT_MARKS = ("\n\nAssistant:", "### Assistant:", "### Response:", "ASSISTANT:")


def read_content(value: Any) -> Union[Content, Unusable, None]:
    """Text as it is, a chat as plain {"role", "content"} turns; None where there is nothing."""
    if value is None or value == []:
        return None
    if isinstance(value, Unusable):
        return value
    if isinstance(value, str):
        return storable(value)
    if not isinstance(value, list):
        return Unusable(f"neither text nor a list of turns, but {_kind(value)}")
    turns = [_read_turn(turn) for turn in value]
    return next((turn for turn in turns if isinstance(turn, Unusable)), turns)


def read_dialogue(value: Any) -> Union[Content, Unusable, None]:
    """Like ``read_content``, for a value that is a whole dialogue: it may be JSON in a text.

    So a table without lists (CSV) can hold chats.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return read_content(value)
    return read_content(value)


def split_text(dialogue: str) -> Optional[tuple[str, str]]:
    """A dialogue in one text, parted behind its last mark of an assistant; None without one."""
    ends = [(dialogue.rfind(mark), len(mark)) for mark in ASSISTANT_MARKS]
    start, length = max(ends)
    if start < 0:
        return None
    return dialogue[: start + length], dialogue[start + length :]


def vicuna_turns(prompt: Any) -> Union[list[Turn], Any]:
    """``USER: ... ASSISTANT: ...</s>USER: ... ASSISTANT:`` as turns; another value as it is."""
    if not isinstance(prompt, str):
        return prompt
    before, *pieces = re.split(r"\b(USER|ASSISTANT):", prompt)
    if not pieces:
        return prompt
    turns = [{"role": "system", "content": before.strip()}] if before.strip() else []
    for role, text in zip(pieces[::2], pieces[1::2], strict=True):
        text = text.replace("</s>", "").strip()
        if text:
            turns.append({"role": ROLES[{"USER": "user"}.get(role, "gpt")], "content": text})
    return turns


def storable(text: str) -> str:
    """``text`` without halves of surrogate pairs, which JSON can spell and UTF-8 can not."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _read_turn(turn: Any) -> Union[Turn, Unusable]:
    if not isinstance(turn, dict):
        return Unusable(f"a turn that is {_kind(turn)}")
    role = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    known = ROLES.get(role.lower()) if isinstance(role, str) else None
    if known is None:
        return Unusable(f"a turn of the role {str(role)[:30]!r}" if role else "a turn without role")
    if content is None:
        return Unusable("a tool call" if turn.get("tool_calls") else "a turn without content")
    if isinstance(content, list):
        content = _joined(content)
    if isinstance(content, Unusable):
        return content
    if not isinstance(content, str):
        return Unusable(f"a turn whose content is {_kind(content)}")
    return {"role": known, "content": storable(content)}


def _joined(parts: list) -> Union[str, Unusable]:
    """The text of OpenAI's list of content parts."""
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            return Unusable(f"a turn with a part of the type {str(kind)[:30]!r}")
        texts.append(text)
    return "".join(texts)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else "a bare text")
