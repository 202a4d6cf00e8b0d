"""Loads the models to serve, and runs each one's engine in a thread, for an asyncio server."""

import asyncio
import copy
import logging
import queue
import threading
import time
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
from dschat.openai_api.delivery import Delivery, Handle
from dschat.openai_api.generation import NamedModel
from dschat.openai_api.patience import Overloaded
from dschat.serving.flags import ServeConfig

logger = logging.getLogger("dschat")


class EngineWorker(Delivery):
    """An engine in a thread of its own, which answers requests together."""

    def __init__(self, engine: InferenceEngine, max_waiting: int) -> None:
        super().__init__(engine)
        self._max_waiting = max_waiting
        self.core = engine.core(streaming=True)
        self.stats = self.core.stats
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- the event loop's thread -------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, tokens: "asyncio.Queue[Token | Exception]", request: Request) -> Handle:
        """See `Delivery`.

        Raises:
            Overloaded: too many answers wait.
        """
        most = self._max_waiting + self.engine.max_num_seqs
        if self.num_waiting + request.sampling.n > most:
            raise Overloaded
        return super().submit(tokens, request)

    def close(self) -> None:
        """Stop the thread. Requests get no more tokens."""
        self.commands.put(self._stop)
        self._thread.join()

    # -- the engine's thread -----------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        try:
            self.core.add(request)
        except Exception as error:
            logger.exception("a request could not be queued")
            self.fail(error, [self.handles.pop(request)])

    def end(self, request: Request, sample: int | None) -> None:
        self.core.cancel(request, sample)

    def _stop(self) -> None:
        self._is_stopped = True

    def _run(self) -> None:
        core = self.core
        while not self._is_stopped:
            try:
                command = self.commands.get(block=not core.has_work)
            except queue.Empty:
                self._step(core)
            else:
                command()

    def _step(self, core: Core) -> None:
        try:
            events = core.step()
        except Exception as error:
            logger.exception("a step failed; its requests are ended")
            core.close()
            self.fail(error)
            self.handles.clear()
        else:
            self.tell(events)


# -- models ----------------------------------------------------------------------------------------


@dataclass
class ServedModel(NamedModel):
    """A model under its name. ``encoder``: the tokenizer's copy of another thread."""

    worker: EngineWorker
    encoder: PreTrainedTokenizerBase
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
    encoder = copy.deepcopy(model.tokenizer)
    return ServedModel(name, model.tokenizer, worker, encoder, int(time.time()))
