"""Runs a step's script with one fault, and records its current phase.

    FAULT='nan_loss 3 1' PHASES=folder python driver.py step1_sft/main.py FLAGS

``FAULT``: none, or one of

    die_in_step N RANK     SIGKILL in the backward of the N-th optimizer step, on that rank
    hang_in_step N RANK    it waits there for ever
    die_writing N          SIGKILL before the N-th change to a checkpoint's folder: a file that is
                           opened, a rename, a removal
    die_renaming N         SIGKILL before a checkpoint whose files are all written gets its name, at
                           the N-th one
    nan_scores N RANK      the reward model gives NaN to one answer of the N-th rollout
    nan_logprobs N RANK    a log-prob of the reference is infinite in the N-th rollout
    small_files N          no file may grow beyond N bytes

``PHASES``: a folder, made by the caller, where each process keeps a file with the word for what it
does: start, evaluation, rollout, update, step.
"""

import os
import resource
import runpy
import signal
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

PHASES = ("start", "evaluation", "rollout", "update", "step")
_WIDTH = 12


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Call ``action(*arguments)`` at each call of ``owner.name``, first."""
    function = getattr(owner, name)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        action(*args, **kwargs)
        return function(*args, **kwargs)

    setattr(owner, name, call)


def after(owner: Any, name: str, change: Callable[..., None]) -> None:
    """Call ``change(value, *arguments)`` with what each call of ``owner.name`` returns."""
    function = getattr(owner, name)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        change(value, *args, **kwargs)
        return value

    setattr(owner, name, call)


def tell_phases(folder: Path) -> None:
    handle = os.open(folder / str(os.getpid()), os.O_WRONLY | os.O_CREAT)

    def tell(phase: str) -> None:
        os.pwrite(handle, phase.ljust(_WIDTH).encode(), 0)

    tell("start")
    from dschat.rlhf import reporter, trainer
    from dschat.supervised import loop

    before(loop, "train_step", lambda *_: tell("step"))
    before(loop, "evaluate", lambda *_: tell("evaluation"))
    before(reporter.Reporter, "evaluate", lambda *_: tell("evaluation"))
    before(trainer.DeepSpeedPPOTrainer, "generate_experience", lambda *_: tell("rollout"))
    before(trainer.DeepSpeedPPOTrainer, "train_rlhf", lambda *_: tell("update"))


# -- Faults


def die_in_step(number: int, rank: int) -> None:
    _at_loss(number, rank, die)


def hang_in_step(number: int, rank: int) -> None:
    _at_loss(number, rank, lambda: time.sleep(3600))


def _at_loss(number: int, rank: int, act: Callable[[], Any]) -> None:
    """``act`` on the first loss of the ``number``-th optimizer step; it does not return."""
    import dschat.distributed as dist
    from dschat.runtime.optimizer_step import OptimizerStep

    steps = [0]

    def at_loss(*_: Any) -> None:
        if steps[0] == number and dist.rank() == rank:
            act()

    before(OptimizerStep, "__init__", lambda *_, **__: _count(steps))
    before(OptimizerStep, "backward", at_loss)


def nan_scores(number: int, rank: int) -> None:
    from dschat.rlhf import collector

    def spoil(scores: Any, *_: Any, **__: Any) -> None:
        scores[0] = float("nan")

    rollouts = [0]  # evaluations have scores too
    after(collector, "reward_scores", _in_rollout(rollouts, number, rank, spoil))
    before(collector.Collector, "score", lambda *_: _count(rollouts))


def nan_logprobs(number: int, rank: int) -> None:
    from dschat.rlhf import trainer

    def spoil(_: Any, engine: Any, experience: Any, args: Any) -> None:
        experience.ref_logprobs[0, 0] = float("-inf")

    rollouts = [0]
    before(trainer, "fill_in", lambda *_: _count(rollouts))
    after(trainer, "fill_in", _in_rollout(rollouts, number, rank, spoil))


def _count(calls: list[int]) -> None:
    calls[0] += 1


def _in_rollout(rollouts: list[int], number: int, rank: int, spoil: Callable[..., None]):
    """``spoil``, in the ``number``-th of the counted ``rollouts`` on that rank."""
    import dschat.distributed as dist

    def act(*args: Any, **kwargs: Any) -> None:
        if rollouts[0] == number and dist.rank() == rank:
            spoil(*args, **kwargs)

    return act


_CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}


def die_writing(number: int) -> None:
    def is_change(event: str, args: tuple) -> bool:
        opened = event == "open" and isinstance(args[1], str) and "w" in args[1]
        return (event in _CHANGES or opened) and "/checkpoints/" in str(args[0])

    _die_at(number, is_change)


def die_renaming(number: int) -> None:
    def is_naming(event: str, args: tuple) -> bool:
        return event == "os.rename" and str(args[0]).endswith(".saving")

    _die_at(number, is_naming)


def _die_at(number: int, counts: Callable[[str, tuple], bool]) -> None:
    seen = [0]

    def look(event: str, args: tuple) -> None:
        if counts(event, args):
            seen[0] += 1
            if seen[0] == number:
                die()

    sys.addaudithook(look)


def small_files(num_bytes: int) -> None:
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    )


FAULTS = {
    f.__name__: f
    for f in (
        die_in_step,
        hang_in_step,
        die_writing,
        die_renaming,
        nan_scores,
        nan_logprobs,
        small_files,
    )
}


def main() -> None:
    del sys.argv[0]
    if folder := os.environ.get("PHASES"):
        tell_phases(Path(folder))
    if fault := os.environ.get("FAULT"):
        name, *numbers = fault.split()
        FAULTS[name](*map(int, numbers))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
