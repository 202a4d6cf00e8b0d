"""Builds OpenAI's response objects and error bodies."""

import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.models.continued_text import token_bytes
from dschat.openai_api.answer_text import Event
from dschat.openai_api.patience import (
    ClientLeft,
    EngineFailure,
    Overloaded,
    Stopping,
    TimedOut,
)

Json = dict[str, Any]
# Ids of an answer -> the text before its calls, and these; see `CallParser.split`.
Parse = Callable[[list[int]], Any]


def server_sent(data: Json | str) -> str:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    return f"data: {text}\n\n"


class Answers(Protocol):
    """The answers to one HTTP request."""

    num_choices: int

    @property
    def model_name(self) -> str: ...
    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...
    @property
    def usage(self) -> dict[str, int]: ...  # OpenAI's counts of tokens


class ChatFormat:
    """Objects of ``/v1/chat/completions``.

    ``parse``: finds calls of tools in answers, which are known when an answer is complete.
    """

    def __init__(self, generation: Answers, has_logprobs: bool, parse: Parse | None = None) -> None:
        self.generation, self.has_logprobs, self._parse = generation, has_logprobs, parse
        self.is_whole = parse is not None
        self._head = _head("chatcmpl", generation)

    def first_chunks(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        choices = range(self.generation.num_choices)
        return [self._chunk(self._choice(i, None, None, delta=delta)) for i in choices]

    def chunk(self, events: list[Event]) -> Json:
        """The events of one choice as a piece of a stream; all of them where ``is_whole``."""
        delta, reason = self.message(events)
        for i, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = i
        logprobs = self._logprobs(events)
        delta = {name: value for name, value in delta.items() if value}
        return self._chunk(self._choice(events[-1].choice, reason, logprobs, delta=delta))

    def message(self, events: list[Event]) -> tuple[Json, str | None]:
        """The text of one choice, or its calls of tools with the text before; and why it ends."""
        text, reason = "".join(e.text for e in events), events[-1].finish_reason
        if self._parse is None or reason == "length":
            return {"content": text}, reason
        found = self._parse([e.token.id for e in events])
        if found is None:
            return {"content": text}, reason
        before, calls = found
        told = [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": c.name, "arguments": json.dumps(c.arguments)},
            }
            for c in calls
        ]
        return {"content": before or None, "tool_calls": told}, "tool_calls"

    def usage_chunk(self) -> Json:
        return self._head | {
            "object": "chat.completion.chunk",
            "choices": [],
            "usage": self.generation.usage,
        }

    def whole(self, choices: list[list[Event]]) -> Json:
        """The response of a request without stream. ``choices``: all events of each."""
        answers = []
        for events in choices:
            message, reason = self.message(events)
            message, logprobs = {"role": "assistant"} | message, self._logprobs(events)
            answers.append(self._choice(events[-1].choice, reason, logprobs, message=message))
        whole = {"object": "chat.completion", "choices": answers, "usage": self.generation.usage}
        return self._head | whole

    def _chunk(self, choice: Json) -> Json:
        return self._head | {"object": "chat.completion.chunk", "choices": [choice]}

    def _choice(self, index: int, reason: str | None, logprobs: Any, **content: Json) -> Json:
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, events: Iterable[Event]) -> Json | None:
        if not self.has_logprobs:
            return None
        tokenizer = self.generation.tokenizer
        entries = []
        for event in events:
            entry = _entry(tokenizer, event.token.id, event.token.logprob)
            top = [_entry(tokenizer, token, value) for token, value in _top(event)]
            entries.append(entry | {"top_logprobs": top})
        return {"content": entries}


