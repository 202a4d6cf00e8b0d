"""Reads config.json and generation_config.json; an invalid field is a one-line error naming it.

transformers checks some fields when it reads a configuration, others when it builds the model, and
many never. It raises any exception: AttributeError, ZeroDivisionError, IndexError. So every
exception here is blamed on the file, and `culprit` finds the field by dropping one after another.
No weights are read.
"""

import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PretrainedConfig
from transformers.utils import cached_file

from dschat.config import UserError
from dschat.models import hub
from dschat.models.text_part import text_part

T = TypeVar("T")
Fault = tuple[str, Any, str]  # a field, its value, the reason why it is invalid

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
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


@dataclass(frozen=True)
class _File:
    """A JSON file of the checkpoint that ``flag`` named, and the errors about it."""

    checkpoint: str
    name: str
    flag: str

    def fault(self, problem: str) -> UserError:
        return UserError(
            f"{self.flag} {self.checkpoint}: its {self.name} {problem}; correct it, or copy or "
            "download it again"
        )

    def wrong_field(self, field: str, value: Any, reason: str) -> UserError:
        shown = json.dumps(value, default=str)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return self.fault(f"cannot be used: {field} is {shown} ({reason})")

    def attempt(self, action: Callable[[Mapping[str, Any]], T], fields: Mapping[str, Any]) -> T:
        """``action(fields)``; a failure is a ``UserError`` with the field that `culprit` finds."""
        with muted(logging.ERROR):  # the error raised here says it in one line
            try:
                return action(fields)
            except UserError:
                raise
            except Exception as error:
                field, reason = culprit(action, fields), _reason(error)
                if field is None:
                    raise self.fault(f"cannot be used ({reason})") from error
                raise self.wrong_field(field, fields[field], reason) from error


def read_json(name_or_path: str, filename: str, flag: str) -> dict[str, Any] | None:
    """The object in a JSON file of a checkpoint; None if the file does not exist.

    Raises:
        OSError: neither a folder nor a model on the hub.
        UserError: the file is not valid JSON, or not an object.
    """
    hub.prepare(name_or_path)
    path = cached_file(name_or_path, filename, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return None
    file = _File(name_or_path, filename, flag)
    try:
        content = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise file.fault(f"is not JSON ({_reason(error)})") from error
    if not isinstance(content, dict):
        raise file.fault(f"holds a {type(content).__name__}, not an object with fields")
    return content


def read_config(name_or_path: str, flag: str, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration of a checkpoint, of its text model if that is a part; sizes validated.

    Raises:
        OSError: as `read_json`; or config.json does not exist.
        UserError: naming ``flag`` and the invalid field.
    """
    raw = read_json(name_or_path, CONFIG, flag)
    if raw is None:
        raise FileNotFoundError(f"{name_or_path} has no {CONFIG}")
    file = _File(name_or_path, CONFIG, flag)
    for fault in _raw_faults(raw):
        raise file.wrong_field(*fault)

    def read(fields: Mapping[str, Any]) -> PretrainedConfig:
        if fields is raw:
            return AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
        return CONFIG_MAPPING[fields["model_type"]].from_dict(dict(fields))

    config = file.attempt(read, raw)
    try:
        text = config.get_text_config()
    except ValueError as error:  # several text configs: not a text-only model
        raise file.fault(f"cannot be used ({_reason(error)})") from error
    if not isinstance(text, PretrainedConfig):
        raise file.wrong_field("text_config", text, f"not of a {type(config).__name__}")
    for fault in _config_faults(text):
        raise file.wrong_field(*fault)
    return text_part(config, raw)


def build_from(
    config: PretrainedConfig, build: Callable[[PretrainedConfig], T], name_or_path: str, flag: str
) -> T:
    """``build(config)``; a failure is a ``UserError`` naming the field that caused it.

    ``build`` may run once per field, so it should not allocate weights.
    """

    def build_with(fields: Mapping[str, Any]) -> T:
        return build(config if fields is complete else type(config).from_dict(dict(fields)))

    complete = config.to_dict()
    return _File(name_or_path, CONFIG, flag).attempt(build_with, complete)


def read_generation_config(name_or_path: str, flag: str) -> GenerationConfig | None:
    """The checkpoint's generation config; None if it has none.

    Raises:
        UserError: naming ``flag`` and the invalid field. transformers ignores a damaged file, and
            generation would miss the checkpoint's EOS ids.
    """
    raw = read_json(name_or_path, GENERATION_CONFIG, flag)
    if raw is None:
        return None
    file, ids = _File(name_or_path, GENERATION_CONFIG, flag), raw.get("eos_token_id")
    if any(type(i) is not int for i in (ids if isinstance(ids, list) else [ids]) if i is not None):
        raise file.wrong_field("eos_token_id", ids, "not a token id or a list of them")
    return file.attempt(lambda fields: GenerationConfig.from_dict(dict(fields)), raw)


def culprit(action: Callable[[Mapping[str, Any]], Any], fields: Mapping[str, Any]) -> str | None:
    """The first field without which ``action`` succeeds; None if there is no such field."""

    def works(without: str | None) -> bool:
        try:
            action({name: value for name, value in fields.items() if name != without})
        except Exception:
            return False
        return True

    return None if works(without=None) else next(filter(works, fields), None)


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
