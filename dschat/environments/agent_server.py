"""Serves OpenAI's interface to the agents of a rollout, at an address of each episode.

It listens on 127.0.0.1 in a thread of its own. A request of another distribution than the one that
training samples from is refused: its tokens would be trained as if they were the model's.
"""

import asyncio
import copy
import json
import secrets
import socket
import threading
from dataclasses import dataclass, replace
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.environments.agent_episodes import AgentRunner, Ask
from dschat.environments.conversations import Conversations, Row, TooLong
from dschat.environments.template_text import CallParser, ObservationTokens
from dschat.inference.protocol import SamplingParams
from dschat.inference.requests.sequence import Request
from dschat.models.tokenizer import text_ids
from dschat.openai_api.answer_text import AnswerText, Event, Token
from dschat.openai_api.limits import BoundedConnection, Guard
from dschat.openai_api.patience import ClientLeft, while_connected
from dschat.openai_api.responses import (
    ChatFormat,
    CompletionFormat,
    error_body,
    handle_errors,
    server_sent,
)
from dschat.openai_api.schema import ChatRequest, CompletionRequest, Message, turns_of

MODEL = "actor"
_MAX_BYTES, _KEEP_ALIVE_S = 8 * 2**20, 3600
_HOSTS = ("127.0.0.1", "localhost")
# Fields that do not change what an answer is drawn from, and those that are compared.
_TAKEN = {"model", "messages", "prompt", "stop", "stream", "stream_options", "max_tokens"}
_TAKEN |= {"max_completion_tokens", "tools", "tool_choice", "chat_template_kwargs"}
_TAKEN |= {"logprobs", "seed"}
_OF_REPLIES = ("logprobs", "skip_special_tokens", "routed_experts_prompt_start")  # of `generate`
_COMPARED = ("temperature", "top_p", "top_k", "min_p")