class CompletionFormat:
    """Objects of ``/v1/completions``."""

    is_whole = False

    def __init__(self, generation: Answers, has_logprobs: bool) -> None:
        self.generation, self.has_logprobs = generation, has_logprobs
        self._head = _head("cmpl", generation) | {"object": "text_completion"}

    def first_chunks(self) -> list[Json]:
        return []

    def chunk(self, events: list[Event]) -> Json:
        """The events of one choice as a piece of a stream."""
        return self._head | {"choices": [self._choice(events)]}

    def usage_chunk(self) -> Json:
        return self._head | {"choices": [], "usage": self.generation.usage}

    def whole(self, choices: list[list[Event]]) -> Json:
        """The response of a request without stream. ``choices``: all events of each."""
        answers = [self._choice(events) for events in choices]
        return self._head | {"choices": answers, "usage": self.generation.usage}

    def _choice(self, events: list[Event]) -> Json:
        last = events[-1]
        return {
            "index": last.choice,
            "text": "".join(event.text for event in events),
            "logprobs": self._logprobs(events) if self.has_logprobs else None,
            "finish_reason": last.finish_reason,
        }

    def _logprobs(self, events: list[Event]) -> Json:
        tokenizer = self.generation.tokenizer
        found: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for event in events:
            drawn = _entry(tokenizer, event.token.id, event.token.logprob)
            found["tokens"].append(drawn["token"])
            found["token_logprobs"].append(drawn["logprob"])
            top: Json = {}
            for token, value in _top(event):
                name = _entry(tokenizer, token, value)["token"]
                top[f"token_id:{token}" if name in top else name] = value
            found["top_logprobs"].append(top if drawn["logprob"] is not None else None)
            found["text_offset"].append(event.offset)
        return found


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> Json:
    """OpenAI's body of a failed request."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _head(prefix: str, generation: Answers) -> Json:
    name = generation.model_name
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}


def _top(event: Event) -> list[tuple[int, float]]:
    """The likeliest tokens; the drawn one with its own log-prob, which has fewer digits."""
    drawn = event.token
    return [(i, drawn.logprob or 0.0 if i == drawn.id else value) for i, value in drawn.top]


def _entry(tokenizer: PreTrainedTokenizerBase, token: int, logprob: float | None) -> Json:
    """``token``: its text; for part of a character its bytes, as OpenAI writes them."""
    content = token_bytes(tokenizer, token)
    try:
        name = content.decode()
    except UnicodeDecodeError:
        name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
    return {"token": name, "logprob": logprob, "bytes": list(content)}


# Status, OpenAI's type of error, and message
_OF_SERVER: dict[type[Exception], tuple[int, str, str]] = {
    Overloaded: (429, "rate_limit_error", "too many requests wait; try again later"),
    TimedOut: (504, "timeout_error", "the request took too long"),
    Stopping: (503, "server_error", "the server stops; ask again later"),
    EngineFailure: (500, "server_error", "the engine failed; see the server's log"),
    ClientLeft: (499, "client_left", ""),  # nginx's status; nobody reads it
    # Outside of texts, where it becomes a "?".
    UnicodeEncodeError: (400, "invalid_request_error", "a name or a value has half of a character"),
    Exception: (500, "server_error", "the server failed; see its log"),  # uvicorn logs it
}


def describe(error: Exception) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    """Status, body and headers for an exception of a request."""
    if isinstance(error, RequestValidationError):
        return 400, _invalid(error), {}
    if isinstance(error, UserError):
        return 400, error_body(str(error), "invalid_request_error"), {}
    if known := _OF_SERVER.get(type(error)):
        status, kind, message = known
        if status != 429:
            return status, error_body(message, kind), {}
        return status, error_body(message, kind, "overloaded"), {"Retry-After": "2"}
    if not isinstance(error, HTTPException):
        return describe(Exception())
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    code = "model_not_found" if error.status_code == 404 and "model" in error.detail else None
    return error.status_code, error_body(error.detail, kind, code), error.headers or {}


def handle_errors(app: FastAPI) -> None:
    """Register `describe` for all exceptions that a request may cause."""

    async def respond(_: Request, error: Exception) -> JSONResponse:
        status, body, headers = describe(error)
        return JSONResponse(body, status, dict(headers))

    for kind in (*_OF_SERVER, RequestValidationError, UserError, HTTPException):
        app.add_exception_handler(kind, respond)


def _invalid(error: RequestValidationError) -> dict[str, Any]:
    """The first invalid field, by its name."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        place, message = "", "the body is not JSON"
    if first["type"] == "too_long":
        count, most = first["ctx"]["actual_length"], first["ctx"]["max_length"]
        message = f"there are {count}, and at most {most} can be sent"
        if first["loc"][-1] == "messages":
            message += "; delete earlier turns, or start a new conversation"
    text = f"{place}: {message}" if place else message
    return error_body(text, "invalid_request_error", param=place or None)
