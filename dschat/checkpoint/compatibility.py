"""Checks whether a step can resume from a checkpoint, and which settings may change then.

No torch: ``train.py`` checks this before anything loads.
"""

import dataclasses
from pathlib import Path
from typing import Any

from dschat.checkpoint.fingerprint import fingerprint
from dschat.checkpoint.manifest import (
    FOLDER,
    CheckpointInfo,
    Damaged,
    changed_settings,
    newest,
    read_manifest,
    step_folders,
)
from dschat.config import CommonConfig, RLHFConfig, SupervisedConfig, UserError

# Settings that may change freely: no number that training computes depends on them.
MAY_CHANGE = {
    # folder and start
    "output_dir": "the folder may have moved",
    "overwrite_output_dir": "only matters at the start",
    "resume": "only matters when resuming",
    # checkpoints and logs
    "save_steps": "when to save",
    "save_total_limit": "how many checkpoints to keep",
    "logging_steps": "what is recorded",
    "enable_tensorboard": "where it is recorded",
    "enable_wandb": "where it is recorded",
    "log_level": "what is printed",
    "disable_tqdm": "what is printed",
    "sample_steps": "what is recorded",
    "print_answers": "what is printed",
    "print_answers_interval": "what is printed",
    # failures
    "max_bad_steps": "when to give up",
    "reward_retries": "when to give up",
    "reward_timeout_s": "when to give up",
    # machine
    "local_rank": "set by the launcher",
    "reward_workers": "how many calls at a time",
    "max_tokens_per_micro_batch": "how a step is cut",
}
# Settings that may change if their product times the world size does not: see `check_step_size`.
_Flags = tuple[str, ...]
_ROWS = ("--per_device_train_batch_size", "--gradient_accumulation_steps")
_PROMPTS = ("--per_device_generation_batch_size", "--generation_batches")
_SEQUENCES = ("--per_device_training_batch_size", "--gradient_accumulation_steps")
CHECKED = {flag.removeprefix("--") for flag in (*_ROWS, *_PROMPTS, *_SEQUENCES)}
# Settings that name files which training reads: their contents must be equal too.
READ = {
    "data_path",
    "eval_data_path",
    "unsupervised_dataset_name",
    "chat_template",
    "reward_fn",
    "deepspeed",
    "deepspeed_config",
    "actor_deepspeed_config",
    "critic_deepspeed_config",
}
_CONTENTS = "contents"
Change = tuple[str, Any, Any]  # name, old, new


def settings_of(config: CommonConfig) -> dict[str, Any]:
    """The settings that a checkpoint records: a run that resumes from it must have equal ones."""
    values = {k: v for k, v in dataclasses.asdict(config).items() if k not in MAY_CHANGE}
    return values | {_CONTENTS: _contents(values)}


def _contents(values: dict[str, Any]) -> dict[str, str]:
    """Fingerprint of each setting that names local files."""
    named = {name: values[name] for name in sorted(READ & values.keys()) if values[name]}
    prints = {
        name: fingerprint([value] if isinstance(value, str) else value)
        for name, value in named.items()
    }
    return {name: digest for name, digest in prints.items() if digest}


def changes(checkpoint: CheckpointInfo, config: CommonConfig) -> list[Change]:
    """The settings that differ between ``config`` and the checkpoint's run, and edited files.

    A setting that is missing in an older checkpoint counts where it is not its default. The batch
    sizes that `check_step_size` compares are left out.
    """
    defaults, settings = settings_of(type(config)()), settings_of(config)
    changed = [
        (name, old, new)
        for name, old, new in changed_settings(checkpoint, settings)
        if name not in {*MAY_CHANGE, *CHECKED, _CONTENTS}
        and (name in checkpoint.settings or new != defaults.get(name))
    ]
    names = {name for name, _, _ in changed}
    then, now = checkpoint.settings.get(_CONTENTS, {}), settings[_CONTENTS]
    edited = [n for n in now if n in then and then[n] != now[n] and n not in names]
    return changed + [(n, settings[n], f"{_shown(settings[n])}, edited since") for n in edited]


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
                f"({num_processes}); make it {size} again with {' and '.join(flags)}, or restart "
                "with --overwrite_output_dir (train.py: --restart)"
            )


def check_weights(checkpoint: CheckpointInfo, config: CommonConfig) -> None:
    """``UserError`` where the checkpoint holds other trained weights: LoRA adapters of another
    rank or on other modules, or none; a critic or none; no moving average.
    """
    before = _config_of(checkpoint, type(config))
    for model in config.deepspeed_models:
        then, now = _trained_by(before, model), _trained_by(config, model)
        if isinstance(config, RLHFConfig) and isinstance(before, RLHFConfig) and config.enable_ema:
            then["enable_ema"], now["enable_ema"] = before.enable_ema, True
        for flag in now | then:
            if then.get(flag) != now.get(flag):
                raise UserError(
                    f"--{flag} {_shown(getattr(config, flag))}: {checkpoint.folder} holds weights "
                    f"that were trained with --{flag} {_shown(getattr(before, flag))}; resume with "
                    "that, or restart with --overwrite_output_dir (train.py: --restart)"
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


def check_start(config: CommonConfig) -> None:
    """``UserError`` where the output folder holds an unfinished run and neither --resume nor
    --overwrite_output_dir is set; or where the checkpoint to resume holds other weights.

    `CheckpointManager.latest` reports damaged checkpoints.
    """
    assert config.output_dir is not None
    folders = [path.name for path in step_folders(Path(config.output_dir) / FOLDER)]
    if folders and not config.resume and not config.overwrite_output_dir:
        raise UserError(
            f"--output_dir {config.output_dir} holds an unfinished run, with {FOLDER}/{folders[0]}"
            "; resume it with --resume, restart with --overwrite_output_dir, or choose another"
        )
    checkpoint = None
    if config.resume:
        is_named = config.resume != "latest"
        checkpoint = _named(config.resume) if is_named else newest(config.output_dir)
    if checkpoint is not None:
        check_weights(checkpoint, config)


def _named(path: str) -> CheckpointInfo | None:
    try:
        return read_manifest(Path(path))
    except Damaged:
        return None


def _shown(value: Any) -> str:
    """The value as one would write it after its flag."""
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value) or "none"
