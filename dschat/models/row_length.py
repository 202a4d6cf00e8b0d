"""What a model computes differently once rows are longer than one of its sizes.

A row's numbers must depend on the row alone, so they follow from the longest row that a run's flags
allow, never from the rows beside it.
"""

import copy
import logging
import re
from typing import Any

from transformers import PretrainedConfig

logger = logging.getLogger("dschat")

# Config fields for the size of a window, a chunk, a sparse selection or the original positions.
_SIZE = re.compile(
    r"window(_size|_len)?$|chunk_size$|topk$|block_size$|local_attention$|^original_"
)


def probe_length(config: PretrainedConfig, longest_row: int, shortest: int) -> int:
    """Tokens of a row that goes a quarter beyond the largest size that ``longest_row`` exceeds; at
    least ``shortest``, at most ``longest_row``.
    """
    fields = config.get_text_config().to_dict().items()
    sizes = [v for k, v in fields if _SIZE.search(k) and type(v) is int and v < longest_row]
    return max([shortest, *(min(longest_row, size + size // 4 + 4) for size in sizes)])


def fix_rotary(config: PretrainedConfig, longest_row: int) -> None:
    """Give every row the long factors of LongRoPE (arXiv 2402.13753) if one may need them.

    transformers chooses by the longest row of a batch, and while an answer is decoded it keeps the
    keys that it computed with the short ones. The choice by the longest row of a run is vLLM's.
    Dynamic NTK scaling starts beyond ``max_position_embeddings``, where no row goes.
    """
    text = config.get_text_config()
    for settings in _longropes(text):
        original = settings["original_max_position_embeddings"]
        if longest_row > original:
            text.published_rope = vars(text).get(
                "published_rope", copy.deepcopy(text.rope_parameters)
            )
            for long in [key for key in settings if key.startswith("long_")]:
                settings[long.replace("long_", "short_")] = settings[long]
            logger.info(
                "rows of up to %d tokens exceed LongRoPE's original %d positions: every row gets "
                "the long factors; shorter limits would keep the short ones",
                *(longest_row, original),
            )


def num_positions(config: PretrainedConfig) -> int | None:
    """Longest row that a model reads; None: unbounded. Of a model with LongRoPE the longest one
    that has the short factors, unless `fix_rotary` gave every row the long ones.
    """
    text = config.get_text_config()
    originals = [
        settings["original_max_position_embeddings"]
        for settings in _longropes(text)
        if settings["long_factor"] != settings["short_factor"]
    ]
    bounds = [getattr(text, "max_position_embeddings", None), *originals]
    return min((bound for bound in bounds if bound), default=None)


def _longropes(text: PretrainedConfig) -> list[dict[str, Any]]:
    """The settings of LongRoPE: one for all layers, or one per layer type."""
    if hasattr(text, "standardize_rope_params"):
        text.standardize_rope_params()
    rope = getattr(text, "rope_parameters", None) or {}
    return [s for s in (rope, *rope.values()) if isinstance(s, dict) and "long_factor" in s]


def restore_rotary(config: PretrainedConfig) -> None:
    """Undo `fix_rotary`, for the config.json of a trained model."""
    text = config.get_text_config()
    if "published_rope" in vars(text):
        text.rope_parameters = vars(text).pop("published_rope")
