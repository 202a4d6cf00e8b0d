"""Validates config.json and generation_config.json; an invalid field is a one-line error naming it.

transformers checks the types of fields when it reads a configuration, and some values when it
builds the model. It raises any exception: AttributeError, ZeroDivisionError, IndexError. So every
exception here is blamed on the file. Other wrong sizes do not fit the weights, see
`dschat.models.load`. No weights are read.
"""

import json
import logging
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from dschat.config import UserError
from dschat.distributed.host_checks import shortage
from dschat.models.checkpoint_files import CONFIG, GENERATION_CONFIG, CheckpointFiles
from dschat.models.checkpoint_tensors import text_part

Fault = tuple[str, Any, str]  # a field, its value, the reason why it is invalid


def read_config(files: CheckpointFiles, raw: dict[str, Any]) -> PretrainedConfig:
    """The configuration of a checkpoint, of its text model if that is a part.
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
    """Context without Python warnings, and without log records up to ``level``.

    Both are settings of the process: threads whose contexts overlap share one, and the last that
    leaves puts back what was before the first.
    """
    with _muting:
        if not _muted:
            _muted.append(logging.root.manager.disable)
            _before.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        _muted.append(level)
        logging.disable(max(_muted))
    try:
        yield
    finally:
        with _muting:
            _muted.remove(level)
            logging.disable(max(_muted))
            if len(_muted) == 1:
                _muted.clear()
                _before.close()


_muting = threading.Lock()
_muted: list[int] = []  # while a context is open: the level before, and that of each context
_before = ExitStack()  # puts the filters of warnings back


def _raw_faults(raw: Mapping[str, Any]) -> Iterator[Fault]:
    """Invalid fields that transformers does not check."""
    names, kind = raw.get("architectures"), raw.get("model_type")
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        yield "architectures", names, "not a list of class names"
    # Without model_type, transformers guesses it from the path.
    if not (isinstance(kind, str) and kind) and not raw.get("auto_map"):
        yield "model_type", kind, "not the name of an architecture"


def _reason(error: BaseException) -> str:
    """An exception's message as one line."""
    error = error.__cause__ or error  # huggingface_hub's field validation wraps the reason
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0].partition(". ")[0].rstrip(".") if lines else type(error).__name__
    text = f"unknown: {text}" if isinstance(error, KeyError) else text
    return text if len(text) <= 200 else f"{text[:197]}..."
