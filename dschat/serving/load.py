"""Loads the models to serve, each into an inference engine."""

import copy
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import dschat.distributed as dist
from dschat.chat.load import causal_lm, resolve_dtype
from dschat.config import UserError
from dschat.inference import InferenceEngine, UnsupportedModel, model_spec
from dschat.models.config_files import read_generation_config
from dschat.models.fit import check_fit
from dschat.models.model_kind import load_config
from dschat.models.tokenizer import load_tokenizer, stop_ids
from dschat.models.vocabulary import num_ids
from dschat.serving.flags import ServeConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("dschat")

_MAX_SEQ_LEN = 32_768  # default bound, even if the model has more positions
_PAGE_SIZE = 16  # the next turn of a conversation computes at most one page of it again


@dataclass
class LoadedModel:
    """An engine and its tokenizer; ``encoder`` is a copy for another thread."""

    name: str
    engine: InferenceEngine
    tokenizer: "PreTrainedTokenizerBase"
    encoder: "PreTrainedTokenizerBase"


def load_models(config: ServeConfig) -> list[LoadedModel]:
    """The models of ``--path``.

    Raises:
        UserError: one is not a causal LM with a tokenizer, or of a family that the engine does not
            run.
    """
    checked = [(name, causal_lm(path, config.trust_remote_code)) for name, path in config.models]
    return [_load(name, path, config) for name, path in checked]


def _load(name: str, path: str, config: ServeConfig) -> LoadedModel:
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
            stop_ids=stop_ids(tokenizer, read_generation_config(path, "--path")),
            num_tokens=num_ids(tokenizer),
            max_num_seqs=config.max_num_seqs,
            max_seq_len=min(config.max_seq_len or _MAX_SEQ_LEN, positions),
            page_size=_PAGE_SIZE,
            kv_cache_gib=config.kv_cache_gib,
            cuda_graphs=False,
        )
    except UnsupportedModel as reason:
        raise UserError(f"--path {path}: the inference engine cannot run it: {reason}") from None
    engine.allocate_cache()
    logger.info("%s: %s in %s on %s", name, path, dtype, dist.device().type)
    return LoadedModel(name, engine, tokenizer, copy.deepcopy(tokenizer))
