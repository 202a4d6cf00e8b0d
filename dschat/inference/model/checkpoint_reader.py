"""Streams the tensors of a Hugging Face checkpoint from disk, one in memory at a time.

`checkpoint_stream` takes a folder or hub name and yields ``(name, tensor)`` pairs: under the names
in the files, or under those that a model expects (`normalized_names`). The consumer checks which
tensors are missing and handles dtype, device and tied weights.
"""

import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import cached_file

from dschat.config import UserError
from dschat.config.errors import first_line
from dschat.models.checkpoint_tensors import embedding_or_head, is_constant, is_untied, value_fault
from dschat.models.model_kind import WEIGHT_FILES
from dschat.models.text_part import text_keys

_ADAPTER_CONFIG = "adapter_config.json"

# Prefixes of training wrappers: DataParallel and DeepSpeed, torch.compile.
_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")

# Aliases of a parameter: the norms of the oldest checkpoints, and GPT-NeoX's head, which is
# embed_out on disk (seen in transformers 5.23) but lm_head in its module.
_ALIASES = (
    (re.compile(r"\.gamma$"), ".weight"),
    (re.compile(r"\.beta$"), ".bias"),
    (re.compile(r"^embed_out\."), "lm_head."),
    (re.compile(r"^lm_head\."), "embed_out."),
)


def normalize(name: str, expected: Collection[str], prefix: str) -> str | None:
    """The member of ``expected`` that ``name`` of a checkpoint stands for; None for a constant.

    ``prefix`` is the architecture's base-model prefix with its dot ("model.", "transformer.",
    "gpt_neox."): a checkpoint of the bare base model lacks it, another may have it where
    ``expected`` does not. A weight without a match in ``expected`` keeps its name, so that the
    consumer can reject it or ignore it (a stored copy of a tied head).
    """
    plain = _WRAPPERS.sub("", name)
    for renamed in (name, plain, *(old.sub(new, plain) for old, new in _ALIASES)):
        for candidate in (renamed, prefix + renamed, renamed.removeprefix(prefix)):
            if candidate in expected:
                return candidate
    return None if is_constant(plain) else name


def normalized_names(expected: Collection[str], prefix: str) -> Callable[[str], str | None]:
    """`normalize` for these ``expected`` names: the ``names`` argument of `checkpoint_stream`."""
    members = frozenset(expected)
    return lambda name: normalize(name, members, prefix)


def names_on_disk(
    path: str | Path, expected: Collection[str], prefix: str
) -> Callable[[str], str | None]:
    """`normalized_names` for the checkpoint ``path``, of which only the text model is read."""
    names = normalized_names(expected, prefix)
    found: list[str] = []

    def note(key: str) -> None:  # reads no tensor
        found.append(key)

    list(checkpoint_stream(path, note))
    plain = {key: name for name, key in text_keys(found).items()}
    return lambda key: names(plain[key]) if key in plain else None


