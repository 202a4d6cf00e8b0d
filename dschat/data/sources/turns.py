"""Parses one value of a raw row into text or chat turns, or says why it is unusable.

A value, as in JSON, CSV or Parquet, may be a text, a list of turns in the form of OpenAI or
ShareGPT, or a whole dialogue as text. All functions are pure.
"""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from typing import Any, Optional, Union

from dschat.config import UserError
from dschat.config.data import template_variables

# {"role": "system" | "user" | "assistant" | "tool", "content": text}, and what templates show of
# `SHOWN` and "tool_calls", in OpenAI's form with arguments as an object; "weight": `weight_of`
Turn = dict[str, Any]
Content = Union[str, list[Turn]]  # plain text, or chat messages


class Unusable(Exception):
    """Stands for a value that cannot be used, with the reason."""


# Turns whose content is calls of tools, in agent data of LLaMA-Factory and ms-swift.
_CALL_ROLES = ("function_call", "tool_call")
# The names of OpenAI, ShareGPT and Open Assistant. Other roles make a dialogue unusable.
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot", *_CALL_ROLES), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "tool_response"), "tool"),
}

# A thought is given under all the names that templates use.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
SHOWN = (*THOUGHTS, "name", "tool_call_id")
# An answer's weight in the loss, as OpenAI, Mistral, axolotl and slime name it.
LOSS_FLAGS = ("weight", "train", "training", "trainable", "loss", "loss_mask")
BEGINS = "begins"  # marks a prompt's last turn, if it is the beginning of the answer
# They would change the text or the loss.
UNSUPPORTED = ("refusal", "prefix", "image", "images", "video", "videos", "audio", "train_detail")
_READ = {"role", "from", "content", "value", "tool_calls", "function_call"}
_READ |= {BEGINS, *SHOWN, *LOSS_FLAGS, *UNSUPPORTED}

# Columns of chats, whatever the data set.
CHAT_COLUMNS = ("tools", "functions", "chat_template_kwargs")

# Marks before an assistant's turn in a dialogue that is one text.
ASSISTANT_MARKS = ("\n\nAssistant:", "### Assistant:", "### Response:", "ASSISTANT:")


def read_content(value: Any) -> Union[Content, Unusable, None]:
    """Text unchanged, a chat as plain {"role", "content"} turns; None if the value is empty."""
    if value is None or value == []:
        return None
    if isinstance(value, Unusable):
        return value
    if isinstance(value, str):
        return storable(value)
    if is_turn(value):
        value = [value]
    if not isinstance(value, list):
        return Unusable(f"neither text nor a list of turns, but {_kind(value)}")
    read: list[Turn] = []
    try:
        for item in value:
            calls = _as_calls(item)
            turn = _read_turn(calls or item)
            if calls and read and read[-1]["role"] == "assistant":
                turn = _with_calls(read.pop(), turn)
            read.append(turn)
    except Unusable as unusable:
        return unusable
    return read


def read_dialogue(value: Any) -> Union[Content, Unusable, None]:
    """`read_content`, where a text that is ``Human: ... Assistant: ...`` becomes turns; a last one
    without text is left out.
    """
    before, *pieces = re.split(
        r"(?:^|\n\n)(Human|Assistant):", value if isinstance(value, str) else ""
    )
    if before.strip() or "Assistant" not in pieces[::2]:
        return read_content(value)
    said = zip(pieces[::2], map(str.strip, pieces[1::2]), strict=True)
    turns = [{"role": role.lower(), "content": text} for role, text in said]
    return read_content(turns if turns[-1]["content"] else turns[:-1])


def masked(parts: list[Any], mask: Any) -> list[Any]:
    """A raw chat, or prompt and answer, with the weights of the row's ``loss_mask``, if a list."""
    if not isinstance(mask, list):
        return parts
    chats = [part if isinstance(part, list) else [part] for part in parts]
    if (num_turns := sum(map(len, chats))) != len(mask):
        wrong = Unusable(f"a loss_mask of {len(mask)} numbers for {num_turns} turns")
        return [*parts[:-1], wrong]
    flat = zip((turn for chat in chats for turn in chat), mask, strict=True)
    turns = [{**turn, "loss_mask": m} if is_turn(turn) else turn for turn, m in flat]
    if isinstance(parts[-1], str) and mask[-1] != 1:
        turns[-1] = {"role": "assistant", "content": parts[-1], "loss_mask": mask[-1]}
    rest = iter(turns)
    return [[*islice(rest, len(p))] if isinstance(p, list) else next(rest) for p in parts]


