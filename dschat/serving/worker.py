"""Loads the models to serve, and runs each one's engine in a thread, for an asyncio server."""

import asyncio
import copy
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

import dschat.distributed as dist
from dschat.chat.load import PAGE_SIZE
from dschat.chat.model import MAX_SEQ_LEN, Model
from dschat.inference import UnsupportedModel
from dschat.inference.generators.engine import InferenceEngine
from dschat.inference.requests.core import Core
from dschat.inference.requests.sequence import Request
from dschat.openai_api.answer_text import Token
from dschat.openai_api.patience import Overloaded
from dschat.serving.flags import ServeConfig

logger = logging.getLogger("dschat")

# The event loop needs about 0.06 ms of Python's lock for the tokens of one request, however many
# they are. So under load the tokens of several steps reach it together, after this time per
# request, and never later than the second one.
_GATHER_S, _LONGEST_GATHER_S = 1e-3, 0.1


@dataclass(eq=False)
class Handle:
    """A request in the event loop. ``tokens``, which several requests may share, gets its tokens as
    they are drawn, or the engine's failure.
    """

    tokens: asyncio.Queue[Token | Exception]
    request: Request  # NOTE: belongs to the engine's thread
    open: set[int]  # answers without their last token
    is_waiting: bool = True  # no token was drawn yet


class EngineWorker:
    """Answers requests together. All methods are for the event loop's thread.

    The engine's thread and the event loop share nothing but two queues: commands go one way, the
    tokens of a step or a few the other. A first or last token takes all others along at once.

    Attributes:
        core, handles: of the engine's thread. A request has a handle until `cancel` releases it.
    """

    def __init__(self, engine: InferenceEngine, max_waiting: int) -> None:
        self.engine = engine
        self._max_waiting = max_waiting
        self._commands: queue.SimpleQueue[Callable[[Core], None] | None] = queue.SimpleQueue()
        self.handles: dict[Request, Handle] = {}
        self._news: list[tuple[Handle, Token | Exception]] = []  # of the engine's thread
        self._delivered = 0.0  # when; of the engine's thread
        self._open: set[Handle] = set()  # of the event loop
        self.core = engine.core(streaming=True)
        self.stats = self.core.stats
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread; it answers in the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Answers of requests that have no token yet."""
        return sum(len(handle.open) for handle in self._open if handle.is_waiting)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, tokens: "asyncio.Queue[Token | Exception]", request: Request) -> Handle:
        """Queue a request that `InferenceEngine.problem` accepts. `cancel` releases the handle.

        Raises:
            Overloaded: too many answers wait.
        """
        num_answers = request.sampling.n
        if self.num_waiting + num_answers > self._max_waiting + self.engine.max_num_seqs:
            raise Overloaded
        handle = Handle(tokens, request, set(range(num_answers)))
        self._open.add(handle)

        def add(core: Core) -> None:
            try:
                core.add(request)
            except Exception as error:
                logger.exception("a request could not be queued")
                self._news.append((handle, error))
                self._send_news()
            else:
                self.handles[request] = handle

        self._commands.put(add)
        return handle

    def cancel(self, handle: Handle, sample: int | None = None) -> None:
        """Stop a request, or one of its answers; no effect on those that have ended."""
        self._close(handle, handle.open if sample is None else {sample})

        def drop(core: Core) -> None:
            core.cancel(handle.request, sample)
            if sample is None:
                self.handles.pop(handle.request, None)

        self._commands.put(drop)

    def close(self) -> None:
        """Stop the thread. Requests get no more tokens."""
        self._commands.put(None)
        self._thread.join()

    # -- the engine's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        core = self.core
        while True:
            try:
                command = self._commands.get(block=not core.has_work)
            except queue.Empty:
                self._step(core)
                continue
            if command is None:
                return
            command(core)

    def _step(self, core: Core) -> None:
        is_urgent = False
        try:
            events = core.step()
        except Exception as error:
            logger.exception("a step failed; its requests are ended")
            self._news += [(handle, error) for handle in self.handles.values()]
            core.close()
            self.handles.clear()
            events, is_urgent = [], True
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


# -- models ----------------------------------------------------------------------------------------


@dataclass
class ServedModel:
    """A model under its name. ``encoder``: the tokenizer's copy of another thread."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    encoder: PreTrainedTokenizerBase
    worker: EngineWorker
    created: int  # Unix time

    def as_dict(self) -> dict[str, object]:
        """OpenAI's description of a model, and how long prompt + answer may be."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "dschat",
            "max_model_len": self.worker.engine.max_positions,
        }


def load_models(config: ServeConfig) -> dict[str, ServedModel]:
    """The models of ``--path`` by name.

    Raises:
        UserError: one is not a causal LM with a tokenizer, or of a family that the engine does not
            run.
    """
    trust, flags = config.trust_remote_code, config.template_flags
    found = {name: Model.find(path, config.dtype, trust, **flags) for name, path in config.models}
    return {name: _load(name, model, config) for name, model in found.items()}


def _load(name: str, model: Model, config: ServeConfig) -> ServedModel:
    try:
        engine = model.engine(
            config.max_seq_len or MAX_SEQ_LEN,
            max_num_seqs=config.max_num_seqs,
            page_size=PAGE_SIZE,
            kv_cache_gib=config.kv_cache_gib,
        )
    except UnsupportedModel as reason:
        raise model.checkpoint.error(f": the inference engine cannot run it: {reason}") from None
    engine.allocate_cache()
    precision = str(model.dtype).removeprefix("torch.")
    logger.info("%s: %s in %s on %s", name, model.path, precision, dist.device().type)
    worker = EngineWorker(engine, config.max_waiting)
    return ServedModel(
        name, model.tokenizer, copy.deepcopy(model.tokenizer), worker, int(time.time())
    )
