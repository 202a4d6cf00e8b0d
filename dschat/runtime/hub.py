"""Writes saved models' cards, README.md, and pushes the models to the Hugging Face hub.

A card says its model's base, data, command, metrics and versions; one without `_MARK` is a user's
and stays as it is. A push that fails is a warning: the models are on disk.
"""

import glob
import logging
import os
import shlex
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id

import dschat.distributed as dist
from dschat import __version__
from dschat.checkpoint.compatibility import OF_MODEL
from dschat.checkpoint.hf_export import written
from dschat.config import CommonConfig, RewardConfig, RLHFConfig, UserError, parser
from dschat.config.errors import first_line, require
from dschat.config.fields import changed, of_result
from dschat.data.sources.resolve import looks_like_file
from dschat.models.checkpoint_files import CHECKSUMS, CONFIG
from dschat.observability.metrics_log import METRICS, is_finite, versions, whole_rows
from dschat.runtime.output_dir import PRODUCTS
from dschat.startup.files import replace_file

logger = logging.getLogger("dschat")

CARD = "README.md"
_MARK = "<!-- Written by dschat, with every save; without this line it is yours, and stays. -->"
_OF_A_SCORE = (
    " The score of a text is its last token's. Where transformers has no class for the family"
    ": `AutoModel` loads the backbone, `score.weight` of `model.safetensors` is the linear head."
)
_FILES = [f"*{end}" for end in (*OF_MODEL, CARD, CHECKSUMS)]
_OTHERS = ["checkpoints/*", "tensorboard/*", "wandb/*"]  # in a folder that is also a run's
_api = HfApi()


# -- cards -----------------------------------------------------------------------------------------


def write_card(folder: Path, config: CommonConfig) -> None:
    """Write the cards of the model in ``folder`` and of its adapter, on rank 0."""
    for place in (folder, folder / "adapter") if dist.is_main_process() else ():
        card = place / CARD
        is_ours = card.is_file() and _MARK in card.read_text("utf-8", "replace")
        if place.is_dir() and (is_ours or not card.exists()):
            try:
                replace_file(card, _text(place, config))
            except OSError as error:
                logger.warning("%s cannot be written: %s", card, error.strerror)


def _text(folder: Path, config: CommonConfig) -> str:
    is_adapter = folder.name == "adapter"
    part = (folder.parent if is_adapter else folder).name
    command, method, base = "sft", "sft", getattr(config, "model_name_or_path", "")
    if isinstance(config, RewardConfig):
        command, method = "reward", config.loss if config.trains_policy else "reward-model"
    if isinstance(config, RLHFConfig):
        critic, actor = config.critic_model_name_or_path, config.actor_model_name_or_path
        command, base = "rlhf", critic if part == "critic" else actor
        method = "ppo" if config.has_critic else config.advantage_estimator.rpartition(":")[2]
    of_step_3 = ("critic", "actor_ema") if isinstance(config, RLHFConfig) else ()
    if part not in (*of_step_3, "actor_best", "reward_best"):
        part = "model"
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
    """The hub's name of a model or data set, of a local folder the name in its card; or None."""
    if os.path.isfile(card := os.path.join(name, CARD)):
        with suppress(Exception):  # a user's card may be anything
            return ModelCard.load(card, ignore_metadata_errors=True).data.get("base_model")
        return None
    is_local = not name or looks_like_file(name) or name.startswith(("builtin/", "reasoning_gym/"))
    return None if is_local else name


def _metrics(config: CommonConfig) -> list[str]:
    """A table of the first and the last evaluation of the run."""
    values = defaultdict[str, list[float]](list)
    for row in whole_rows(Path(config.output_dir, METRICS)) if config.output_dir else ():
        for name, value in row.items():
            if name.startswith("eval/") and is_finite(value):
                values[name.removeprefix("eval/")].append(value)
    table = [f"| {name} | {of[0]:.4g} | {of[-1]:.4g} |" for name, of in values.items()]
    head = ["## Metrics of held-out rows", "", "| metric | before | after |", "|---|---|---|"]
    return [*head, *table, ""] if table else []


# -- hub -------------------------------------------------------------------------------------------


def check_hub(config: CommonConfig) -> None:
    """``UserError`` where ``push_to_hub`` does not name a repository, or where there is no token,
    or one that may not write there. Rank 0 asks the hub.
    """
    if not config.push_to_hub or not dist.is_main_process():
        return
    where, owner = f"--push_to_hub {config.push_to_hub}", config.push_to_hub.rpartition("/")[0]
    try:
        validate_repo_id(config.push_to_hub)
        user = _api.whoami()
    except Exception as error:
        raise UserError(
            f"{where}: {first_line(error)}; name a repository as OWNER/NAME and log in by `hf auth "
            "login`, or leave the flag out and push the saved model later: hf upload"
        ) from None
    owners = [user["name"], *(org["name"] for org in user.get("orgs", ()))]
    can_write = user.get("auth", {}).get("accessToken", {}).get("role") != "read"
    require(
        owner in ("", *owners) and can_write,
        f"{where}: the token of {user['name']} cannot write there; use one with write access, or a "
        f"repository of {' or '.join(owners)}",
    )


def publish(config: CommonConfig, waits: bool = True) -> None:
    """On rank 0, write the cards of the saved models and push them where ``push_to_hub`` is set, in
    the background unless it ``waits``. Pushes follow each other.
    """
    if not dist.is_main_process():
        return
    places = [Path(str(config.output_dir), name) for name in ("", *PRODUCTS)]
    models = [folder for folder in places if (folder / CONFIG).exists()]
    for model in models:
        write_card(model, config)
    if config.push_to_hub:
        push = _api.run_as_future(_push, config, models)
        if waits:
            push.result()


def _files(model: Path) -> list[str]:
    """Patterns of what is pushed of a folder: what was saved there, and a step's adapter. A folder
    of another process has files of models only.
    """
    if model not in written:
        return _FILES
    names = [glob.escape(name) for name in (*written[model], CARD)]
    return [*names, *(f"{name}/*" for name in names), *(f"adapter/{name}" for name in _FILES)]


def _push(config: CommonConfig, models: Sequence[Path]) -> None:
    """The first of ``models`` becomes the repository's root, the others are folders in it."""
    try:
        repo = _api.create_repo(
            str(config.push_to_hub), private=config.hub_private_repo, exist_ok=True
        )
        for model in models:
            _api.upload_folder(
                repo_id=repo.repo_id,
                folder_path=model,
                path_in_repo=None if model == models[0] else model.name,
                allow_patterns=_files(model),
                ignore_patterns=_OTHERS,
            )
        logger.info("pushed to %s", repo)
    except Exception as error:
        logger.warning(
            "not pushed to the hub: %s; by hand: hf upload %s %s . --exclude 'checkpoints/*'",
            *(first_line(error), config.push_to_hub, shlex.quote(str(models[0]))),
        )
