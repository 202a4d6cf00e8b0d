"""The files of a checkpoint: JSON files, weight files and their headers, each read once.

No pickled code runs. The Hugging Face hub is turned off if it cannot be reached: its client repeats
every request five times, which takes half a minute for each file of a model, even if the model was
downloaded before.
"""

import json
import logging
import os
import pickle
import re
import socket
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from huggingface_hub import constants
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import cached_file

from dschat.builtin.tiny_model import resolve_model
from dschat.config import UserError
from dschat.config.errors import first_line
from dschat.distributed.host_checks import shortage
from dschat.models.checkpoint_tensors import embedding_or_head, is_constant, is_untied
from dschat.startup.files import sha256_of

logger = logging.getLogger("dschat")


def prepare_hub(name_or_path: str) -> None:
    """Call before ``name_or_path`` is looked up: turns the hub off if it cannot be reached."""
    if not os.path.exists(name_or_path) and not constants.HF_HUB_OFFLINE and not has_network():
        constants.HF_HUB_OFFLINE = True
        logger.warning("%s cannot be reached: only downloaded models are found", _host())


def why_missing() -> str:
    reason = ": no such folder, and no such model on the hub; check the name"
    if constants.HF_HUB_OFFLINE:
        reason += " (only downloaded models are found: no network, or HF_HUB_OFFLINE)"
    return reason


def _host() -> str:
    return urlsplit(constants.ENDPOINT).hostname or constants.ENDPOINT


@cache
def has_network() -> bool:
    """False where the hub's name has no address. A proxy knows addresses that are unknown here.
    Asked once.
    """
    if {"https", "http", "all"} & {*getproxies()}:
        return True
    try:
        return bool(socket.getaddrinfo(_host(), 443))
    except OSError:
        return False


CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
CHECKSUMS = "SHA256SUMS"  # of the weight files, as the program sha256sum writes them
_MAX_HASHED = 2 * 2**30  # bytes of weights whose checksums are checked before each start
WEIGHT_FILES = (  # in the order of transformers' from_pretrained
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Reward models of DeepSpeed-Chat: both spellings occur.
_LEGACY_PREFIXES = ("rwtransformer.", "rwtranrsformer.")
_LEGACY_HEAD = "v_head.weight"

Names = Callable[[str], str | None]


class Stored(NamedTuple):
    """A tensor's entry in the header of a weight file."""

    shape: tuple[int, ...]
    is_float: bool


class CheckpointFiles:
    """The files of ``name`` (a folder, a hub model or ``builtin/tiny``), which ``flag`` named.

    Nothing is read before it is needed; JSON files and headers are read once. Every problem is a
    ``UserError`` of one line that names ``flag``.

    Args:
        trust_remote_code: whether Python code that comes with the checkpoint may run.
    """

    def __init__(self, name: str | Path, flag: str, trust_remote_code: bool = False) -> None:
        self.name, self.flag = resolve_model(str(name)), flag
        self.trust_remote_code = trust_remote_code
        self._read: dict[str, dict[str, Any] | None] = {}

    def error(self, problem: str) -> UserError:
        """The error that says ``problem`` of this checkpoint: " is a file; ...", ": it has ..."."""
        return UserError(f"{self.flag} {self.name}{problem}")

    def file_error(self, filename: str, problem: str) -> UserError:
        """The error for a file with a ``problem``: "is not JSON"."""
        return self.error(f": its {filename} {problem}; correct it, or copy or download it again")

    def locate(self, filename: str) -> Path | None:
        """The local path of a file; None if the checkpoint does not have it.

        Raises:
            UserError: neither a folder nor a model on the hub.
        """
        if os.path.isfile(self.name):
            raise self.error(" is a file; name the folder of a checkpoint")
        prepare_hub(self.name)
        try:
            file = cached_file(self.name, filename, _raise_exceptions_for_missing_entries=False)
        except (OSError, ValueError) as error:
            if shortage(error):
                raise
            raise self.error(why_missing()) from error
        return None if file is None else Path(file)

    def json(self, filename: str) -> dict[str, Any] | None:
        """The object in a JSON file; None if the checkpoint does not have it.

        Raises:
            UserError: as `locate`; the file is not valid JSON, or not an object.
        """
        if filename not in self._read:
            file = self.locate(filename)
            self._read[filename] = None if file is None else self._parsed(file)
        return self._read[filename]

    def _parsed(self, file: Path) -> dict[str, Any]:
        try:
            content = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            if shortage(error):
                raise
            raise self.file_error(file.name, f"is not JSON ({first_line(error)})") from error
        if not isinstance(content, dict):
            kind = type(content).__name__
            raise self.file_error(file.name, f"holds a {kind}, not an object with fields")
        return content

    def brings_code(self, filename: str = CONFIG) -> bool:
        """Whether this JSON file refers to Python code (``auto_map``)."""
        try:
            return "auto_map" in (self.json(filename) or {})
        except UserError:
            return False

    def adapter_only(self) -> UserError:
        """The error for a LoRA adapter without its base model: names the merged model, or how to
        merge it.
        """
        parent = Path(self.name).parent
        if (parent / CONFIG).exists():
            return self.error(f" is a LoRA adapter; name {parent}, which holds the merged model")
        try:
            base = (self.json(ADAPTER_CONFIG) or {})["base_model_name_or_path"]
        except (UserError, KeyError):
            base = "its base model"
        return self.error(
            f" is a LoRA adapter; merge it into {base} first: peft's AutoPeftModelForCausalLM"
            ".from_pretrained(...).merge_and_unload().save_pretrained(...)"
        )

    # -- weights -----------------------------------------------------------------------------------

    @cached_property
    def weight_files(self) -> list[Path]:
        """The files that hold the weights, shards in the order of their names.

        Raises:
            UserError: there are none, or a shard is missing.
        """
        for name in WEIGHT_FILES:
            file = self.locate(name)
            if file is not None:
                return self._shards(file) if name.endswith(".json") else [file]
        if self.locate(ADAPTER_CONFIG) is not None:
            raise self.adapter_only()
        if os.path.isdir(self.name):
            raise self.error(
                " holds no weights; name another folder, or save the model with save_pretrained"
            )
        raise self.error(why_missing())

    def _shards(self, file: Path) -> list[Path]:
        try:
            index = json.loads(file.read_text("utf-8"))["weight_map"]
            names = sorted(map(os.fspath, set(index.values())))  # TypeError: not a name
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
            problem = "is not an index (JSON with a weight_map of tensors and files)"
            raise self.file_error(file.name, problem) from e
        files = {name: self.locate(name) for name in names}
        if missing := [name for name, path in files.items() if path is None]:
            raise self.error(
                f": {len(missing)} of the {len(names)} files of its {file.name} are missing: "
                f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}; copy or download "
                "them again"
            )
        return [path for path in files.values() if path is not None]

    @property
    def keys(self) -> frozenset[str]:
        """Names of all tensors. Raises as `tensors`."""
        return frozenset(self.headers)

    @cached_property
    def headers(self) -> dict[str, Stored]:
        """Name -> header entry of all tensors. Raises as `tensors`."""
        entries: dict[str, Stored] = {}
        for file in self.weight_files:
            if file.suffix != ".safetensors":
                for key, value in self._load_bin(file, "meta").items():
                    entries[key] = Stored(tuple(value.shape), value.is_floating_point())
                continue
            with self._opened(file) as opened:
                for key in opened.keys():  # noqa: SIM118
                    part = opened.get_slice(key)
                    # F32, BF16, F8_E4M3 are floats; I8, BOOL are not.
                    entries[key] = Stored(tuple(part.get_shape()), "F" in part.get_dtype())
        return entries

    def check_checksums(self) -> None:
        """Raise ``UserError`` where a weight file is not what its `CHECKSUMS` say; only of small
        models, where that takes a second or two.
        """
        file, files = Path(self.name) / CHECKSUMS, {path.name: path for path in self.weight_files}
        if not file.is_file() or sum(f.stat().st_size for f in files.values()) > _MAX_HASHED:
            return
        for line in file.read_text("utf-8", "replace").splitlines():
            digest, _, name = line.partition("  ")
            if name in files and sha256_of(files[name]) != digest:
                raise self.error(
                    f": its {name} has another checksum than {CHECKSUMS} says; copy it again, or "
                    f"remove {CHECKSUMS} if you changed the weights"
                )

    @property
    def integer_weights(self) -> list[str]:
        """Sorted names of weights stored as integers or booleans."""
        return sorted(
            key
            for key, stored in self.headers.items()
            if not (stored.is_float or is_constant(key)) and key.endswith((".weight", ".bias"))
        )

    def tensors(self, names: Names = str) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor, file by file, one in memory at a time.

        ``names`` maps a name in the file to the consumer's; a tensor for which it returns None is
        not read. Tensors are on the CPU, in their stored shape and dtype, memory-mapped where the
        format allows: such pages do not count as memory of this process. A tensor that is kept
        keeps its file mapped, so copy what you keep. A ``.bin`` in the format before torch 1.6 is
        read as a whole; its tensors are freed as they are consumed.

        Raises:
            UserError: naming the file. Before the first tensor: no weights, an adapter only, a
                missing shard, a broken index, a file that is damaged or would run code. Later: two
                tensors of one name.
        """
        _ = self.headers
        seen: dict[str, str] = {}
        for file in self.weight_files:
            with self._opened(file) as tensors:
                for key in list(tensors.keys()):
                    if (name := names(key)) is None:
                        continue
                    if name in seen:
                        raise self.error(
                            f": {key} of {file.name} is a second {name} (the first is "
                            f"{seen[name]}); remove one"
                        )
                    seen[name] = key
                    # NOTE: no local holds the tensor, so it is freed when the consumer drops it.
                    yield name, tensors.get_tensor(key)

    @contextmanager
    def _opened(self, file: Path) -> Iterator[Any]:
        if file.suffix != ".safetensors":
            yield _Tensors(self._load_bin(file))
            return
        # NOTE: an OSError from the yield may come from the consumer and not from this file.
        try:
            opened = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise self._unreadable(file, error) from error
        try:
            with opened as tensors:
                yield tensors
        except SafetensorError as error:  # a dtype that torch does not have
            raise self._unreadable(file, error) from error

    def _load_bin(self, file: Path, device: str = "cpu") -> dict[str, Tensor]:
        mapped = zipfile.is_zipfile(file)  # torch maps only the format it writes since 1.6
        try:
            state = torch.load(file, map_location=device, weights_only=True, mmap=mapped)
        except pickle.UnpicklingError as error:
            raise self.refused_pickle(file.name, error) from error
        except (RuntimeError, EOFError, OSError, ValueError) as error:
            raise self._unreadable(file, error) from error
        other = (
            state
            if not isinstance(state, dict)
            else next((value for value in state.values() if not isinstance(value, Tensor)), None)
        )
        if other is not None:
            raise self.error(
                f": its {file.name} holds a {type(other).__name__}, not tensors by name; save the "
                "model with save_pretrained"
            )
        return state

    def _unreadable(self, file: Path, error: Exception) -> UserError:
        return self.error(
            f": its {file.name} cannot be read ({first_line(error)}); if it is damaged or "
            "incomplete, copy or download it again"
        )

    def refused_pickle(self, filename: str, error: pickle.UnpicklingError) -> UserError:
        """The error for a ``.bin`` that is damaged or holds more than tensors."""
        # torch names the first object it refuses: "GLOBAL builtins.eval was not an allowed".
        code = re.search(r"GLOBAL (\S+)", str(error))
        return self.error(
            f": its {filename} is damaged, or holds more than tensors and would run code"
            f"{f' ({code[1]})' if code else ''}, which is refused; copy it again, or use a "
            "safetensors checkpoint"
        )

    @cached_property
    def has_own_head(self) -> bool:
        """Whether the stored head differs from the embedding, even if the config ties them.

        Reads both matrices. Raises as `tensors`.
        """
        return is_untied(dict(self.tensors(embedding_or_head)))

    # -- DeepSpeed-Chat ----------------------------------------------------------------------------

    @property
    def is_legacy_reward(self) -> bool:
        """Whether DeepSpeed-Chat saved this reward model: backbone ``rwtransformer``, head
        ``v_head``.
        """
        return _LEGACY_HEAD in self.keys

    def legacy_state_dict(self, prefix: str) -> dict[str, Tensor]:
        """The tensors of such a reward model under the names of transformers'
        ``...ForSequenceClassification(num_labels=1)``.

        ``prefix`` is the architecture's base-model prefix ("model", "transformer"). Other tensors
        keep their names; the loader reports them as unexpected. Raises as `tensors`.
        """

        def current(name: str) -> str:
            if name == _LEGACY_HEAD:
                return "score.weight"
            old = next((old for old in _LEGACY_PREFIXES if name.startswith(old)), None)
            return name if old is None else f"{prefix}.{name.removeprefix(old)}"

        return dict(self.tensors(current))


class _Tensors(dict[str, Tensor]):
    """A state dict that is read as safetensors' files are."""

    def get_tensor(self, key: str) -> Tensor:
        # Popped, so that an unmapped file's memory is freed during the iteration. Detached: a
        # tensor may be a Parameter.
        return self.pop(key).detach()
