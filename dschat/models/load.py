"""Loads causal LMs and score models; a missing or unexpected weight is an error.

Under ZeRO-3 the caller wraps the call in `sharded_loading` of `dschat.runtime.deepspeed_engine`,
and the parameters are sharded as they load.
"""

import copy
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
from dschat.config import UserError
from dschat.config.errors import first_line
from dschat.models.checkpoint_tensors import embedding_or_head, is_constant, is_finite
from dschat.models.config_files import CONFIG, muted, read_json
from dschat.models.legacy_weights import legacy_state_dict
from dschat.models.model_kind import (
    checkpoint_keys,
    has_own_head,
    load_config,
    no_score_head,
    refused_pickle,
    require_causal_lm,
    reward_form,
    score_class,
)
from dschat.models.row_length import fix_rotary
from dschat.models.text_part import FIELD, Rest, text_keys, text_prefix
from dschat.models.vocabulary import drop_pad, embedding_rows, grow_embeddings

transformers_logging.disable_progress_bar()  # one bar per file drowns the log

Kind = Literal["lm", "score"]
# Families whose row of the pad id transformers zeroes at every load: saved without one.
_ZEROES_PAD_ROW = ("youtu",)
# Prefixes of what a score model that starts from a causal LM may lack, and may leave.
_OF_A_BASE = ("score.",), ("lm_head.", "embed_out.")


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


def load_causal_lm(
    name_or_path: str,
    flag: str,
    dtype: torch.dtype,
    dropout: float | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    num_tokens: int = 0,
    longest_row: int = 0,
) -> PreTrainedModel:
    """An ``AutoModelForCausalLM`` with exactly the checkpoint's weights, on the CPU or sharded.

    ``num_tokens``: size of the tokenizer; embedding and head grow to it if they have fewer rows.
    ``longest_row``: tokens of the longest row that the run's flags allow; 0: not known.

    Raises:
        UserError: naming ``flag``: not a causal LM, or unreadable, missing, unexpected, reshaped or
            non-finite weights.
    """
    config = load_config(name_or_path, flag, trust_remote_code)
    require_causal_lm(config, name_or_path, flag)
    pad_token_id = drop_pad(config)
    tied = getattr(config.get_text_config(), "tie_word_embeddings", False)
    if tied and has_own_head(name_or_path, flag):
        # NOTE: under ZeRO-3 transformers cannot compare the two, and would tie them.
        config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = False
    options = dtype, dropout, attn_implementation, trust_remote_code, longest_row
    model, info = _from_pretrained(AutoModelForCausalLM, name_or_path, flag, config, *options)
    _check(model, info, name_or_path, flag)
    model.rest = info["rest"]
    grow_embeddings(model, num_tokens)
    known = pad_token_id is not None and 0 <= pad_token_id < embedding_rows(model.config)
    if known and config.model_type not in _ZEROES_PAD_ROW:
        model.config.pad_token_id = pad_token_id
    return model


def load_score_backbone(
    name_or_path: str,
    flag: str,
    dtype: torch.dtype,
    from_base: bool,
    pad_token_id: int,
    num_tokens: int,
    dropout: float | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    longest_row: int = 0,
) -> PreTrainedModel:
    """An ``AutoModelForSequenceClassification(num_labels=1)``.

    ``from_base``: step 2 may start from a causal LM; then the score head may be missing and the LM
    head is unused. ``num_tokens``: size of the tokenizer; the embedding grows to it if it has fewer
    rows. ``longest_row``: see `load_causal_lm`. Reads reward models of DeepSpeed-Chat too.

    Raises:
        UserError: naming ``flag``; as `load_causal_lm`, or not a reward model.
    """
    config = load_config(name_or_path, flag, trust_remote_code)
    form = reward_form(config, name_or_path, flag)
    if form == "base" and not from_base:
        raise not_a_reward_model(name_or_path, flag, config)
    config.num_labels = 1
    drop_pad(config)
    options = dtype, dropout, attn_implementation, trust_remote_code, longest_row, form == "v_head"
    auto_class = AutoModelForSequenceClassification
    model, info = _from_pretrained(auto_class, name_or_path, flag, config, *options)
    if not hasattr(model, "score"):
        raise no_score_head(name_or_path, flag, type(model).__name__)
    if form == "base":
        _check(model, info, name_or_path, flag, *_OF_A_BASE)
    else:
        _check(model, info, name_or_path, flag)
    grow_embeddings(model, num_tokens)
    model.config.pad_token_id = pad_token_id
    return model


