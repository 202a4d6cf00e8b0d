"""Classifies the tensors of a checkpoint: constants, embedding, head; and validates their values.

Everything that reads checkpoints uses these rules.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

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


def value_fault(weight: Tensor) -> str | None:
    """The fault of a stored ``weight`` (integers, NaN, infinity); None if it is valid."""
    if not weight.is_floating_point():
        return f"is stored as {str(weight.dtype).removeprefix('torch.')}, not in floating point"
    return None if is_finite(weight) else "has values that are NaN or infinite"
