"""Hands the requests of an event loop to an engine's thread, and their tokens back."""

import asyncio
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dschat.inference.generators.engine import InferenceEngine
from dschat.inference.requests.sequence import Event as Drawn
from dschat.inference.requests.sequence import Request
from dschat.openai_api.answer_text import Token

# The event loop needs about 0.06 ms of Python's lock for the tokens of one request, however many
# they are. So under load the tokens of several steps reach it together, after this time per
# request, and never later than the second one.
_GATHER_S, _LONGEST_GATHER_S = 1e-3, 0.1


@dataclass(eq=False)
class Handle:
    """A request in the event loop. ``tokens``, which several requests may share, gets its tokens as
    they are drawn, or what ended it.
    """

    tokens: asyncio.Queue[Token | Exception]
    request: Request  # NOTE: belongs to the engine's thread
    open: set[int]  # answers without their last token
    is_waiting: bool = True  # no token was drawn yet


class Delivery(ABC):
    """What an event loop's thread and an engine's share: two queues.

    Commands go one way, the tokens of a step or a few the other. A first or last token takes all
    others along at once. The engine's thread carries out `commands` and gives `tell` what its core
    drew; `begin` and `end` are what it does for a request.

    Attributes:
        handles: of the engine's thread. A request has a handle until `cancel` releases it.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self.engine = engine
        self.commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.handles: dict[Request, Handle] = {}
        self._open: set[Handle] = set()  # of the event loop
        self._news: list[tuple[Handle, Token | Exception]] = []  # of the engine's thread
        self._delivered = 0.0  # when

    # -- the event loop's thread -------------------------------------------------------------------

    def submit(self, tokens: "asyncio.Queue[Token | Exception]", request: Request) -> Handle:
        """Queue a request that `InferenceEngine.problem` accepts. `cancel` releases the handle."""
        self._loop = asyncio.get_running_loop()
        handle = Handle(tokens, request, set(range(request.sampling.n)))
        self._open.add(handle)
        self.commands.put(partial(self._begin, handle))
        return handle

    def cancel(self, handle: Handle, sample: int | None = None) -> None:
        """Stop a request, or one of its answers; no effect on answers that have ended."""
        self._close(handle, handle.open if sample is None else {sample})
        self.commands.put(partial(self._end, handle, sample))

    @property
    def num_waiting(self) -> int:
        """Answers of requests that have no token yet."""
        return sum(len(handle.open) for handle in self._open if handle.is_waiting)

    def _deliver(self, news: list[tuple[Handle, Token | Exception]]) -> None:
        for handle, item in news:
            handle.is_waiting = False
            if isinstance(item, Exception):
                self._close(handle, handle.open)
            elif item.finish_reason is not None:
                self._close(handle, {item.sample})
            handle.tokens.put_nowait(item)

    def _close(self, handle: Handle, samples: set[int]) -> None:
        handle.open -= set(samples)
        if not handle.open:
            self._open.discard(handle)

    # -- the engine's thread -----------------------------------------------------------------------

    @abstractmethod
    def begin(self, request: Request) -> None:
        """Give a request to the core."""

    @abstractmethod
    def end(self, request: Request, sample: int | None) -> None:
        """End a request, or one of its answers, which may have ended before."""

    def tell(self, events: list[Drawn]) -> None:
        """Send what was drawn."""
        is_urgent = False
        for sequence, token, logprob, is_last in events:
            request = sequence.request
            if (handle := self.handles.get(request)) is None:
                continue
            is_urgent = is_urgent or is_last or sequence.num_drawn == 1
            top = request.top[sequence.sample].pop(0) if request.num_top else []
            reason = sequence.finish_reason if is_last else None
            drawn = Token(handle, sequence.sample, token, logprob, top, reason)
            self._news.append((handle, drawn))
        gather_s = min(_GATHER_S * len(self.handles), _LONGEST_GATHER_S)
        if is_urgent or time.monotonic() - self._delivered >= gather_s:
            self._send_news()

    def fail(self, error: Exception, handles: list[Handle] | None = None) -> None:
        """Tell requests, by default all, that ``error`` has ended them."""
        of = list(self.handles.values()) if handles is None else handles
        self._news += [(handle, error) for handle in of]
        self._send_news()

    def _begin(self, handle: Handle) -> None:
        self.handles[handle.request] = handle
        self.begin(handle.request)

    def _end(self, handle: Handle, sample: int | None) -> None:
        self.end(handle.request, sample)
        if sample is None:
            self.handles.pop(handle.request, None)

    def _send_news(self) -> None:
        news, self._news = self._news, []
        if news and not self._loop.is_closed():
            self._delivered = time.monotonic()
            self._loop.call_soon_threadsafe(self._deliver, news)
