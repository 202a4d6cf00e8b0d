"""Classifies and names the tensors of a checkpoint, and validates their values.

Everything that reads checkpoints uses these rules.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from dschat.config import UserError

logger = logging.getLogger("dschat")

# Constants that older versions of transformers saved among the weights: causal masks, rotary
# tables and position numbers (GPT-2, GPT-Neo, GPT-J, CodeGen, Pythia, Llama 2, BERT's relatives).
# `attn.c_attn.bias` and `attention.dense.bias` are weights: only `attention.bias` is a constant.
_CONSTANTS = re.compile(
    r"(?:^|\.)(?:"
    r"(?:attn|attention|crossattention)\.(?:masked_)?bias"
    r"|attn\.causal_mask"
    r"|inv_freq|cos_cached|sin_cached"
    r"|position_ids"
    r")$"
)

_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|embed_in|wte|word_embeddings)\.weight$")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out)\.weight$")


def embedding_or_head(name: str) -> str | None:
    """``name`` if it is the embedding or the head, which ``tie_word_embeddings`` ties."""
    return name if _EMBEDDING.search(name) or _HEAD.search(name) else None


def is_untied(pair: Mapping[str, Tensor]) -> bool:
    """Whether a checkpoint stores a head that differs from its embedding.

    transformers does not tie the two then, whatever the configuration says.
    """
    return (
        len(pair) == 2
        and any(_HEAD.search(name) for name in pair)
        and not torch.equal(*pair.values())
    )


def is_constant(name: str) -> bool:
    """Whether ``name`` is a constant that current models compute instead of loading."""
    return _CONSTANTS.search(name) is not None


def is_finite(weight: Tensor) -> bool:
    """Whether all values are finite, in one pass over the memory and without a copy."""
    if weight.numel() == 0:
        return True
    if weight.element_size() == 1:  # torch.aminmax does not support 8-bit floats
        weight = weight.float()
    return bool(torch.stack(torch.aminmax(weight.detach())).isfinite().all())


def sound_weights(stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the stream; ``UserError`` at the first weight that is not finite floating point."""
    for name, tensor in stream:
        fault = None
        if not tensor.is_floating_point():
            dtype = str(tensor.dtype).removeprefix("torch.")
            fault = f"is stored as {dtype}, not in floating point"
        elif not is_finite(tensor):
            fault = "has values that are NaN or infinite"
        if fault is not None:
            raise UserError(f"{name} {fault}; name another checkpoint, or copy it again")
        yield name, tensor
        del tensor  # NOTE: a tensor that is kept keeps its file mapped


# -- text part -------------------------------------------------------------------------------------
#
# Finds the text model in a vision-language checkpoint: its configuration and its weights.
#
# Training reads the text model alone, a causal LM like any other. What else the checkpoint has
# stays on disk, until a save copies it beside the trained weights (`dschat.checkpoint.hf_export`).


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


# -- names -----------------------------------------------------------------------------------------
#
# Names a checkpoint's tensors as a model expects them.

# Prefixes of training wrappers: DataParallel and DeepSpeed, torch.compile.
_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")

# Aliases of a parameter: the norms of the oldest checkpoints, and GPT-NeoX's head, which is
# embed_out on disk (seen in transformers 5.23) but lm_head in its module.
_ALIASES = (
    (re.compile(r"\.gamma$"), ".weight"),
    (re.compile(r"\.beta$"), ".bias"),
    (re.compile(r"^embed_out\."), "lm_head."),
    (re.compile(r"^lm_head\."), "embed_out."),
)


def normalized_names(expected: Collection[str], prefix: str) -> Callable[[str], str | None]:
    """From a name in a checkpoint to the one of ``expected`` that it stands for; None: a constant.

    ``prefix`` is the architecture's base-model prefix with its dot ("model.", "transformer.",
    "gpt_neox."): a checkpoint of the bare base model lacks it, another may have it where
    ``expected`` does not. A weight without a match in ``expected`` keeps its name, so that the
    consumer can reject it or ignore it (a stored copy of a tied head).
    """
    members = frozenset(expected)

    def normalized(name: str) -> str | None:
        plain = _WRAPPERS.sub("", name)
        for renamed in (name, plain, *(old.sub(new, plain) for old, new in _ALIASES)):
            for candidate in (renamed, prefix + renamed, renamed.removeprefix(prefix)):
                if candidate in members:
                    return candidate
        return None if is_constant(plain) else name

    return normalized


def names_on_disk(
    keys: Iterable[str], expected: Collection[str], prefix: str
) -> Callable[[str], str | None]:
    """`normalized_names` for a checkpoint's ``keys``, of which only the text model's are read."""
    names = normalized_names(expected, prefix)
    plain = {key: name for name, key in text_keys(keys).items()}
    return lambda key: names(plain[key]) if key in plain else None
