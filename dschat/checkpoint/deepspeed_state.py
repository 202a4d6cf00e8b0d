"""Captures and restores the state of a DeepSpeed engine, also under another layout.

A restored engine keeps its own settings; its ZeRO stage, precision and number of processes may
differ from those of the checkpoint. DeepSpeed chooses the files and their contents; they are
captured instead of written, and unpickling is confined to the few types that they need. Frozen
weights are left out: they are loaded from the base model again.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

import dschat.distributed as dist
from dschat.checkpoint.reshard import SavedEngine, fill, load_file
from dschat.config import UserError
from dschat.models.training_engine import (
    TrainingEngine,
    attributes_replaced,
    full_shape,
    wait_for_copies,
)

_SCALE_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def _files_in(states: dict[str, Any]) -> SimpleNamespace:
    """DeepSpeed's interface for files (its CheckpointEngine); keeps in ``states`` what it saves."""
    return SimpleNamespace(
        save=lambda state_dict, path: states.update({path: state_dict}),
        load=lambda path, map_location=None: load_file(Path(path), map_location),
        makedirs=lambda path, exist_ok=False: None,  # `async_writer` makes them
        create=lambda info: None,
        commit=lambda info: True,
        is_decoupled=lambda: False,
        preserves_storage_sharing=lambda: True,
    )


def capture(engine: TrainingEngine, folder: Path, name: str) -> dict[str, Any]:
    """Collective. The files that DeepSpeed would write for ``engine`` on this rank: path below
    ``folder`` -> state, with live tensors. Copies optimizer states that are offloaded to a disk.
    """
    wait_for_copies()  # of optimizer states that were away
    states: dict[str, Any] = {}
    with attributes_replaced(
        engine, checkpoint_engine=_files_in(states), _copy_recovery_script=lambda folder: None
    ):
        engine.save_checkpoint(
            str(folder),
            tag=name,
            # DeepSpeed does not save micro_steps; `reshard` needs the groups.
            client_state={"micro_steps": engine.micro_steps, "groups": _plain_groups(engine)},
            save_latest=False,
            exclude_frozen_parameters=True,
        )
    return {Path(path).relative_to(folder).as_posix(): s for path, s in states.items()}


def _plain_groups(engine: TrainingEngine) -> list[list[str]]:
    """Under ZeRO 0, the names of the parameters in each group of torch's optimizer."""
    if engine.zero_optimization():
        return []
    return [[engine.param_names[p] for p in g["params"]] for g in engine.optimizer.param_groups]


def restore(engine: TrainingEngine, folder: Path, name: str, world_size: int) -> None:
    """Collective. Restore ``engine`` from ``folder / name``, written by ``world_size`` processes.

    Restored: weights, moments, counters, position in the schedule, fp16's loss scale. Kept from
    ``engine``: learning rate, betas, decay, schedule, clipping, scaling. The engine must be new:
    under ZeRO-3 DeepSpeed does not load into one that has saved.

    Raises ``UserError`` for another model, and for states on a disk that need another layout.
    """
    saved = SavedEngine(folder / name, world_size)
    _check_fits(engine, saved)
    has_same_ranks = world_size == dist.world_size() or not engine.zero_optimization()
    with _own_settings(engine, saved):
        if has_same_ranks and _layout(saved.config) == _layout(engine.config):
            _load_checkpoint(engine, folder, name)
        else:
            _check_in_memory(engine, saved)
            _reshard(engine, saved)
    dist.barrier()


