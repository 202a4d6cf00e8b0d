"""What a model computes differently once rows are longer than one of its sizes.

A row's numbers must depend on the row alone, so they follow from the longest row that a run's flags
allow, never from the rows beside it.
"""

import copy
import logging
import re

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
    if hasattr(text, "standardize_rope_params"):
        text.standardize_rope_params()
    rope = getattr(text, "rope_parameters", None) or {}
    for settings in (rope, *rope.values()):  # one for all layers, or one per layer type
        if not isinstance(settings, dict) or "long_factor" not in settings:
            continue
        original = settings["original_max_position_embeddings"]
        if longest_row > original:
            text.published_rope = vars(text).get("published_rope", copy.deepcopy(rope))
            for long in [key for key in settings if key.startswith("long_")]:
                settings[long.replace("long_", "short_")] = settings[long]
            logger.info(
                "rows of up to %d tokens exceed LongRoPE's original %d positions: every row gets "
                "the long factors; shorter limits would keep the short ones",
                *(longest_row, original),
            )


def restore_rotary(config: PretrainedConfig) -> None:
    """Undo `fix_rotary`, for the config.json of a trained model."""
    text = config.get_text_config()
    if "published_rope" in vars(text):
        text.rope_parameters = vars(text).pop("published_rope")
