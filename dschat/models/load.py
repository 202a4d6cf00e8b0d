"""Loading checkpoints: a causal LM, or a score model, with every missing or unexpected key an
error.

A name or folder comes in, a transformers module goes out. Under ZeRO-3 the caller wraps the call in
`deepspeed_setup.sharded_loading`, and the module arrives in shards; nothing else here knows of
DeepSpeed.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import cached_file

from dschat.config import UserError

_WEIGHT_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)


def load_config(name_or_path: str, flag: str, trust_remote_code: bool = False) -> PretrainedConfig:
    """The checkpoint's configuration; raises ``UserError`` naming ``flag`` where there is none."""
    path = name_or_path
    has_adapter = (Path(path) / "adapter_config.json").exists()
    if has_adapter and not (Path(path) / "config.json").exists():
        raise UserError(
            f"{flag} {name_or_path} is a LoRA adapter; merge it into its base model first"
        )
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        detail = "" if Path(path).is_dir() else ": no such folder, and no such model on the hub"
        reason = detail or ": its config.json is missing or not one that transformers knows"
        raise UserError(f"{flag} {name_or_path}{reason}") from error


def set_dropout(config: PretrainedConfig, dropout: float) -> None:
    """Set every dropout probability that this configuration has (layer dropout too)."""
    for key, value in config.to_dict().items():
        if isinstance(value, float) and any(
            word in key for word in ("dropout", "pdrop", "layerdrop")
        ):
            setattr(config, key, dropout)


def load_causal_lm(
    name_or_path: str,
    flag: str,
    dtype: torch.dtype,
    dropout: float | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """An ``AutoModelForCausalLM`` with exactly the checkpoint's weights, on the CPU or sharded."""
    config = load_config(name_or_path, flag, trust_remote_code)
    model = _from_pretrained(
        AutoModelForCausalLM,
        name_or_path,
        flag,
        config,
        dtype,
        dropout,
        attn_implementation,
        trust_remote_code,
    )
    return _checked(model, name_or_path, flag, may_miss=(), may_ignore=())


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
) -> PreTrainedModel:
    """An ``AutoModelForSequenceClassification(num_labels=1)``.

    ``from_base``: step 2 starting from a language model; then exactly the score head may be missing
    and the LM head unused. ``num_tokens`` is the tokenizer's size: the embedding grows to it where
    it is smaller.
    """
    config = load_config(name_or_path, flag, trust_remote_code)
    if not from_base and "ForSequenceClassification" not in str(config.architectures):
        raise UserError(
            f"{flag} {name_or_path} is not a reward model (its config.json says "
            f"{config.architectures}); train one with step 2 first"
        )
    config.num_labels = 1
    if pad_token_id < config.vocab_size:  # an embedding refuses a padding row that it does not have
        config.pad_token_id = pad_token_id
    model = _from_pretrained(
        AutoModelForSequenceClassification,
        name_or_path,
        flag,
        config,
        dtype,
        dropout,
        attn_implementation,
        trust_remote_code,
    )
    if not hasattr(model, "score"):
        raise UserError(
            f"{flag} {name_or_path}: {type(model).__name__} has no per-token score head"
        )
    may_miss = ("score.",) if from_base else ()
    may_ignore = ("lm_head.", "embed_out.") if from_base else ()
    model = _checked(model, name_or_path, flag, may_miss, may_ignore)
    if num_tokens > config.vocab_size:
        model.resize_token_embeddings(num_tokens, mean_resizing=False)  # nobody reads the new rows
    model.config.pad_token_id = pad_token_id
    return model


def _from_pretrained(
    auto_class: Any,
    name_or_path: str,
    flag: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    dropout: float | None,
    attn_implementation: str | None,
    trust_remote_code: bool,
) -> PreTrainedModel:
    if dropout is not None:
        set_dropout(config, dropout)
    options = {"attn_implementation": attn_implementation} if attn_implementation else {}
    try:
        model, info = auto_class.from_pretrained(
            name_or_path,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # we name them ourselves, in one line
            trust_remote_code=trust_remote_code,
            **options,
        )
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{flag} {name_or_path}: its weights cannot be read: {reason}") from error
    except RuntimeError as error:
        # NOTE: ZeRO-3's loader does not honour ignore_mismatched_sizes.
        if "size mismatch" not in str(error):
            raise
        reason = next(line for line in str(error).splitlines() if "size mismatch" in line).strip()
        raise UserError(f"{flag} {name_or_path}: {reason}") from error
    except ValueError as error:
        if "Unrecognized configuration class" in str(error):
            raise UserError(
                f"{flag} {name_or_path} is no {auto_class.__name__.removeprefix('AutoModelFor')} "
                f"model ({type(config).__name__})"
            ) from error
        raise
    model.config.use_cache = False  # training never reads the cache; generation asks for it
    model.dschat_loading_info = info
    return model


def _checked(
    model: PreTrainedModel,
    name_or_path: str,
    flag: str,
    may_miss: tuple[str, ...],
    may_ignore: tuple[str, ...],
) -> PreTrainedModel:
    info = model.__dict__.pop("dschat_loading_info")
    missing = {k for k in info["missing_keys"] if not k.startswith(may_miss or ("\0",))}
    unexpected = set(info["unexpected_keys"])
    if is_deepspeed_zero3_enabled():
        unexpected = _unexpected_keys(model, name_or_path)
    unexpected = {k for k in unexpected if not k.startswith(may_ignore or ("\0",))}
    reshaped = {f"{name} {tuple(on_disk)}" for name, on_disk, _ in info["mismatched_keys"]}
    faults = (("lacks", missing), ("has unexpected", unexpected), ("has of other shapes", reshaped))
    for what, keys in faults:
        if keys:
            shown = ", ".join(sorted(keys)[:3]) + (" ..." if len(keys) > 3 else "")
            raise UserError(
                f"{flag} {name_or_path} {what} {len(keys)} weights of a {type(model).__name__}: "
                f"{shown}"
            )
    return model


def _unexpected_keys(model: PreTrainedModel, path: str) -> set[str]:
    """Keys on disk that the model has no place for; under ZeRO-3 transformers reports none."""
    prefix = model.base_model_prefix + "."
    ignored = tuple(model._keys_to_ignore_on_load_unexpected or ())
    wanted = {k.removeprefix(prefix) for k in model.state_dict()}
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    wanted |= {k.removeprefix(prefix) for k in tied}
    renamings = get_model_conversion_mapping(model)

    def current(key: str) -> str:
        """What transformers 5 calls the tensor (GPT-NeoX's head is embed_out on disk)."""
        for renaming in renamings:
            key, _ = renaming.rename_source_key(key)
        return key

    return {
        key
        for key in checkpoint_keys(path)
        if not {key.removeprefix(prefix), current(key).removeprefix(prefix)} & wanted
        and not any(re.search(pattern, key) for pattern in ignored)
    }


def checkpoint_keys(path: str) -> set[str]:
    """Names of all tensors in a checkpoint, from its index or headers, without the weights."""
    for name in _WEIGHT_FILES:
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        if file is None:
            continue
        if name.endswith(".json"):
            return set(json.loads(Path(file).read_text())["weight_map"])
        if name.endswith(".safetensors"):
            with safe_open(file, framework="pt") as opened:
                return set(opened.keys())
        return set(torch.load(file, map_location="meta", weights_only=True, mmap=True))
    return set()


def load_generation_config(name: str) -> GenerationConfig | None:
    """The checkpoint's generation config; None where it has none."""
    try:
        return GenerationConfig.from_pretrained(name)
    except OSError:
        return None
