"""Loads the models to serve, each into an inference engine."""

import copy
import logging
import time

import dschat.distributed as dist
from dschat.chat.load import PAGE_SIZE
from dschat.chat.model import MAX_SEQ_LEN, Model
from dschat.inference import UnsupportedModel
from dschat.serving.flags import ServeConfig
from dschat.serving.generation import ServedModel
from dschat.serving.worker import EngineWorker

logger = logging.getLogger("dschat")


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
