"""Fingerprints the local files or the model that a flag names, to detect that they changed."""

import glob
import os
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Optional

from dschat.checkpoint.manifest import COMPLETE

# Files of a data folder: its own, those of its train splits, and those of a hub clone.
_IN_FOLDER = ("*", "train*/*", "data/*", "data/train*/*")
_OF_DATA = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt", ".arrow", ".gz")
OF_MODEL = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt", ".py")
_CACHE_PREFIX = "cache-"  # files that the datasets library writes beside its shards
_BLOCK = 1 << 16  # bytes
_NUM_BLOCKS = 256  # of all files together, at least 2 each: 16 MiB for up to 128 files


def fingerprint(names: Iterable[str]) -> Optional[str]:
    """16 hexadecimal digits for the files that ``names`` match; None where none is local.

    A name is a file, a folder, a glob, or one of these before colons (``PATH:WEIGHT``,
    ``file.py:name``). It covers the names of the files, not their folders; all bytes of small
    files; the size of large files and blocks spread over them.
    """
    return _digest([path for name in names for path in _files(name)])


def model_fingerprint(name: str) -> Optional[str]:
    """16 hexadecimal digits for the model in the folder ``name``; None where it is not local.

    Of a finished step that of its mark, which tells when it was trained; else as `fingerprint`.
    """
    folder = os.path.expanduser(name)
    mark = os.path.join(folder, COMPLETE)
    if os.path.isfile(mark):
        return _digest([mark])
    files = sorted(glob.glob(os.path.join(glob.escape(folder), "*")))
    return _digest([path for path in files if path.endswith(OF_MODEL) and os.path.isfile(path)])


def _digest(files: list[str]) -> Optional[str]:
    digest = blake2b(digest_size=8)
    for path in files:
        digest.update(os.fsencode(os.path.basename(path)) + b"\0")
        try:
            _read(path, max(2, _NUM_BLOCKS // len(files)), digest.update)
        except OSError:
            digest.update(b"unreadable")  # reading it later reports the error
    return digest.hexdigest() if files else None


def _files(name: str) -> list[str]:
    """The local files that ``name`` matches, sorted."""
    colon = ":"
    while name and colon:
        path = os.path.expanduser(name)
        if os.path.isfile(path):
            return [path]
        if os.path.isdir(path):
            base = glob.escape(path)
            matches = [p for pattern in _IN_FOLDER for p in glob.glob(os.path.join(base, pattern))]
            return sorted(set(filter(_is_data, matches)))
        if matches := sorted(filter(_is_data, glob.glob(path, recursive=True))):
            return matches
        name, colon, _ = name.rpartition(":")
    return []


def _is_data(path: str) -> bool:
    name = os.path.basename(path)
    is_kind = name.lower().endswith(_OF_DATA) and not name.startswith(_CACHE_PREFIX)
    return is_kind and os.path.isfile(path)


def _read(path: str, num_blocks: int, use: Callable[[bytes], None]) -> None:
    """Pass a file's size and up to ``num_blocks`` blocks, first and last included, to ``use``."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        use(b"%d\0" % size)
        last = max(0, size - _BLOCK)
        stride = max(_BLOCK, -(-last // (num_blocks - 1)))
        for start in (*range(0, last, stride), last):
            file.seek(start)
            use(file.read(_BLOCK))
