"""Whether the files that a flag names still hold what they held.

Names come in as flags have them; a fingerprint of the local files behind them goes out. It must not
know what is in a file.
"""

import glob
import os
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Optional

# What is read of a data folder: its own files, those of its train splits and of a hub clone's.
_IN_FOLDER = ("*", "train*/*", "data/*", "data/train*/*")
_OF_DATA = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt", ".arrow", ".gz")
_LIBRARYS_OWN = "cache-"  # what the datasets library writes beside the shards that it reads
_BLOCK = 1 << 16  # bytes
_NUM_BLOCKS = 256  # of all files together: a fingerprint reads 16 MiB, of more than 128 files more


def fingerprint(names: Iterable[str]) -> Optional[str]:
    """16 hexadecimal digits of the files that ``names`` stand for; None where none is local.

    A name is a file, a folder, a glob, or one of these before colons (``PATH:WEIGHT``,
    ``file.py:name``). Files may move, with their folder, but neither change nor be renamed. Of
    small ones every byte counts; of larger ones the size and blocks spread over all of it.
    """
    files = [path for name in names for path in _files(name)]
    digest = blake2b(digest_size=8)
    for path in files:
        digest.update(os.fsencode(os.path.basename(path)) + b"\0")
        try:
            _read(path, max(2, _NUM_BLOCKS // len(files)), digest.update)
        except OSError:
            digest.update(b"unreadable")  # who needs it will say so
    return digest.hexdigest() if files else None


def _files(name: str) -> list[str]:
    """The local files that ``name`` stands for, in an order that does not depend on the disk's."""
    colon = ":"
    while name and colon:
        path = os.path.expanduser(name)
        if os.path.isfile(path):
            return [path]
        if os.path.isdir(path):
            base = glob.escape(path)
            found = [p for pattern in _IN_FOLDER for p in glob.glob(os.path.join(base, pattern))]
            return sorted(set(filter(_is_data, found)))
        if found := sorted(filter(_is_data, glob.glob(path, recursive=True))):
            return found
        name, colon, _ = name.rpartition(":")
    return []


def _is_data(path: str) -> bool:
    name = os.path.basename(path)
    is_kind = name.lower().endswith(_OF_DATA) and not name.startswith(_LIBRARYS_OWN)
    return is_kind and os.path.isfile(path)


def _read(path: str, num_blocks: int, use: Callable[[bytes], None]) -> None:
    """Hand ``use`` a file's size and up to ``num_blocks`` of its blocks, its first and last too."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        use(b"%d\0" % size)
        last = max(0, size - _BLOCK)
        stride = max(_BLOCK, -(-last // (num_blocks - 1)))
        for start in (*range(0, last, stride), last):
            file.seek(start)
            use(file.read(_BLOCK))
