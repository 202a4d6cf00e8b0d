"""Reads reward models saved by DeepSpeed-Chat.

Such a folder has the base model's config.json and one ``pytorch_model.bin`` with the transformer
under ``rwtransformer.`` and the head as ``v_head.weight``. The tensors are returned under the names
of ``...ForSequenceClassification(num_labels=1)``. Nothing is written.
"""

import pickle

from torch import Tensor

from dschat.config import UserError
from dschat.models.model_kind import (
    LEGACY_HEAD,
    LEGACY_PREFIXES,
    load_bin,
    refused_pickle,
    weight_files,
)


def legacy_state_dict(name_or_path: str, flag: str, prefix: str) -> dict[str, Tensor]:
    """The checkpoint's tensors under transformers' names, memory-mapped if the format allows.

    ``prefix`` is the architecture's base-model prefix ("model", "transformer"). Any other tensors
    keep their names; the loader reports them as unexpected.

    Raises:
        UserError: naming ``flag``: an unreadable file, or a pickle that would run code.
    """
    files, _ = weight_files(name_or_path)
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            stored = load_bin(file)
        except pickle.UnpicklingError as error:
            raise refused_pickle(name_or_path, flag) from error
        except (RuntimeError, OSError, EOFError, ValueError) as error:
            raise UserError(f"{flag} {name_or_path}: {file.name} cannot be read") from error
        state |= {_current_name(name, prefix): tensor for name, tensor in stored.items()}
    return state


def _current_name(name: str, prefix: str) -> str:
    if name == LEGACY_HEAD:
        return "score.weight"
    for legacy_prefix in LEGACY_PREFIXES:
        if name.startswith(legacy_prefix):
            return f"{prefix}.{name.removeprefix(legacy_prefix)}"
    return name
