"""Reads config.json and generation_config.json of a model; what cannot be right in them is one line
that names the file and the field.

transformers checks some fields while it reads a configuration, others when a model is made of it,
and many never. What it raises is whatever came up: AttributeError, ZeroDivisionError, IndexError.
So every exception is the file's fault here, and the field is found by leaving out one after
another. No weight is read.
"""

import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PretrainedConfig
from transformers.utils import cached_file

from dschat.config import UserError

T = TypeVar("T")
Fault = tuple[str, Any, str]  # a field, its value, what is wrong with it

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
# By transformers' common names; where a family has others, its `attribute_map` knows them.
_SIZES = {  # and what no model comes near, but a damaged file may ask for
    "vocab_size": 100_000_000,
    "hidden_size": 1_000_000,
    "intermediate_size": 10_000_000,
    "num_hidden_layers": 2_000,  # laying out a million takes hours
    "num_attention_heads": 100_000,
    "num_key_value_heads": 100_000,
    "head_dim": 100_000,
    "max_position_embeddings": 10_000_000_000,
}
_YES_OR_NO = ("is_causal", "is_decoder", "output_hidden_states", "output_attentions", "return_dict")
_ROPE = {"rope_theta": math.inf, "factor": math.inf, "partial_rotary_factor": 1}
_MOST_LABELS = 10_000  # transformers makes a table of their names


