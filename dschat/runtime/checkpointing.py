"""Where a training loop begins, when it saves, and when it stops before its end.

A step's configuration comes in, and at every boundary between two steps what the loop holds; a
checkpoint now and then, and `Stopped` where somebody asked for it, go out. It must not know what a
step computes.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import dschat.distributed as dist
from dschat.checkpoint import CheckpointManager, RunState, read_generators, step_name
from dschat.checkpoint.compatibility import changes, check_step_size, describe, settings_of
from dschat.config import CommonConfig, UserError
from dschat.distributed import stop_signals
from dschat.rewards.reward_functions import RewardError

logger = logging.getLogger("dschat")


class TrainingCheckpointer:
    """What happens between the steps of one loop. Made by `boundaries`."""

    def __init__(
        self,
        config: CommonConfig,
        checkpoints: CheckpointManager | None,
        request: stop_signals.StopRequest | None,
    ) -> None:
        self._config = config
        self._checkpoints = checkpoints
        self._request = request
        self._last: tuple[int, RunState] | None = None  # at the boundary that was passed last

    def begin(self, state: RunState) -> dict[str, Any] | None:
        """Collective. Put back what the checkpoint to go on from holds, into ``state``'s engines
        and tensors; returns its values. None where the run begins.

        ``rows`` among ``state``'s values, how many the data has (None: nobody knows), must be as
        many as then. Raises ``UserError`` where ``--resume`` names a checkpoint that is damaged or
        does not fit.
        """
        config, checkpoints = self._config, self._checkpoints
        if checkpoints is None or not config.resume:
            return None
        found = checkpoints.latest(None if config.resume == "latest" else config.resume)
        if found is None:
            logger.info("there is no checkpoint in %s yet: beginning", config.output_dir)
            return None
        check_step_size(found, config, dist.world_size())
        changed = changes(found, config)
        if changed:
            logger.warning("going on with other settings: %s", describe(changed))
        values = checkpoints.load(found, state)
        then, now = values.get("rows"), state.values.get("rows")
        if then != now:
            raise UserError(
                f"the data has {now} rows and had {then} when {found.folder} was made, so its "
                "place in them is lost; put the data back, or begin anew with "
                "--overwrite_output_dir (train.py: --restart)"
            )
        checkpoints.remove_later(found)
        logger.info("going on after step %d, from %s", found.step, found.folder)
        return values

    def after(self, step: int, state: Callable[[], RunState], is_last: bool = False) -> None:
        """Collective. Save after every ``save_steps`` steps, but the last, which only `save_last`
        saves. Evaluations come after it: one that fails must not lose the step.

        Raises ``TrainingStopped``, once all is saved, where any process was asked to stop.
        """
        if self._checkpoints is None:
            return
        self._last = step, state()
        self._last[1].generators = read_generators()
        if is_last:
            return
        stop = self._request is not None and self._request.agreed()
        if stop or (self._config.save_steps and step % self._config.save_steps == 0):
            self._checkpoints.save(*self._last)
        if stop:
            self._checkpoints.wait()
            last = self._checkpoints.last
            if dist.is_main_process() and (last is None or last.name != step_name(step)):
                logger.warning("step %d could not be saved", step)
            raise stop_signals.TrainingStopped(step, last)

    def leave(self) -> None:
        """Another step has changed weights: what was at the last boundary is gone."""
        self._last = None

    def save_last(self) -> None:
        """Collective. Save what was at the last boundary, where a step failed before it changed
        any weight: a reward function, say. What is being written becomes whole in any case.
        """
        if self._checkpoints is None or not self._config.save_steps:
            return
        self._checkpoints.wait()
        if self._last is None:
            return
        last = self._checkpoints.last
        if not dist.max_int(last is not None and last.name == step_name(self._last[0])):
            self._checkpoints.save(*self._last)
            self._checkpoints.wait()
        logger.info("saved before the error: --resume latest resumes once its cause is fixed")

    def last_good(self) -> str:
        """For the message of a run that fails: where it can go on from."""
        last = self._checkpoints.last if self._checkpoints is not None else None
        return f"; the last good checkpoint is {last}" if last else ""


@contextmanager
def training_checkpointer(config: CommonConfig) -> Iterator[TrainingCheckpointer]:
    """Collective. A scope for one loop; at its end what is being written becomes whole.

    Without ``output_dir``, or with ``save_steps`` 0, nothing is saved and signals end the process
    as they do outside.
    """
    if config.output_dir is None:
        yield TrainingCheckpointer(config, None, None)
        return
    limit = config.save_total_limit or None
    checkpoints = CheckpointManager(config.output_dir, settings_of(config), limit)
    listening = (
        stop_signals.handle_stop_signals(config.output_dir) if config.save_steps else nullcontext()
    )
    with listening as request:
        checkpointer = TrainingCheckpointer(config, checkpoints, request)
        try:
            yield checkpointer
        except RewardError:  # on all processes alike; other mistakes may be of one alone
            checkpointer.save_last()
            raise
        except FloatingPointError as error:
            checkpoints.wait()
            raise FloatingPointError(f"{error}{checkpointer.last_good()}") from None
        checkpoints.wait()
