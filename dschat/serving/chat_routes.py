"""The web chat: its page, scores of a reward model, and preferences."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse
from starlette.exceptions import HTTPException

from dschat.serving.preferences import PreferenceFile
from dschat.serving.schema import Preference, ScoreRequest, turns_of

if TYPE_CHECKING:
    from dschat.serving.app import Server
    from dschat.serving.reward import ChatScorer

_PAGE = Path(__file__).with_name("chat.html")
# The page has its script and style in itself, and loads nothing.
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class WebChat:
    """What the page asks for, besides answers."""

    def __init__(
        self, server: "Server", preferences: PreferenceFile, reward_model: "ChatScorer | None"
    ) -> None:
        self._server, self._preferences, self._reward_model = server, preferences, reward_model
        self._thread = server.thread()  # one, as the reward model's tokenizer demands

    def add_to(self, app: FastAPI) -> None:
        """Register the routes."""
        app.get("/")(self.page)
        app.get("/api/info")(self.info)
        app.post("/api/score")(self.score)
        app.post("/api/preference")(self.prefer)

    async def page(self) -> FileResponse:
        headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
        return FileResponse(_PAGE, media_type="text/html", headers=headers)

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
        await self._thread.run(request, self._preferences.append, body)
        return Response(status_code=204)
