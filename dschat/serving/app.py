"""The HTTP application: OpenAI's routes, and the state of the server."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from dschat.config import UserError
from dschat.data.segments import prompt_text_ids
from dschat.environments.template_text import CallParser
from dschat.inference.requests.sequence import Request
from dschat.models.tokenizer import text_ids
from dschat.openai_api.answer_text import Event
from dschat.openai_api.limits import Guard, require_short, too_long
from dschat.openai_api.patience import Ended, PatientThread, Stopping, while_connected
from dschat.openai_api.responses import (
    ChatFormat,
    CompletionFormat,
    Parse,
    describe,
    handle_errors,
    server_sent,
)
from dschat.openai_api.schema import ChatRequest, CompletionRequest
from dschat.openai_api.shaping import Shape, shape_of
from dschat.serving.flags import ServeConfig
from dschat.serving.generation import Generation
from dschat.serving.web_chat import ChatScorer, PreferenceFile, WebChat
from dschat.serving.worker import ServedModel

_SEND_TIMEOUT_S = 30.0  # after a request's time, for a client that reads slowly

Format = ChatFormat | CompletionFormat
Body = ChatRequest | CompletionRequest
# The ids of each prompt, and what finds calls of tools in the answers.
_Encoded = tuple[list[list[int]], Parse | None]


@dataclass
class Server:
    """What the routes share."""

    config: ServeConfig
    models: dict[str, ServedModel]

    def __post_init__(self) -> None:
        # NOTE: one thread, which has tokenizers of its own: they are not safe for several.
        self.encoders = self.thread()
        self._running: set[Generation] = set()
        self._is_stopping = False

    def thread(self) -> PatientThread:
        """A thread with the limits of the server."""
        return PatientThread(self.config.max_waiting, self.config.request_timeout_s)

    def start(self) -> None:
        """Start the engines, in the event loop."""
        for model in self.models.values():
            model.worker.start()

    def stop(self) -> None:
        for model in self.models.values():
            model.worker.close()
        self.encoders.close()

    def end_answers(self) -> None:
        """End those that run, and those that would begin."""
        self._is_stopping = True
        for generation in self._running:
            generation.stop()

    def model(self, name: str | None) -> ServedModel:
        """The model called ``name``; the first one without a name."""
        if not name:
            return next(iter(self.models.values()))
        if name not in self.models:
            known = ", ".join(self.models)
            raise HTTPException(404, f"the model {name[:100]} does not exist; there is {known}")
        return self.models[name]

    # -- answers -----------------------------------------------------------------------------------

    async def chat(self, request: HttpRequest, body: ChatRequest) -> Response:
        self._require_room(1, body.n)
        generation, parse = await self._begin(request, body, _encoded_chat)
        answers = ChatFormat(generation, body.logprobs, parse)
        return await self._respond(request, body, generation, answers)

    async def complete(self, request: HttpRequest, body: CompletionRequest) -> Response:
        self._require_room(len(body.prompts), body.n)
        generation, _ = await self._begin(request, body, _encoded)
        has_logprobs = body.logprobs is not None
        answers = CompletionFormat(generation, has_logprobs)
        return await self._respond(request, body, generation, answers)

    def _require_room(self, num_prompts: int, n: int) -> None:
        if not num_prompts:
            raise UserError("prompt: is empty; write at least one")
        if num_prompts * n > self.config.max_num_seqs + self.config.max_waiting:
            raise UserError(f"{num_prompts} prompts with n {n} are more than the queue holds")

    async def _begin(
        self, request: HttpRequest, body: Body, encode: Callable[[Any, Any], _Encoded]
    ) -> tuple[Generation, Parse | None]:
        began, model = time.perf_counter(), self.model(body.model)
        engine = model.worker.engine

        def read() -> tuple[_Encoded, Shape | None]:
            shape = shape_of(body, model.encoder, engine.num_tokens)
            if isinstance(body, ChatRequest):
                new = body.max_new_tokens or 1
                require_short(
                    model.name, model.encoder, body.turns, engine.max_positions, new, **body.inputs
                )
            return encode(model.encoder, body), shape

        (prompts, parse), shape = await self.encoders.run(request, read)
        if self._is_stopping:
            raise Stopping
        limit = body.max_new_tokens
        if limit is None:
            limit = max(1, min(engine.max_positions - len(ids) for ids in prompts))
        if isinstance(body, ChatRequest) and len(prompts[0]) + limit > engine.max_positions:
            raise too_long(model.name, engine.max_positions, len(prompts[0]), limit)
        requests = []
        for ids in prompts:
            split = 1 if body.echo else len(ids)
            sampling = body.sampling(limit)  # without a seed each has its own
            given = Request(ids[:split], sampling, limit=limit, forced=ids[split:])
            given.num_top, given.shape = body.num_top, shape
            requests.append(given)
        generation = Generation(model, requests, body.stops, began, body.echo)
        self._running.add(generation)
        return generation, parse

    async def _respond(
        self, request: HttpRequest, body: Body, generation: Generation, answers: Format
    ) -> Response:
        if body.stream:
            timeout_s = self.config.request_timeout_s + _SEND_TIMEOUT_S
            return _Stream(self._chunks(body, generation, answers), generation, timeout_s)
        choices: list[list[Event]] = [[] for _ in range(generation.num_choices)]

        async def collect() -> None:
            async with aclosing(self._events(generation)) as batches:
                async for events in batches:
                    for event in events:
                        choices[event.choice].append(event)

        await while_connected(request, collect())
        return JSONResponse(answers.whole(choices))

    async def _chunks(
        self, body: Body, generation: Generation, answers: Format
    ) -> AsyncIterator[str]:
        """The server-sent events of an answer."""
        held: dict[int, list[Event]] = defaultdict(list)  # by choice
        yield "".join(map(server_sent, answers.first_chunks()))
        try:
            async with aclosing(self._events(generation)) as batches:
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

    async def _events(self, generation: Generation) -> AsyncGenerator[list[Event], None]:
        """The events of ``generation``, which the server may stop meanwhile."""
        try:
            async with aclosing(generation.events(self.config.request_timeout_s)) as batches:
                async for events in batches:
                    yield events
        finally:
            self._running.discard(generation)

    # -- state -------------------------------------------------------------------------------------

    async def list_models(self) -> dict[str, Any]:
        return {"object": "list", "data": [model.as_dict() for model in self.models.values()]}

    async def describe_model(self, name: str) -> dict[str, Any]:
        return self.model(name).as_dict()

    async def health(self) -> JSONResponse:
        """Status 503 if an engine's thread has ended."""
        ended = [name for name, model in self.models.items() if not model.worker.is_alive]
        status = {"status": "ok"} if not ended else {"status": "failed", "models": ended}
        return JSONResponse(status, 503 if ended else 200)


