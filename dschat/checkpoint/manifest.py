"""Manifests of checkpoints: finds and verifies checkpoints.

No torch: ``train.py`` looks for checkpoints before it loads.

``OUT/<step>/checkpoints/step_000012/manifest.json`` is written last::

    {"format": 3, "dschat": "0.1.0", "step": 12, "world_size": 2, "settings": {...},
     "files": {"actor/mp_rank_00_model_states.pt": {"size": 1234, "sha256": "..."}, ...},
     "sha256": "of all of the above"}
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dschat import __version__
from dschat.config import UserError
from dschat.config.fields import read_text
from dschat.config.renamed import translated
from dschat.startup.files import sha256_of

FORMAT = 3
FOLDER = "checkpoints"  # in an output folder
MANIFEST = "manifest.json"
VALUES = "values.json"  # of a `RunState`, in a checkpoint
COMPLETE = "COMPLETE"  # the file in an output folder that marks a finished step
_NAME = re.compile(r"step_(\d{6,})")


class Damaged(ValueError):
    """An incomplete or damaged checkpoint; the message names the file."""


@dataclass
class CheckpointInfo:
    """A checkpoint on disk, from its manifest. ``files``: path inside it -> (size, sha256)."""

    folder: Path
    step: int
    world_size: int
    settings: dict[str, Any]
    files: dict[str, tuple[int, str]] = field(repr=False)

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


def step_name(step: int) -> str:
    return f"step_{step:06d}"


def step_folders(folder: Path) -> dict[Path, int]:
    """The checkpoints in ``folder``, complete or not, and their steps; latest first.

    Raises ``UserError`` where they cannot be listed, which is not the same as none: a disk that is
    not mounted, a server that does not answer.
    """
    try:
        numbered = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not folder.is_symlink():
            return {}  # not made yet, or removed
        raise UserError(
            f"the checkpoints in {folder} cannot be listed: {error.strerror}; make them readable, "
            "or move them elsewhere to start over"
        ) from None
    steps = [(int(match[1]), path) for match, path in numbered if match]
    return {path: step for step, path in sorted(steps, reverse=True)}


def manifest_bytes(
    step: int, world_size: int, settings: Mapping[str, Any], files: Mapping[str, tuple[int, str]]
) -> bytes:
    content = {
        "format": FORMAT,
        "dschat": __version__,
        "step": step,
        "world_size": world_size,
        "settings": settings,
        "files": {name: {"size": size, "sha256": sha} for name, (size, sha) in files.items()},
    }
    return (json.dumps(content | {"sha256": _digest(content)}, indent=1) + "\n").encode()


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> CheckpointInfo:
    """Read the manifest of ``folder``; ``Damaged`` where it is missing or not of this format.

    Raises ``UserError`` where the folder has the name of another step: it would be taken for that.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(read_text(path))
        digest = content.pop("sha256")
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise Damaged(f"{path} is broken") from None
    if content.get("format") != FORMAT:
        raise Damaged(f"{path} has format {content.get('format')}, this version reads {FORMAT}")
    if digest != _digest(content):
        raise Damaged(f"{path} has another checksum than it names")
    name = _NAME.fullmatch(folder.name)
    if name and int(name[1]) != content["step"]:
        raise UserError(
            f"{folder} holds the checkpoint of step {content['step']}; name it "
            f"{step_name(content['step'])} again, or move it elsewhere"
        )
    files = {name: (entry["size"], entry["sha256"]) for name, entry in content["files"].items()}
    settings = translated(content["settings"])
    return CheckpointInfo(folder, content["step"], content["world_size"], settings, files)


def check_sizes(checkpoint: CheckpointInfo) -> None:
    """``Damaged`` where a file is missing or has another size than in the manifest, or where a
    ``.pt`` file is not in the manifest: DeepSpeed would unpickle it.
    """
    for name, (size, _) in checkpoint.files.items():
        path = checkpoint.folder / name
        try:
            actual = path.stat().st_size
        except OSError:
            raise Damaged(f"{path} is missing") from None
        if actual != size:
            raise Damaged(f"{path} has {actual} bytes, the manifest says {size}")
    for path in sorted(checkpoint.folder.rglob("*.pt")):
        if path.relative_to(checkpoint.folder).as_posix() not in checkpoint.files:
            raise Damaged(f"{path} is not in the manifest")


def check_checksums(checkpoint: CheckpointInfo, names: Iterable[str]) -> None:
    """``Damaged`` where one of the files ``names`` has another checksum than in the manifest."""
    for name in names:
        path = checkpoint.folder / name
        try:
            sha = sha256_of(path)
        except OSError as error:
            raise Damaged(f"{path} cannot be read: {error.strerror}") from None
        if sha != checkpoint.files[name][1]:
            raise Damaged(f"{path} has another checksum than the manifest says")


def newest(output_dir: str | Path) -> CheckpointInfo | None:
    """The latest checkpoint of a step's output folder whose files all exist, in their sizes.

    Reads no checksums; `CheckpointManager.latest` verifies them before anything is loaded.
    """
    for folder in step_folders(Path(output_dir) / FOLDER):
        try:
            checkpoint = read_manifest(folder)
            check_sizes(checkpoint)
        except Damaged:
            continue
        return checkpoint
    return None