class GenerateRequest(BaseModel, extra="allow"):
    """Body of vLLM's ``/inference/v1/generate``."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}


@dataclass
class _Answer:
    """One answer, for the formats of `dschat.openai_api.responses`."""

    tokenizer: PreTrainedTokenizerBase
    num_prompt: int
    events: list[Event]
    model_name: str = MODEL
    num_choices: int = 1

    @property
    def usage(self) -> dict[str, int]:
        drawn = len(self.events)
        total = self.num_prompt + drawn
        return dict(prompt_tokens=self.num_prompt, completion_tokens=drawn, total_tokens=total)


class AgentServer:
    """The HTTP server of this process's agents.

    Attributes:
        open: of the episodes that run, by their keys.
        encoder: the tokenizer of its thread.
        address: without an episode's key.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.open: dict[str, tuple[AgentRunner, Conversations]] = {}
        # NOTE: tokenizers are not safe for several threads: this one is the event loop's.
        self.encoder = copy.deepcopy(tokenizer)
        self._observations: ObservationTokens | None = None
        self._parsers: dict[str, CallParser] = {}
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.address = f"http://127.0.0.1:{listener.getsockname()[1]}/episode"
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        at = "/episode/{key}"
        app.post(f"{at}/v1/chat/completions")(self.chat)
        app.post(f"{at}/v1/completions")(self.complete)
        app.get(f"{at}/v1/models")(self.models)
        app.post(f"{at}/inference/v1/generate")(self.generate)
        handle_errors(app)
        app.add_exception_handler(TooLong, _refuse_long)
        app.add_middleware(Guard, keys=[], max_bytes=_MAX_BYTES)
        settings = uvicorn.Config(
            app,
            log_level="error",
            access_log=False,
            http=BoundedConnection,
            ws="none",
            # clients close idle connections; a request on one that this side closes would fail
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        server = uvicorn.Server(settings)
        threading.Thread(target=server.run, args=([listener],), name="agents", daemon=True).start()

    # -- routes ------------------------------------------------------------------------------------

    async def chat(self, key: str, request: HttpRequest, body: ChatRequest) -> Response:
        runner, episode = self._episode(key, request)
        _require_as_trained(body, runner.sampling)
        if self._observations is None:
            self._observations = ObservationTokens(self.encoder, True)
        turns, inputs = body.turns, body.inputs
        parse = self._parser(inputs)
        row = episode.chat(self._observations, turns, inputs)
        answer = await self._answer(request, runner, episode, row, body)
        made = ChatFormat(answer, body.logprobs, parse.split if parse else None)
        whole = made.whole([answer.events])
        (turn,) = turns_of([Message(**whole["choices"][0]["message"])])
        episode.answered(row, turn, inputs)
        return _streamed(made, answer, body) if body.stream else JSONResponse(whole)

    async def complete(self, key: str, request: HttpRequest, body: CompletionRequest) -> Response:
        runner, episode = self._episode(key, request)
        _require_as_trained(body, runner.sampling)
        if len(body.prompts) != 1:
            raise UserError("prompt: an episode takes one at a time")
        (given,) = body.prompts
        ids = text_ids(self.encoder, [given])[0] if isinstance(given, str) else given
        row = episode.continued(ids)
        answer = await self._answer(request, runner, episode, row, body)
        made = CompletionFormat(answer, body.logprobs is not None)
        episode.answered(row, None, {})
        if body.stream:
            return _streamed(made, answer, body)
        return JSONResponse(made.whole([answer.events]))

    async def generate(self, key: str, request: HttpRequest, body: GenerateRequest) -> Response:
        """vLLM's route: ids in; ids and log-probs out."""
        runner, episode = self._episode(key, request)
        given = {name: v for name, v in body.sampling_params.items() if name not in _OF_REPLIES}
        try:
            asked = CompletionRequest.model_validate({"prompt": body.token_ids, **given})
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None
        if {*asked.stop_token_ids} <= runner.sampling.end_ids(runner.engine.stop_ids):
            asked.stop_token_ids = []  # they end answers anyway
        _require_as_trained(asked, runner.sampling)
        row = episode.continued(body.token_ids)
        answer = await self._answer(request, runner, episode, row, asked)
        episode.answered(row, None, {})
        made = ChatFormat(answer, True)
        choice = made.whole([answer.events])["choices"][0]
        choice = {name: choice[name] for name in ("index", "logprobs", "finish_reason")}
        choice["token_ids"] = [event.token.id for event in answer.events]
        for told, drawn in zip(choice["logprobs"]["content"], choice["token_ids"], strict=True):
            told["token"] = f"token_id:{drawn}"
        number = getattr(body, "request_id", None) or secrets.token_hex(8)
        return JSONResponse({"request_id": number, "choices": [choice]})

    async def models(self, key: str, request: HttpRequest) -> Response:
        runner, _ = self._episode(key, request)
        length = runner.engine.max_seq_len
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "dschat"}
        return JSONResponse({"object": "list", "data": [model | {"max_model_len": length}]})

    # -- answers -----------------------------------------------------------------------------------

    def _episode(self, key: str, request: HttpRequest) -> tuple[AgentRunner, Conversations]:
        """The episode of ``key``, for who has it and comes from this machine."""
        if request.url.hostname not in _HOSTS:
            raise HTTPException(403, "this server answers to 127.0.0.1 alone")
        if (found := self.open.get(key)) is None:
            raise HTTPException(404, "there is no such episode, or it has ended")
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not secrets.compare_digest(given.strip(), key):
            raise HTTPException(401, "the API key is missing or wrong")
        return found

    def _parser(self, inputs: dict[str, Any]) -> CallParser | None:
        """What finds calls of a request's tools."""
        if not inputs["tools"]:
            return None
        if (known := json.dumps(inputs)) not in self._parsers:
            more = {name: value for name, value in inputs.items() if name != "tools"}
            self._parsers[known] = CallParser(self.encoder, inputs["tools"], **more)
        return self._parsers[known]

    async def _answer(
        self,
        request: HttpRequest,
        runner: AgentRunner,
        episode: Conversations,
        row: Row,
        body: ChatRequest | CompletionRequest,
    ) -> _Answer:
        """The next answer in ``row``.

        Raises:
            TooLong: it does not fit into the model.
        """
        room = episode.room(row)
        limit = min(room, runner.args.max_turn_tokens or room, body.max_new_tokens or room)
        shortest = min(runner.sampling.min_new_tokens, limit)
        sampling = replace(runner.sampling, n=1, max_new_tokens=limit, min_new_tokens=shortest)
        number, sample = episode.key
        asked = Request(row.ids, sampling, number, None, sample, row.first_position)
        if problem := runner.engine.problem([asked]):
            episode.is_cut = True
            raise TooLong(problem)
        ends, loop = sampling.end_ids(runner.engine.stop_ids), asyncio.get_running_loop()
        ask = Ask(episode, row, asked, loop.create_future(), loop)
        if body.stops:
            ask.stops = AnswerText(runner.tokenizer, body.stops, ends)
        runner.send(ask)
        try:
            ids, logprobs, reason = await while_connected(request, ask.result())
        except ClientLeft:
            runner.send(replace(ask, is_left=True))
            raise
        text = AnswerText(self.encoder, body.stops, ends)
        events = list[Event]()
        for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True), 1):
            drawn = Token(None, 0, token, logprob, [], reason if place == len(ids) else None)
            offset, (said, why) = text.num_chars, text.push(drawn)
            events.append(Event(0, said, drawn, why, offset))
        return _Answer(self.encoder, len(asked.ids), events)


def _streamed(made: ChatFormat | CompletionFormat, answer: _Answer, body: Any) -> Response:
    """The answer as server-sent events: one piece, when it is complete."""
    chunks: list[Any] = [*made.first_chunks(), made.chunk(answer.events)]
    chunks += [made.usage_chunk()] if body.has_usage else []
    text = "".join(map(server_sent, [*chunks, "[DONE]"]))
    return Response(text, media_type="text/event-stream")


def _require_as_trained(body: ChatRequest | CompletionRequest, sampling: SamplingParams) -> None:
    """Raise ``UserError`` for a request of another distribution than training's."""
    given = body.model_dump(exclude_defaults=True)
    for name in _COMPARED:
        value, trained = given.pop(name, None), getattr(sampling, name)
        if value is not None and value != trained and not (name == "top_k" and value < 1 > trained):
            raise UserError(
                f"{name} {value}: training samples with {trained:g}; leave it out of the request, "
                f"or train with --{name} {value}"
            )
    for name, value in given.items():
        if value and name not in _TAKEN:
            raise UserError(f"{name} {value!r:.60}: training samples without it; leave it out")


async def _refuse_long(_: HttpRequest, error: Exception) -> JSONResponse:
    kind = "context_length_exceeded"
    return JSONResponse(error_body(str(error), "invalid_request_error", kind), 400)
