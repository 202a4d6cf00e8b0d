"""Loads weights into models of transformers; a missing or unexpected weight is an error.

Under ZeRO-3 the caller wraps the call in `sharded_loading` of `dschat.runtime.deepspeed_engine`,
and the parameters are sharded as they load.
"""

import logging
import pickle
import re
from collections.abc import Iterator
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging as transformers_logging

import dschat.distributed as dist
from dschat.config.errors import first_line
from dschat.models.checkpoint_files import CONFIG, CheckpointFiles
from dschat.models.checkpoint_tensors import embedding_or_head, is_constant, is_finite
from dschat.models.config_files import muted
from dschat.models.model_kind import is_reward_config, no_score_head, score_class
from dschat.models.row_length import fix_rotary
from dschat.models.text_part import FIELD, Rest, text_keys, text_prefix

transformers_logging.disable_progress_bar()  # one bar per file drowns the log

Kind = Literal["lm", "score"]


def set_dropout(config: PretrainedConfig, dropout: float) -> None:
    """Set every dropout probability of this configuration and those inside it, layer dropout
    included.
    """
    for key, value in vars(config).copy().items():
        if isinstance(value, PretrainedConfig):
            set_dropout(value, dropout)
        elif isinstance(value, float) and any(
            word in key for word in ("dropout", "pdrop", "layerdrop")
        ):
            setattr(config, key, dropout)


def silence_routers(model: nn.Module) -> None:
    """Let routers of experts that draw noise in training mode compute what they do in evaluation.

    Their settings stay: PhiMoE's jitter is also a threshold of its routing.
    """

    def leave_training(router: nn.Module, _: Any) -> None:
        router.training = False

    for module in model.modules():
        if any("jitter" in name for name in vars(module)):
            module.register_forward_pre_hook(leave_training)


