"""Loads the models to serve, each into an inference engine."""

import copy
import logging
import time

import dschat.distributed as dist
from dschat.chat.load import causal_lm, resolve_dtype
from dschat.config import UserError
from dschat.inference import InferenceEngine, UnsupportedModel, model_spec
from dschat.models.fit import check_fit
from dschat.models.model_kind import load_config
from dschat.models.tokenizer import load_tokenizer, stop_ids
from dschat.models.vocabulary import num_ids
from dschat.serving.flags import ServeConfig
from dschat.serving.generation import ServedModel
from dschat.serving.worker import EngineWorker

logger = logging.getLogger("dschat")

_MAX_SEQ_LEN = 32_768  # default bound, even if the model has more positions
_PAGE_SIZE = 16  # the next turn of a conversation computes at most one page of it again


def load_models(config: ServeConfig) -> dict[str, ServedModel]:
    """The models of ``--path`` by name.

    Raises:
        UserError: one is not a causal LM with a tokenizer, or of a family that the engine does not
            run.
    """
    checked = [(name, causal_lm(path, config.trust_remote_code)) for name, path in config.models]
    return {name: _load(name, path, config) for name, path in checked}


def _load(name: str, path: str, config: ServeConfig) -> ServedModel:
    tokenizer = load_tokenizer(path, "--path", config.trust_remote_code)
    model_config = load_config(path, "--path", config.trust_remote_code)
    check_fit(model_config, path, "--path", "lm")
    dtype = str(resolve_dtype(config.dtype)).removeprefix("torch.")
    try:
        positions = model_spec(model_config).max_positions or _MAX_SEQ_LEN
        engine = InferenceEngine.from_pretrained(
            path,
            dtype,
            str(dist.device()),
            stop_ids=stop_ids(tokenizer),
            num_tokens=num_ids(tokenizer),
            max_num_seqs=config.max_num_seqs,
            max_seq_len=min(config.max_seq_len or _MAX_SEQ_LEN, positions),
            page_size=_PAGE_SIZE,
            kv_cache_gib=config.kv_cache_gib,
        )
    except UnsupportedModel as reason:
        raise UserError(f"--path {path}: the inference engine cannot run it: {reason}") from None
    engine.allocate_cache()
    logger.info("%s: %s in %s on %s", name, path, dtype, dist.device().type)
    worker = EngineWorker(engine, config.max_waiting)
    return ServedModel(name, tokenizer, copy.deepcopy(tokenizer), worker, int(time.time()))
