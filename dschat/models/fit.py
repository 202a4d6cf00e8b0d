"""Whether a checkpoint can do what the flags ask of it, told before any weight is read.

A name, its configuration and knobs come in; nothing goes out, or one line that says which flag asks
for what is not there. The model is made on the meta device, where a weight has a shape and no
bytes. It must not know how weights load or train; call it outside ZeRO-3's scope of loading, in
which a module without memory cannot be made.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from dschat.config import UserError
from dschat.models.config_files import made_of, read_generation_config
from dschat.models.lora import check_rank
from dschat.models.model_kind import checkpoint_headers, integer_weights, reward_form

Kind = Literal["lm", "score"]


def check_fit(
    config: PretrainedConfig,
    name_or_path: str,
    flag: str,
    kind: Kind,
    attn_implementation: str | None = None,
    lora_dim: int = 0,
    lora_modules: Sequence[str] = (),
    lora_flag: str = "--lora_dim",
) -> None:
    """Whether this checkpoint makes a model of ``kind``.

    Args:
        lora_dim: rank of the adapters on ``lora_modules``; 0: there are none.

    Raises:
        UserError: it lacks weights or stores integers for them, the architecture has no such
            attention or modules, or adapters of that rank do not fit into memory.
    """
    headers = checkpoint_headers(name_or_path, flag)
    if not headers:
        raise UserError(
            f"{flag} {name_or_path} holds no weights; name another folder, or save the model with "
            "save_pretrained"
        )
    if integers := integer_weights(headers):
        raise UserError(
            f"{flag} {name_or_path} stores {len(integers)} weights as integers, such as "
            f"{integers[0]}; name the checkpoint in floating point that it was made from"
        )
    if kind == "lm":
        read_generation_config(name_or_path, flag)  # says where answers end
    if getattr(config, "auto_map", None):
        return  # its own code makes it, which loading runs
    model = _empty(config, name_or_path, flag, kind, attn_implementation)
    legacy = kind == "score" and reward_form(config, name_or_path, flag) == "v_head"
    shapes = {key: stored.shape for key, stored in headers.items()}
    missing, other = _differences(model, shapes, "score." if kind == "score" else "\0")
    if other and not legacy:
        raise UserError(
            f"{flag} {name_or_path}: its weights have other shapes than its config.json asks for: "
            f"{other[0]}; copy or download both again"
        )
    if missing and not legacy:
        shown = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        raise UserError(
            f"{flag} {name_or_path} lacks {len(missing)} weights of a {type(model).__name__}: "
            f"{shown}; copy or save it again"
        )
    if lora_dim:
        check_rank(model, lora_dim, lora_modules, lora_flag)


def check_positions(
    config: PretrainedConfig, length: int, name_or_path: str, flags: str, remedy: str
) -> None:
    """Raise ``UserError`` where sequences of ``length`` tokens are longer than the model reads."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise UserError(f"{flags} {length}: {name_or_path} has {positions} positions; {remedy}")


def _empty(
    config: PretrainedConfig,
    name_or_path: str,
    flag: str,
    kind: Kind,
    attn_implementation: str | None,
) -> PreTrainedModel:
    def make(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
        config = copy.deepcopy(config)
        auto_class = AutoModelForCausalLM
        if kind == "score":
            config.num_labels, auto_class = 1, AutoModelForSequenceClassification
        text = config.get_text_config()
        if text.pad_token_id is not None and not 0 <= text.pad_token_id < text.vocab_size:
            text.pad_token_id = config.pad_token_id = None
        with torch.device("meta"):
            return auto_class.from_config(config, **options)

    logging.disable(logging.WARNING)  # its advice is for those who compute with the model
    try:
        model = made_of(config, make, name_or_path, flag)
        if not attn_implementation:
            return model
        return make(config, attn_implementation=attn_implementation)
    except (ValueError, ImportError) as error:
        if isinstance(error, UserError):
            raise
        reason = str(error).splitlines()[0].partition(". ")[0].rstrip(".")
        raise UserError(
            f"--attn_implementation {attn_implementation}: {name_or_path} cannot use it here "
            f"({reason}); sdpa and eager always work"
        ) from error
    finally:
        logging.disable(logging.NOTSET)


def _differences(
    model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]], may_miss: str
) -> tuple[list[str], list[str]]:
    """Names of weights that the model has and ``shapes`` lacks, sorted; then the others that have
    another shape there: "NAME (64, 32) instead of (64, 48)".

    None where weights are made of several on disk: only loading knows how.
    """
    transforms = get_model_conversion_mapping(model)
    if any(isinstance(transform, WeightConverter) for transform in transforms):
        return [], []
    prefix = model.base_model_prefix + "."

    def plain(key: str) -> str:
        for transform in transforms:
            key, _ = transform.rename_source_key(key)
        return key.removeprefix(prefix)

    there = {key.removeprefix(prefix): shape for key, shape in shapes.items()}
    there |= {plain(key): shape for key, shape in shapes.items()}
    for tied, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        pair = (tied.removeprefix(prefix), source.removeprefix(prefix))
        for name, other in (pair, pair[::-1]):
            if other in there:
                there.setdefault(name, there[other])
    missing, different = [], []
    for name, parameter in model.named_parameters():
        shape = there.get(name.removeprefix(prefix))
        if shape is None and not name.startswith(may_miss):
            missing.append(name)
        elif shape is not None and shape != tuple(parameter.shape):
            different.append(f"{name} {shape} instead of {tuple(parameter.shape)}")
    return sorted(missing), different
