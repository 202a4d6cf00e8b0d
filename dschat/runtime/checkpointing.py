"""Resumes a training loop, saves checkpoints after its steps, and stops it on a signal."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import dschat.distributed as dist
from dschat.checkpoint import compatibility
from dschat.checkpoint.async_writer import read_generators
from dschat.checkpoint.manager import CheckpointManager, RunState
from dschat.checkpoint.manifest import step_name
from dschat.config import CommonConfig, UserError
from dschat.distributed import stop_signals
from dschat.rewards.scoring import RewardError
from dschat.runtime.hub import publish

logger = logging.getLogger("dschat")


@dataclass
class TrainingCheckpointer:
    """Checkpoints of one loop. Made by `training_checkpointer`."""

    config: CommonConfig
    checkpoints: CheckpointManager | None
    request: stop_signals.StopRequest | None
    save_models: Callable[[], None] = lambda: None
    last: tuple[int, RunState] | None = None  # after the last step

    def begin(
        self, state: RunState, total: int, restore: Callable[[dict[str, Any]], None]
    ) -> dict[str, Any] | None:
        """Collective. Restore ``state``'s engines and tensors from the checkpoint of --resume, and
        the rest by ``restore(values)``; returns its values. None where the run starts.

        ``total``: steps of the run. ``rows`` among ``state``'s values, the size of the data (None:
        unknown), must be unchanged. Raises ``UserError`` where ``--resume`` names a checkpoint that
        is damaged or does not fit, before any later one is removed.
        """
        config, checkpoints = self.config, self.checkpoints
        if checkpoints is None or not config.resume:
            return None
        checkpoint = checkpoints.latest(None if config.resume == "latest" else config.resume)
        if checkpoint is None:
            logger.info("no checkpoint in %s yet: starting", config.output_dir)
            return None
        compatibility.check_step_size(checkpoint, config, dist.world_size())
        compatibility.check_total(checkpoint, total)
        changed = compatibility.changes(checkpoint, config)
        if changed:
            logger.warning("resuming with other settings: %s", compatibility.describe(changed))
        values = checkpoints.load(checkpoint, state)
        then, now = values.get("rows"), state.values.get("rows")
        if then != now:
            raise UserError(
                f"the data has {now} rows and had {then} when {checkpoint.folder} was made, so its "
                "place in them is lost; put the data back, or restart with "
                "--overwrite_output_dir (train.py: --restart)"
            )
        restore(values)
        checkpoints.remove_later(checkpoint)
        logger.info("resuming after step %d, from %s", checkpoint.step, checkpoint.folder)
        return values

    def after(self, step: int, state: Callable[[], RunState], is_last: bool = False) -> None:
        """Collective. Save after every ``save_steps`` steps, except the last one, which only
        `save_last` saves. Called before evaluation, so that a failing one does not lose the step.

        Raises ``TrainingStopped`` after saving where any rank received a stop signal.
        """
        if self.checkpoints is None:
            return
        self.checkpoints.poll()
        self.last = step, state()
        self.last[1].generators = read_generators()
        if is_last:
            return
        stop = self.request is not None and self.request.agreed()
        is_due = self.config.save_steps and step % self.config.save_steps == 0
        if stop or is_due:
            self.checkpoints.save(*self.last)
        if stop:
            self.checkpoints.wait()
            last = self.checkpoints.last
            if dist.is_main_process() and (last is None or last.name != step_name(step)):
                logger.warning("step %d could not be saved", step)
            raise stop_signals.TrainingStopped(step, last)
        if is_due and self.config.push_to_hub and self.config.hub_strategy == "every_save":
            self.save_models()
            publish(self.config, waits=False)

    def leave(self) -> None:
        """The next step has changed weights: the state after the last one is lost."""
        self.last = None

    def save_last(self) -> None:
        """Collective. Save the state after the last step, where the next one failed before it
        changed weights (in a reward function). Completes the current write in any case.
        """
        if self.checkpoints is None or not self.config.save_steps:
            return
        self.checkpoints.wait()
        if self.last is None:
            return
        last = self.checkpoints.last
        if not dist.max_int(last is not None and last.name == step_name(self.last[0])):
            self.checkpoints.save(*self.last)
            self.checkpoints.wait()
        logger.info("saved before the error: --resume latest resumes once its cause is fixed")


@contextmanager
def training_checkpointer(
    config: CommonConfig, save_models: Callable[[], None] = lambda: None
) -> Iterator[TrainingCheckpointer]:
    """Collective. A scope for one loop; on exit it completes the current write. ``save_models``:
    called with each checkpoint that is also pushed to the hub.

    Without ``output_dir``, or with ``save_steps`` 0, nothing is saved and signals end the process.
    """
    if config.output_dir is None:
        yield TrainingCheckpointer(config, None, None)
        return
    limit = config.save_total_limit or None
    checkpoints = CheckpointManager(config.output_dir, compatibility.settings_of(config), limit)
    listening = (
        stop_signals.handle_stop_signals(config.output_dir) if config.save_steps else nullcontext()
    )
    with listening as request:
        checkpointer = TrainingCheckpointer(config, checkpoints, request, save_models)
        try:
            yield checkpointer
        except RewardError:  # raised on all ranks; other errors may be of one rank only
            checkpointer.save_last()
            raise
        except FloatingPointError as error:
            checkpoints.wait()
            last = checkpoints.last
            saved = f"the latest checkpoint is {last}" if last else "there is no checkpoint"
            raise FloatingPointError(f"{error}; {saved}") from None
        except BaseException:  # in a notebook the next run finds the checkpoint, or races with it
            if dist.world_size() == 1:
                checkpoints.wait()
            raise
        checkpoints.wait()
