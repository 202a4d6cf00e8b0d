"""Checks whether a step can resume from a checkpoint, and which settings may change then.

No torch: ``train.py`` checks this before anything loads.
"""

import dataclasses
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from dschat.checkpoint.fingerprint import fingerprint, model_fingerprint
from dschat.checkpoint.manifest import (
    FOLDER,
    VALUES,
    CheckpointInfo,
    Damaged,
    newest,
    read_manifest,
    step_folders,
)
from dschat.config import CommonConfig, RLHFConfig, SupervisedConfig, UserError
from dschat.config.fields import of_result
from dschat.observability.metrics_log import METRICS

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


def reads_model(name: str) -> bool:
    """Whether the flag ``name`` names a model or a tokenizer."""
    return name.endswith("name_or_path")


def changes(checkpoint: CheckpointInfo, config: CommonConfig) -> list[Change]:
    """The settings that differ between ``config`` and the checkpoint's run, and files and models
    that have changed.

    A setting that is missing in an older checkpoint had its default. The batch sizes that
    `check_step_size` compares are left out.
    """
    defaults, settings = json.loads(json.dumps([settings_of(type(config)()), settings_of(config)]))
    before = defaults | checkpoint.settings
    ignored = {f.name for f in dataclasses.fields(config)} | {_CONTENTS}
    ignored -= of_result(type(config), before, settings) - CHECKED
    pairs = [(name, before.get(name), settings.get(name)) for name in before | settings]
    changed = [pair for pair in pairs if pair[0] not in ignored and pair[1] != pair[2]]
    names = {name for name, _, _ in changed}
    then, now = checkpoint.settings.get(_CONTENTS, {}), settings[_CONTENTS]
    edited = [n for n in now if n in then and then[n] != now[n] and n not in names]
    return changed + [(n, settings[n], f"{_shown(settings[n])}, changed since") for n in edited]


def check_resume(checkpoint: CheckpointInfo, config: CommonConfig, num_processes: int) -> None:
    """``UserError`` where a run cannot resume from ``checkpoint``: a step of another size, another
    state, more steps than the run has, or rows of metrics.jsonl that are gone.
    """
    check_step_size(checkpoint, config, num_processes)
    check_state(checkpoint, config)
    check_total(checkpoint, config.max_steps or checkpoint.step)
    assert config.output_dir is not None
    log = Path(config.output_dir) / METRICS
    try:
        size = json.loads((checkpoint.folder / VALUES).read_bytes())["log"]["bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # a damaged checkpoint; `CheckpointManager.latest` reports it
    if size > (log.stat().st_size if log.exists() else 0):
        raise UserError(
            f"{log} is shorter than when {checkpoint.folder} was saved; restore it, resume in the "
            f"--output_dir of that run, or {_RESTART}"
        )


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
    rank or on other modules, or none; a critic or none; no moving average. Or answers under way
    (``partial_rollout``) of another number to a prompt, or longer ones than are sampled now.
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
    folders = [path.name for path in step_folders(Path(config.output_dir) / FOLDER)]
    if folders and not config.resume and not config.overwrite_output_dir:
        raise UserError(
            f"--output_dir {config.output_dir} holds an unfinished run, with {FOLDER}/{folders[0]}"
            "; resume it with --resume, restart with --overwrite_output_dir, or choose another"
        )
    checkpoint = newest(config.output_dir) if config.resume == "latest" else None
    if config.resume and config.resume != "latest":
        with suppress(Damaged):
            checkpoint = read_manifest(Path(config.resume))
    if checkpoint is not None:
        check_resume(checkpoint, config, num_processes)


def _shown(value: Any) -> str:
    """The value as one would write it after its flag."""
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value) or "none"