def create_app(
    server: Server,
    keys: list[str],
    preferences: PreferenceFile,
    reward_model: ChatScorer | None = None,
) -> FastAPI:
    """The application of ``server``, for requests with one of ``keys`` (none: for all)."""
    config = server.config

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.start()
        try:
            yield
        finally:
            server.stop()

    app = FastAPI(title="dschat", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.post("/v1/chat/completions")(server.chat)
    app.post("/v1/completions")(server.complete)
    app.get("/v1/models")(server.list_models)
    app.get("/v1/models/{name:path}")(server.describe_model)
    app.get("/health")(server.health)
    WebChat(server, preferences, reward_model).add_to(app)
    handle_errors(app)
    max_bytes, origins = int(config.max_request_mib * 2**20), config.allow_origin or []
    app.add_middleware(Guard, keys=keys, max_bytes=max_bytes, origins=origins)
    if config.allow_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allow_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    if config.is_local:  # a page of another origin could otherwise give this address its own name
        local = ["localhost", "127.0.0.1", "[::1]", config.host]
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=local)
    return app


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


def _encoded_chat(encoder: Any, body: ChatRequest) -> _Encoded:
    turns, parse = body.turns, None
    begun = turns[-1]["content"] if body.continue_final_message else None
    try:
        if tools := body.inputs["tools"]:
            parser = CallParser(encoder, tools, **body.chat_template_kwargs)
            parse = partial(parser.split, begun=begun)
    except UserError as error:
        raise UserError(str(error).removeprefix("--")) from None
    return [prompt_text_ids(encoder, turns, **body.inputs)], parse


def _encoded(encoder: Any, body: CompletionRequest) -> _Encoded:
    return [text_ids(encoder, [p])[0] if isinstance(p, str) else p for p in body.prompts], None
