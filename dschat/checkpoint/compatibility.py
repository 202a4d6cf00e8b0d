"""Whether a step goes on from the checkpoints in its folder, and what may be different then.

A step's configuration comes in, and its output folder; which settings a checkpoint records, which
of them have changed, and an error for a run that would be lost, go out. No torch: ``train.py`` asks
before anything loads. It must not know what is in a checkpoint.
"""

import dataclasses
from pathlib import Path
from typing import Any

from dschat.checkpoint.fingerprint import fingerprint
from dschat.checkpoint.manifest import (
    FOLDER,
    Damaged,
    Found,
    changed_settings,
    newest,
    read_manifest,
    step_folders,
)
from dschat.config import CommonConfig, RLHFConfig, SupervisedConfig, UserError

# What may change without a question: no number that training computes depends on it.
MAY_CHANGE = {
    # where, and how to begin
    "output_dir": "the folder may have moved",
    "overwrite_output_dir": "is about beginning",
    "resume": "is about going on",
    # how much is kept and told
    "save_steps": "when to save",
    "save_total_limit": "how much of it to keep",
    "logging_steps": "what is recorded",
    "enable_tensorboard": "where it is recorded",
    "enable_wandb": "where it is recorded",
    "log_level": "what is printed",
    "disable_tqdm": "what is printed",
    "print_answers": "what is printed",
    "print_answers_interval": "what is printed",
    # how much is endured
    "max_bad_steps": "when to give up",
    "reward_retries": "when to give up",
    "reward_timeout_s": "when to give up",
    # the machine
    "local_rank": "set by the launcher",
    "reward_workers": "how many calls at a time",
}
# What may change as long as its product, times the processes, does not: see `check_step_size`.
_Flags = tuple[str, ...]
_ROWS = ("--per_device_train_batch_size", "--gradient_accumulation_steps")
_PROMPTS = ("--per_device_generation_batch_size", "--generation_batches")
_SEQUENCES = ("--per_device_training_batch_size", "--gradient_accumulation_steps")
CHECKED = {flag.removeprefix("--") for flag in (*_ROWS, *_PROMPTS, *_SEQUENCES)}
# What names files that training reads: with other contents it is another setting.
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
    """What a checkpoint records of a run, and another run must have equal to go on from it."""
    values = {k: v for k, v in dataclasses.asdict(config).items() if k not in MAY_CHANGE}
    return values | {_CONTENTS: _contents(values)}


def _contents(values: dict[str, Any]) -> dict[str, str]:
    """A fingerprint for every setting that names local files."""
    named = {name: values[name] for name in sorted(READ & values.keys()) if values[name]}
    prints = {
        name: fingerprint([value] if isinstance(value, str) else value)
        for name, value in named.items()
    }
    return {name: found for name, found in prints.items() if found}


def changes(found: Found, config: CommonConfig) -> list[Change]:
    """The settings of ``config`` that are not those of the checkpoint's run. A knob that the
    checkpoint is too old to know has changed if it has not its default. A file that was edited
    since is another setting. The sizes that `check_step_size` compares are not among them.
    """
    defaults, settings = settings_of(type(config)()), settings_of(config)
    changed = [
        (name, old, new)
        for name, old, new in changed_settings(found, settings)
        if name not in {*MAY_CHANGE, *CHECKED, _CONTENTS}
        and (name in found.settings or new != defaults.get(name))
    ]
    names = {name for name, _, _ in changed}
    then, now = found.settings.get(_CONTENTS, {}), settings[_CONTENTS]
    edited = [n for n in now if n in then and then[n] != now[n] and n not in names]
    return changed + [(n, settings[n], f"{_shown(settings[n])}, edited since") for n in edited]


def check_step_size(found: Found, config: CommonConfig, num_processes: int) -> None:
    """``UserError`` where a step takes another number of rows than in the checkpoint's run: its
    place in the data, and how many steps there are, count steps.
    """
    before = _config_of(found, type(config))
    then, now = step_sizes(before, found.world_size), step_sizes(config, num_processes)
    for (what, flags), size in then.items():
        if now[what, flags] != size:
            raise UserError(
                f"{found.folder} is of a run with {size} {what} over all processes "
                f"({found.world_size}); here it would be {now[what, flags]} ({num_processes}); "
                f"make it {size} again with {' and '.join(flags)}, or begin anew with "
                "--overwrite_output_dir (train.py: --restart)"
            )


def check_weights(found: Found, config: CommonConfig) -> None:
    """``UserError`` where other weights would be trained than the checkpoint holds: LoRA adapters
    of another rank, or on other modules, or none.
    """
    before = _config_of(found, type(config))
    for model in config.deepspeed_models:
        then, now = _adapters(before, model), _adapters(config, model)
        for flag in now | then:
            if then.get(flag) != now.get(flag):
                raise UserError(
                    f"--{flag} {_shown(getattr(config, flag))}: {found.folder} holds weights that "
                    f"were trained with --{flag} {_shown(getattr(before, flag))}; resume with "
                    "that, or restart with --overwrite_output_dir (train.py: --restart)"
                )


def _adapters(config: CommonConfig, model: str) -> dict[str, Any]:
    """The flags that say which weights of ``model`` are trained."""
    rank, modules = (f"{model}_lora_{of}".removeprefix("_") for of in ("dim", "modules"))
    if model == "critic" and not getattr(config, "has_critic", True):
        return {}
    names = [rank, modules, "only_optimize_lora"] if getattr(config, rank) else [rank]
    return {name: getattr(config, name) for name in names}


def _config_of(found: Found, config_class: type[CommonConfig]) -> CommonConfig:
    known = {f.name for f in dataclasses.fields(config_class)}
    return config_class(**{k: v for k, v in found.settings.items() if k in known})


def step_sizes(config: CommonConfig, num_processes: int) -> dict[tuple[str, _Flags], int]:
    """What a step takes, and the flags that it is the product of -> how much."""
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
    """``UserError`` where a step would begin in the folder of one that was cut short, with neither
    --resume nor --overwrite_output_dir to say what becomes of that; or would resume a checkpoint of
    other weights. A damaged checkpoint is for `Checkpoints.latest` to name.
    """
    assert config.output_dir is not None
    folders = [path.name for path in step_folders(Path(config.output_dir) / FOLDER)]
    if folders and not config.resume and not config.overwrite_output_dir:
        raise UserError(
            f"--output_dir {config.output_dir} holds an unfinished run, with {FOLDER}/{folders[0]}"
            "; go on from there with --resume, begin anew with --overwrite_output_dir, or choose "
            "another"
        )
    found = None
    if config.resume:
        is_named = config.resume != "latest"
        found = _named(config.resume) if is_named else newest(config.output_dir)
    if found is not None:
        check_weights(found, config)


def _named(path: str) -> Found | None:
    try:
        return read_manifest(Path(path))
    except Damaged:
        return None


def _shown(value: Any) -> str:
    """As a flag would have it, or nearly."""
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value) or "none"