def is_turn(value: Any) -> bool:
    return isinstance(value, dict) and bool(value.keys() & {"role", "from"})


def chat_in_cell(value: Any) -> Any:
    """The chat or turn that a CSV cell holds as JSON; other values unchanged."""
    found = from_cell(value)
    turns = found if isinstance(found, list) else [found]
    return found if turns and all(map(is_turn, turns)) else value


def from_cell(value: Any) -> Any:
    """The list or object in a text of JSON, as in a CSV cell; other values unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def split_text(dialogue: str) -> Optional[tuple[str, str]]:
    """A dialogue as one text, split after its last assistant mark; None without one."""
    ends = [(dialogue.rfind(mark), len(mark)) for mark in ASSISTANT_MARKS]
    start, length = max(ends)
    if start < 0:
        return None
    return dialogue[: start + length], dialogue[start + length :]


def is_plain(prompt: Content) -> bool:
    """Whether a prompt is text at whose end no assistant is named."""
    ends = tuple(mark.strip() for mark in ASSISTANT_MARKS)
    return isinstance(prompt, str) and bool(prompt) and not prompt.rstrip().endswith(ends)


def vicuna_turns(prompt: Any) -> Union[list[Turn], Any]:
    """``USER: ... ASSISTANT: ...</s>USER: ... ASSISTANT:`` as turns; other values unchanged."""
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
    """``text`` with lone surrogates replaced, which JSON can represent and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _as_calls(turn: Any) -> Optional[Turn]:
    """A turn of `_CALL_ROLES` in OpenAI's form; its content may begin with a thought. Else None."""
    if not is_turn(turn) or str(turn.get("role", turn.get("from"))).lower() not in _CALL_ROLES:
        return None
    if turn.get("tool_calls"):
        return turn
    content, said = turn.get("content", turn.get("value")), ""
    if isinstance(content, str) and content.lstrip().startswith("<think>"):
        thought, end, content = content.partition("</think>")
        said = thought + end
    calls = from_cell(content)
    return {**turn, "content": said, "tool_calls": calls if isinstance(calls, list) else [calls]}


def _with_calls(answer: Turn, calls: Turn) -> Turn:
    """One turn of an answer and the calls behind it, with the lower weight."""
    if not (answer["content"].strip() or answer.get("tool_calls") or THOUGHTS[0] in answer):
        return calls
    calls["content"] = answer["content"] + calls["content"]
    calls["tool_calls"] = answer.get("tool_calls", []) + calls["tool_calls"]
    weight = min(weight_of(answer), weight_of(calls))
    return {**answer, **calls} | ({"weight": weight} if weight < 1 else {})


def _read_turn(turn: Any) -> Turn:
    """Raises ``Unusable``."""
    if not isinstance(turn, dict):
        raise Unusable(f"a turn that is {_kind(turn)}")
    role = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    known = ROLES.get(role.lower()) if isinstance(role, str) else None
    if known is None:
        raise Unusable(f"a turn of the role {str(role)[:30]!r}" if role else "a turn without role")
    if named := next((name for name in UNSUPPORTED if turn.get(name)), None):
        raise Unusable(f"a turn with {named!r}")
    legacy = turn.get("function_call")
    calls = turn.get("tool_calls") or (legacy and [{"function": legacy}])
    if content is None and not calls:
        raise Unusable("a turn without content")
    if isinstance(content, list):
        content = "".join(map(_part_text, content))
    if not isinstance(content, (str, type(None))):
        raise Unusable(f"a turn whose content is {_kind(content)}")
    read: Turn = {"role": known, "content": storable(content or "")}
    if calls:
        read["tool_calls"] = _read_calls(known, calls)
    for name in SHOWN:
        if isinstance(text := turn.get(name) or "", str) and text:
            read |= dict.fromkeys(THOUGHTS if name in THOUGHTS else [name], storable(text))
        elif text:
            raise Unusable(f"a turn whose {name} is {_kind(text)}")
    flags = {name: turn.get(name) for name in LOSS_FLAGS} if known == "assistant" else {}
    if odd := [f"{k} {str(v)[:30]}" for k, v in flags.items() if not _is_weight(v)]:
        raise Unusable(f"a turn with {odd[0]}, which is not a number from 0 to 1")
    says = read["content"].strip() or calls or THOUGHTS[0] in read
    weight = min((float(v) for v in flags.values() if v is not None), default=1.0)
    if known == "assistant" and (weight < 1 or not says):
        read["weight"] = weight if says else 0.0
    return read


