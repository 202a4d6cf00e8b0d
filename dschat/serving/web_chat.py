"""The web chat: its page, scores of a reward model, and preferences, which step 2 trains on."""

import errno
import json
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from dschat.chat.model import resolve_dtype
from dschat.config import UserError
from dschat.data.segments import encode_examples
from dschat.data.sources.adapters import Content, Example
from dschat.models.checkpoint import Checkpoint
from dschat.models.heads import RewardModel
from dschat.models.long_rows import num_positions
from dschat.models.tokenizer import num_ids
from dschat.openai_api.limits import require_short, too_long
from dschat.openai_api.schema import Conversation, Text, turns_of
from dschat.startup.files import no_link

if TYPE_CHECKING:
    from dschat.serving.app import Server

logger = logging.getLogger("dschat")

_FILES = Path(__file__).with_name("page")
# The page has its scripts and style in itself, and loads nothing.
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class ScoreRequest(BaseModel):
    """Body of ``/api/score``: a conversation and answers to it."""

    messages: Conversation
    answers: list[Text] = Field(min_length=1, max_length=64)


class Preference(BaseModel):
    """Body of ``/api/preference``: a conversation, and which of two answers is better."""

    messages: Conversation
    chosen: Text = Field(min_length=1)
    rejected: Text = Field(min_length=1)
    chosen_model: Text = ""
    rejected_model: Text = ""


class PreferenceFile:
    """A JSONL file with the columns ``prompt`` (turns), ``chosen`` and ``rejected`` (an assistant's
    turn), and the names of the models.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        parent = next(folder for folder in self.path.absolute().parents if folder.exists())
        problem = None
        if self.path.is_symlink():
            problem = errno.ELOOP
        elif self.path.is_dir():
            problem = errno.EISDIR
        elif not parent.is_dir():
            problem = errno.ENOTDIR
        elif not os.access(self.path if self.path.exists() else parent, os.W_OK):
            problem = errno.EACCES
        if problem is not None:
            raise UserError(f"--preferences {path}: {os.strerror(problem)}; name another file")

    def append(self, judged: Preference) -> None:
        """Add a row, at once and whole."""
        row = {"prompt": turns_of(judged.messages), **judged.model_dump(exclude={"messages"})}
        for name in ("chosen", "rejected"):
            row[name] = [{"role": "assistant", "content": row[name]}]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        with open(self.path, "ab", buffering=0, opener=no_link) as file:
            size = os.fstat(file.fileno()).st_size
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)  # a half row would join the next one
                raise


class ChatScorer:
    """The reward model of step 2 at ``path``, which reads what it was trained on: its own tokens.

    Raises:
        UserError: not a reward model with a tokenizer.
    """

    def __init__(self, path: str, dtype: str, trust_remote_code: bool = False) -> None:
        checkpoint = Checkpoint(path, "--reward_model", trust_remote_code)
        checkpoint.require_reward_model()
        checkpoint.check("score")
        self._tokenizer = tokenizer = checkpoint.tokenizer()
        self._positions = num_positions(checkpoint.config)
        self._model = RewardModel(
            checkpoint, resolve_dtype(dtype), tokenizer.pad_token_id, num_ids(tokenizer)
        )

    def score(self, messages: list[dict[str, str]], answers: list[str]) -> list[float]:
        """The score of each answer to a conversation, at its end.

        Raises:
            UserError: the chat template refuses the messages, or they are longer than the model.
        """
        turns: list[Content] = [[{"role": "assistant", "content": text}] for text in answers]
        if self._positions is not None:
            require_short("the reward model", self._tokenizer, messages, self._positions, 0)
        example = Example(messages, others=turns)
        (encoded,) = encode_examples(self._tokenizer, [example])
        if encoded.problem:
            raise UserError(encoded.problem)
        rows = [encoded.prompt_ids + answer for answer in encoded.answers]
        if self._positions is not None and (longest := max(map(len, rows))) > self._positions:
            raise too_long("the reward model", self._positions, longest, 0)
        return self._model.score(rows).tolist()


class WebChat:
    """What the page asks for, besides answers."""

    def __init__(
        self, server: "Server", preferences: PreferenceFile, reward_model: ChatScorer | None
    ) -> None:
        self._server, self._preferences, self._reward_model = server, preferences, reward_model
        self._thread = server.thread()  # one, as the reward model's tokenizer demands
        html = (_FILES / "chat.html").read_text("utf-8")  # it names the other files in braces
        self._page = re.sub(r"{{(.+)}}", lambda name: (_FILES / name[1]).read_text("utf-8"), html)

    def add_to(self, app: FastAPI) -> None:
        """Register the routes."""
        app.get("/")(self.page)
        app.get("/api/info")(self.info)
        app.post("/api/score")(self.score)
        app.post("/api/preference")(self.prefer)

    async def page(self) -> HTMLResponse:
        headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(self._page, headers=headers)

    async def info(self) -> dict[str, Any]:
        return {
            "models": list(self._server.models),
            "scores": self._reward_model is not None,
            "preferences": str(self._preferences.path),
        }

    async def score(self, request: Request, body: ScoreRequest) -> dict[str, list[float]]:
        """Scores of answers to one conversation."""
        if self._reward_model is None:
            raise HTTPException(404, "the server has no reward model; start it with --reward_model")
        messages = turns_of(body.messages)
        scores = await self._thread.run(request, self._reward_model.score, messages, body.answers)
        return {"scores": scores}

    async def prefer(self, request: Request, body: Preference) -> Response:
        """Record that one answer is better than another."""
        try:
            await self._thread.run(request, self._preferences.append, body)
        except OSError as error:
            logger.error("--preferences %s: %s", self._preferences.path, error.strerror)
            raise HTTPException(500, f"not recorded: {error.strerror}") from None
        return Response(status_code=204)
