"""Runs an engine in a thread of its own, for requests of an asyncio server."""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from dschat.inference.engine import InferenceEngine
from dschat.inference.open_batch import OpenBatch, Request
from dschat.inference.protocol import FinishReason, SamplingParams
from dschat.serving.patience import Overloaded

logger = logging.getLogger("dschat")

# The event loop needs about 0.06 ms of Python's lock for the tokens of one request, however many
# they are. So under load the tokens of several steps reach it together, after this time per
# request, and never later than the second one.
_GATHER_S, _LONGEST_GATHER_S = 1e-3, 0.1


class Token(NamedTuple):
    """A token of one of a request's answers."""

    handle: "Handle"
    sample: int
    id: int
    logprob: float
    top: list[tuple[int, float]]  # likeliest tokens at its position, where asked for
    finish_reason: FinishReason | None  # None: more tokens follow


@dataclass(eq=False)
class Handle:
    """A request in the event loop. ``tokens``, which several requests may share, gets its tokens as
    they are drawn, or the engine's failure.
    """

    tokens: asyncio.Queue[Token | Exception]
    open: set[int]  # answers without their last token
    request: Request | None = None  # NOTE: belongs to the engine's thread
    is_waiting: bool = True  # no token was drawn yet


class EngineWorker:
    """Answers requests together. All methods are for the event loop's thread.

    The engine's thread and the event loop share nothing but two queues: commands go one way, the
    tokens of a step or a few the other. A first or last token takes all others along at once.
    """

    def __init__(self, engine: InferenceEngine, max_waiting: int) -> None:
        self.engine = engine
        self._max_waiting = max_waiting
        self._commands: queue.SimpleQueue[Callable[[OpenBatch], None] | None] = queue.SimpleQueue()
        self._handles: dict[Request, Handle] = {}  # of the engine's thread
        self._news: list[tuple[Handle, Token | Exception]] = []  # of the engine's thread
        self._delivered = 0.0  # when; of the engine's thread
        self._open: set[Handle] = set()  # of the event loop
        self._batch = OpenBatch(engine)
        self.stats = self._batch.stats
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread; it answers in the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def num_running(self) -> int:
        """Answers of requests that have their first token."""
        return sum(len(handle.open) for handle in self._open if not handle.is_waiting)

    @property
    def num_waiting(self) -> int:
        """Answers of requests that have no token yet."""
        return sum(len(handle.open) for handle in self._open if handle.is_waiting)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(
        self,
        tokens: "asyncio.Queue[Token | Exception]",
        ids: list[int],
        sampling: SamplingParams,
        num_top: int = 0,
    ) -> Handle:
        """Queue a prompt that `InferenceEngine.problem` accepts. `cancel` releases the handle.

        Raises:
            Overloaded: too many answers wait.
        """
        if self.num_waiting + sampling.n > self._max_waiting + self.engine.max_num_seqs:
            raise Overloaded
        handle = Handle(tokens, set(range(sampling.n)))
        self._open.add(handle)

        def add(batch: OpenBatch) -> None:
            try:
                handle.request = batch.add(ids, sampling, num_top)
            except Exception as error:
                logger.exception("a request could not be queued")
                news: list[tuple[Handle, Token | Exception]] = [(handle, error)]
                self._loop.call_soon_threadsafe(self._deliver, news)
                return
            self._handles[handle.request] = handle

        self._commands.put(add)
        return handle

    def cancel(self, handle: Handle, sample: int | None = None) -> None:
        """Stop a request, or one of its answers; no effect on those that have ended."""
        self._close(handle, handle.open if sample is None else {sample})

        def drop(batch: OpenBatch) -> None:
            if handle.request is not None:
                batch.cancel(handle.request, sample)
                if sample is None:
                    self._handles.pop(handle.request, None)

        self._commands.put(drop)

    def close(self) -> None:
        """Stop the thread. Requests get no more tokens."""
        self._commands.put(None)
        self._thread.join()

    # -- the engine's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        batch = self._batch
        while True:
            try:
                command = self._commands.get(block=not batch.has_work)
            except queue.Empty:
                self._step(batch)
                continue
            if command is None:
                return
            command(batch)

    def _step(self, batch: OpenBatch) -> None:
        is_urgent = False
        try:
            events = batch.step()
        except Exception as error:
            logger.exception("a step failed; its requests are ended")
            self._news += [(handle, error) for handle in self._handles.values()]
            batch.clear()
            self._handles.clear()
            events, is_urgent = [], True
        for sequence, token, is_last in events:
            request = sequence.prompt
            assert isinstance(request, Request)
            if (handle := self._handles.get(request)) is None:
                continue
            reason: FinishReason | None = None
            if is_last:
                reason = "stop" if sequence.stopped else "length"
            is_urgent = is_urgent or is_last or len(sequence.answer) == 1
            top = request.top[sequence.sample][-1] if request.num_top else []
            drawn = Token(handle, sequence.sample, token, sequence.logprobs[-1], top, reason)
            self._news.append((handle, drawn))
        gather_s = min(_GATHER_S * len(self._handles), _LONGEST_GATHER_S)
        if is_urgent or time.monotonic() - self._delivered >= gather_s:
            self._send_news()

    def _send_news(self) -> None:
        news, self._news = self._news, []
        if news and not self._loop.is_closed():
            self._delivered = time.monotonic()
            self._loop.call_soon_threadsafe(self._deliver, news)

    # -- the event loop's thread -------------------------------------------------------------------

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
