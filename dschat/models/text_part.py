"""Finds the text model in a vision-language checkpoint: its configuration and its weights.

Training reads the text model alone, a causal LM like any other. What else the checkpoint has stays
on disk, until a save copies it beside the trained weights (`dschat.checkpoint.hub_format`).
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

logger = logging.getLogger("dschat")

FIELD = "text_config"

# How such checkpoints name the text model's weights -> how the text model itself does.
_PREFIXES = {"model.language_model.": "model.", "language_model.": ""}


@dataclass(frozen=True)
class Rest:
    """What a loaded model leaves of its checkpoint, for saves to keep.

    ``prefixes``: of the model's weights, see `text_prefix`. ``keys``: names of the other tensors.
    """

    source: str = ""
    prefixes: tuple[str, str] = ("", "")
    keys: frozenset[str] = frozenset()


def text_part(config: PretrainedConfig, raw: dict[str, Any]) -> PretrainedConfig:
    """The configuration of the causal LM inside ``config``, ``raw`` on disk; else ``config``."""
    text: Any = config.get_text_config()
    causal_lm: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    named = " ".join(config.architectures or [])
    is_part = getattr(config, FIELD, None) is text and causal_lm is not None
    if not is_part or config.is_encoder_decoder or "ForSequenceClassification" in named:
        return config
    text.architectures = [causal_lm.__name__]
    if "tie_word_embeddings" in raw:  # the whole model's decides
        text.tie_word_embeddings = raw["tie_word_embeddings"]
    return text


def announce_rest(model: Any) -> None:
    """Log which parts of its checkpoint ``model`` leaves as they are."""
    rest: Rest = model.rest
    if rest.keys:
        parts = sorted({key.removeprefix("model.").split(".")[0] for key in rest.keys})
        logger.info(
            "%s trains; saved as they are: %d other tensors of %s (%s)",
            *(type(model).__name__, len(rest.keys), rest.source, ", ".join(parts)),
        )


def text_prefix(keys: Iterable[str]) -> tuple[str, str]:
    """(prefix on disk, prefix in the text model) of a checkpoint's ``keys``; equal if it is all."""
    names = list(keys)
    for prefix, plain in _PREFIXES.items():
        if any(name.startswith(prefix) for name in names):
            return prefix, plain
    return "", ""


def text_keys(keys: Iterable[str]) -> dict[str, str]:
    """Name in the text model -> name on disk, of its weights among ``keys``."""
    names = list(keys)
    prefix, plain = text_prefix(names)
    return {
        plain + name.removeprefix(prefix) if name.startswith(prefix) else name: name
        for name in names
        if name.startswith((prefix, "lm_head."))
    }


def whole_name(name: str, prefixes: tuple[str, str]) -> str:
    """The name on disk of the text model's weight ``name``, where `text_prefix` found these."""
    prefix, plain = prefixes
    return prefix + name.removeprefix(plain) if name.startswith(plain) else name