def checkpoint_stream(
    path: str | Path, names: Callable[[str], str | None] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of the checkpoint ``path``, a folder or a hub name, file by file.

    A hub name resolves as in ``from_pretrained``: from the hub's cache when offline. ``names`` maps
    a name in the file to the consumer's; a tensor for which it returns None is not read.

    Tensors are on the CPU, in their stored shape and dtype, memory-mapped where the format allows:
    such pages do not count as memory of this process. A tensor that is kept keeps its file mapped,
    so copy what you keep. A ``.bin`` in the format before torch 1.6 is read as a whole; its tensors
    are freed as they are consumed.

    Raises:
        UserError: naming the file. When called: no weights, an adapter only, a missing shard, a
            broken index or safetensors header. While iterating: a ``.bin`` that is damaged or would
            run code, two tensors of one name. Missing tensors are not detected here.
    """
    files = _weight_files(str(path))
    for file in files:
        if file.suffix == ".safetensors":  # headers are cheap; an old .bin would be read twice
            with _open_safetensors(file):
                pass
    return _walk(files, names)


def sound_weights(stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the stream; ``UserError`` at the first weight that is not finite floating point."""
    for name, tensor in stream:
        if (fault := value_fault(tensor)) is not None:
            raise UserError(f"{name} {fault}; name another checkpoint, or copy it again")
        yield name, tensor
        del tensor  # NOTE: a tensor that is kept keeps its file mapped


def has_own_head(path: str | Path) -> bool:
    """Whether a checkpoint stores a head that differs from its embedding."""
    return is_untied(dict(checkpoint_stream(path, embedding_or_head)))


def _walk(
    files: list[Path], names: Callable[[str], str | None] | None
) -> Iterator[tuple[str, Tensor]]:
    seen: dict[str, str] = {}
    for file in files:
        opened = _open_safetensors if file.suffix == ".safetensors" else _open_pickle
        with opened(file) as (keys, read):
            for key in keys:
                name = key if names is None else names(key)
                if name is None:
                    continue
                if name in seen:
                    raise UserError(
                        f"{file}: {key} is a second {name} (the first is {seen[name]}); remove one"
                    )
                seen[name] = key
                # NOTE: no local holds the tensor, so it is freed when the consumer drops it.
                yield name, read(key)


_Opened = Iterator[tuple[list[str], Callable[[str], Tensor]]]  # names, and their reader


@contextmanager
def _open_safetensors(file: Path) -> _Opened:
    # NOTE: an OSError from the yield may come from `names` and not from this file.
    try:
        opened = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise _unreadable(file, error) from error
    try:
        with opened as tensors:
            yield list(tensors.keys()), tensors.get_tensor
    except SafetensorError as error:  # a dtype that torch does not have
        raise _unreadable(file, error) from error


@contextmanager
def _open_pickle(file: Path) -> _Opened:
    state = _load_pickle(file)
    if not isinstance(state, dict):
        raise UserError(
            f"{file} holds a {type(state).__name__}, not a state dict; save the model with "
            f"save_pretrained"
        )
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise UserError(
                f"{file} is not a plain state dict: its {key!r} is a {type(value).__name__}; save "
                f"the model with save_pretrained"
            )
    # Popped, so that an unmapped file's memory is freed during the iteration. Detached: a tensor
    # may be a Parameter.
    yield list(state), lambda key: state.pop(key).detach()


def _load_pickle(file: Path) -> object:
    mapped = zipfile.is_zipfile(file)  # torch maps only the format it writes since 1.6
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        # torch names the first object it refuses: "GLOBAL builtins.eval was not an allowed".
        code = re.search(r"GLOBAL (\S+)", str(error))
        if code is None:
            raise _damaged(file) from error
        raise UserError(
            f"{file} holds more than tensors: loading it would run {code[1]}, which is refused; "
            f"if you trust the file, save the model as safetensors"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise _damaged(file) from error


def _unreadable(file: Path, error: Exception) -> UserError:
    return UserError(
        f"{file} cannot be read ({first_line(error)}); if it is damaged or incomplete, copy or "
        f"download it again"
    )


def _damaged(file: Path) -> UserError:
    return UserError(
        f"{file} is damaged, incomplete or not a torch.save file; copy or download it again"
    )


def _weight_files(path: str) -> list[Path]:
    """Weight files of ``path``, shards in the order of their names."""
    if Path(path).is_file():
        raise UserError(f"{path} is a file; name the checkpoint's folder")
    for filename in WEIGHT_FILES:
        file = _locate(path, filename)
        if file is not None:
            return _shards(path, file) if filename.endswith(".json") else [file]
    adapter = _locate(path, _ADAPTER_CONFIG)
    if adapter is not None:
        raise UserError(
            f"{path} holds an adapter only ({_ADAPTER_CONFIG}); merge it into its base model"
            f"{_base_of(adapter)}, or name that"
        )
    if Path(path).is_dir():
        raise UserError(
            f"{path} has no weights (none of {', '.join(WEIGHT_FILES)}); name another folder, or "
            f"save the model with save_pretrained"
        )
    raise UserError(
        f"{path} is not a folder, and neither the hub nor its cache has weights under that name; "
        f"check the name, or download the model first"
    )


def _shards(path: str, index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(map(os.fspath, set(weight_map.values())))  # TypeError: not a name
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{index} is not a checkpoint index (JSON with a weight_map); copy or download it again"
        ) from error
    files = [_locate(path, name) for name in names]
    missing = [name for name, file in zip(names, files, strict=True) if file is None]
    if missing:
        raise UserError(
            f"{index}: {len(missing)} of its {len(names)} files are missing: "
            f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}; copy or download them"
        )
    return [file for file in files if file is not None]


def _locate(path: str, filename: str) -> Path | None:
    """Local path of ``filename`` in the folder or hub model ``path``; None if it has none."""
    try:
        file = cached_file(path, filename, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise UserError(
            f"{path} is not a folder, and the hub has no such model ({first_line(error)}); check "
            f"the name"
        ) from error
    return None if file is None else Path(file)


def _base_of(adapter: Path) -> str:
    try:
        return f" {json.loads(adapter.read_text(encoding='utf-8'))['base_model_name_or_path']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # the message does without it
