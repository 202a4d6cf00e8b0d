"""Validates config.json and generation_config.json; an invalid field is a one-line error naming it.

transformers checks some fields when it reads a configuration, others when it builds the model, and
many never. It raises any exception: AttributeError, ZeroDivisionError, IndexError. So every
exception here is blamed on the file. No weights are read.
"""

import json
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from dschat.config import UserError
from dschat.distributed.host_checks import shortage
from dschat.models.checkpoint_files import CONFIG, GENERATION_CONFIG, CheckpointFiles
from dschat.models.checkpoint_tensors import text_part

Fault = tuple[str, Any, str]  # a field, its value, the reason why it is invalid

# transformers' common field names; `attribute_map` translates those of a model family.
_SIZES = {  # upper bounds, far above any model, against damaged files
    "vocab_size": 100_000_000,
    "hidden_size": 1_000_000,
    "intermediate_size": 10_000_000,
    "num_hidden_layers": 2_000,  # building a million layers takes hours
    "num_attention_heads": 100_000,
    "num_key_value_heads": 100_000,
    "head_dim": 100_000,
    "max_position_embeddings": 10_000_000_000,
}
_BOOLEANS = ("is_causal", "is_decoder", "output_hidden_states", "output_attentions", "return_dict")
_ROPE = {"rope_theta": math.inf, "factor": math.inf, "partial_rotary_factor": 1}
_MAX_LABELS = 10_000  # transformers builds a table of their names


def read_config(files: CheckpointFiles, raw: dict[str, Any]) -> PretrainedConfig:
    """The configuration of a checkpoint, of its text model if that is a part; sizes validated.
    ``raw``: its config.json.

    Raises:
        UserError: naming the invalid field.
    """
    for fault in _raw_faults(raw):
        raise _wrong_field(files, CONFIG, *fault)
    with blamed_on(files, CONFIG):
        trust = files.trust_remote_code
        config = AutoConfig.from_pretrained(files.name, trust_remote_code=trust)
        text = config.get_text_config()  # ValueError: several, not a text-only model
    if not isinstance(text, PretrainedConfig):
        reason = f"not of a {type(config).__name__}"
        raise _wrong_field(files, CONFIG, "text_config", text, reason)
    for fault in _config_faults(text):
        raise _wrong_field(files, CONFIG, *fault)
    with blamed_on(files, CONFIG):
        return text_part(config, raw)


def read_generation_config(files: CheckpointFiles) -> GenerationConfig | None:
    """The checkpoint's generation config; None if it has none.

    Raises:
        UserError: naming the invalid field. transformers ignores a damaged file, and generation
            would miss the checkpoint's EOS ids.
    """
    raw = files.json(GENERATION_CONFIG)
    if raw is None:
        return None
    ids = raw.get("eos_token_id")
    if any(type(i) is not int for i in (ids if isinstance(ids, list) else [ids]) if i is not None):
        reason = "not a token id or a list of them"
        raise _wrong_field(files, GENERATION_CONFIG, "eos_token_id", ids, reason)
    with blamed_on(files, GENERATION_CONFIG):
        return GenerationConfig.from_dict(raw)


@contextmanager
def blamed_on(files: CheckpointFiles, filename: str = CONFIG) -> Iterator[None]:
    """Context in which every exception is a ``UserError`` about this file of ``files``."""
    with muted(logging.ERROR):  # the error raised here says it in one line
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if shortage(error):  # of memory, threads, open files: not the file's fault
                raise
            raise files.file_error(filename, f"cannot be used ({_reason(error)})") from error


def _wrong_field(
    files: CheckpointFiles, filename: str, field: str, value: Any, reason: str
) -> UserError:
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return files.file_error(filename, f"cannot be used: {field} is {shown} ({reason})")


@contextmanager
def muted(level: int) -> Iterator[None]:
    """Context without Python warnings, and without log records up to ``level``."""
    before = logging.root.manager.disable
    logging.disable(max(level, before))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _raw_faults(raw: Mapping[str, Any]) -> Iterator[Fault]:
    """Invalid fields that transformers does not check, or spends hours on."""
    names, code, kind = raw.get("architectures"), raw.get("auto_map"), raw.get("model_type")
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        yield "architectures", names, "not a list of class names"
    if "auto_map" in raw and not isinstance(code, dict):
        yield "auto_map", code, "not an object"
    # Without model_type, transformers guesses it from the path.
    if not (isinstance(kind, str) and kind) and not code:
        yield "model_type", kind, "not the name of an architecture"
    for field in _BOOLEANS:
        if not isinstance(raw.get(field), bool | None):
            yield field, raw[field], "neither true nor false"
    for size, most in _SIZES.items():  # some classes divide by them
        value = raw.get(size)
        if isinstance(value, (str, float, bool)) or (isinstance(value, int) and value < 1):
            yield size, value, f"not a whole number from 1 to {most:,}"
    labels = raw.get("num_labels")
    if isinstance(labels, (int, float)) and labels > _MAX_LABELS:
        yield "num_labels", labels, f"more than {_MAX_LABELS:,}"


def _config_faults(config: PretrainedConfig) -> Iterator[Fault]:
    """Fields with values that no model supports."""
    names = getattr(config, "attribute_map", {})
    for size, most in _SIZES.items():
        values = _of_all_layers(config, size)  # in some families a list, one per layer
        for value in values if values and isinstance(values, (list, tuple)) else [values]:
            if value is not None and not (type(value) is int and 1 <= value <= most):
                yield names.get(size, size), values, f"not a whole number from 1 to {most:,}"
    heads = _of_all_layers(config, "num_attention_heads")
    groups = _of_all_layers(config, "num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        yield "num_key_value_heads", groups, f"not a divisor of the {heads} attention heads"
    for name, value in vars(config).items():
        is_epsilon = name.endswith(("_eps", "_epsilon")) and value is not None
        if is_epsilon and not (_is_number(value) and 0 <= value < 1):
            yield name, value, "not a number from 0 to 1"
    rope = getattr(config, "rope_parameters", None) or {}
    for settings in (rope, *rope.values()):  # one for all layers, or one per layer type
        for name, limit in _ROPE.items():
            value = settings.get(name, 1.0) if isinstance(settings, dict) else 1.0
            if not (_is_number(value) and 0 < value <= limit):
                yield f"rope_parameters.{name}", value, f"not a number above 0 and up to {limit}"


def _of_all_layers(config: PretrainedConfig, name: str) -> Any:
    """The value of a field; None if it is absent, computed by the class (XLNet's length of -1), or
    differs between layers.
    """
    if isinstance(getattr(type(config), name, None), property):
        return None
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _reason(error: BaseException) -> str:
    """An exception's message as one line."""
    error = error.__cause__ or error  # huggingface_hub's field validation wraps the reason
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0].partition(". ")[0].rstrip(".") if lines else type(error).__name__
    text = f"unknown: {text}" if isinstance(error, KeyError) else text
    return text if len(text) <= 200 else f"{text[:197]}..."
