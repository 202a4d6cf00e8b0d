"""Writes a saved model's card, README.md: its base, data, command, metrics and versions.

A card without `_MARK` is a user's and stays as it is.
"""

import json
import os
import shlex
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

import dschat.distributed as dist
from dschat import __version__
from dschat.config import CommonConfig, RewardConfig, RLHFConfig, parser
from dschat.config.fields import changed, of_result
from dschat.data.sources.resolve import looks_like_file
from dschat.observability.metrics_log import METRICS, versions
from dschat.startup.files import replace_file

CARD = "README.md"
_MARK = "<!-- Written by dschat, with every save; without this line it is yours, and stays. -->"
_OF_A_SCORE = (
    " The score of a text is that of its last token. Where transformers has no class for the family"
    ": `AutoModel` loads the backbone, `score.weight` of `model.safetensors` is the linear head."
)


def write_card(folder: Path, config: CommonConfig) -> None:
    """Write the cards of the model in ``folder`` and of its adapter, on rank 0."""
    for place in (folder, folder / "adapter") if dist.is_main_process() else ():
        card = place / CARD
        if place.is_dir() and (not card.exists() or _MARK in card.read_text("utf-8", "replace")):
            replace_file(card, _text(place, config))


def _text(folder: Path, config: CommonConfig) -> str:
    is_adapter = folder.name == "adapter"
    part = (folder.parent if is_adapter else folder).name
    command, method, base = "sft", "sft", getattr(config, "model_name_or_path", "")
    if isinstance(config, RewardConfig):
        command, method = "reward", config.loss if config.trains_policy else "reward-model"
    if isinstance(config, RLHFConfig):
        command, base = "rlhf", config.actor_model_name_or_path
        method = "ppo" if config.has_critic else config.advantage_estimator.rpartition(":")[2]
    if not isinstance(config, RLHFConfig) or part not in ("critic", "actor_best", "actor_ema"):
        part = "model"
    elif part == "critic":
        base = config.critic_model_name_or_path
    is_score = part == "critic" or method == "reward-model"
    datasets = [_on_hub(name.partition(":")[0]) for name in config.data_path]
    data = ModelCardData(
        base_model=_on_hub(base),
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-classification" if is_score else "text-generation",
        tags=["dschat", method, *(["lora"] if is_adapter else [])],
        datasets=[name for name in datasets if name] or None,
    )
    lines = [
        *("---", data.to_yaml().rstrip(), "---", _MARK, "", f"# {Path(base).name}, {method}", ""),
        f"The {'adapter of the ' if is_adapter else ''}{part} of {method}, trained from {base} on "
        f"{', '.join(config.data_path)} by dschat {__version__}.{_OF_A_SCORE * is_score}",
        *("", "## Command", "", "```sh", f"dschat {command}{_flags(config)}", "```", ""),
        *(_metrics(config) if part == "model" else ()),
        *("## Versions", "", ", ".join(f"{k} {v}" for k, v in versions().items()), ""),
    ]
    return "\n".join(lines)


def _flags(config: CommonConfig) -> str:
    """The flags of the result that are not at their defaults, each on a line; none with a URL,
    which may have a password.
    """
    names = of_result(type(config))
    items = ((name, value) for name, value in changed(config).items() if name in names)
    given = [{name: value} for name, value in items if "://" not in str(value)]
    return "".join(f" \\\n    {shlex.join(parser.to_flags(one))}" for one in given)


def _on_hub(name: str) -> Any:
    """The hub's name of a model or data set, for a local folder that of its card; None without."""
    if os.path.isfile(card := os.path.join(name, CARD)):
        with suppress(Exception):  # a user's card may be anything
            return ModelCard.load(card, ignore_metadata_errors=True).data.get("base_model")
        return None
    is_local = not name or looks_like_file(name) or name.startswith("builtin/")
    return None if is_local else name


def _metrics(config: CommonConfig) -> list[str]:
    """A table of the first and the last evaluation of the run."""
    log = Path(config.output_dir or "", METRICS)
    values = defaultdict[str, list[float]](list)
    for line in log.read_text("utf-8").splitlines() if config.output_dir and log.exists() else ():
        for name, value in json.loads(line).items():
            if name.startswith("eval/") and value is not None:
                values[name.removeprefix("eval/")].append(value)
    table = [f"| {name} | {of[0]:.4g} | {of[-1]:.4g} |" for name, of in values.items()]
    head = ["## Metrics of held-out rows", "", "| metric | before | after |", "|---|---|---|"]
    return [*head, *table, ""] if table else []
