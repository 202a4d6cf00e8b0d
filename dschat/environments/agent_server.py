"""Serves OpenAI's interface to the agents of a rollout, at an address of each episode.

It listens on 127.0.0.1 in a thread of its own. A request of another distribution than the one that
training samples from is refused, or its answer is not trained: its tokens are not the policy's.
"""

import copy
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
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
from dschat.environments.agent_episodes import AgentRunner
from dschat.environments.conversations import Conversations, Row, TooLong
from dschat.environments.template_text import CallParser, ObservationTokens
from dschat.inference.requests.sequence import Request
from dschat.openai_api.answer_text import Event, Token
from dschat.openai_api.generation import Generation, NamedModel
from dschat.openai_api.limits import BoundedConnection, Guard
from dschat.openai_api.patience import Stopping
from dschat.openai_api.responses import ChatFormat, CompletionFormat, error_body, handle_errors
from dschat.openai_api.schema import Body, ChatRequest, CompletionRequest, Message, turns_of
from dschat.openai_api.sending import collected, respond
from dschat.openai_api.shaping import shape_of

MODEL = "actor"
_MAX_BYTES, _KEEP_ALIVE_S, _MAX_PARSERS = 8 * 2**20, 3600, 64
_HOSTS = ("127.0.0.1", "localhost")
# Fields that do not change what an answer is drawn from, and fields that are compared.
_TAKEN = {"model", "stop", "stream", "stream_options", "max_tokens", "max_completion_tokens"}
_TAKEN |= {"tool_choice", "chat_template_kwargs", "logprobs", "top_logprobs", "seed"}
_NEVER = {"n", "echo", "continue_final_message", "add_generation_prompt"}
_OF_REPLIES = ("logprobs", "skip_special_tokens", "routed_experts_prompt_start")  # of `generate`
_COMPARED = ("temperature", "top_p", "top_k", "min_p")


