"""DeepSpeed's part of a checkpoint: the states of one engine, out of it and back in.

An engine comes in, with a folder of its files; those files' contents go out, or the engine goes on
where it was, with any number of processes. DeepSpeed decides what its state is and where it lies;
what it would write is handed to whoever writes, and what it unpickles is confined to the few types
that belong there. Frozen weights are not in it: they come from where they came at the start. It
must not know what is trained.
"""

import argparse
import copy
import io
import logging
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dschat import dist
from dschat.knobs import UserError

logger = logging.getLogger("dschat")


class _InPlaceOfFiles:
    """What DeepSpeed takes for the one that writes and reads its files."""

    def __init__(self) -> None:
        self.states: dict[str, Any] = {}

    def save(self, state_dict: Any, path: str) -> None:
        self.states[path] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        return _load(Path(path), map_location)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Whoever writes has made them."""

    def create(self, info: Any) -> None:
        """There is nothing to announce to."""

    def commit(self, info: Any) -> bool:
        return True

    def is_decoupled(self) -> bool:
        return False

    def preserves_storage_sharing(self) -> bool:
        return True


def _load(path: Path, map_location: Any = None) -> Any:
    """One of DeepSpeed's files, read without running what a pickle may ask for."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    known = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    try:
        with torch.serialization.safe_globals(known):
            return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        asked = re.search(r"(?:GLOBAL|Unsupported global:) (\S+)", str(error))
        what = asked[1] if asked else str(error).splitlines()[0]
        raise UserError(
            f"--resume {path.parents[1]}: {path} asks for {what}, which is no state that this "
            "version of DeepSpeed writes; it is not loaded"
        ) from None


@contextmanager
def _with(target: Any, **attributes: Any) -> Iterator[None]:
    """A scope in which ``target`` has other attributes."""
    before = {name: target.__dict__[name] for name in attributes if name in target.__dict__}
    for name, value in attributes.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name in attributes:
            delattr(target, name)
        for name, value in before.items():
            setattr(target, name, value)


def capture(engine: Any, folder: Path, name: str) -> dict[str, Any]:
    """Collective. What DeepSpeed would write of ``engine`` on this process: path below ``folder``
    -> state, live tensors and all. Optimizer states on a disk are copied there at once.
    """
    files = _InPlaceOfFiles()
    with _with(engine, checkpoint_engine=files, _copy_recovery_script=lambda folder: None):
        engine.save_checkpoint(
            str(folder),
            tag=name,
            client_state={"micro_steps": engine.micro_steps},  # DeepSpeed forgets it
            save_latest=False,
            exclude_frozen_parameters=True,
        )
    return {Path(path).relative_to(folder).as_posix(): s for path, s in files.states.items()}


def restore(engine: Any, folder: Path, name: str, world_size: int, scratch: Path) -> None:
    """Collective. Put ``engine`` where it was when ``folder / name`` was written by ``world_size``
    processes. It must be new: DeepSpeed does not load into ZeRO-3 that has already saved.

    ``scratch``: where a conversion for another number of processes may lie meanwhile.

    Raises ``UserError`` for what DeepSpeed cannot convert.
    """
    if world_size == dist.world_size() or not engine.zero_optimization():
        _load_checkpoint(engine, folder, name)
        return
    try:
        _convert_once(engine, folder / name, scratch / name)
        inner = engine.optimizer.optimizer
        decays = [group["weight_decay"] for group in inner.param_groups]
        with _with(engine._config, load_universal_checkpoint=True):
            _load_checkpoint(engine, scratch, name)
        # NOTE: what DeepSpeed 0.19 loads into ZeRO-3 has two faults: all parameter groups get the
        # settings of the first one, and all share one count of steps, which each of them advances.
        for group, decay in zip(inner.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        for moments in inner.state.values():
            moments["step"] = copy.deepcopy(moments["step"])
        dist.barrier()
    finally:
        if dist.is_main_process():
            shutil.rmtree(scratch, ignore_errors=True)


def _load_checkpoint(engine: Any, folder: Path, name: str) -> None:
    with _with(engine, checkpoint_engine=_InPlaceOfFiles()):
        path, client_state = engine.load_checkpoint(
            str(folder), tag=name, custom_load_fn=_load_trained
        )
    assert path is not None, f"{folder / name} holds nothing for DeepSpeed"
    engine.micro_steps = client_state["micro_steps"]


def _load_trained(src: dict[str, Any], dst: nn.Module) -> None:
    """Every weight that is trained, and no other: frozen ones were left out."""
    result = dst.load_state_dict(src, strict=False)
    trained = {name for name, p in dst.named_parameters() if p.requires_grad}
    missing = trained & set(result.missing_keys)
    assert not missing, f"missing in the checkpoint: {sorted(missing)}"
    assert not result.unexpected_keys, f"not in the model: {result.unexpected_keys}"


def _convert_once(engine: Any, source: Path, target: Path) -> None:
    """Collective. `_convert` by the main process; ``UserError`` with the reason if it cannot."""
    problem = ""
    if engine.zero_nvme_offload_optimizer():
        problem = "optimizer states lie on a disk (offload_optimizer nvme), where it cannot read"
    elif dist.is_main_process():
        logger.info("converting %s for another number of processes", source)
        try:
            _convert(source, target)
        except Exception as error:  # nobody may be left waiting
            logger.debug("the conversion failed", exc_info=True)
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
    (problem, *_) = dist.gather_objects(problem)
    if problem:
        raise UserError(
            f"--resume {source.parent}: it was written by another number of processes, and "
            f"DeepSpeed's universal checkpoint cannot convert it ({problem}); start as many as "
            "before"
        )


def _convert(source: Path, target: Path) -> None:
    """DeepSpeed's universal checkpoint of ``source``: every parameter's state whole, in ``target``.

    It unpickles without limits, so every file is read within them first.
    """
    from deepspeed.checkpoint import ds_to_universal

    for path in sorted(source.glob("*.pt")):
        _load(path, "cpu")
    target.mkdir(parents=True)
    arguments = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,  # more are processes, forked from one with threads
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(io.StringIO()):
        ds_to_universal.main(arguments)
