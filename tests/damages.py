"""Damages of a file: by a disk, by a copy that was cut, by a hand that meant well."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path, share: float = 0.5, bit: int = 1) -> None:
    """Flip a bit of the byte at that share of the file."""
    if content := bytearray(path.read_bytes()):
        content[int(len(content) * share)] ^= bit
        path.write_bytes(content)


def folder(path: Path) -> None:
    remove(path)
    path.mkdir()


def broken_link(path: Path) -> None:
    remove(path)
    path.symlink_to(path.parent / "nowhere")


def pipe(path: Path) -> None:
    """A FIFO: who opens it waits for the other end."""
    remove(path)
    os.mkfifo(path)


def numbers(path: Path) -> None:
    """Each number gets 400 digits more."""
    path.write_bytes(re.sub(rb"\d+", rb"\g<0>" + b"9" * 400, path.read_bytes(), count=200))


# Of a file as a whole; each line of a file of lines is damaged by `of_a_line`.
DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: path.write_bytes(b""),
    "half": half,
    "bit": flip,
    "another bit": lambda path: flip(path, 0.9, 64),
    "folder": folder,
    "broken link": broken_link,
    "pipe": pipe,
    "deep": lambda path: path.write_text("[" * 10_000),
    "deep object": lambda path: path.write_text('{"step":' * 10_000),
    "digits": numbers,
    "null": lambda path: path.write_text("null"),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe" + path.read_bytes()[2:]),
}
LINES = ('{"step": 3, "eval/sc', "[]", "null", '{"eval/score": 1}', '{"step": "3"}', "\xff\x00")
LINES += (
    '{"step": 3, "eval/score": ' + "[" * 10_000 + "}",
    '{"step": 1' + "0" * 400 + "}",
    "9" * 5_000,
)
