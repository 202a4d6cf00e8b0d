"""Which tensors of a checkpoint are weights, and what no weight may be; one rule for everything
that reads checkpoints.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

# Constants that older versions of transformers saved among the weights: causal masks, rotary
# tables and position numbers (GPT-2, GPT-Neo, GPT-J, CodeGen, Pythia, Llama 2, BERT's relatives).
# `attn.c_attn.bias` and `attention.dense.bias` are weights: the bias must be attention's own.
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
    """``name``, if it is one of the pair that ``tie_word_embeddings`` speaks of."""
    return name if _EMBEDDING.search(name) or _HEAD.search(name) else None


def is_untied(pair: Mapping[str, Tensor]) -> bool:
    """Whether a checkpoint that stores these has a head of its own, whatever its configuration
    says: transformers does not tie what is stored with two values.
    """
    return (
        len(pair) == 2
        and any(_HEAD.search(name) for name in pair)
        and not torch.equal(*pair.values())
    )


def is_constant(name: str) -> bool:
    """Whether ``name``, which the model has no place for, is a constant that it computes itself."""
    return _CONSTANTS.search(name) is not None


def is_finite(weight: Tensor) -> bool:
    """Whether no value is NaN or infinite: one pass over the memory, without a copy of it."""
    if weight.numel() == 0:
        return True
    if weight.element_size() == 1:  # torch finds no minimum of 8-bit floats
        weight = weight.float()
    return bool(torch.stack(torch.aminmax(weight.detach())).isfinite().all())


def value_fault(weight: Tensor) -> str | None:
    """What is wrong with a stored ``weight``, whatever model it is for; None where nothing is."""
    if not weight.is_floating_point():
        return f"is stored as {str(weight.dtype).removeprefix('torch.')}, not in floating point"
    return None if is_finite(weight) else "has values that are NaN or infinite"
