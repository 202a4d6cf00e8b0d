"""Starts the process of a step: console, ranks, seed, and the checks that need nothing loaded."""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from transformers import set_seed

import dschat.distributed as dist
from dschat.checkpoint.compatibility import check_start, contents_of
from dschat.config import CommonConfig
from dschat.observability import console
from dschat.observability.metrics_log import check_sinks
from dschat.runtime.callbacks import Callbacks
from dschat.runtime.hub import check_hub
from dschat.runtime.output_dir import check_output_dir

logger = logging.getLogger("dschat")

_FEW_STEPS = 20


def start_step(
    config: CommonConfig, default_output_dir: str, callbacks: Sequence[Any] = ()
) -> Callbacks:
    """Collective. Set up the console, join the process group, seed, check the output folder.

    ``config.output_dir`` becomes ``default_output_dir`` where it is not set. Log lines wait for
    `console.release`, so that a mistake found until then stands alone on the screen. Returns the
    hooks of ``config`` and ``callbacks``.

    Raises ``UserError`` where ranks have other settings or files, the step cannot write or resume
    there, a metrics sink is missing, or the hub takes no push.
    """
    console.setup(config.log_level, hold=True)
    dist.init()
    set_seed(config.seed)
    config.output_dir = config.output_dir or default_output_dir
    settings = {f"--{k}": v for k, v in asdict(config).items()}
    # With a disk of its own a machine may have other files under the same names.
    dist.check_same(settings | {f"content of --{k}": v for k, v in contents_of(config).items()})
    check_output_dir(config.output_dir, config.overwrite_output_dir, asdict(config))
    check_start(config, dist.world_size())
    check_sinks(config)
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