def read_json(name_or_path: str, filename: str, flag: str) -> dict[str, Any] | None:
    """The object in a JSON file of a checkpoint; None where it has no such file.

    Raises:
        OSError: no such folder, and no such model on the hub.
        UserError: the file is damaged, or holds something else.
    """
    file = cached_file(name_or_path, filename, _raise_exceptions_for_missing_entries=False)
    if file is None:
        return None
    try:
        content = json.loads(Path(file).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _fault(name_or_path, filename, flag, f"is not JSON ({_said(error)})") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise _fault(name_or_path, filename, flag, f"holds a {kind}, not an object with fields")
    return content


def read_config(name_or_path: str, flag: str, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration of a checkpoint, with sizes that a model can have.

    Raises:
        OSError: as `read_json`; or there is no config.json.
        UserError: naming ``flag`` and the field that cannot be right.
    """
    raw = read_json(name_or_path, CONFIG, flag)
    if raw is None:
        raise FileNotFoundError(f"{name_or_path} has no {CONFIG}")
    for fault in _wrong_before_reading(raw):
        raise _wrong_field(name_or_path, CONFIG, flag, fault)

    def read(fields: Mapping[str, Any]) -> PretrainedConfig:
        if fields is raw:
            return AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
        return CONFIG_MAPPING[fields["model_type"]].from_dict(dict(fields))

    config = _attempt(read, raw, name_or_path, CONFIG, flag)
    try:
        text = config.get_text_config()
    except ValueError as error:  # several: no model of text alone
        raise _fault(name_or_path, CONFIG, flag, f"cannot be used ({_said(error)})") from error
    if not isinstance(text, PretrainedConfig):
        fault = ("text_config", text, f"not of a {type(config).__name__}")
        raise _wrong_field(name_or_path, CONFIG, flag, fault)
    for fault in _wrong_in(text):
        raise _wrong_field(name_or_path, CONFIG, flag, fault)
    return config


def made_of(
    config: PretrainedConfig, make: Callable[[PretrainedConfig], T], name_or_path: str, flag: str
) -> T:
    """``make(config)``, without memory for weights; ``UserError`` naming the field it fails for."""

    def make_of(fields: Mapping[str, Any]) -> T:
        return make(config if fields is whole else type(config).from_dict(dict(fields)))

    whole = config.to_dict()
    return _attempt(make_of, whole, name_or_path, CONFIG, flag)


def read_generation_config(name_or_path: str, flag: str) -> GenerationConfig | None:
    """The checkpoint's generation config; None where it has none.

    Raises:
        UserError: naming ``flag`` and the field that cannot be right. transformers takes a damaged
            file for none, and answers would not end where the checkpoint says.
    """
    raw = read_json(name_or_path, GENERATION_CONFIG, flag)
    if raw is None:
        return None
    ids = raw.get("eos_token_id")
    if any(type(i) is not int for i in (ids if isinstance(ids, list) else [ids]) if i is not None):
        fault = ("eos_token_id", ids, "not a token id or a list of them")
        raise _wrong_field(name_or_path, GENERATION_CONFIG, flag, fault)
    return _attempt(
        lambda fields: GenerationConfig.from_dict(dict(fields)),
        raw,
        name_or_path,
        GENERATION_CONFIG,
        flag,
    )


def _attempt(
    action: Callable[[Mapping[str, Any]], T],
    fields: Mapping[str, Any],
    name_or_path: str,
    filename: str,
    flag: str,
) -> T:
    """``action(fields)``. Where it fails, the first field without which it does not is named."""
    with _silence():
        try:
            return action(fields)
        except UserError:
            raise
        except Exception as error:
            field, reason = culprit(action, fields), _said(error)
            if field is None:
                raise _fault(name_or_path, filename, flag, f"cannot be used ({reason})") from error
            fault = (field, fields[field], reason)
            raise _wrong_field(name_or_path, filename, flag, fault) from error


def culprit(action: Callable[[Mapping[str, Any]], Any], fields: Mapping[str, Any]) -> str | None:
    """The first field without which ``action`` succeeds; None where no single one is to blame."""

    def works(without: str | None) -> bool:
        try:
            action({name: value for name, value in fields.items() if name != without})
        except Exception:
            return False
        return True

    return None if works(without=None) else next(filter(works, fields), None)


@contextmanager
def _silence() -> Iterator[None]:
    """Without transformers' own words on what is one line here."""
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _wrong_before_reading(raw: Mapping[str, Any]) -> Iterator[Fault]:
    """Fields that transformers takes as they are, or spends hours on."""
    names, code, kind = raw.get("architectures"), raw.get("auto_map"), raw.get("model_type")
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        yield "architectures", names, "not a list of class names"
    if "auto_map" in raw and not isinstance(code, dict):
        yield "auto_map", code, "not an object"
    # Without one, transformers takes any architecture whose name is somewhere in the path.
    if not (isinstance(kind, str) and kind) and not code:
        yield "model_type", kind, "not the name of an architecture"
    for field in _YES_OR_NO:
        if not isinstance(raw.get(field), bool | None):
            yield field, raw[field], "neither true nor false"
    labels = raw.get("num_labels")
    if isinstance(labels, (int, float)) and labels > _MOST_LABELS:
        yield "num_labels", labels, f"more than {_MOST_LABELS:,}"


def _wrong_in(config: PretrainedConfig) -> Iterator[Fault]:
    """Fields with which no model works."""
    names = getattr(config, "attribute_map", {})
    for size, most in _SIZES.items():
        values = _of_all_layers(config, size)  # some families have a list, by layer
        for value in values if values and isinstance(values, (list, tuple)) else [values]:
            if value is not None and not (type(value) is int and 1 <= value <= most):
                yield names.get(size, size), values, f"not a whole number from 1 to {most:,}"
    heads = _of_all_layers(config, "num_attention_heads")
    groups = _of_all_layers(config, "num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        yield "num_key_value_heads", groups, f"no divisor of the {heads} attention heads"
    for name, value in vars(config).items():
        is_epsilon = name.endswith(("_eps", "_epsilon")) and value is not None
        if is_epsilon and not (_is_number(value) and 0 <= value < 1):
            yield name, value, "not a number from 0 to 1"
    rope = getattr(config, "rope_parameters", None) or {}
    for settings in (rope, *rope.values()):  # of all layers, or by their kind
        for name, most in _ROPE.items():
            value = settings.get(name, 1.0) if isinstance(settings, dict) else 1.0
            if not (_is_number(value) and 0 < value <= most):
                yield f"rope_parameters.{name}", value, f"not a number above 0 and up to {most}"


def _of_all_layers(config: PretrainedConfig, name: str) -> Any:
    """A field; None where there is none, where the class computes it (XLNet's length of -1), or
    where transformers has one for each layer.
    """
    if isinstance(getattr(type(config), name, None), property):
        return None
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _wrong_field(name_or_path: str, filename: str, flag: str, fault: Fault) -> UserError:
    field, value, why = fault
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return _fault(name_or_path, filename, flag, f"cannot be used: {field} is {shown} ({why})")


def _fault(name_or_path: str, filename: str, flag: str, what: str) -> UserError:
    return UserError(
        f"{flag} {name_or_path}: its {filename} {what}; correct it, or copy or download it again"
    )


def _said(error: BaseException) -> str:
    """What an exception says, in a line."""
    error = error.__cause__ or error  # huggingface_hub's checks of a field wrap the reason
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0].partition(". ")[0].rstrip(".") if lines else type(error).__name__
    text = f"unknown: {text}" if isinstance(error, KeyError) else text
    return text if len(text) <= 200 else f"{text[:197]}..."