def _layout(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """The settings that determine how DeepSpeed partitions its files."""
    enabled = [config.get(name, {}).get("enabled", False) for name in ("bf16", "fp16")]
    return config["zero_optimization"], *enabled


def _check_fits(engine: TrainingEngine, saved: SavedEngine) -> None:
    """``UserError`` where other weights were trained."""
    then = saved.shapes()
    now = {name: tuple(full_shape(p)) for p, name in engine.param_names.items() if p.requires_grad}
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            raise UserError(
                f"--resume {saved.folder.parent}: {name} of its {saved.folder.name} is "
                f"{_described(then.get(name))}, here {_described(now.get(name))}; resume with the "
                "model and the LoRA flags of that run, or restart with --overwrite_output_dir "
                "(train.py: --restart)"
            )


def _described(shape: tuple[int, ...] | None) -> str:
    return f"trained ({' x '.join(map(str, shape))})" if shape else "not trained"


def _check_in_memory(engine: TrainingEngine, saved: SavedEngine) -> None:
    sections = [config["zero_optimization"] for config in (saved.config, engine.config)]
    kinds = ("offload_optimizer", "offload_param")
    if any((zero.get(kind) or {}).get("device") == "nvme" for zero in sections for kind in kinds):
        raise UserError(
            f"--resume {saved.folder.parent}: states on a disk (nvme) can only be resumed as they "
            "were saved; start as many processes as before, with the same ZeRO stage, --dtype and "
            "offload settings"
        )


@contextmanager
def _own_settings(engine: TrainingEngine, saved: SavedEngine) -> Iterator[None]:
    """A scope for loading into ``engine``, after which it has its own settings again."""
    optimizer, schedule = engine.optimizer, engine.lr_scheduler
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    base_rates = schedule.base_lrs
    names = ("clip_grad", "loss_scaler", "dynamic_loss_scale")  # of ZeRO's optimizers
    scaling = {name: getattr(optimizer, name) for name in names if hasattr(optimizer, name)}
    yield
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        group.update(settings)
    schedule.base_lrs = base_rates
    rates = zip(optimizer.param_groups, base_rates, schedule.lr_lambdas, strict=True)
    for group, rate, factor in rates:
        group["lr"] = rate * factor(schedule.last_epoch)
    schedule._last_lr = [group["lr"] for group in optimizer.param_groups]
    for name, value in scaling.items():
        setattr(optimizer, name, value)
    if "loss_scaler" in scaling:
        _restore_loss_scale(scaling["loss_scaler"], engine.config, saved)


def _restore_loss_scale(scaler: Any, config: Mapping[str, Any], saved: SavedEngine) -> None:
    """Restore fp16's dynamic loss scale, unless its initial value is set differently now."""
    before, initial = saved.loss_scaler(), ("loss_scale", "initial_scale_power")
    then, now = (c.get("fp16", {}) for c in (saved.config, config))
    if not (scaler.dynamic and getattr(before, "dynamic", False)):
        return
    if all(then.get(name) == now.get(name) for name in initial):
        for name in _SCALE_STATE:
            setattr(scaler, name, getattr(before, name))
        scaler.cur_scale = max(scaler.cur_scale, scaler.min_scale)


def _load_checkpoint(engine: TrainingEngine, folder: Path, name: str) -> None:
    """Collective. Load into the same layout."""
    with attributes_replaced(engine, checkpoint_engine=_files_in({})):
        path, client_state = engine.load_checkpoint(
            str(folder), tag=name, custom_load_fn=_load_trained
        )
    assert path is not None, f"{folder / name} has no files of DeepSpeed"
    engine.micro_steps = client_state["micro_steps"]


def _reshard(engine: TrainingEngine, saved: SavedEngine) -> None:
    """Collective. Load into another layout."""
    optimizer = engine.optimizer
    if engine.zero_optimization_partition_weights():
        optimizer.checkpoint_event_prologue()
    fill(engine, saved)
    if engine.zero_optimization_partition_weights():
        optimizer.checkpoint_event_epilogue()
    engine.lr_scheduler.load_state_dict(saved.head["lr_scheduler"])
    for name in ("global_steps", "global_samples", "skipped_steps", "micro_steps"):
        setattr(engine, name, saved.head[name])


def _load_trained(src: dict[str, Any], dst: nn.Module) -> None:
    """Load exactly the trained weights: frozen ones were not saved."""
    result = dst.load_state_dict(src, strict=False)
    trained = {name for name, p in dst.named_parameters() if p.requires_grad}
    missing = trained & set(result.missing_keys)
    assert not missing, f"missing in the checkpoint: {sorted(missing)}"
    assert not result.unexpected_keys, f"not in the model: {result.unexpected_keys}"
