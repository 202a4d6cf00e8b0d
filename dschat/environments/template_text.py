"""Reads and writes what a chat template puts between the answers of an episode: the calls of tools
in an answer, and an environment's text after it.

Observations: the model's own tokens are never decoded and encoded again: only what stands between
two answers is text. The template's pieces around it come from a small chat of placeholders, so they
do not depend on the episode.

Calls: a tokenizer with a ``response_template`` says itself how answers are read. For others the
form is taken from the template: it renders a call, and what it puts before the JSON object, such as
Hermes's and Qwen's ``<tool_call>``, marks calls in answers. Where it puts nothing there, as Llama
3's, JSON with arguments is a call. Qwen3.5's form ``<function=NAME><parameter=KEY>`` is read too.
"""

import ast
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.data.rendering import RefusedChat, render_chat
from dschat.data.segments import Segment, encode, end_of, require_eos
from dschat.data.sources.turns import storable
from dschat.environments.contract import Call, Observation, ToolResult
from dschat.models.continued_text import continued_texts
from dschat.models.tokenizer import stop_ids
from dschat.user_code.calls import Fault

_ASKED, _ANSWERED, _SAID = "question", "the-answer", "the-observation"


class ObservationTokens:
    """The tokens of an observation, from after an answer's end to where the next answer begins.

    ``is_chat``: whether prompts are chats; else the text is all there is.

    Raises:
        UserError: the chat template has no place for such a turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, is_chat: bool) -> None:
        self._tokenizer = tokenizer
        ends = tokenizer.convert_ids_to_tokens(list(stop_ids(tokenizer)))
        self._ends = re.compile("|".join(map(re.escape, ends)))
        self._end = "".join(tokenizer.convert_ids_to_tokens(end_of(tokenizer, is_chat)))
        self._pieces = ("", "")
        if is_chat:
            require_eos(tokenizer)
            before, found, after = self._after_answer(
                {"role": "assistant", "content": _ANSWERED}, [{"role": "user", "content": _SAID}]
            ).partition(_SAID)
            if not found:
                raise _no_place("--environment", "a turn after an answer")
            self._pieces = (before, after)

    def __call__(self, said: Observation) -> list[int]:
        if said.results:
            return self._ids(self._results(said.results))
        before, after = ("", "") if said.is_raw else self._pieces
        return self._ids(before + said.text + after)

    def turns(
        self, answer: dict[str, Any], turns: list[dict[str, Any]], **inputs: Any
    ) -> list[int]:
        """The tokens of ``turns`` after ``answer``, which may call tools. ``inputs``: the chat
        template's.

        Raises:
            UserError: the chat template does not render them there.
        """
        shown = {"role": "assistant", "content": _ANSWERED}
        if calls := answer.get("tool_calls"):
            shown |= {"content": "", "tool_calls": calls}
        return self._ids(self._after_answer(shown, turns, **inputs))

    def require_tools(self) -> None:
        """Raise ``UserError`` where the chat template does not render a tool's result."""
        try:
            rendered = self._results([ToolResult("name", _SAID)])
        except Fault:
            rendered = ""
        if _SAID not in rendered:
            raise _no_place("--tools", "a tool's result")

    def _results(self, results: Sequence[ToolResult]) -> str:
        """The text of tools' turns. Some templates allow one call in an answer: they see one."""
        ids = [f"call{i:05d}" for i in range(len(results))]  # Mistral's have nine characters
        calls = [_call(r.name or "tool", _ANSWERED, i) for r, i in zip(results, ids, strict=True)]
        turns = [
            {"role": "tool", "content": r.text, "name": r.name or "tool", "tool_call_id": i}
            for r, i in zip(results, ids, strict=True)
        ]
        for shown in (calls, calls[:1]):
            try:
                answer = {"role": "assistant", "content": "", "tool_calls": shown}
                return self._after_answer(answer, turns)
            except RefusedChat as error:
                refused = error
        raise Fault(str(refused))

    def _after_answer(
        self, answer: dict[str, Any], turns: list[dict[str, Any]], **inputs: Any
    ) -> str:
        """What the template writes after the end of ``answer``, for ``turns`` and up to where the
        next answer begins.
        """
        chat = [{"role": "user", "content": _ASKED}, answer]
        whole = render_chat(self._tokenizer, [*chat, *turns], add_generation_prompt=True, **inputs)
        before = render_chat(self._tokenizer, chat, **inputs)
        answered = before.find(_ANSWERED)
        if whole.startswith(before):
            asked = render_chat(self._tokenizer, chat[:1], add_generation_prompt=True, **inputs)
            start = answered if answered >= 0 else len(asked)
            is_text = answered >= 0 and "tool_calls" not in answer
            after = answered + len(_ANSWERED) if is_text else len(before)
            # a turn's first token may end the answer before it
            end = self._ends.search(before, start) or self._ends.match(whole, after)
            return whole[end.end() if end else after :]
        # it renders the last answer in another way, such as with its thoughts
        answered = whole.find(_ANSWERED)
        end = self._ends.search(whole, max(answered, 0))
        if answered < 0 or end is None:
            raise _no_place("--tools" if "tool_calls" in answer else "--environment", "a turn")
        return whole[end.end() :]

    def _ids(self, text: str) -> list[int]:
        (ids,) = encode(self._tokenizer, [Segment(storable(text), before=self._end)])
        return ids


