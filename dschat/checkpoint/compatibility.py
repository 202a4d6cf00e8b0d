"""Compares the settings and fingerprints of a run with those of a checkpoint or a finished step,
and checks whether a step can resume from a checkpoint.

A fingerprint tells whether the local files, or the model, that a flag names have changed. No torch:
``train.py`` checks this before anything loads.
"""

import dataclasses
import glob
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b
from itertools import zip_longest
from pathlib import Path
from typing import Any, Optional

from dschat.checkpoint import manifest
from dschat.checkpoint.manifest import COMPLETE, CheckpointInfo, Damaged
from dschat.config import CommonConfig, RLHFConfig, SupervisedConfig, UserError
from dschat.config.fields import of_result, read_text

# Files of a data folder: its own, its train splits', and a hub clone's.
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

    Of a finished step it is of the mark, which tells when it was trained; else as `fingerprint`.
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


# Settings that may change if their product times the world size does not: see `check_step_size`.
_Flags = tuple[str, ...]
_ROWS = ("--per_device_train_batch_size", "--gradient_accumulation_steps")
_PROMPTS = ("--per_device_generation_batch_size", "--generation_batches")
_SEQUENCES = ("--per_device_training_batch_size", "--gradient_accumulation_steps")
CHECKED = {flag.removeprefix("--") for flag in (*_ROWS, *_PROMPTS, *_SEQUENCES)}
# Settings of answers that a partial rollout leaves under way.
_LENGTHS = ("max_prompt_seq_len", "max_answer_seq_len")
_UNDER_WAY = ("num_samples_per_prompt", *_LENGTHS)
_CONTENTS = "contents"
BASE = "model_name_or_path"
_RESTART = "restart with --overwrite_output_dir (train.py: --restart)"
Change = tuple[str, Any, Any]  # name, old, new


def settings_of(config: CommonConfig) -> dict[str, Any]:
    """The settings that a checkpoint records: a run that resumes from it must have equal ones."""
    counted = of_result(type(config))
    values = {k: v for k, v in dataclasses.asdict(config).items() if k in counted}
    return values | {_CONTENTS: contents_of(config)}


def contents_of(config: CommonConfig) -> dict[str, str]:
    """Fingerprint of each setting that names local files, or a model in a folder."""
    prints = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if value and reads_model(f.name):
            prints[f.name] = model_fingerprint(value)
        elif value and f.metadata.get("reads") == "files":
            prints[f.name] = fingerprint([value] if isinstance(value, str) else value)
    return {name: digest for name, digest in prints.items() if digest}


def started_from(folder: str, model: str) -> Optional[bool]:
    """Whether the finished step in ``folder`` started from what is in ``model``; None: not known
    (no finished step, a model of the hub).
    """
    try:
        record, _, _ = read_text(Path(folder, COMPLETE)).partition("\n")
        then = json.loads(record)[_CONTENTS].get(BASE)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    now = model_fingerprint(model)
    return then == now if then and now else None


