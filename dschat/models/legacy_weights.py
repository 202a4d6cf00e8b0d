"""Reward models as DeepSpeed-Chat saved them, read as ours.

Its folder has the base model's config.json and one ``pytorch_model.bin`` with the transformer under
``rwtransformer.`` and the head as ``v_head.weight``. A name or folder comes in; tensors go out
under the names of ``...ForSequenceClassification(num_labels=1)``. Nothing is written.
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
    """The checkpoint's tensors by our names, mapped from the file where its format allows.

    ``prefix`` is the architecture's base-model prefix ("model", "transformer"). Tensors that are
    neither of the transformer nor the head keep their names, for the loader to complain of.

    Raises:
        UserError: naming ``flag``: a file that cannot be read, or that would run code.
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
        state |= {_our_name(name, prefix): tensor for name, tensor in stored.items()}
    return state


def _our_name(name: str, prefix: str) -> str:
    if name == LEGACY_HEAD:
        return "score.weight"
    for theirs in LEGACY_PREFIXES:
        if name.startswith(theirs):
            return f"{prefix}.{name.removeprefix(theirs)}"
    return name
