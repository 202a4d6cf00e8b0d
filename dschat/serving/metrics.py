"""Counts requests, tokens and seconds for Prometheus."""

from collections.abc import Collection
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dschat.serving.worker import ServedModel

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class ServerMetrics:
    """The metrics of ``/metrics``, in a registry of its own; also the state of ``models``."""

    def __init__(self, models: Collection[ServedModel]) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        model = ["model"]

        def counter(name: str, text: str, labels: list[str]) -> Counter:
            return Counter(f"dschat_{name}", text, labels, registry=self.registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(
                f"dschat_{name}_seconds", text, model, registry=self.registry, buckets=_SECONDS
            )

        self.requests = counter("requests", "Requests by path and status.", ["path", "status"])
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.", model)
        self.answer_tokens = counter("answer_tokens", "Tokens of answers.", model)
        self.cancelled = counter("cancelled", "Requests whose client left.", model)
        self.first_token_s = seconds("first_token", "Time to the first token.")
        self.request_s = seconds("request", "Time of a request.")
        for name, text, state in (
            ("running", "Answers that decode.", "num_running"),
            ("waiting", "Answers that wait for their first token.", "num_waiting"),
            ("cache_use", "Share of KV cache pages in use.", "cache_use"),
        ):
            gauge = Gauge(f"dschat_{name}", text, ["model"], registry=self.registry)
            for served in models:
                gauge.labels(served.name).set_function(partial(getattr, served.worker, state))


class Counted:
    """ASGI middleware: counts requests by route and status."""

    def __init__(self, app: ASGIApp, counter: Counter) -> None:
        self._app, self._counter = app, counter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")
                self._counter.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counting)