def reads_model(name: str) -> bool:
    """Whether the flag ``name`` names a model or a tokenizer."""
    return name.endswith("name_or_path")


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The settings of a run that was started, or would be, as JSON has them; and their context."""

    settings: Mapping[str, Any]
    contents: Mapping[str, str]  # setting -> fingerprint of the local files it names
    num_processes: int
    output_dir: str
    working_directory: str
    auto_dtype: str = ""  # the precision of `dtype` auto, where it is known

    @classmethod
    def of(cls, config: CommonConfig, num_processes: int) -> "RunRecord":
        """What a run with ``config`` would record now."""
        settings = json.loads(json.dumps(dataclasses.asdict(config)))
        folder = config.output_dir or ""
        return cls(settings, contents_of(config), num_processes, folder, os.getcwd())

    def place(self, name: str) -> str:
        """The real path of ``name``; relative to OUT if inside, since OUT may be moved."""
        path = os.path.realpath(os.path.join(self.working_directory, os.path.expanduser(name)))
        out = os.path.join(self.working_directory, self.output_dir, os.pardir)
        inside = os.path.relpath(path, os.path.realpath(out))
        return path if inside.startswith(os.pardir) else os.path.join("OUT", inside)


def differences(
    config_class: type[CommonConfig],
    then: RunRecord,
    now: RunRecord,
    compared: Optional[Collection[str]] = None,
) -> list[Change]:
    """Settings that the result depends on (`of_result`) and that differ, and files and models whose
    contents do. The spelling of paths, and files that were moved, are no difference.

    A base model that is not named now, and the batch sizes that make up a step (`changed_sizes`),
    are left out. ``compared``: names of the settings to compare; None: all.
    """
    counted = of_result(config_class, then.settings, now.settings) - CHECKED
    known = {f.name: f.metadata for f in dataclasses.fields(config_class)}
    changed: list[Change] = []
    before, after = (_used(config_class, run.settings) for run in (then, now))
    for name in [*known, *(then.settings.keys() - known)]:
        old, new = before.get(name), after.get(name)
        is_left_out = name == BASE and not new if compared is None else name not in compared
        if is_left_out or (name in known and name not in counted):
            continue
        if name == "dtype":
            same = old == new or {old, new} == {"auto", then.auto_dtype}
        elif not (reads_model(name) or (name in known and known[name].get("reads") == "files")):
            same = old == new
        elif same := _same_files(name, then, now):
            same = name not in now.contents or then.contents.get(name) == now.contents[name]
            new = f"{_shown(new)}, changed since"
        if not same:
            changed.append((name, old, new))
    return changed


def _used(config_class: type[CommonConfig], settings: Mapping[str, Any]) -> dict[str, Any]:
    """``settings``, with what is used where other flags choose a default."""
    known = {f.name for f in dataclasses.fields(config_class)}
    config = config_class(**{name: value for name, value in settings.items() if name in known})
    return {**settings, **config.chosen()}


def _same_files(name: str, then: RunRecord, now: RunRecord) -> bool:
    """Whether a setting names the same files, in the same place or moved without changes."""
    moved = then.contents.get(name) == now.contents.get(name) is not None
    names = (_words(run.settings.get(name)) for run in (then, now))
    return all(
        old == new
        or then.place(old) == now.place(new)
        or (moved and os.path.basename(old) == os.path.basename(new) and fingerprint([new]))
        for old, new in zip_longest(*names, fillvalue="")
    )


def _words(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def changed_sizes(
    config_class: type[CommonConfig], then: RunRecord, now: RunRecord
) -> list[Change]:
    """The sizes of a step that differ, as `check_step_size` compares them."""
    old, new = (step_sizes(config_class(**run.settings), run.num_processes) for run in (then, now))
    return [(key[0], size, new[key]) for key, size in old.items() if size != new[key]]


def changes(checkpoint: CheckpointInfo, config: CommonConfig) -> list[Change]:
    """The `differences` between ``config`` and the checkpoint's run.

    A setting that is missing in an older checkpoint had its default.
    """
    now = RunRecord.of(config, checkpoint.world_size)
    defaults = RunRecord.of(type(config)(), 1).settings
    settings = {**defaults, **checkpoint.settings}
    contents = settings.pop(_CONTENTS, now.contents)  # older ones do not say
    then = dataclasses.replace(now, settings=settings, contents=contents)
    return differences(type(config), then, now)


def check_resume(checkpoint: CheckpointInfo, config: CommonConfig, num_processes: int) -> None:
    """``UserError`` where a run cannot resume from ``checkpoint``: a step of another size, another
    state, or more steps than the run has.
    """
    check_step_size(checkpoint, config, num_processes)
    check_state(checkpoint, config)
    check_total(checkpoint, config.max_steps or checkpoint.step)


def check_total(checkpoint: CheckpointInfo, total: int) -> None:
    """``UserError`` where a run of ``total`` steps ends before ``checkpoint``."""
    if checkpoint.step > total:
        raise UserError(
            f"{checkpoint.folder} is of a run that had taken {checkpoint.step} steps, and this one "
            f"ends after {total}; raise --max_steps or --num_train_epochs, or {_RESTART}"
        )


def check_step_size(checkpoint: CheckpointInfo, config: CommonConfig, num_processes: int) -> None:
    """``UserError`` where a step takes another number of rows than in the checkpoint's run: the
    position in the data and the number of steps are counted in steps.
    """
    before = _config_of(checkpoint, type(config))
    then, now = step_sizes(before, checkpoint.world_size), step_sizes(config, num_processes)
    for (unit, flags), size in then.items():
        if now[unit, flags] != size:
            raise UserError(
                f"{checkpoint.folder} is of a run with {size} {unit} over all processes "
                f"({checkpoint.world_size}); here it would be {now[unit, flags]} "
                f"({num_processes}); make it {size} again with {' and '.join(flags)}, or {_RESTART}"
            )


def check_state(checkpoint: CheckpointInfo, config: CommonConfig) -> None:
    """``UserError`` where the checkpoint holds other trained weights: LoRA adapters of another
    rank or on other modules or weights, or none; a critic or none; no moving average. Or answers
    under way (``partial_rollout``) of another number to a prompt, or longer ones than now.
    """
    before = _config_of(checkpoint, type(config))
    for model in config.deepspeed_models:
        then, now = _trained_by(before, model), _trained_by(config, model)
        if isinstance(config, RLHFConfig) and isinstance(before, RLHFConfig):
            if config.enable_ema:
                then["enable_ema"], now["enable_ema"] = before.enable_ema, True
            for name in _UNDER_WAY if config.partial_rollout and before.partial_rollout else ():
                old, new = getattr(before, name), getattr(config, name)
                then[name], now[name] = old, min(old, new) if name in _LENGTHS else new
        for flag in now | then:
            if then.get(flag) != now.get(flag):
                raise UserError(
                    f"--{flag} {_shown(getattr(config, flag))}: {checkpoint.folder} holds a state "
                    f"of --{flag} {_shown(getattr(before, flag))}; resume with that, or {_RESTART}"
                )


def _trained_by(config: CommonConfig, model: str) -> dict[str, Any]:
    """The flags that say which weights of ``model`` are trained, and what they choose."""
    chosen: dict[str, Any] = {}
    if model == "critic" and isinstance(config, RLHFConfig):
        chosen["advantage_estimator"] = config.has_critic
        if not config.has_critic:
            return chosen
        chosen["share_base"] = config.share_base  # its adapters fit other weights
    rank, modules = (f"{model}_lora_{of}".removeprefix("_") for of in ("dim", "modules"))
    names = [rank, modules, "only_optimize_lora"] if getattr(config, rank) else [rank]
    return chosen | {name: getattr(config, name) for name in names}


def _config_of(checkpoint: CheckpointInfo, config_class: type[CommonConfig]) -> CommonConfig:
    known = {f.name for f in dataclasses.fields(config_class)}
    return config_class(**{k: v for k, v in checkpoint.settings.items() if k in known})


def step_sizes(config: CommonConfig, num_processes: int) -> dict[tuple[str, _Flags], int]:
    """Size of a step, by its unit and the flags whose product it is."""
    if isinstance(config, SupervisedConfig):
        return {("rows a step", _ROWS): config.global_batch_size(num_processes)}
    assert isinstance(config, RLHFConfig)
    return {
        ("prompts an iteration", _PROMPTS): config.rollout_prompts(num_processes),
        ("sequences a step", _SEQUENCES): config.mini_batch_size(num_processes),
    }


def describe(changed: list[Change]) -> str:
    """``seed: 1 -> 2; max_steps: 0 -> 10``"""
    return "; ".join(f"{name}: {_shown(old)} -> {_shown(new)}" for name, old, new in changed)


def check_start(config: CommonConfig, num_processes: int) -> None:
    """``UserError`` where the output folder holds an unfinished run and neither --resume nor
    --overwrite_output_dir is set; or where the checkpoint to resume does not fit the run.

    `CheckpointManager.latest` reports damaged checkpoints.
    """
    assert config.output_dir is not None
    checkpoints = Path(config.output_dir) / manifest.FOLDER
    folders = [path.name for path in manifest.step_folders(checkpoints)]
    if folders and not config.resume and not config.overwrite_output_dir:
        raise UserError(
            f"--output_dir {config.output_dir} holds an unfinished run, with {checkpoints.name}/"
            f"{folders[0]}; resume it with --resume, restart with --overwrite_output_dir, or "
            "choose another"
        )
    checkpoint = manifest.newest(config.output_dir) if config.resume == "latest" else None
    if config.resume and config.resume != "latest":
        with suppress(Damaged):
            checkpoint = manifest.read_manifest(Path(config.resume))
    if checkpoint is not None:
        check_resume(checkpoint, config, num_processes)


def _shown(value: Any) -> str:
    """The value as one would write it after its flag."""
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value) or "none"