def weight_of(turn: Turn) -> float:
    """A turn's weight in step 1's loss, from 0 to 1; 0 if it is not an answer, or is empty."""
    has_loss = turn["role"] == "assistant" and BEGINS not in turn
    return float(turn.get("weight", 1.0)) if has_loss else 0.0


def begun(prompt: list[Turn]) -> list[Turn]:
    """``prompt``; its last turn is marked if it is an assistant's text, which begins the answer."""
    *before, last = prompt
    is_text = bool(last["content"].strip()) and "tool_calls" not in last
    has_begun = before and last["role"] == "assistant" and is_text
    return [*before, {**last, BEGINS: True}] if has_begun else prompt


def _is_weight(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and 0 <= value <= 1)


def unread_keys(values: Iterable[Any]) -> list[str]:
    """Keys of the turns in a row's columns that nothing reads: metadata."""
    chats = [chat for chat in map(from_cell, values) if isinstance(chat, list)]
    turns = [turn.items() for chat in chats for turn in chat if is_turn(turn)]
    return sorted({key for turn in turns for key, value in turn if value is not None} - _READ)


def read_tools(value: Any, functions: Any = None) -> Optional[list[dict[str, Any]]]:
    """A row's tools, JSON schemas in OpenAI's form or a JSON text of them; None without any. Its
    legacy form is ``functions``.

    Raises:
        Unusable: it is neither.
    """
    tools = from_cell(value)
    if not tools and isinstance(functions, list):
        tools = [{"type": "function", "function": function} for function in functions]
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Unusable("tools that are no list of JSON schemas")
    return tools


def read_template_kwargs(value: Any) -> Optional[dict[str, Any]]:
    """A row's variables for the chat template, an object or its JSON text; None without any.

    Raises:
        Unusable: it is neither.
    """
    if isinstance(value, str) and value.strip():
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if value and not isinstance(value, dict):
        raise Unusable("chat_template_kwargs that are no JSON object")
    try:
        return template_variables(value) if value else None
    except UserError as error:
        raise Unusable(str(error)) from None


def without_nulls(value: Any) -> Any:
    """A JSON value whose objects have no nulls: tables of one schema fill them in."""
    if isinstance(value, dict):
        return {name: without_nulls(v) for name, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def _read_calls(role: str, calls: Any) -> list[dict[str, Any]]:
    """Raises ``Unusable``."""
    if role != "assistant":
        raise Unusable(f"tool calls in a turn of the role {role!r}")
    if not isinstance(calls, list):
        raise Unusable(f"tool calls that are {_kind(calls)}")
    read = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not isinstance(function, dict):
            raise Unusable("a tool call without a name")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise Unusable("a tool call whose arguments are not JSON") from None
        if not isinstance(arguments, dict):
            raise Unusable(f"a tool call whose arguments are {_kind(arguments)}")
        function = {"name": storable(name), "arguments": arguments}
        number = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        read.append({"type": "function", **number, "function": function})
    return read


def _part_text(part: Any) -> str:
    """The text of one of OpenAI's content parts. Raises ``Unusable``."""
    kind = part.get("type", "text") if isinstance(part, dict) else None
    text = part.get("text") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(text, str):
        raise Unusable(f"a turn with a part of the type {str(kind)[:30]!r}")
    return text


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else "a bare text")
