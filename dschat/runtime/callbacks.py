"""Calls the user's hooks of a run: objects with methods named as `EVENTS`."""

import logging
from collections.abc import Sequence
from typing import Any

from dschat.config import UserError
from dschat.config.errors import did_you_mean
from dschat.user_code.calls import raised
from dschat.user_code.imports import load

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