def _call(name: str, value: str, number: str) -> dict[str, Any]:
    function = {"name": name, "arguments": {"argument": value}}
    return {"type": "function", "id": number, "function": function}


def _no_place(flag: str, what: str) -> UserError:
    return UserError(
        f"{flag}: the chat template does not render {what} after an answer as a continuation; "
        "name another with --chat_template"
    )


_QUESTION = [{"role": "user", "content": "question"}]
_NAME = "name-of-tool"
_ARGUMENTS = ("arguments", "parameters")
# Seed-OSS writes <seed:think>, Magistral [THINK]. A thought without an end is the whole answer.
_THINK = r"(?i:(?:\w+:)?think[>\]])"
_THOUGHT, _THOUGHT_END = re.compile(rf"[<\[]{_THINK}"), re.compile(rf"[<\[]/{_THINK}")
_OPENED = re.compile(rf"{_THOUGHT.pattern}\s*\Z")
_THOUGHTS = re.compile(rf"(?:\s*[<\[]{_THINK}.*?(?:[<\[]/{_THINK}|\Z))*", re.DOTALL)
# JSON without a mark begins an answer or a fence. Llama 3.1 may write a token before it.
_BARE = re.compile(r"(?:\A|```(?:json)?)\s*(?:<\|python_tag\|>)?([{\[])")
_TAGS = re.compile(r"(?:<[^<>/\s]+>\s*)?<function=([^>]*)>")
# A value may hold tags itself: it ends where another one begins, or the function ends.
_VALUE = r"\s*<parameter=([^>]*)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>|\Z))"
_PARAMETER, _FUNCTION_END = re.compile(_VALUE, re.DOTALL), re.compile(r"\s*(?:</function>|\Z)")
_KINDS = {list: "array", dict: "object", type(None): "null"}


