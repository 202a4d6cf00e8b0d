"""Reads and writes what a chat template puts between the answers of an episode: the calls of tools
in an answer, and an environment's text after it.

Observations: the model's own tokens are never decoded and encoded again: only what stands between
two answers is text. The template's pieces around it come from a small chat of placeholders, so they
do not depend on the episode.

Calls: a tokenizer with a ``response_template`` says itself how answers are read. For others the
form is taken from the template: it renders a call, and what it puts before the JSON object, such as
Hermes's and Qwen's ``<tool_call>``, marks calls in answers. Where it puts nothing there, as Llama
3's, an answer that is JSON is a call. Qwen3.5's form ``<function=NAME><parameter=KEY>`` is read
too.
"""

import contextlib
import json
import re
from collections.abc import Sequence
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

    def _after_answer(self, answer: dict[str, Any], turns: list[dict[str, Any]]) -> str:
        """What the template writes after the end of ``answer``, for ``turns`` and up to where the
        next answer begins.
        """
        chat = [{"role": "user", "content": _ASKED}, answer]
        whole = render_chat(self._tokenizer, [*chat, *turns], add_generation_prompt=True)
        before = render_chat(self._tokenizer, chat)
        answered = before.find(_ANSWERED)
        if whole.startswith(before):
            asked = render_chat(self._tokenizer, chat[:1], add_generation_prompt=True)
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
_FUNCTION = re.compile(r"<function=([^>]*)>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
_FENCE = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL)
_DECODER = json.JSONDecoder()


class CallParser:
    """Reads the calls of an answer, as text with special tokens and without its EOS.

    ``tools``: JSON schemas.

    Raises:
        UserError: the chat template does not show tools to the model, or writes calls in a form
            that only a ``response_template`` can describe.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]]) -> None:
        self._tokenizer, self._tools = tokenizer, list(tools)
        functions = [tool["function"] for tool in tools]
        self._types = {f["name"]: f["parameters"].get("properties", {}) for f in functions}
        try:
            self._prompt = render_chat(
                tokenizer, _QUESTION, add_generation_prompt=True, tools=tools
            )
        except RefusedChat as error:
            raise UserError(f"--tools: {error}") from None
        if not all(tool["function"]["name"] in self._prompt for tool in tools):
            raise UserError(
                "--tools: the chat template does not show tools to the model; name one that does "
                "with --chat_template"
            )
        self._reads_itself = getattr(tokenizer, "response_template", None) is not None
        self._mark = "" if self._reads_itself else _mark(tokenizer)
        if self._reads_itself and (found := self("answer")):
            raise UserError(f"--tools: the tokenizer's response_template fails: {found[0].problem}")

    def __call__(self, answer: str) -> list[Call]:
        if self._reads_itself:
            return self._read_by_template(answer)
        if self._mark == "<function=":
            return [self._tagged(*found.groups()) for found in _FUNCTION.finditer(answer)]
        if self._mark:
            return [c for piece in answer.split(self._mark)[1:] for c in _calls(piece, True)]
        fenced = _FENCE.search(answer)
        return _calls(fenced[1] if fenced else answer, False)

    def split(self, ids: Sequence[int]) -> tuple[str, list[Call]] | None:
        """The text of an answer before its calls, and the calls; None where it has none, or one
        that cannot be read.
        """
        ends = stop_ids(self._tokenizer)
        kept = ids[:-1] if ids and ids[-1] in ends else ids
        (answer,) = continued_texts(self._tokenizer, [list(kept)], with_special=True)
        calls = self(answer)
        if not calls or any(call.problem for call in calls):
            return None
        if self._reads_itself:
            parsed = self._tokenizer.parse_response(answer, prefix=self._prompt, tools=self._tools)
            return str(parsed.get("content") or "").strip(), calls
        return (answer.split(self._mark)[0].strip() if self._mark else ""), calls

    def _tagged(self, name: str, body: str) -> Call:
        """A call whose arguments have tags. Those that are no text are JSON."""
        types, arguments = self._types.get(name, {}), {}
        for key, text in _PARAMETER.findall(body):
            arguments[key] = text
            if types.get(key, {}).get("type") != "string":
                with contextlib.suppress(ValueError, RecursionError):
                    arguments[key] = json.loads(text)
        return Call(name, arguments)

    def _read_by_template(self, answer: str) -> list[Call]:
        try:
            parsed = self._tokenizer.parse_response(answer, prefix=self._prompt, tools=self._tools)
        except Exception as error:  # what the model wrote may be anything
            return [Call(problem=f"the tool call cannot be read: {_line(error)}")]
        return [_parsed_call(call) for call in parsed.get("tool_calls") or ()]


def _mark(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the template writes before a call; "" if nothing."""
    calls = [_call(_NAME, "value-of-argument", "call00000")]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    asked = render_chat(tokenizer, _QUESTION, add_generation_prompt=True)
    try:
        written = render_chat(tokenizer, [*_QUESTION, turn])
    except RefusedChat:
        return ""
    shared = next((i for i, (a, b) in enumerate(zip(asked, written, strict=False)) if a != b), None)
    answer = written[len(asked) if shared is None else shared :]
    for brace in re.finditer(r"\{", answer):
        try:
            value, _ = _DECODER.raw_decode(answer, brace.start())
        except ValueError:
            continue
        if isinstance(value, dict) and value.get("name") == _NAME:
            before = answer[: brace.start()].strip().removesuffix("[").rstrip()
            return re.split(r"\s", before)[-1]
    if f"<function={_NAME}>" in answer:
        return "<function="
    if _NAME in answer:
        raise UserError(
            "--tools: the chat template writes calls of tools in a form of its own; give the "
            "tokenizer a response_template for it"
        )
    return ""


def _calls(text: str, is_marked: bool) -> list[Call]:
    """The calls that ``text`` begins with: JSON objects, or a list of them."""
    found: list[Call] = []
    text = text.strip()
    starts: tuple[str, ...] = ("{", "[")
    while is_marked or text.startswith(starts):
        try:
            value, end = _DECODER.raw_decode(text)
        except (ValueError, RecursionError) as error:
            problem = f"the tool call is not JSON: {_line(error)}"
            return [Call(problem=problem)] if is_marked else found
        calls = [_parsed_call(value) for value in (value if isinstance(value, list) else [value])]
        if not is_marked and any(call.problem for call in calls):
            break  # JSON, but no call
        found += calls
        text, is_marked, starts = text[end:].lstrip(" \n;,"), False, ("{",)
    return found


def _parsed_call(value: Any) -> Call:
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not isinstance(function, dict):
        return Call(problem='the tool call has no "name"')
    given = next((function[key] for key in _ARGUMENTS if key in function), None)
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            return Call(name, problem=f"its arguments are not JSON: {_line(error)}")
    if given is None:
        given = {}
    if not isinstance(given, dict):
        return Call(name, problem='its "arguments" are no object')
    return Call(name, given)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]
