"""Loads a model to talk to: flags, generator, tokenizer.

torch loads in ``load_chat``, so that ``--help`` and mistakes in the flags answer at once.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional

import dschat.distributed as dist
from dschat.chat.session import Chat, StreamingGenerator, check_system
from dschat.config import UserError
from dschat.config.fields import flag, require_types
from dschat.inference.protocol import SamplingParams

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("dschat")


# Where the three steps leave something to talk to, below a folder that is no model itself.
_CHAT_FOLDERS = ("actor", "step3_rlhf/actor", "step1_sft")
_LONGEST = 32_768  # tokens of a conversation, where the model has positions for more
_PAGE_SIZE = 256
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass
class ChatConfig:
    """Talk to a trained model: on a terminal turn by turn, through a pipe one prompt a line."""

    path: str = flag("", "The model: a folder such as output/demo/step3_rlhf/actor, or a hub name.")
    system: Optional[str] = flag(None, "System message that opens every conversation.")
    max_new_tokens: int = flag(256, "Longest answer in tokens.")
    temperature: float = flag(0.7, "Sampling temperature: 0 (greedy), or 0.01 to 100.")
    top_p: float = flag(1.0, "Nucleus sampling: keep the smallest set of tokens with this mass.")
    top_k: int = flag(0, "Keep the k likeliest tokens; 0: all.")
    min_p: float = flag(0.0, "Drop tokens less likely than this share of the likeliest one.")
    greedy: bool = flag(False, "Always take the likeliest token, whatever --temperature says.")
    seed: int = flag(1234, "Seed: the same prompts in the same order get the same answers.")
    dtype: Literal["auto", "fp32", "bf16"] = flag(
        "auto", "Precision of the weights; auto is bf16 on an accelerator and fp32 on a CPU."
    )
    trust_remote_code: bool = flag(False, "Let a checkpoint bring and run its own Python code.")

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=0.0 if self.greedy else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
        )

    def validate(self) -> None:
        """Raise ``UserError`` (flag and remedy in one line) for the first knob that cannot work."""
        require_types(self)
        if not self.path:
            raise UserError("--path is missing; name a model's folder")
        try:
            _ = self.sampling
        except UserError as error:
            raise UserError(f"--{error}") from None


def load_chat(config: ChatConfig) -> "Chat":
    """The model of ``config``, ready to talk.

    Raises:
        UserError: before any weight loads, where ``--path`` is no causal LM with a tokenizer or the
            chat template refuses ``--system``; after that, where the weights do not fit the model.
    """
    name = _causal_lm(config.path, config.trust_remote_code)

    from dschat.models.fit import check_fit
    from dschat.models.model_kind import load_config
    from dschat.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(name, "--path", config.trust_remote_code)
    # As it was typed: in a locale without umlauts Python makes halves of surrogates of them.
    system = config.system and os.fsencode(config.system).decode("utf-8", "replace")
    check_system(tokenizer, system)
    check_fit(load_config(name, "--path", config.trust_remote_code), name, "--path", "lm")
    dtype = _resolve_dtype(config.dtype)
    generator, stops = _load_generator(name, config, dtype, tokenizer)
    precision = str(dtype).removeprefix("torch.")
    logger.info(
        "%s: %s in %s on %s", config.path, type(generator).__name__, precision, dist.device().type
    )
    return Chat(generator, tokenizer, stops, config.sampling, system)


def _load_generator(
    name: str, config: ChatConfig, dtype: "torch.dtype", tokenizer: Any
) -> tuple["StreamingGenerator", tuple[int, ...]]:
    """The inference engine where it knows the family, else the Hugging Face module; and the tokens
    that end an answer.
    """
    from dschat.inference import InferenceEngine, UnsupportedModel, model_spec
    from dschat.inference.hf_generator import HuggingFaceGenerator
    from dschat.models.config_files import read_generation_config
    from dschat.models.load import load_causal_lm, load_config
    from dschat.models.tokenizer import stop_ids
    from dschat.models.vocabulary import num_ids

    stops = stop_ids(tokenizer, read_generation_config(name, "--path"))
    try:
        spec = model_spec(load_config(name, "--path", config.trust_remote_code))
        if not (Path(name) / "adapter_config.json").is_file():
            longest = min(spec.max_positions or _LONGEST, _LONGEST)
            engine = InferenceEngine.from_pretrained(
                name,
                str(dtype).removeprefix("torch."),
                str(dist.device()),
                stop_ids=stops,
                num_tokens=num_ids(tokenizer),
                max_num_seqs=1,
                max_seq_len=longest,
                page_size=_PAGE_SIZE,
            )
            return engine, stops
    except UnsupportedModel as reason:
        logger.warning("NO FAST GENERATION: %s; the Hugging Face module answers, slower", reason)
    model = load_causal_lm(name, "--path", dtype, trust_remote_code=config.trust_remote_code)
    model.to(dist.device())
    generator = HuggingFaceGenerator(
        model, stops, tokenizer.pad_token_id, num_tokens=num_ids(tokenizer)
    )
    return generator, stops


def _causal_lm(path: str, trust_remote_code: bool) -> str:
    """``path`` as ``from_pretrained`` takes it; ``UserError`` where that is no causal LM."""
    folder = Path(os.path.expanduser(path))
    if os.path.isdir(folder):  # pathlib raises where a name is too long for the disk
        if (
            not (folder / "config.json").is_file()
            and not (folder / "adapter_config.json").is_file()
        ):
            inner = [folder / f for f in _CHAT_FOLDERS if (folder / f / "config.json").is_file()]
            remedy = f"did you mean {inner[0]}?" if inner else "name the folder that has it"
            raise UserError(f"--path {path}: no config.json there, so no model; {remedy}")
        path = str(folder)
    elif path.startswith((".", "/", "~")) or path.count("/") > 1 or _is_missing_sibling(folder):
        raise UserError(f"--path {path}: no such folder; check the path")

    from dschat.builtin.tiny_model import resolve_model
    from dschat.models.model_kind import load_config, require_causal_lm

    name = resolve_model(path)
    require_causal_lm(load_config(name, "--path", trust_remote_code), name, "--path")
    return name


def _is_missing_sibling(folder: Path) -> bool:
    """Whether OWNER/NAME is rather a mistyped folder: the hub would be asked for it in vain."""
    return folder.parent != Path(".") and os.path.isdir(folder.parent)


def _resolve_dtype(name: str) -> "torch.dtype":
    import torch

    if name == "auto":
        name = "bf16" if dist.device().type == "cuda" else "fp32"
    return getattr(torch, _DTYPES[name])
