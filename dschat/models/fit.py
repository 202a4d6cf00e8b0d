"""Whether a checkpoint can do what the flags ask of it, told before any weight is read.

A name, its configuration and knobs come in; nothing goes out, or one line that says which flag asks
for what is not there. The model is made on the meta device, where a weight has a shape and no
bytes. It must not know how weights load or train; call it outside ZeRO-3's scope of loading, in
which a module without memory cannot be made.
"""

import copy
import logging
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from dschat.cli import did_you_mean
from dschat.config import UserError
from dschat.models.kind import checkpoint_keys, reward_form

Kind = Literal["lm", "score"]


def check_fit(
    config: PretrainedConfig,
    name_or_path: str,
    flag: str,
    kind: Kind,
    attn_implementation: str | None = None,
    lora_modules: Sequence[str] = (),
    lora_flag: str = "--lora_modules",
) -> None:
    """Whether this checkpoint makes a model of ``kind``.

    Args:
        lora_modules: what adapters are put on; empty without LoRA.

    Raises:
        UserError: it lacks weights, the architecture has no such attention, or no such modules.
    """
    keys = checkpoint_keys(name_or_path, flag)
    if not keys:
        raise UserError(
            f"{flag} {name_or_path} holds no weights; name another folder, or save the model with "
            "save_pretrained"
        )
    if getattr(config, "auto_map", None):
        return  # its own code makes it, which loading runs
    model = _empty(config, name_or_path, kind, attn_implementation)
    missing = _missing(model, keys, may_miss="score." if kind == "score" else "\0")
    if missing and (kind == "lm" or reward_form(config, name_or_path, flag) != "v_head"):
        shown = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        raise UserError(
            f"{flag} {name_or_path} lacks {len(missing)} weights of a {type(model).__name__}: "
            f"{shown}; copy or save it again"
        )
    _check_modules(model, lora_modules, lora_flag)


def check_positions(
    config: PretrainedConfig, length: int, name_or_path: str, flags: str, remedy: str
) -> None:
    """Raise ``UserError`` where sequences of ``length`` tokens are longer than the model reads."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise UserError(f"{flags} {length}: {name_or_path} has {positions} positions; {remedy}")


def _empty(
    config: PretrainedConfig, name_or_path: str, kind: Kind, attn_implementation: str | None
) -> PreTrainedModel:
    config = copy.deepcopy(config)
    auto_class = AutoModelForCausalLM
    if kind == "score":
        config.num_labels, auto_class = 1, AutoModelForSequenceClassification
    text = config.get_text_config()
    if text.pad_token_id is not None and not 0 <= text.pad_token_id < text.vocab_size:
        text.pad_token_id = config.pad_token_id = None
    options = {"attn_implementation": attn_implementation} if attn_implementation else {}
    logging.disable(logging.WARNING)  # its advice is for those who compute with the model
    try:
        with torch.device("meta"):
            return auto_class.from_config(config, **options)
    except (ValueError, ImportError) as error:
        if not attn_implementation:
            raise
        reason = str(error).splitlines()[0].partition(". ")[0].rstrip(".")
        raise UserError(
            f"--attn_implementation {attn_implementation}: {name_or_path} cannot use it here "
            f"({reason}); sdpa and eager always work"
        ) from error
    finally:
        logging.disable(logging.NOTSET)


def _missing(model: PreTrainedModel, keys: set[str], may_miss: str) -> list[str]:
    """Names of weights that the model has and ``keys`` lacks, sorted.

    None where weights are made of several on disk: only loading knows how.
    """
    transforms = get_model_conversion_mapping(model)
    if any(isinstance(transform, WeightConverter) for transform in transforms):
        return []
    prefix = model.base_model_prefix + "."

    def plain(key: str) -> str:
        for transform in transforms:
            key, _ = transform.rename_source_key(key)
        return key.removeprefix(prefix)

    there = {plain(key) for key in keys} | {key.removeprefix(prefix) for key in keys}
    for tied, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        pair = {tied.removeprefix(prefix), source.removeprefix(prefix)}
        there |= pair if pair & there else set()
    return sorted(
        name
        for name, _ in model.named_parameters()
        if name.removeprefix(prefix) not in there and not name.startswith(may_miss)
    )


def _check_modules(model: nn.Module, modules: Sequence[str], flag: str) -> None:
    """PEFT puts adapters on every module whose name is, or ends in, one of these."""
    names = {name for name, _ in model.named_modules() if name}
    for wanted in modules:
        if wanted == "all-linear" or any(f".{name}".endswith(f".{wanted}") for name in names):
            continue
        linear = {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        }
        raise UserError(
            f"{flag} {wanted}: {type(model).__name__} has no such module"
            f"{did_you_mean(wanted, linear)}; it has {', '.join(sorted(linear))}, and all-linear "
            "means all of them"
        )
