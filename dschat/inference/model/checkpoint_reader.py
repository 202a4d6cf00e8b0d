"""The weight stream from disk: every tensor of a Hugging Face checkpoint, one in memory at a time.

A folder or hub name comes in; ``(name, whole_tensor)`` pairs go out, under the names in the files
or, through a ``names`` function, under the ones the reader expects: `normalised_names` makes one.
It must not know architectures, devices or who reads: which tensors *should* be there is the
reader's business, and so are dtype, ties and the place of each.
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
from dschat.models.checkpoint_tensors import embedding_or_head, is_constant, is_untied, value_fault

# In the order in which transformers' from_pretrained looks for them.
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_ADAPTER_CONFIG = "adapter_config.json"

# What training wrappers put before every name: DataParallel and DeepSpeed, torch.compile.
_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")

# Other names of a parameter: of the norms in the oldest checkpoints, and of GPT-NeoX's head, which
# is embed_out on disk (seen in transformers 5.23) though its module calls it lm_head.
_OTHER_NAMES = (
    (re.compile(r"\.gamma$"), ".weight"),
    (re.compile(r"\.beta$"), ".bias"),
    (re.compile(r"^embed_out\."), "lm_head."),
    (re.compile(r"^lm_head\."), "embed_out."),
)


def normalise(name: str, expected: Collection[str], prefix: str) -> str | None:
    """The member of ``expected`` that a checkpoint means by ``name``; None if it is no weight.

    ``prefix`` is the architecture's base-model prefix with its dot ("model.", "transformer.",
    "gpt_neox."), which a checkpoint of the bare base model lacks and others may have in excess. A
    weight that nothing in ``expected`` answers to keeps its name, for the reader to complain of or
    to ignore (a stored copy of a tied head).
    """
    plain = _WRAPPERS.sub("", name)
    for renamed in (name, plain, *(old.sub(new, plain) for old, new in _OTHER_NAMES)):
        for candidate in (renamed, prefix + renamed, renamed.removeprefix(prefix)):
            if candidate in expected:
                return candidate
    return None if is_constant(plain) else name


def normalised_names(expected: Collection[str], prefix: str) -> Callable[[str], str | None]:
    """`normalise` with what the reader expects filled in: the ``names`` of `checkpoint_stream`."""
    members = frozenset(expected)
    return lambda name: normalise(name, members, prefix)


def checkpoint_stream(
    path: str | Path, names: Callable[[str], str | None] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint ``path``, a folder or a hub name, file by file.

    A hub name is found as ``from_pretrained`` finds it: in the hub's cache when offline. ``names``
    turns a name in the file into the reader's; a tensor for which it returns None is not read.

    Tensors are on the CPU, of the shape and dtype they are stored in, mapped from the file where
    its format allows: pages of the file, which the system takes back at will, and no memory of our
    own. A tensor kept keeps its file mapped, so copy what you keep. Only a ``.bin`` of the format
    before torch 1.6 is read as a whole, and shrinks as it is walked.

    Raises ``UserError`` naming the file, when called: no weights, an adapter only, a missing shard,
    a broken index or safetensors header; while walking: a ``.bin`` that is damaged or that would
    run code, two tensors of one name. Tensors that are missing are for the reader to find.
    """
    files = _weight_files(str(path))
    for file in files:
        if file.suffix == ".safetensors":  # a header costs nothing; an old .bin would be read twice
            with _opened_safetensors(file):
                pass
    return _walk(files, names)


