"""Flags of a chat, and whether there is a model; `AnswersConfig` is for other commands too.

Loads neither torch nor transformers: ``--help`` and errors in the flags take no time.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Optional

from dschat.config import UserError
from dschat.config.data import TemplateConfig
from dschat.config.fields import flag, place_flag, require_valid
from dschat.inference.protocol import SamplingParams

FLAG = "--path"
_TEMPERATURE = "Sampling temperature: 0 (greedy), or 0.01 to 100."
# Chat models below an output folder, for the error message about a folder without a model.
_CHAT_FOLDERS = ("actor", "step3_rlhf/actor", "step1_sft")
PAGE_SIZE = 16  # the next turn computes at most one page of the conversation again


@dataclass
class AnswersConfig(TemplateConfig):
    """How a model answers."""

    max_new_tokens: int = flag(256, "Longest answer in tokens.", short=True, ge=1)
    temperature: float = flag(1.0, _TEMPERATURE, short=True)
    top_p: float = flag(1.0, "Nucleus sampling: keep the smallest set of tokens with this mass.")
    top_k: int = flag(0, "Keep the k likeliest tokens; 0: all.")
    min_p: float = flag(0.0, "Drop tokens less likely than this share of the likeliest one.")
    seed: int = flag(
        1234,
        "Seed: the same prompts in the same order get the same answers.",
        short=True,
        ge=0,
        le=2**32 - 1,
    )
    dtype: Literal["auto", "fp32", "bf16"] = flag(
        "auto",
        "Precision of the weights; auto is bf16 on an accelerator and fp32 on a CPU.",
        short=True,
    )
    trust_remote_code: bool = place_flag(False, "Run Python code that comes with a checkpoint.")

    def sampling(self, n: int = 1) -> SamplingParams:
        """The sampling of ``n`` answers per prompt."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            n=n,
        )

    def validate_answers(self) -> None:
        require_valid(self)
        try:
            self.sampling()
        except UserError as error:
            raise UserError(f"--{error}") from None


@dataclass
class ChatConfig(AnswersConfig):
    """Talk to a trained model: turn by turn on a terminal, one prompt per line through a pipe."""

    path: str = flag(
        "", "Model: a folder such as output/demo/step3_rlhf/actor, or a hub name.", short=True
    )
    system: Optional[str] = flag(
        None, "System message at the start of every conversation.", short=True
    )
    temperature: float = flag(0.7, _TEMPERATURE, short=True)
    greedy: bool = flag(
        False, "Always take the likeliest token; overrides --temperature.", short=True
    )

    def sampling(self, n: int = 1) -> SamplingParams:
        found = super().sampling(n)
        return replace(found, temperature=0.0) if self.greedy else found

    def validate(self) -> None:
        """Raise ``UserError`` (flag and remedy in one line) for the first invalid flag."""
        if not self.path:
            raise UserError("--path is missing; name a model's folder")
        self.validate_answers()


def present(path: str) -> str:
    """``path`` in the form ``from_pretrained`` takes; ``UserError`` if nothing is there."""
    folder = Path(os.path.expanduser(path))
    # OWNER/NAME is a mistyped path and not a hub name where the folder OWNER exists.
    is_sibling = folder.parent != Path(".") and os.path.isdir(folder.parent)
    if os.path.isdir(folder):  # Path.is_dir raises for a name too long for the file system
        if (
            not (folder / "config.json").is_file()
            and not (folder / "adapter_config.json").is_file()
        ):
            inner = [folder / f for f in _CHAT_FOLDERS if (folder / f / "config.json").is_file()]
            remedy = f"did you mean {inner[0]}?" if inner else "name the folder that has it"
            raise UserError(f"{FLAG} {path}: no config.json there, so no model; {remedy}")
        path = str(folder)
    elif path.startswith((".", "/", "~")) or path.count("/") > 1 or is_sibling:
        raise UserError(f"{FLAG} {path}: no such folder; check the path")
    return path