class CallParser:
    """Reads the calls of an answer, as text with special tokens and without its EOS. What stands in
    its thought is no call.

    ``tools``: JSON schemas. ``inputs``: the chat template's variables. ``begun``, of an answer: the
    text of the prompt's last turn, where the answer continues it.

    Raises:
        UserError: the chat template does not show tools to the model, or writes calls in a form
            that only a ``response_template`` can describe.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]], /, **inputs: Any
    ) -> None:
        self._tokenizer, self._tools = tokenizer, list(tools)
        self._schemas = {t["function"]["name"]: t["function"].get("parameters") for t in tools}
        try:
            prompt = render_chat(
                tokenizer, _QUESTION, add_generation_prompt=True, tools=tools, **inputs
            )
        except RefusedChat as error:
            raise UserError(f"--tools: {error}") from None
        if not all(name in prompt for name in self._schemas):
            raise UserError(
                "--tools: the chat template does not show tools to the model; name one that does "
                "with --chat_template"
            )
        opened = _OPENED.search(prompt)
        self._opened = opened[0] if opened else ""
        self._prompt = prompt.removesuffix(self._opened)
        self._reads_itself = getattr(tokenizer, "response_template", None) is not None
        self._start = _BARE if self._reads_itself else _start_of_calls(tokenizer)
        if self._reads_itself and (found := self._read_by_template("answer")[1]):
            raise UserError(f"--tools: the tokenizer's response_template fails: {found[0].problem}")

    def __call__(self, answer: str, begun: str | None = None) -> list[Call]:
        return self._read(answer, begun)[1]

    def split(self, ids: Sequence[int], begun: str | None = None) -> tuple[str, list[Call]] | None:
        """The text of an answer before its calls, and the calls; None where it has none, or one
        that cannot be read.
        """
        ends = stop_ids(self._tokenizer)
        kept = ids[:-1] if ids and ids[-1] in ends else ids
        (answer,) = continued_texts(self._tokenizer, [list(kept)], with_special=True)
        before, calls = self._read(answer, begun)
        if not calls or any(call.problem for call in calls):
            return None
        return before.strip(), calls

    def _read(self, answer: str, begun: str | None) -> tuple[str, list[Call]]:
        """The text of ``answer`` before its calls, and the calls."""
        opened = self._opened
        if begun is not None:
            after = _THOUGHT_END.split(begun)[-1]
            opened = after[found.start() :] if (found := _THOUGHT.search(after)) else ""
        thought = _THOUGHTS.match(opened + answer)
        begin = thought.end() - len(opened)  # type: ignore[union-attr]  # it may be empty
        if self._reads_itself:
            return self._read_by_template(answer[begin:])
        text, before, calls, at = answer[begin:], answer, list[Call](), 0
        while start := self._start.search(text, at):
            if self._start is _TAGS:
                new, rest = self._tagged(start[1], text[start.end() :])
            else:
                new, rest = _calls(text[start.start(1) :], self._start is not _BARE)
            if new and not calls:
                before = answer[: begin + start.start()]
            calls += new
            at = max(start.end(), len(text) - len(rest))
        return before, calls

    def _tagged(self, name: str, text: str) -> tuple[list[Call], str]:
        """The call of ``name`` with the arguments that ``text`` begins with, and the text after."""
        arguments = {}
        while given := _PARAMETER.match(text):
            arguments[given[1]] = _argument(given[2], self._schemas.get(name), given[1])
            text = text[given.end() :]
        if end := _FUNCTION_END.match(text):
            return [Call(name, arguments)], text[end.end() :]
        return [Call(name, problem="its arguments are not in <parameter=NAME> tags")], ""

    def _read_by_template(self, answer: str) -> tuple[str, list[Call]]:
        try:
            parsed = self._tokenizer.parse_response(answer, prefix=self._prompt, tools=self._tools)
        except Exception as error:  # what the model wrote may be anything
            return "", [Call(problem=f"the tool call cannot be read: {_line(error)}")]
        calls = [_parsed_call(call, True) for call in parsed.get("tool_calls") or ()]
        return str(parsed.get("content") or ""), calls


def _start_of_calls(tokenizer: PreTrainedTokenizerBase) -> re.Pattern:
    """What the template writes before a call, with a group where its JSON or its name begins."""
    calls = [_call(_NAME, "value-of-argument", "call00000")]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    asked = render_chat(tokenizer, _QUESTION, add_generation_prompt=True)
    try:
        answered = render_chat(tokenizer, [*_QUESTION, turn])
    except RefusedChat:
        return _BARE
    shared = re.sub(r"[<\[][^<>\[\]\s]*\Z", "", commonprefix([asked, answered]))  # no half tags
    answer = answered[len(shared) :]
    for brace in re.finditer(r"\{", answer):
        written, _ = _calls(answer[brace.start() :], False)
        if written and written[0].name == _NAME:
            before = answer[: brace.start()].strip().removesuffix("[").rstrip()
            mark = re.split(rf"\s|/{_THINK}", before)[-1]  # behind an empty thought
            return re.compile(f"{re.escape(mark)}()") if mark else _BARE
    if f"<function={_NAME}>" in answer:
        return _TAGS
    if _NAME in answer:
        raise UserError(
            "--tools: the chat template writes calls of tools in a form of its own; give the "
            "tokenizer a response_template for it"
        )
    return _BARE


def _calls(text: str, is_marked: bool) -> tuple[list[Call], str]:
    """The calls that ``text`` begins with, JSON objects or a list of them; and the text after."""
    found: list[Call] = []
    rest, is_first = text.lstrip(), is_marked
    starts: tuple[str, ...] = ("{", "[")
    while is_first or rest.startswith(starts):
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError) as error:
            problem = f"the tool call is not JSON: {_line(error)}"
            return [Call(problem=problem)] if is_first else found, rest
        values = value if isinstance(value, list) else [value]
        calls = [_parsed_call(value, is_marked) for value in values]
        if not is_first and any(call.problem for call in calls):
            break  # JSON, but no call
        found += calls
        rest, is_first, starts = rest[end:].lstrip(" \n;,"), False, ("{",)
    return found, rest


def _parsed_call(value: Any, is_marked: bool) -> Call:
    """``is_marked``: as a call; JSON alone is one only if it has arguments."""
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not isinstance(function, dict):
        return Call(problem='the tool call has no "name"')
    missing = None if is_marked else ""
    given = next((function[key] for key in _ARGUMENTS if key in function), missing)
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            return Call(name, problem=f"its arguments are not JSON: {_line(error)}")
    if not isinstance(given, dict | None):
        return Call(name, problem='its "arguments" are no object')
    return Call(name, given or {})


def _argument(text: str, function: Any, key: str) -> Any:
    """An argument in a tag: text where the schema of the ``function``'s parameters says so, else
    JSON, or a Python value as `str` writes it.
    """
    parts = [part for known in _under(function, "properties") for part in _under(known, key)]
    for part in parts:  # which grow meanwhile; some refer to themselves
        named = [str(ref).rpartition("/")[2] for ref in _under(part, "$ref")]
        referred = [known for each in _under(function, "$defs") for known in _under(each, *named)]
        parts += _under(part, "anyOf", "oneOf") + referred if len(parts) < 64 else []
    choices = [choice for part in parts for choice in _under(part, "enum")]
    types = [kind for part in parts for kind in _under(part, "type")]
    types += ["null" for part in parts if True in _under(part, "nullable")]
    types += ["string" for choice in choices if isinstance(choice, str)]
    for choice in choices:
        if text in (str(choice), json.dumps(choice)):
            return choice
    value = _literal(text.strip())
    is_text = "string" in types and _KINDS.get(type(value)) not in types
    return text if is_text or isinstance(value, str) else value


def _under(schema: Any, *names: str) -> list[Any]:
    """The values that ``schema`` has under ``names``, or lists of them."""
    found = [schema[name] for name in names if name in schema] if isinstance(schema, dict) else []
    return [v for value in found for v in (value if isinstance(value, list) else [value])]


def _literal(text: str) -> Any:
    """The value that is JSON, or what `str` makes of a Python one; ``text`` where it is neither."""
    is_python = text in ("True", "False", "None") or text.startswith(("[", "{"))
    for read in (json.loads, ast.literal_eval) if is_python else (json.loads,):
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return json.loads(json.dumps(read(text), allow_nan=False))
    return text


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]
