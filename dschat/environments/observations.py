"""Tokenizes an environment's text as the chat template would put it between two answers.

The model's own tokens are never decoded and encoded again: only what stands between two answers is
text. The template's pieces around it come from a small chat of placeholders, so they do not depend
on the episode.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.data.rendering import RefusedChat, render_chat
from dschat.data.segments import Segment, encode, end_of, require_eos
from dschat.data.sources.turns import storable
from dschat.environments.contract import Observation, ToolResult
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
        self._encode = lru_cache(maxsize=4096)(self._ids)

    def __call__(self, said: Observation) -> list[int]:
        if said.results:
            return list(self._encode(self._results(said.results)))
        before, after = ("", "") if said.is_raw else self._pieces
        return list(self._encode(before + said.text + after))

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
        calls = [_call(r.name, i) for r, i in zip(results, ids, strict=True)]
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
            end = self._ends.search(before, answered if answered >= 0 else len(asked))
            if end:
                return whole[end.end() :]
            is_text = answered >= 0 and "tool_calls" not in answer
            return whole[answered + len(_ANSWERED) if is_text else len(before) :]
        # it renders the last answer in another way, such as with its thoughts
        answered = whole.find(_ANSWERED)
        end = self._ends.search(whole, max(answered, 0))
        if answered < 0 or end is None:
            raise _no_place("--tools" if "tool_calls" in answer else "--environment", "a turn")
        return whole[end.end() :]

    def _ids(self, text: str) -> tuple[int, ...]:
        (ids,) = encode(self._tokenizer, [Segment(storable(text), before=self._end)])
        return tuple(ids)


def _call(name: str, number: str) -> dict[str, Any]:
    function = {"name": name or "tool", "arguments": {"argument": _ANSWERED}}
    return {"type": "function", "id": number, "function": function}


def _no_place(flag: str, what: str) -> UserError:
    return UserError(
        f"{flag}: the chat template does not render {what} after an answer as a continuation; "
        "name another with --chat_template"
    )
