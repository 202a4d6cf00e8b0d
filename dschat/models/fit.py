"""Checks a checkpoint against the flags before any weights load.

Builds the model on the meta device and compares its parameters with the headers of the weight
files. NOTE: call it outside ZeRO-3's loading context, in which modules cannot be built on the meta
device.
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
from dschat.models.config_files import build_from, muted, read_generation_config
from dschat.models.lora import check_rank
from dschat.models.model_kind import checkpoint_headers, integer_weights, reward_form, score_class
from dschat.models.packing.model import Packing, cannot_pack, packing_problem
from dschat.models.text_part import text_keys
from dschat.models.vocabulary import drop_pad

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
    packing: Packing = "auto",
) -> None:
    """Raise ``UserError`` unless this checkpoint loads as a model of ``kind``.

    Args:
        lora_dim: rank of the adapters on ``lora_modules``; 0: no adapters.

    Raises:
        UserError: missing, reshaped or integer weights, an attention implementation, packing or
            LoRA modules that the architecture lacks, or adapters that exceed the memory.
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
            f"{integers[0]}; name the floating-point checkpoint that it was made from"
        )
    if kind == "lm":
        read_generation_config(name_or_path, flag)  # has the EOS ids
    if getattr(config, "auto_map", None):
        return  # only its own code can build it, which loading runs
    model = _meta_model(config, name_or_path, flag, kind, attn_implementation)
    if packing == "on" and (problem := packing_problem(model)):
        raise cannot_pack(model, problem)
    legacy = kind == "score" and reward_form(config, name_or_path, flag) == "v_head"
    shapes = {name: headers[key].shape for name, key in text_keys(headers).items()}
    missing, reshaped = _differences(model, shapes, "score." if kind == "score" else "\0")
    if reshaped and not legacy:
        raise UserError(
            f"{flag} {name_or_path}: its weights have other shapes than its config.json asks for: "
            f"{reshaped[0]}; copy or download both again"
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
    """Raise ``UserError`` if ``length`` tokens exceed the model's positions, or Doge's window."""
    text, limits = config.get_text_config(), ("max_position_embeddings", "keep_window_size")
    positions = min(filter(None, (getattr(text, limit, None) for limit in limits)), default=None)
    if positions is not None and length > positions:
        raise UserError(f"{flags} {length}: {name_or_path} has {positions} positions; {remedy}")


def _meta_model(
    config: PretrainedConfig,
    name_or_path: str,
    flag: str,
    kind: Kind,
    attn_implementation: str | None,
) -> PreTrainedModel:
    """The model on the meta device: shapes without memory."""

    def build(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
        config = copy.deepcopy(config)
        auto_class = AutoModelForCausalLM
        if kind == "score":
            config.num_labels, auto_class = 1, AutoModelForSequenceClassification
            score_class(config)
        drop_pad(config)
        with torch.device("meta"):
            return auto_class.from_config(config, **options)

    try:
        with muted(logging.WARNING):  # its advice concerns models that compute
            model = build_from(config, build, name_or_path, flag)
            if not attn_implementation:
                return model
            return build(config, attn_implementation=attn_implementation)
    except (ValueError, ImportError) as error:
        if isinstance(error, UserError):
            raise
        reason = str(error).splitlines()[0].partition(". ")[0].rstrip(".")
        raise UserError(
            f"--attn_implementation {attn_implementation}: {name_or_path} cannot use it here "
            f"({reason}); sdpa and eager always work"
        ) from error


def _differences(
    model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]], may_miss: str
) -> tuple[list[str], list[str]]:
    """Sorted names of the model's weights that ``shapes`` lacks, and a line for each one with
    another shape: "NAME (64, 32) instead of (64, 48)".

    Both are empty if loading fuses or splits tensors: then names on disk cannot be compared.
    """
    transforms = get_model_conversion_mapping(model)
    if any(isinstance(transform, WeightConverter) for transform in transforms):
        return [], []
    prefix = model.base_model_prefix + "."

    def plain(key: str) -> str:
        for transform in transforms:
            key, _ = transform.rename_source_key(key)
        return key.removeprefix(prefix)

    stored = {key.removeprefix(prefix): shape for key, shape in shapes.items()}
    stored |= {plain(key): shape for key, shape in shapes.items()}
    for tied, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        pair = (tied.removeprefix(prefix), source.removeprefix(prefix))
        for name, other in (pair, pair[::-1]):
            if other in stored:
                stored.setdefault(name, stored[other])
    missing, reshaped = [], []
    for name, parameter in model.named_parameters():
        shape = stored.get(name.removeprefix(prefix))
        if shape is None and not name.startswith(may_miss):
            missing.append(name)
        elif shape is not None and shape != tuple(parameter.shape):
            reshaped.append(f"{name} {shape} instead of {tuple(parameter.shape)}")
    return sorted(missing), reshaped