class GenerateRequest(BaseModel, extra="allow"):
    """Body of vLLM's ``/inference/v1/generate``."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}


class _Answer(Generation):
    """The next answer in ``row`` of ``episode``, which has it before its last token is sent.

    ``told``: called then, with all that was drawn.
    """

    def __init__(
        self,
        model: NamedModel,
        request: Request,
        stops: list[str],
        episode: Conversations,
        row: Row,
        is_trained: bool,
    ) -> None:
        super().__init__(model, [request], stops, time.perf_counter())
        self._episode, self._row, self._is_trained = episode, row, is_trained
        self._request, self._seen = request, list[Event]()
        self.told: Callable[[list[Event]], None] = lambda events: None

    def follow(self, item: Token | Exception) -> list[Event]:
        events = super().follow(item)
        self._seen += events
        if events and (reason := events[-1].finish_reason) is not None:
            drawn, row = [event.token for event in self._seen], self._row
            ids, logprobs = [token.id for token in drawn], [token.logprob or 0.0 for token in drawn]
            ended = {
                "is_trained": self._is_trained,
                "finish_reason": reason,
                "is_ended": drawn[-1].finish_reason == "stop",
                "experts": self._request.sequences[0].experts,
            }
            if not self._episode.take(row, ids, logprobs, **ended):
                raise Stopping
            self.told(self._seen)
        return events


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
        if self._observations is None:
            self._observations = ObservationTokens(self.encoder, True)
        turns, inputs = body.turns, body.inputs
        parse, is_trained = self._parser(inputs), _is_as_trained(body, runner)
        row = episode.chat(self._observations, turns, inputs)
        answer = self._answer(runner, episode, row, body, is_trained)
        made = ChatFormat(answer, body.logprobs, parse.split if parse else None)

        def told(events: list[Event]) -> None:
            message, _ = made.message(events)
            (turn,) = turns_of([Message(role="assistant", **message)])
            episode.answered(row, turn, inputs)

        answer.told = told
        return await respond(request, body, answer, made, runner.args.agent_timeout_s)

    async def complete(self, key: str, request: HttpRequest, body: CompletionRequest) -> Response:
        runner, episode = self._episode(key, request)
        is_trained = _is_as_trained(body, runner)
        if len(body.prompts) != 1:
            raise UserError("prompt: an episode takes one at a time")
        (given,) = body.prompts
        if isinstance(given, str):
            row = episode.continued_text(given)
        else:
            row = episode.continued(given)
        answer = self._answer(runner, episode, row, body, is_trained)
        answer.told = lambda _: episode.answered(row, None, {})
        made = CompletionFormat(answer, body.logprobs is not None)
        return await respond(request, body, answer, made, runner.args.agent_timeout_s)

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
        is_trained = _is_as_trained(asked, runner)
        row = episode.continued(body.token_ids)
        answer = self._answer(runner, episode, row, asked, is_trained)
        answer.told = lambda _: episode.answered(row, None, {})
        (events,) = await collected(request, answer, runner.args.agent_timeout_s)
        choice = ChatFormat(answer, True).whole([events])["choices"][0]
        choice = {name: choice[name] for name in ("index", "logprobs", "finish_reason")}
        choice["token_ids"] = [event.token.id for event in events]
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
            if len(self._parsers) >= _MAX_PARSERS:  # of an agent that writes tools as it goes
                self._parsers.clear()
            self._parsers[known] = CallParser(self.encoder, inputs["tools"], **more)
        return self._parsers[known]

    def _answer(
        self,
        runner: AgentRunner,
        episode: Conversations,
        row: Row,
        body: Body,
        is_trained: bool,
    ) -> _Answer:
        """The next answer in ``row``.

        Raises:
            TooLong: it does not fit into the model.
        """
        room, as_trained = episode.room(row), runner.sampling
        limit = min(room, runner.args.max_turn_tokens or room, body.max_new_tokens or room)
        shortest = min(as_trained.min_new_tokens, limit)
        sampling = replace(as_trained, n=1, max_new_tokens=limit, min_new_tokens=shortest)
        if not is_trained:
            seed = as_trained.seed if body.seed is None else body.seed
            sampling = replace(body.sampling(limit), seed=seed)
        number, sample = episode.key
        asked = Request(row.ids, sampling, number, None, sample, row.first_position)
        asked.num_top = body.num_top
        if not is_trained:
            asked.shape = shape_of(body, self.encoder, runner.engine.num_tokens)
            if asked.shape is not None and runner.engine.group.size > 1:
                raise UserError("penalties, biases and formats need --inference_tp_size 1")
        model = NamedModel(MODEL, self.encoder, runner)
        try:
            return _Answer(model, asked, body.stops, episode, row, is_trained)
        except UserError as error:
            episode.is_cut = True
            raise TooLong(str(error)) from None


def _is_as_trained(body: Body, runner: AgentRunner) -> bool:
    """Whether a request is answered as training samples.

    Raises:
        UserError: it asks for another distribution, and ``--agent_sampling`` does not allow it.
    """
    large = {"messages", "prompt", "tools"}
    given = body.model_dump(exclude_defaults=True, exclude=large)
    trained, problem = runner.sampling, ""
    for name in _NEVER & given.keys():
        raise UserError(f"{name} {given[name]!r:.60}: an agent's endpoint does not know it")
    if body.stops and runner.args.moe_routing_replay:
        raise UserError("stop: --moe_routing_replay does not know the experts of such an answer")
    for name in _COMPARED:
        value, own = given.pop(name, None), getattr(trained, name)
        if value is not None and value != own and not (name == "top_k" and value < 1 > own):
            problem = (
                f"{name} {value}: training samples with {own:g}; leave it out of the request, "
                f"or train with --{name} {value}"
            )
    for name, value in given.items():
        if value and name not in _TAKEN:
            problem = f"{name} {value!r:.60}: training samples without it; leave it out"
    if problem and runner.args.agent_sampling == "as_trained":
        raise UserError(f"{problem}, or pass --agent_sampling free")
    return not problem


async def _refuse_long(_: HttpRequest, error: Exception) -> JSONResponse:
    kind = "context_length_exceeded"
    return JSONResponse(error_body(str(error), "invalid_request_error", kind), 400)
