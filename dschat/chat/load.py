"""Loads a model for chat: flags, generator and tokenizer.

torch and transformers are imported in ``load_chat``, so that ``--help`` and errors in the flags
take no time.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Optional

import dschat.distributed as dist
from dschat.config import UserError
from dschat.config.fields import flag, require_types
from dschat.inference.protocol import SamplingParams

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from dschat.chat.session import Chat
    from dschat.inference import InferenceEngine
    from dschat.inference.hf_generator import HuggingFaceGenerator

logger = logging.getLogger("dschat")

# Chat models below an output folder, for the error message about a folder without a model.
_CHAT_FOLDERS = ("actor", "step3_rlhf/actor", "step1_sft")
_MAX_SEQ_LEN = 32_768  # tokens of a conversation, even if the model has more positions
_PAGE_SIZE = 16  # the next turn computes at most one page of the conversation again
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass
class ChatConfig:
    """Talk to a trained model: turn by turn on a terminal, one prompt per line through a pipe."""

    path: str = flag(
        "", "Model: a folder such as output/demo/step3_rlhf/actor, or a hub name.", short=True
    )
    system: Optional[str] = flag(
        None, "System message at the start of every conversation.", short=True
    )
    max_new_tokens: int = flag(256, "Longest answer in tokens.", short=True)
    temperature: float = flag(0.7, "Sampling temperature: 0 (greedy), or 0.01 to 100.", short=True)
    top_p: float = flag(1.0, "Nucleus sampling: keep the smallest set of tokens with this mass.")
    top_k: int = flag(0, "Keep the k likeliest tokens; 0: all.")
    min_p: float = flag(0.0, "Drop tokens less likely than this share of the likeliest one.")
    greedy: bool = flag(
        False, "Always take the likeliest token; overrides --temperature.", short=True
    )
    seed: int = flag(
        1234, "Seed: the same prompts in the same order get the same answers.", short=True
    )
    dtype: Literal["auto", "fp32", "bf16"] = flag(
        "auto",
        "Precision of the weights; auto is bf16 on an accelerator and fp32 on a CPU.",
        short=True,
    )
    trust_remote_code: bool = flag(False, "Run Python code that comes with a checkpoint.")

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
        """Raise ``UserError`` (flag and remedy in one line) for the first invalid flag."""
        require_types(self)
        if not self.path:
            raise UserError("--path is missing; name a model's folder")
        try:
            _ = self.sampling
        except UserError as error:
            raise UserError(f"--{error}") from None


def load_chat(config: ChatConfig) -> "Chat":
    """Load the model of ``config`` and return a conversation with it.

    Raises:
        UserError: before weights load, if ``--path`` is not a causal LM with a tokenizer or the
            chat template refuses ``--system``; afterwards, if the weights do not match the model.
    """
    name = causal_lm(config.path, config.trust_remote_code)

    from dschat.chat.session import Chat, check_system
    from dschat.models.fit import check_fit
    from dschat.models.model_kind import load_config
    from dschat.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(name, "--path", config.trust_remote_code)
    # The bytes as typed: in an ASCII locale Python decodes other characters to lone surrogates.
    system = config.system and os.fsencode(config.system).decode("utf-8", "replace")
    check_system(tokenizer, system)
    check_fit(load_config(name, "--path", config.trust_remote_code), name, "--path", "lm")
    dtype = resolve_dtype(config.dtype)
    sizes = {"max_num_seqs": 1, "page_size": _PAGE_SIZE}
    generator, stops = load_generator(name, dtype, tokenizer, config.trust_remote_code, **sizes)
    precision = str(dtype).removeprefix("torch.")
    logger.info(
        "%s: %s in %s on %s", config.path, type(generator).__name__, precision, dist.device().type
    )
    return Chat(generator, tokenizer, stops, config.sampling, system)


def load_generator(
    name: str,
    dtype: "torch.dtype",
    tokenizer: "PreTrainedTokenizerBase",
    trust_remote_code: bool = False,
    max_num_seqs: int = 1,
    max_seq_len: int = _MAX_SEQ_LEN,
    page_size: Optional[int] = None,
) -> tuple["InferenceEngine | HuggingFaceGenerator", tuple[int, ...]]:
    """Returns the inference engine if it knows the family, else the Hugging Face module; and the
    tokens that end an answer.

    Sizes: see `dschat.inference.EngineConfig`; ``max_seq_len`` is cut to the model's positions.
    """
    from dschat.inference import InferenceEngine, UnsupportedModel, model_spec
    from dschat.inference.hf_generator import HuggingFaceGenerator
    from dschat.models.load import load_causal_lm, load_config
    from dschat.models.tokenizer import stop_ids
    from dschat.models.vocabulary import num_ids

    stops = stop_ids(tokenizer)
    try:
        spec = model_spec(load_config(name, "--path", trust_remote_code))
        if not (Path(name) / "adapter_config.json").is_file():
            engine = InferenceEngine.from_pretrained(
                name,
                str(dtype).removeprefix("torch."),
                str(dist.device()),
                stop_ids=stops,
                num_tokens=num_ids(tokenizer),
                max_num_seqs=max_num_seqs,
                max_seq_len=min(spec.max_positions or max_seq_len, max_seq_len),
                page_size=page_size,
            )
            return engine, stops
    except UnsupportedModel as reason:
        logger.warning("NO FAST GENERATION: %s; using the slower Hugging Face module", reason)
    model = load_causal_lm(name, "--path", dtype, trust_remote_code=trust_remote_code)
    model.to(dist.device())
    generator = HuggingFaceGenerator(
        model,
        stops,
        tokenizer.pad_token_id,
        max_num_seqs,
        num_tokens=num_ids(tokenizer),
        self_check=max_num_seqs > 1,
    )
    return generator, stops


def causal_lm(path: str, trust_remote_code: bool = False) -> str:
    """``path`` in the form ``from_pretrained`` takes; ``UserError`` if it is not a causal LM."""
    folder = Path(os.path.expanduser(path))
    if os.path.isdir(folder):  # Path.is_dir raises for a name too long for the file system
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
    """Whether OWNER/NAME is a mistyped path and not a hub name, because the folder OWNER exists."""
    return folder.parent != Path(".") and os.path.isdir(folder.parent)


def resolve_dtype(name: str) -> "torch.dtype":
    """``--dtype`` as torch knows it; auto is bf16 on an accelerator and fp32 on a CPU."""
    import torch

    if name == "auto":
        name = "bf16" if dist.device().type == "cuda" else "fp32"
    return getattr(torch, _DTYPES[name])
