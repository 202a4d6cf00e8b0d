"""Starts the process of a step: console, ranks, seed, the user's hooks, and the checks that need
nothing loaded.

Hooks are objects with methods named as `EVENTS`.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from transformers import set_seed

import dschat.distributed as dist
from dschat.checkpoint.compatibility import check_start, contents_of
from dschat.config import CommonConfig, UserError
from dschat.config.errors import did_you_mean
from dschat.observability import console
from dschat.observability.trackers import check_trackers
from dschat.runtime.hub import check_hub
from dschat.runtime.output_dir import check_output_dir
from dschat.user_code.calls import load, raised
from dschat.user_code.surroundings import restored

logger = logging.getLogger("dschat")

# With the arguments after the trainer, in steps 1 and 2 DeepSpeed's engine. ``metrics`` may be
# changed: they are logged after the call.
EVENTS = {
    "on_rollout": "experience",  # step 3, before it is trained on, which sees its tensors changed
    "on_step": "metrics",  # of an iteration, or an optimizer step
    "on_evaluate": "metrics",
    "on_save": "folder",  # of the saved models
    "on_end": "",
}


class Callbacks:
    """The objects of ``--callback`` and those ``given``, on every rank, in this order.

    Args:
        specs: ``file.py:NAME`` or ``pkg.mod:NAME``, of classes, made without arguments, or of
            objects.
        on_error: "error": one that raises ends the run; "log": it is logged.

    Raises:
        UserError: one does not exist, cannot be made, or has no hook.
    """

    def __init__(self, specs: Sequence[str], given: Sequence[Any], on_error: str) -> None:
        named = [(load(spec, f"--callback {spec}"), f"--callback {spec}") for spec in specs]
        named += [(item, f"callback {item!r:.80}") for item in given]
        self._objects = [(_made(item, label), label) for item, label in named]
        self._on_error = on_error

    def __call__(self, event: str, trainer: Any, *args: Any) -> None:
        """Call the hook ``event`` of all that have it.

        Raises:
            UserError: one raised, and that is an error.
        """
        for item, label in self._objects:
            if (hook := getattr(item, event, None)) is None:
                continue
            try:
                with restored(label):
                    hook(trainer, *args)
            except Exception as error:
                problem = f"{label}: {event} {raised(error)}"
                if self._on_error == "error":
                    raise UserError(f"{problem}; --on_callback_error log goes on") from error
                logger.warning("%s", problem)


def _made(item: Any, label: str) -> Any:
    if isinstance(item, type):
        try:
            item = item()
        except Exception as error:
            raise UserError(
                f"{label} cannot be made without arguments: it {raised(error)}"
            ) from None
    hooks = [name for name in dir(item) if name.startswith("on_")]
    if unknown := [name for name in hooks if name not in EVENTS]:
        raise UserError(
            f"{label}: no hook is called {unknown[0]}{did_you_mean(unknown[0], EVENTS)}"
        )
    if not hooks:
        raise UserError(f"{label} has none of the hooks {', '.join(EVENTS)}")
    return item


_FEW_STEPS = 20


def start_step(config: CommonConfig, callbacks: Sequence[Any] = ()) -> Callbacks:
    """Collective. Set up the console, join the process group, seed, check the output folder.

    ``config.output_dir`` becomes absolute, and the step's default where it is not set. Log lines
    wait for `console.release`, so that a mistake found until then stands alone on the screen.
    Returns the hooks of ``config`` and ``callbacks``.

    Raises ``UserError`` where ranks have other settings or files, the step cannot write or resume
    there, a metrics sink is missing, or the hub takes no push.
    """
    console.setup(config.log_level, hold=True)
    dist.init()
    set_seed(config.seed)
    config.output_dir = config.output_dir or config.default_output_dir
    settings = {f"--{k}": v for k, v in asdict(config).items()}
    # With a disk of its own a machine may have other files under the same names.
    dist.check_same(settings | {f"content of --{k}": v for k, v in contents_of(config).items()})
    config.output_dir = os.path.abspath(config.output_dir)  # the user's code may call os.chdir
    check_output_dir(config.output_dir, config.overwrite_output_dir, asdict(config))
    check_start(config, dist.world_size())
    check_trackers(config.report_to)
    check_hub(config)
    return Callbacks(config.callback or (), callbacks, config.on_callback_error)


def warn_of_few_steps(config: CommonConfig, num_steps: int, batch_size: str) -> None:
    """Log that a run of so few optimizer steps teaches little, unless --max_steps asks for it.

    ``batch_size``: the flag that decides how many steps an epoch has.
    """
    if num_steps < _FEW_STEPS and not config.max_steps:
        logger.warning(
            "too few rows to learn much, optimizer steps in all: %d; add data, raise "
            "--num_train_epochs (%d) or lower --%s (%d)",
            *(num_steps, config.num_train_epochs, batch_size, getattr(config, batch_size)),
        )
