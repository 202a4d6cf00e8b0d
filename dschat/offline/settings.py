"""The settings that the lines of an output file depend on, and whether the file may be written."""

import os
from dataclasses import asdict
from typing import Any

import dschat.distributed as dist
from dschat.builtin.tiny_model import resolve_model
from dschat.checkpoint.fingerprint import fingerprint
from dschat.config import UserError
from dschat.config.fields import of_result
from dschat.models.model_kind import weight_files
from dschat.offline.flags import GenerateConfig
from dschat.offline.model import Model


def settings_of(config: GenerateConfig, model: Model) -> dict[str, Any]:
    """JSON values by flag; and what the data, the models and the functions contain."""
    counted = of_result(GenerateConfig)
    settings = {f"--{k}": v for k, v in asdict(config).items() if k in counted}
    settings["command"] = "dschat generate"
    settings["device"] = dist.device().type
    settings["--dtype"] = str(model.dtype).removeprefix("torch.")
    settings["content of --data_path"] = fingerprint(config.data_path or ())
    settings["content of --reward_fn"] = fingerprint(config.reward_fn or ())
    settings["weights of --path"] = _weights(model.name)
    if config.reward_model_name_or_path:
        reward = resolve_model(config.reward_model_name_or_path)
        settings["weights of --reward_model_name_or_path"] = _weights(reward)
    return settings


def _weights(name: str) -> str | None:
    return fingerprint([str(file) for file in weight_files(name)[0]])


def check_out(config: GenerateConfig) -> None:
    """Raise ``UserError`` where ``--overwrite`` would replace the data."""
    replaces = config.overwrite and os.path.exists(config.out)
    for path in (config.data_path or ()) if replaces else ():
        if os.path.exists(path) and os.path.samefile(path, config.out):
            raise UserError(f"--out {config.out} is the data itself; name another file")