def from_pretrained(
    auto_class: type[AutoModelForCausalLM] | type[AutoModelForSequenceClassification],
    files: CheckpointFiles,
    config: PretrainedConfig,
    dtype: torch.dtype,
    dropout: float | None,
    attn_implementation: str | None,
    longest_row: int,
    device: str | None = None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model, and transformers' report of missing, unexpected and reshaped weights."""
    if dropout is not None:
        set_dropout(config, dropout)
    fix_rotary(config, longest_row)
    source: str | None = files.name
    loader: Any = auto_class
    scores = auto_class is AutoModelForSequenceClassification
    if scores and not (score_class(config) or getattr(config, "auto_map", None)):
        raise no_score_head(files, type(config).__name__)
    options: dict[str, Any] = {"trust_remote_code": files.trust_remote_code}
    if scores and files.is_legacy_reward and not is_reward_config(config):
        source, loader = None, score_class(config)
        options = {"state_dict": files.legacy_state_dict(loader.base_model_prefix)}
    if attn_implementation:
        options["attn_implementation"] = attn_implementation
    if device:
        options["device_map"] = device
    keys = set(options.get("state_dict") or files.keys)
    prefix, plain = text_prefix(keys)
    if prefix:
        options["key_mapping"] = {"^" + re.escape(prefix): plain}
    try:
        with muted(logging.WARNING):  # `check_weights` reports in one line what its table says
            model, info = loader.from_pretrained(
                source,
                config=config,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise files.error(f": its weights cannot be read: {reason}") from error
    except pickle.UnpicklingError as error:
        raise files.refused_pickle("weights file", error) from error
    except (IndexError, RuntimeError, ValueError) as error:
        # NOTE: ZeRO-3's loader does not honour ignore_mismatched_sizes.
        if fault := next((s for s in str(error).splitlines() if "size mismatch" in s), None):
            raise files.error(f": {fault.strip()}") from error
        # It initializes and splits by shapes, which shards do not have.
        by_shape = not isinstance(error, RuntimeError) or "split_with_sizes" in str(error)
        if not (by_shape and is_deepspeed_zero3_enabled()):
            raise
        raise files.error(
            ": transformers cannot load this family in shards "
            f"({first_line(error.__cause__ or error)}); use ZeRO stage 2 or less"
        ) from error
    if dropout == 0.0:
        silence_routers(model)
    model.longest_row = longest_row  # `PackedModel.check` reads it
    model.config.use_cache = False  # training does not read the cache; generation enables it
    others = _not_loaded(model, info, keys, files)
    info["unexpected_keys"] = set(info["unexpected_keys"]) - others
    info["rest"] = Rest(files.name, (prefix, plain), frozenset(others))
    # NOTE: a save reverts what loading does to the family's own names, not to those found here.
    model._weight_conversions = None
    return model, info


def _not_loaded(
    model: PreTrainedModel, info: dict[str, Any], keys: set[str], files: CheckpointFiles
) -> set[str]:
    """Names of a checkpoint's tensors that are no part of ``model`` by design.

    Under ZeRO-3, where transformers does not, it also puts unexpected ones into ``info``.
    """
    part = text_keys(keys)
    others = keys - set(part.values())
    if FIELD in (files.json(CONFIG) or {}):
        own = {name.split(".")[0] for name in model.state_dict()}
        others |= {key for key in part if key.split(".")[0] not in own}
    patterns = tuple(model._keys_to_ignore_on_load_unexpected or ())
    if patterns or is_deepspeed_zero3_enabled():
        unused = _unused_keys(model, set(part))
        passed = {key for key in unused if any(re.search(pattern, key) for pattern in patterns)}
        others |= {k for k in passed if not (is_constant(k) or embedding_or_head(k))}
        if is_deepspeed_zero3_enabled():
            info["unexpected_keys"] = unused - passed
    return others


def check_weights(
    model: PreTrainedModel,
    info: dict[str, Any],
    files: CheckpointFiles,
    may_be_missing: tuple[str, ...] = (),
    may_be_unused: tuple[str, ...] = (),
) -> None:
    """Collective under ZeRO-3. Raise ``UserError`` if weights do not match or are not finite.

    ``may_be_missing`` and ``may_be_unused`` are prefixes of keys.
    """
    missing = {k for k in info["missing_keys"] if not k.startswith(may_be_missing)}
    unexpected = {
        k for k in info["unexpected_keys"] if not (is_constant(k) or k.startswith(may_be_unused))
    }
    reshaped = {
        f"{name} {tuple(on_disk)} instead of {tuple(wanted)}"
        for name, on_disk, wanted in info["mismatched_keys"]
    }
    for problem, keys, remedy in (
        ("has other shapes than its config.json asks for:", reshaped, "copy or download both"),
        ("lacks", missing, "copy or save it"),
        ("has unexpected", unexpected, "copy or save it"),
    ):
        if keys:
            shown = ", ".join(sorted(keys)[:3]) + (" ..." if len(keys) > 3 else "")
            raise files.error(
                f" {problem} {len(keys)} weights of a {type(model).__name__}: "
                f"{shown}; {remedy} again"
            )
    if model.device.type == "meta":
        return
    not_finite = [name for name, weight in _local_weights(model) if not is_finite(weight)]
    # NOTE: under ZeRO-3 a rank sees only its shards, and all ranks must raise together.
    ranks = dist.gather_objects(not_finite) if is_deepspeed_zero3_enabled() else [not_finite]
    if names := sorted(set().union(*ranks)):
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        raise files.error(
            f" has values that are NaN or infinite (in {dtype}) in "
            f"{len(names)} weights, such as {names[0]}; copy it again, or name a model from before "
            "it diverged"
        )


def _local_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter, or this rank's shard of it without padding."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_tensor"):
            shard = parameter.ds_tensor.data.view(-1)
            rest = parameter.ds_numel - dist.rank() * shard.numel()
            yield name, shard[: max(0, rest)]
        else:
            yield name, parameter.data


def _unused_keys(model: PreTrainedModel, keys: set[str]) -> set[str]:
    """Those of ``keys`` that the model does not load."""
    prefix = model.base_model_prefix + "."
    expected = {k.removeprefix(prefix) for k in model.state_dict()}
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    expected |= {k.removeprefix(prefix) for k in tied}
    renamings = get_model_conversion_mapping(model)

    def current(key: str) -> str:
        """transformers 5's name of the tensor (GPT-NeoX's head is embed_out on disk)."""
        for renaming in renamings:
            key, _ = renaming.rename_source_key(key)
        return key

    return {
        key
        for key in keys
        if not {key.removeprefix(prefix), current(key).removeprefix(prefix)} & expected
    }
