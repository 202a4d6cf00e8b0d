"""Checks a saved model: transformers loads all of it, and it computes what the trained one does."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

import dschat.distributed as dist
from dschat.config.errors import first_line
from dschat.distributed.memory import available_memory
from dschat.models.checkpoint import Checkpoint
from dschat.models.checkpoint_files import CONFIG
from dschat.models.config_files import muted
from dschat.models.heads import LanguageModel, ScoreModel
from dschat.models.packing.model import PackedModel
from dschat.models.packing.rows import pack
from dschat.models.packing.states import by_torch
from dschat.models.training_engine import ModelOrEngine, evaluating

_NUM_TOKENS = 16
_MAX_BYTES = 16 * 2**30  # of weights that are loaded again: some seconds
# Largest mean difference of the values. In 16 bits adapters are rounded when they are merged, and
# a router may choose another expert.
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_16_BIT = 0.25


class SavedModelError(RuntimeError):
    """What was written is not the model that was trained."""


@torch.no_grad()
def probe_values(
    model: ModelOrEngine, config: PretrainedConfig, device: torch.device | None = None
) -> Tensor:
    """Collective under ZeRO-3. Log-probs or scores (M,) fp32 of a few tokens on ``device``, by
    default this rank's.

    ``model`` is a `PackedModel`, perhaps in an engine.
    """
    vocab = config.get_text_config().vocab_size
    ids = [(7 * i + 3) % vocab for i in range(1, _NUM_TOKENS + 1)]
    rows = pack([ids], [range(_NUM_TOKENS - 1)]).to(device or dist.device())
    with evaluating(model):
        values = model(rows)
    return (values[0] if isinstance(values, tuple) else values).float().cpu()


def check_saved(folder: Path, model: PreTrainedModel, expected: Tensor | None) -> None:
    """Raise ``SavedModelError`` unless ``folder`` loads as ``model`` and computes ``expected``.

    ``expected``: of `probe_values`; None compares names and shapes only, as for large models.
    """
    raw = json.loads((folder / CONFIG).read_text("utf-8"))
    loader: Any = getattr(transformers, raw["architectures"][0], type(model))
    with muted(logging.WARNING), torch.random.fork_rng(devices=[]):
        options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        try:
            _, info = loader.from_pretrained(folder, device_map="meta", **options)
        except RuntimeError as error:  # tensors that cannot be fused
            raise SavedModelError(f"{folder}: {first_line(error)}") from error
    for kind, names in info.items():
        if names:
            raise SavedModelError(
                f"{folder}: transformers finds {len(names)} {kind.replace('_', ' ')} in the saved "
                f"model, such as {sorted(map(str, names))[0]}"
            )
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if expected is None or 2 * num_bytes > min(_MAX_BYTES, available_memory() // 2):
        return
    with torch.random.fork_rng(devices=[]), by_torch():
        loaded = _loaded(str(folder), model)
        loaded.check(torch.device("cpu"))
        values = probe_values(loaded, model.config, torch.device("cpu"))
    gap = float((values - expected).abs().mean())
    if not gap <= _TOLERANCE.get(model.dtype, _TOLERANCE_16_BIT):
        raise SavedModelError(
            f"{folder}: the saved model's values differ by {gap:.2g} from the trained model's"
        )


def _loaded(folder: str, model: PreTrainedModel) -> PackedModel:
    """The saved model in fp32 on the CPU, loaded as a later step would."""
    trust = getattr(model, "_auto_class", None) is not None
    saved, longest = Checkpoint(folder, "the saved model", trust), getattr(model, "longest_row", 0)
    if hasattr(model, "score"):
        pad_id = model.config.pad_token_id
        loaded = saved.score_model(torch.float32, pad_id, longest_row=longest)
    else:
        loaded = saved.language_model(torch.float32, longest_row=longest)
    loaded.longest_row = 0  # a short check will do
    return (ScoreModel if hasattr(model, "score") else LanguageModel)(loaded, "off")
