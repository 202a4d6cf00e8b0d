"""Pushes a run's saved models, each with its card, to the Hugging Face hub. A push that fails is a
warning: the models are on disk.
"""

import glob
import logging
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.utils import validate_repo_id

import dschat.distributed as dist
from dschat.checkpoint.fingerprint import OF_MODEL
from dschat.checkpoint.hf_export import written
from dschat.config import CommonConfig, UserError
from dschat.config.errors import first_line, require
from dschat.models.checkpoint_files import CHECKSUMS, CONFIG
from dschat.runtime.model_card import CARD, write_card
from dschat.runtime.output_dir import PRODUCTS

logger = logging.getLogger("dschat")

_FILES = [f"*{end}" for end in (*OF_MODEL, CARD, CHECKSUMS)]
_OTHERS = ["checkpoints/*", "tensorboard/*", "wandb/*"]  # in a folder that is also a run's
_api = HfApi()


def check_hub(config: CommonConfig) -> None:
    """``UserError`` where ``push_to_hub`` is no name of a repository, or where there is no token,
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
            *(first_line(error), config.push_to_hub, models[0]),
        )
