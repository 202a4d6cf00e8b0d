"""Writes a saved model's card, README.md: its base, data, command, metrics and versions.

A card without `_MARK` is a user's and stays as it is.
"""

import dataclasses
import json
import os
import shlex
from collections import defaultdict
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import ModelCard, ModelCardData

import dschat.distributed as dist
from dschat import __version__
from dschat.config import CommonConfig, RewardConfig, RLHFConfig, parser
from dschat.data.sources.resolve import looks_like_file
from dschat.models.checkpoint_files import CONFIG
from dschat.observability.metrics_log import METRICS, versions
from dschat.startup.files import replace_file

CARD = "README.md"
_MARK = "<!-- Written by dschat, with every save; without this line it is yours, and stays. -->"
_NO_CLASS = """
The usual form, a backbone and a linear `score` of its last hidden state, for a family of which
transformers has no such class. dschat loads it (`--reward-model`, or
`dschat.models.load.load_score_backbone`). Anywhere else: the backbone by `AutoModel`, and
`score.weight` of `model.safetensors`; a text's score is that of its last token.
"""


def write_card(folder: Path, config: CommonConfig) -> None:
    """Write the cards of the model in ``folder`` and of its adapter, on rank 0."""
    if not dist.is_main_process():
        return
    for place in (folder, folder / "adapter"):
        path = place / CARD
        is_users = path.exists() and _MARK not in path.read_text("utf-8", "replace")
        if place.is_dir() and not is_users:
            replace_file(path, str(_card(place, config)))


def _card(folder: Path, config: CommonConfig) -> ModelCard:
    is_adapter = folder.name == "adapter"
    command, method, base = _recipe(config)
    part = (folder.parent if is_adapter else folder).name
    if part not in ("critic", "actor_best", "actor_ema") or not isinstance(config, RLHFConfig):
        part = "model"
    elif part == "critic":
        base = config.critic_model_name_or_path
    is_score = part == "critic" or method == "reward model"
    datasets = [name.partition(":")[0] for name in config.data_path]
    data = ModelCardData(
        base_model=_hub_base(base),
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-classification" if is_score else "text-generation",
        tags=["dschat", method.replace(" ", "-"), *(["lora"] if is_adapter else [])],
        datasets=list(filter(_is_on_hub, datasets)) or None,
    )
    lines = [
        *("---", data.to_yaml().rstrip(), "---", _MARK, "", f"# {Path(base).name}, {method}", ""),
        f"The {'adapter of the ' if is_adapter else ''}{part} of {method}, trained from {base} on "
        f"{', '.join(config.data_path)} by dschat {__version__}.",
        *(_no_class(folder).splitlines()),
        *("", "## Command", "", "```sh", command, "```", ""),
        *(_metrics(config) if part == "model" else ()),
        *("## Versions", "", ", ".join(f"{k} {v}" for k, v in versions().items()), ""),
    ]
    return ModelCard("\n".join(lines))


def _recipe(config: CommonConfig) -> tuple[str, str, str]:
    """The command, with the flags that are not at their defaults; the method; the base model."""
    default = dataclasses.asdict(type(config)())
    given = {
        f.name: value
        for f in dataclasses.fields(config)
        if f.metadata.get("affects") not in ("log", "place")
        and (value := getattr(config, f.name)) != default[f.name]
    }
    flags = [shlex.join(parser.to_flags({name: value})) for name, value in given.items()]
    command, method, base = "sft", "sft", getattr(config, "model_name_or_path", "")
    if isinstance(config, RewardConfig):
        command, method = "reward", config.loss if config.trains_policy else "reward model"
    if isinstance(config, RLHFConfig):
        command, base = "rlhf", config.actor_model_name_or_path
        method = "ppo" if config.has_critic else config.advantage_estimator.rpartition(":")[2]
    return " \\\n    ".join([f"dschat {command}", *flags]), method, base


def _is_on_hub(name: str) -> bool:
    return bool(name) and not looks_like_file(name) and not name.startswith("builtin/")


def _hub_base(name: str) -> Any:
    """The hub's model that ``name`` is, or that the card in a local folder goes back to."""
    card = Path(name, CARD)
    if os.path.isfile(card):
        text = card.read_text("utf-8", "replace")
        return ModelCard(text, ignore_metadata_errors=True).data.get("base_model")
    return name if _is_on_hub(name) else None


def _no_class(folder: Path) -> str:
    """A note where transformers has no class for the model, as `score_class` made it."""
    path = folder / CONFIG
    saved = json.loads(path.read_text("utf-8")) if path.exists() else {}
    name = (saved.get("architectures") or [""])[0]
    is_made = name.endswith("ForSequenceClassification") and not hasattr(transformers, name)
    return _NO_CLASS if is_made and "auto_map" not in saved else ""


def _metrics(config: CommonConfig) -> list[str]:
    """A table of the first and the last evaluation of the run."""
    log = Path(config.output_dir or "", METRICS)
    values = defaultdict[str, list[float]](list)
    for line in log.read_text("utf-8").splitlines() if log.exists() else ():
        for name, value in json.loads(line).items():
            if name.startswith("eval/") and value is not None:
                values[name.removeprefix("eval/")].append(value)
    table = [f"| {name} | {of[0]:.4g} | {of[-1]:.4g} |" for name, of in values.items()]
    head = ["## Metrics of held-out rows", "", "| metric | before | after |", "|---|---|---|"]
    return [*head, *table, ""] if table else []
