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
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)
from transformers.utils import logging as transformers_logging

import dschat.distributed as dist
from dschat.config import UserError
from dschat.config.errors import first_line
from dschat.models.checkpoint_files import CONFIG, CheckpointFiles
from dschat.models.checkpoint_tensors import (
    FIELD,
    Rest,
    embedding_or_head,
    is_constant,
    is_finite,
    text_keys,
    text_prefix,
)
from dschat.models.config_files import muted
from dschat.models.long_rows import fix_rotary
from dschat.models.quantized import dequantized, finish_loading, loading_options

transformers_logging.disable_progress_bar()  # one bar per file drowns the log

Kind = Literal["lm", "score"]
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


def from_pretrained(
    kind: Kind,
    files: CheckpointFiles,
    config: PretrainedConfig,
    dtype: torch.dtype,
    dropout: float | None,
    attn_implementation: str | None,
    longest_row: int,
    weight_bits: int,
    device: str | None = None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model, and transformers' report of missing, unexpected and reshaped weights.

    ``weight_bits``: quantize the linear layers to so many; 0: do not.
    """
    if dropout is not None:
        set_dropout(config, dropout)
    fix_rotary(config, longest_row)
    source: str | None = files.name
    scores = kind == "score"
    loader: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    if scores and not (score_class(config) or getattr(config, "auto_map", None)):
        raise no_score_head(files, type(config).__name__)
    options: dict[str, Any] = {"trust_remote_code": files.trust_remote_code}
    if scores and files.is_legacy_reward and not is_reward_config(config):
        source, loader = None, score_class(config)
        options = {"state_dict": files.legacy_state_dict(loader.base_model_prefix)}
    is_bounded = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    # NOTE: transformers 5.17 would take sdpa, which ignores the bound.
    if attention := attn_implementation or ("eager" if is_bounded else None):
        options["attn_implementation"] = attention
    if device:
        options["device_map"] = device
    if weight_bits:
        options |= loading_options(weight_bits, dtype)
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
    if weight_bits:
        finish_loading(model, dtype)
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
    is_base: bool,
) -> None:
    """Collective under ZeRO-3. Raise ``UserError`` if weights do not match or are not finite.

    ``is_base``: they are a causal LM's, from which a score model starts.
    """
    may_be_missing, may_be_unused = _OF_A_BASE if is_base else ((), ())
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
        dtype = str(model.dtype).removeprefix("torch.")
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
            yield name, dequantized(parameter).data


def _unused_keys(model: PreTrainedModel, keys: set[str]) -> set[str]:
    """The ``keys`` that the model does not load."""
    prefix = model.base_model_prefix + "."
    tied = getattr(model, "all_tied_weights_keys", None) or ()
    expected = {k.removeprefix(prefix) for k in (*model.state_dict(), *tied)}
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


# -- model kind ------------------------------------------------------------------------------------
#
# Tells from a configuration whether a model generates, scores, or neither.

# In transformers' table of causal LMs, but their logits depend on later tokens.
_NOT_CAUSAL = ("bert-generation", "cpmant", "prophetnet", "reformer", "xlm", "xlnet")

RewardForm = Literal["score", "v_head", "base"]


def is_reward_config(config: PretrainedConfig) -> bool:
    """Whether config.json names a ``...ForSequenceClassification``."""
    return any(a.endswith("ForSequenceClassification") for a in config.architectures or [])


def not_causal_lm(config: PretrainedConfig) -> str | None:
    """The architecture of a model that is not a causal LM; None if it is one."""
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return None
    architectures = config.architectures or []
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    base = MODEL_MAPPING.get(type(config), None)
    if isinstance(base, type):
        known.add(base.__name__)  # saved without a head; loading checks the weights
    # BERT and its relatives attend in both directions, unless configured as decoders.
    masked = MODEL_FOR_MASKED_LM_MAPPING.get(type(config), None) is not None
    bidirectional = masked and not getattr(config, "is_decoder", True)
    is_other = (
        MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) is None
        or (architectures and not known.intersection(architectures))
        or config.is_encoder_decoder
        or bidirectional
        or config.model_type in _NOT_CAUSAL
    )
    return [*architectures, type(config).__name__][0] if is_other else None


def score_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The ``...ForSequenceClassification`` of this architecture; None if there can be none.

    Where transformers has a causal LM only, the class is made and registered with its auto classes,
    in the form that transformers gives to most families: the backbone and a linear ``score``.
    """
    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    causal_lm = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if known is not None or causal_lm is None or type(config) not in MODEL_MAPPING:
        return known
    family = next(base for base in causal_lm.__mro__[1:] if issubclass(base, PreTrainedModel))
    name = re.sub(r"(For\w+|LMHeadModel)$", "ForSequenceClassification", causal_lm.__name__)
    # NOTE: transformers takes a class of another module for custom code, with names of its own.
    fields = {"__module__": causal_lm.__module__, "config_class": type(config)}
    fields["base_model_prefix"] = family.base_model_prefix or "model"
    made = type(name, (GenericForSequenceClassification, family), fields)
    AutoModelForSequenceClassification.register(type(config), made, exist_ok=True)
    return made


def no_score_head(files: CheckpointFiles, class_name: str) -> UserError:
    """The error for an architecture (BERT, T5) without scores per token."""
    return files.error(
        f": {class_name} has no per-token score head; name a model of a causal architecture"
    )