def load_shapes(
    config: PretrainedConfig,
    name_or_path: str,
    flag: str,
    kind: Kind,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """The model of ``config`` on the meta device, without memory, from the headers of the weight
    files. NOTE: call it outside ZeRO-3's loading context.

    Raises:
        UserError: naming ``flag``: no per-token score head; missing, unexpected or reshaped
            weights.
    """
    config, auto_class, form = copy.deepcopy(config), AutoModelForCausalLM, None
    if kind == "score":
        config.num_labels, auto_class = 1, AutoModelForSequenceClassification
        form = reward_form(config, name_or_path, flag)
    drop_pad(config)
    options = torch.float32, None, attn_implementation, False, 0, form == "v_head", "meta"
    model, info = _from_pretrained(auto_class, name_or_path, flag, config, *options)
    if kind == "score" and (config.is_encoder_decoder or not hasattr(model, "score")):
        raise no_score_head(name_or_path, flag, type(model).__name__)
    _check(model, info, name_or_path, flag, *(_OF_A_BASE if form == "base" else ()))
    return model


def not_a_reward_model(name_or_path: str, flag: str, config: PretrainedConfig) -> UserError:
    """The error for a causal LM in place of a reward model."""
    return UserError(
        f"{flag} {name_or_path} is not a reward model (its config.json says "
        f"{config.architectures}); train one with step 2 first"
    )


def _from_pretrained(
    auto_class: type[AutoModelForCausalLM] | type[AutoModelForSequenceClassification],
    name_or_path: str,
    flag: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    dropout: float | None,
    attn_implementation: str | None,
    trust_remote_code: bool,
    longest_row: int,
    legacy: bool = False,
    device: str | None = None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model, and transformers' report of missing, unexpected and reshaped weights."""
    if dropout is not None:
        set_dropout(config, dropout)
    fix_rotary(config, longest_row)
    source: str | None = name_or_path
    loader: Any = auto_class
    known = auto_class is AutoModelForCausalLM or score_class(config)
    if not known and not getattr(config, "auto_map", None):
        raise no_score_head(name_or_path, flag, type(config).__name__)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if legacy:
        source, loader = None, score_class(config)
        options = {"state_dict": legacy_state_dict(name_or_path, flag, loader.base_model_prefix)}
    if attn_implementation:
        options["attn_implementation"] = attn_implementation
    if device:
        options["device_map"] = device
    keys = set(options.get("state_dict") or checkpoint_keys(name_or_path, flag))
    prefix, plain = text_prefix(keys)
    if prefix:
        options["key_mapping"] = {"^" + re.escape(prefix): plain}
    try:
        with muted(logging.WARNING):  # `_check` reports in one line what its table says
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
        raise UserError(f"{flag} {name_or_path}: its weights cannot be read: {reason}") from error
    except pickle.UnpicklingError as error:
        raise refused_pickle(name_or_path, flag) from error
    except (IndexError, RuntimeError, ValueError) as error:
        # NOTE: ZeRO-3's loader does not honour ignore_mismatched_sizes.
        if fault := next((s for s in str(error).splitlines() if "size mismatch" in s), None):
            raise UserError(f"{flag} {name_or_path}: {fault.strip()}") from error
        # It initializes and splits by shapes, which shards do not have.
        by_shape = not isinstance(error, RuntimeError) or "split_with_sizes" in str(error)
        if not (by_shape and is_deepspeed_zero3_enabled()):
            raise
        raise UserError(
            f"{flag} {name_or_path}: transformers cannot load this family in shards "
            f"({first_line(error.__cause__ or error)}); use ZeRO stage 2 or less"
        ) from error
    if dropout == 0.0:
        silence_routers(model)
    model.longest_row = longest_row  # `PackedModel.check` reads it
    model.config.use_cache = False  # training does not read the cache; generation enables it
    others = _not_loaded(model, info, keys, name_or_path, flag)
    info["unexpected_keys"] = set(info["unexpected_keys"]) - others
    info["rest"] = Rest(name_or_path, (prefix, plain), frozenset(others))
    # NOTE: a save reverts what loading does to the family's own names, not to those found here.
    model._weight_conversions = None
    return model, info


def _not_loaded(
    model: PreTrainedModel, info: dict[str, Any], keys: set[str], name_or_path: str, flag: str
) -> set[str]:
    """Names of a checkpoint's tensors that are no part of ``model`` by design.

    Under ZeRO-3, where transformers does not, it also puts unexpected ones into ``info``.
    """
    part = text_keys(keys)
    others = keys - set(part.values())
    if FIELD in (read_json(name_or_path, CONFIG, flag) or {}):
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


def _check(
    model: PreTrainedModel,
    info: dict[str, Any],
    name_or_path: str,
    flag: str,
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
            raise UserError(
                f"{flag} {name_or_path} {problem} {len(keys)} weights of a {type(model).__name__}: "
                f"{shown}; {remedy} again"
            )
    if model.device.type == "meta":
        return
    not_finite = [name for name, weight in _local_weights(model) if not is_finite(weight)]
    # NOTE: under ZeRO-3 a rank sees only its shards, and all ranks must raise together.
    ranks = dist.gather_objects(not_finite) if is_deepspeed_zero3_enabled() else [not_finite]
    if names := sorted(set().union(*ranks)):
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        raise UserError(
            f"{flag} {name_or_path} has values that are NaN or infinite (in {dtype}) in "
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
