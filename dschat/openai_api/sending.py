"""Sends answers: whole, or as streams of server-sent events."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from dschat.config import UserError
from dschat.openai_api.answer_text import Event
from dschat.openai_api.generation import Generation
from dschat.openai_api.patience import Ended, while_connected
from dschat.openai_api.responses import ChatFormat, CompletionFormat, describe, server_sent
from dschat.openai_api.schema import Body

Format = ChatFormat | CompletionFormat

_SEND_TIMEOUT_S = 30.0  # after a request's time, for a client that reads slowly


async def respond(
    request: Request, body: Body, generation: Generation, answers: Format, timeout_s: float
) -> Response:
    """The response of a request that may take ``timeout_s``.

    Raises:
        ClientLeft: nobody awaits it. See `Generation.events` for others.
    """
    if body.stream:
        chunks = _chunks(body, generation, answers, timeout_s)
        return _Stream(chunks, generation, timeout_s + _SEND_TIMEOUT_S)
    return JSONResponse(answers.whole(await collected(request, generation, timeout_s)))


async def collected(
    request: Request, generation: Generation, timeout_s: float
) -> list[list[Event]]:
    """All events of each choice. Raises as `respond` does."""
    choices: list[list[Event]] = [[] for _ in range(generation.num_choices)]

    async def collect() -> None:
        async with aclosing(generation.events(timeout_s)) as batches:
            async for events in batches:
                for event in events:
                    choices[event.choice].append(event)

    await while_connected(request, collect())
    return choices


async def _chunks(
    body: Body, generation: Generation, answers: Format, timeout_s: float
) -> AsyncIterator[str]:
    """The server-sent events of an answer."""
    held: dict[int, list[Event]] = defaultdict(list)  # by choice
    yield "".join(map(server_sent, answers.first_chunks()))
    try:
        async with aclosing(generation.events(timeout_s)) as batches:
            async for events in batches:
                ready = []
                for event in events:
                    held[event.choice].append(event)
                    if event.finish_reason or (answers.has_logprobs and not answers.is_whole):
                        ready.append(held.pop(event.choice))
                for choice in () if answers.is_whole else list(held):
                    if any(event.text for event in held[choice]):
                        ready.append(held.pop(choice))
                yield "".join(server_sent(answers.chunk(events)) for events in ready)
    except (Ended, UserError) as error:
        _, problem, _ = describe(error)
        yield server_sent(problem)
    else:
        if body.has_usage:
            yield server_sent(answers.usage_chunk())
    yield server_sent("[DONE]")


class _Stream(StreamingResponse):
    """Server-sent events; ends the generation with the connection."""

    def __init__(
        self, chunks: AsyncIterator[str], generation: Generation, timeout_s: float
    ) -> None:
        super().__init__(
            chunks, media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )
        self._generation, self._timeout_s = generation, timeout_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.wait_for(super().__call__(scope, receive, send), self._timeout_s)
        finally:
            self._generation.close()