def sound_weights(stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The stream; ``UserError`` at the first weight whose values no model can compute with."""
    for name, tensor in stream:
        if (fault := value_fault(tensor)) is not None:
            raise UserError(f"{name} {fault}; name another checkpoint, or copy it again")
        yield name, tensor
        del tensor  # NOTE: a tensor that is kept keeps its file mapped


def has_own_head(path: str | Path) -> bool:
    """Whether a checkpoint stores a head that is another matrix than its embedding."""
    return is_untied(dict(checkpoint_stream(path, embedding_or_head)))


def _walk(
    files: list[Path], names: Callable[[str], str | None] | None
) -> Iterator[tuple[str, Tensor]]:
    seen: dict[str, str] = {}
    for file in files:
        opened = _opened_safetensors if file.suffix == ".safetensors" else _opened_pickle
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
                # NOTE: no variable of ours holds the tensor: it is gone when the reader drops it.
                yield name, read(key)


_Opened = Iterator[tuple[list[str], Callable[[str], Tensor]]]  # a file's names, and their reader


@contextmanager
def _opened_safetensors(file: Path) -> _Opened:
    # NOTE: an OSError is the file's fault only here; around the yield it may be that of `names`.
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
def _opened_pickle(file: Path) -> _Opened:
    state = _load_pickle(file)
    if not isinstance(state, dict):
        raise UserError(
            f"{file} holds a {type(state).__name__}, no state dict; save the model with "
            f"save_pretrained"
        )
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise UserError(
                f"{file} is no plain state dict: its {key!r} is a {type(value).__name__}; save the "
                f"model with save_pretrained"
            )
    # Taken out, so that an unmapped file's memory goes as the walk does; a tensor may be a trained
    # Parameter, whose history nobody wants.
    yield list(state), lambda key: state.pop(key).detach()


def _load_pickle(file: Path) -> object:
    mapped = zipfile.is_zipfile(file)  # torch maps only the format it writes since 1.6
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        # torch names the first object that is no tensor: "GLOBAL builtins.eval was not an allowed".
        code = re.search(r"GLOBAL (\S+)", str(error))
        if code is None:
            raise _damaged(file) from error
        raise UserError(
            f"{file} holds more than tensors: loading it would run {code[1]}, which is refused; "
            f"save the model as safetensors where you trust the file"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise _damaged(file) from error


def _unreadable(file: Path, error: Exception) -> UserError:
    return UserError(
        f"{file} cannot be read ({_first_line(error)}); if it is damaged or incomplete, copy or "
        f"download it again"
    )


def _damaged(file: Path) -> UserError:
    return UserError(
        f"{file} is no file of torch.save, or damaged or incomplete; copy or download it again"
    )


def _weight_files(path: str) -> list[Path]:
    """The files that hold the weights of ``path``, shards in the order of their names."""
    if Path(path).is_file():
        raise UserError(f"{path} is a file; name the checkpoint's folder")
    for filename in _WEIGHT_FILES:
        file = _located(path, filename)
        if file is not None:
            return _shards(path, file) if filename.endswith(".json") else [file]
    adapter = _located(path, _ADAPTER_CONFIG)
    if adapter is not None:
        raise UserError(
            f"{path} holds an adapter only ({_ADAPTER_CONFIG}); merge it into its base model"
            f"{_base_of(adapter)}, or name that"
        )
    if Path(path).is_dir():
        raise UserError(
            f"{path} holds no weights: none of {', '.join(_WEIGHT_FILES)} is there; name another "
            f"folder, or save the model with save_pretrained"
        )
    raise UserError(
        f"{path} is no folder, and no model of that name with weights is to be had from the hub or "
        f"its cache; check the name, or download the model first"
    )


def _shards(path: str, index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(map(os.fspath, set(weight_map.values())))  # TypeError: one is no name
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{index} is no index of a checkpoint (JSON with a weight_map); copy or download it "
            f"again"
        ) from error
    files = [_located(path, name) for name in names]
    missing = [name for name, file in zip(names, files, strict=True) if file is None]
    if missing:
        raise UserError(
            f"{index} names {len(missing)} of {len(names)} files that are not there: "
            f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}; copy or download them"
        )
    return [file for file in files if file is not None]


def _located(path: str, filename: str) -> Path | None:
    """Where ``filename`` of the folder or hub model ``path`` lies; None where it has none."""
    try:
        file = cached_file(path, filename, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise UserError(
            f"{path} is no folder, and the hub gives no such model ({_first_line(error)}); check "
            f"the name"
        ) from error
    return None if file is None else Path(file)


def _base_of(adapter: Path) -> str:
    try:
        return f" {json.loads(adapter.read_text(encoding='utf-8'))['base_model_name_or_path']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # the message stands without the name


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
