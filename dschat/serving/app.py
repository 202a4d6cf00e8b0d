"""The HTTP application: OpenAI's routes, and the state of the server."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from dschat.config import UserError
from dschat.data.segments import prompt_text_ids
from dschat.environments.template_text import CallParser
from dschat.inference.requests.sequence import Request
from dschat.models.tokenizer import text_ids
from dschat.openai_api.generation import Generation
from dschat.openai_api.limits import Guard, require_short, too_long
from dschat.openai_api.patience import PatientThread, Stopping
from dschat.openai_api.responses import ChatFormat, CompletionFormat, Parse, handle_errors
from dschat.openai_api.schema import Body, ChatRequest, CompletionRequest
from dschat.openai_api.sending import respond
from dschat.openai_api.shaping import Shape, shape_of
from dschat.serving.flags import ServeConfig
from dschat.serving.web_chat import ChatScorer, PreferenceFile, WebChat
from dschat.serving.worker import ServedModel

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
        return await respond(request, body, generation, answers, self.config.request_timeout_s)

    async def complete(self, request: HttpRequest, body: CompletionRequest) -> Response:
        self._require_room(len(body.prompts), body.n)
        generation, _ = await self._begin(request, body, _encoded)
        answers = CompletionFormat(generation, body.logprobs is not None)
        return await respond(request, body, generation, answers, self.config.request_timeout_s)

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
        generation.closed = partial(self._running.discard, generation)
        return generation, parse

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
