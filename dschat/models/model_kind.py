"""Determines what a checkpoint is, from its configuration and the headers of its weight files.

No weights load here (except a possibly tied embedding and head, see `has_own_head`), and no Python
code of a checkpoint runs without ``trust_remote_code``.
"""

import json
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)
from transformers.utils import cached_file

from dschat.config import UserError
from dschat.models import hub
from dschat.models.checkpoint_tensors import embedding_or_head, is_constant, is_untied
from dschat.models.config_files import CONFIG, read_config, read_json

WEIGHT_FILES = (  # in the order of transformers' from_pretrained
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Both spellings occur in checkpoints of DeepSpeed-Chat.
LEGACY_PREFIXES = ("rwtransformer.", "rwtranrsformer.")
LEGACY_HEAD = "v_head.weight"
# In transformers' table of causal LMs, but their logits depend on later tokens.
_NOT_CAUSAL = ("bert-generation", "cpmant", "prophetnet", "reformer", "xlm", "xlnet")
IS_MADE = "made_by_dschat"  # attribute of classes that `score_class` makes

RewardForm = Literal["score", "v_head", "base"]


def load_config(name_or_path: str, flag: str, trust_remote_code: bool = False) -> PretrainedConfig:
    """The checkpoint's configuration; of a vision-language model that of its text model.

    Raises:
        UserError: naming ``flag``: not a checkpoint, a LoRA adapter without its base model,
            quantized weights, or an architecture that needs the checkpoint's own code.
    """
    path = Path(name_or_path)
    if os.path.exists(path / "adapter_config.json") and not os.path.exists(path / "config.json"):
        raise UserError(f"{flag} {name_or_path} is a LoRA adapter; {_adapter_remedy(path)}")
    try:
        raw = read_json(name_or_path, CONFIG, flag)
        if raw is not None and "quantization_config" in raw:
            raise UserError(
                f"{flag} {name_or_path} is quantized ({_quantization(raw)}), which neither "
                "training nor generation supports; name the checkpoint it was made from"
            )
        return read_config(name_or_path, flag, trust_remote_code)
    except UserError as error:
        if "trust_remote_code" not in str(error.__cause__):
            raise
        raise UserError(
            f"{flag} {name_or_path} needs its own Python code, which does not run by default: "
            "read it, and pass --trust_remote_code if you trust it"
        ) from error
    except (OSError, ValueError) as error:
        if os.path.isfile(path):
            reason = " is a file; name the folder of a checkpoint"
        elif not os.path.isdir(path):
            reason = hub.missing()
        else:
            reason = ": its config.json is missing; name a folder that save_pretrained wrote"
        raise UserError(f"{flag} {name_or_path}{reason}") from error


def brings_code(name_or_path: str, filename: str = "config.json") -> bool:
    """Whether this JSON file of a checkpoint refers to Python code (``auto_map``)."""
    try:
        file = cached_file(name_or_path, filename, _raise_exceptions_for_missing_entries=False)
        return file is not None and "auto_map" in json.loads(Path(file).read_text("utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def _adapter_remedy(path: Path) -> str:
    """Names the merged model, or how to merge it."""
    if (path.parent / "config.json").exists():
        return f"name {path.parent}, which holds the merged model"
    try:
        base = json.loads((path / "adapter_config.json").read_text("utf-8"))
        base = base["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = "its base model"
    return (
        f"merge it into {base} first: peft's AutoPeftModelForCausalLM.from_pretrained(...)"
        ".merge_and_unload().save_pretrained(...)"
    )


def _quantization(raw: dict[str, Any]) -> str:
    settings = raw["quantization_config"]
    return str(settings.get("quant_method", "?") if isinstance(settings, dict) else settings)


def require_causal_lm(config: PretrainedConfig, name_or_path: str, flag: str) -> None:
    """Raise ``UserError`` unless the checkpoint is a causal language model."""
    architectures = config.architectures or []
    shown = architectures[0] if architectures else type(config).__name__
    if any(a.endswith("ForSequenceClassification") for a in architectures) or (
        os.path.isdir(name_or_path) and is_legacy_reward(name_or_path, flag)
    ):
        raise UserError(
            f"{flag} {name_or_path} is a reward model, which scores and does not generate text; "
            "name a causal LM, such as step 1's folder or the actor of step 3"
        )
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    base = MODEL_MAPPING.get(type(config), None)
    if isinstance(base, type):
        known.add(base.__name__)  # saved without a head; loading checks the weights
    # BERT and its relatives attend in both directions, unless configured as decoders.
    masked = MODEL_FOR_MASKED_LM_MAPPING.get(type(config), None) is not None
    bidirectional = masked and not getattr(config, "is_decoder", True)
    if (
        MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) is None
        or (architectures and not known.intersection(architectures))
        or config.is_encoder_decoder
        or bidirectional
        or config.model_type in _NOT_CAUSAL
    ):
        raise UserError(f"{flag} {name_or_path} is a {shown}; name a causal LM")


def reward_form(config: PretrainedConfig, name_or_path: str, flag: str) -> RewardForm:
    """The form of a checkpoint that a score model loads from.

    "score": ``...ForSequenceClassification``; "v_head": a reward model of DeepSpeed-Chat; "base": a
    causal LM, which needs a new score head.
    """
    if any(a.endswith("ForSequenceClassification") for a in config.architectures or []):
        return "score"
    return "v_head" if is_legacy_reward(name_or_path, flag) else "base"


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
    fields = {"__module__": causal_lm.__module__, "config_class": type(config), IS_MADE: True}
    fields["base_model_prefix"] = family.base_model_prefix or "model"
    made = type(name, (GenericForSequenceClassification, family), fields)
    AutoModelForSequenceClassification.register(type(config), made, exist_ok=True)
    return made


def no_score_head(name_or_path: str, flag: str, class_name: str) -> UserError:
    """The error for an architecture (BERT, T5) without scores per token."""
    return UserError(
        f"{flag} {name_or_path}: {class_name} has no per-token score head; name a model of a "
        "causal architecture"
    )


def is_legacy_reward(name_or_path: str, flag: str) -> bool:
    """Whether DeepSpeed-Chat saved this reward model."""
    return LEGACY_HEAD in checkpoint_keys(name_or_path, flag)


def weight_files(name_or_path: str) -> tuple[list[Path], dict[str, str]]:
    """The weight files, and the index (weight name -> file name) of a sharded checkpoint."""
    for name in WEIGHT_FILES:
        file = cached_file(name_or_path, name, _raise_exceptions_for_missing_entries=False)
        if file is None:
            continue
        if not name.endswith(".json"):
            return [Path(file)], {}
        index = _weight_map(Path(file))
        shards = [cached_file(name_or_path, shard) for shard in sorted(set(index.values()))]
        return [Path(shard) for shard in shards], index
    return [], {}


def _weight_map(file: Path) -> dict[str, str]:
    content = json.loads(file.read_text("utf-8"))
    index = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise ValueError(f"{file.name} has no weight_map of tensors and files")
    return index


def checkpoint_keys(name_or_path: str, flag: str) -> set[str]:
    """Names of all tensors in a checkpoint, from its index or headers.

    Raises:
        UserError: naming ``flag``: an unreadable file, or a pickle that would run code.
    """
    with _reading(name_or_path, flag):
        files, index = weight_files(name_or_path)
        return set(index) or {key for file in files for key in _header(file)}


class Stored(NamedTuple):
    """A tensor's entry in the header of a weight file."""

    shape: tuple[int, ...]
    is_float: bool


def checkpoint_headers(name_or_path: str, flag: str) -> dict[str, Stored]:
    """Name -> header entry of all tensors in a checkpoint. Raises as `checkpoint_keys`."""
    with _reading(name_or_path, flag):
        files, _ = weight_files(name_or_path)
        return {key: stored for file in files for key, stored in _header(file).items()}


def integer_weights(headers: Mapping[str, Stored]) -> list[str]:
    """Sorted names of weights stored as integers or booleans."""
    return sorted(
        key
        for key, stored in headers.items()
        if not (stored.is_float or is_constant(key)) and key.endswith((".weight", ".bias"))
    )


def has_own_head(name_or_path: str, flag: str) -> bool:
    """Whether the stored head differs from the embedding, even if the config ties them.

    Reads both matrices. Raises as `checkpoint_keys`.
    """
    pair: dict[str, torch.Tensor] = {}
    with _reading(name_or_path, flag):
        files, _ = weight_files(name_or_path)
        for file in files:
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as opened:
                    keys = filter(embedding_or_head, opened.keys())
                    pair |= {key: opened.get_tensor(key) for key in keys}
            else:
                pair |= {k: t for k, t in load_bin(file).items() if embedding_or_head(k)}
    return is_untied(pair)


@contextmanager
def _reading(name_or_path: str, flag: str) -> Iterator[None]:
    """Context that turns errors in weight files into a ``UserError``."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, TypeError, SafetensorError, RuntimeError, EOFError) as error:
        reason = next(iter(str(error).split(". Checkout")[0].splitlines()), type(error).__name__)
        raise UserError(
            f"{flag} {name_or_path}: its weights cannot be read: {reason}; copy or download it "
            "again"
        ) from error
    except pickle.UnpicklingError as error:
        raise refused_pickle(name_or_path, flag) from error


def _header(file: Path) -> dict[str, Stored]:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
            return {  # F32, BF16, F8_E4M3 are floats; I8, BOOL are not
                key: Stored(tuple(part.get_shape()), "F" in part.get_dtype())
                for key, part in slices.items()
            }
    state = load_bin(file, "meta")
    if not isinstance(state, dict):
        raise ValueError(f"{file.name} holds a {type(state).__name__}, not a state dict")
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return {key: Stored(tuple(t.shape), t.is_floating_point()) for key, t in tensors.items()}


def load_bin(file: Path, device: str = "cpu") -> dict[str, torch.Tensor]:
    """The tensors of a ``.bin``, memory-mapped if its format allows. Pickled code never runs."""
    try:
        return torch.load(file, map_location=device, weights_only=True, mmap=True)
    except RuntimeError:  # the format before torch 1.6 does not support mmap
        return torch.load(file, map_location=device, weights_only=True)


def refused_pickle(name_or_path: str, flag: str) -> UserError:
    """The error for a ``.bin`` that is damaged or holds more than tensors."""
    return UserError(
        f"{flag} {name_or_path}: its .bin is damaged, or holds more than tensors and would run "
        "code, which is refused; copy it again, or use a safetensors checkpoint"
    )
