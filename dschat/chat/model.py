"""The causal LM of ``--path``: its checkpoint, its tokenizer, and a generator for it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dschat.distributed as dist
from dschat.builtin.tiny_model import resolve_model
from dschat.chat.load import FLAG, present
from dschat.config import UserError
from dschat.inference import EngineConfig, InferenceEngine, UnsupportedModel
from dschat.inference.hf_generator import HuggingFaceGenerator, module_engine
from dschat.models.checkpoint import Checkpoint
from dschat.models.row_length import num_positions
from dschat.models.tokenizer import stop_ids
from dschat.models.vocabulary import num_ids

MAX_SEQ_LEN = 32_768  # tokens of prompt and answer, even if the model has more positions
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass
class Model:
    """A causal LM whose weights are not loaded yet.

    ``stop_ids``: tokens that end an answer. ``positions``: longest prompt + answer.
    """

    path: str  # as the user wrote it
    checkpoint: Checkpoint
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    positions: int
    dtype: torch.dtype

    @classmethod
    def find(cls, path: str, dtype: str, trust_remote_code: bool = False, **flags: Any) -> "Model":
        """Check ``path`` by its configuration, tokenizer and list of weights.

        ``flags``: of its tokenizer, see `complete_tokenizer`.

        Raises:
            UserError: not a causal LM with a tokenizer.
        """
        checkpoint = Checkpoint(resolve_model(present(path)), FLAG, trust_remote_code)
        checkpoint.require_causal_lm()
        tokenizer = checkpoint.tokenizer(**flags)
        checkpoint.check("lm")
        positions = min(num_positions(checkpoint.config) or MAX_SEQ_LEN, MAX_SEQ_LEN)
        ends = stop_ids(tokenizer)
        return cls(path, checkpoint, tokenizer, ends, positions, resolve_dtype(dtype))

    def longest_prompt(self, max_new_tokens: int, *bounds: int | None) -> int:
        """Tokens that a prompt may have, before an answer of ``max_new_tokens``.

        ``bounds``: of prompt + answer, beside the model's positions.

        Raises:
            UserError: no prompt fits.
        """
        positions = min([self.positions, *(bound for bound in bounds if bound is not None)])
        if positions <= max_new_tokens:
            raise UserError(
                f"--max_new_tokens {max_new_tokens}: {self.path} has {positions} positions, for "
                "prompt and answer together; lower it"
            )
        return positions - max_new_tokens

    def engine(self, max_seq_len: int = MAX_SEQ_LEN, **sizes: Any) -> InferenceEngine:
        """Load the weights into an inference engine; ``max_seq_len`` is cut to its positions.

        ``sizes``: see `dschat.inference.EngineConfig`.

        Raises:
            UnsupportedModel: the engine cannot run the family.
        """
        checkpoint = self.checkpoint
        sizes |= {"stop_ids": self.stop_ids, "num_tokens": num_ids(self.tokenizer)}
        sizes["max_seq_len"] = min(num_positions(checkpoint.config) or max_seq_len, max_seq_len)
        try:
            dtype = str(self.dtype).removeprefix("torch.")
            return InferenceEngine.from_pretrained(checkpoint, dtype, str(dist.device()), **sizes)
        except UnsupportedModel:
            engine = module_engine(self.module, EngineConfig(**sizes))
        engine.weights.use()
        return engine

    @cached_property
    def module(self) -> PreTrainedModel:
        """transformers' module with the weights."""
        return self.checkpoint.language_model(self.dtype).to(dist.device())

    def generator(
        self,
        max_num_seqs: int = 1,
        max_seq_len: int = MAX_SEQ_LEN,
        page_size: int | None = None,
    ) -> InferenceEngine | HuggingFaceGenerator:
        """Load the weights into the inference engine if it runs the family, else into the Hugging
        Face module.
        """
        try:
            return self.engine(max_seq_len, max_num_seqs=max_num_seqs, page_size=page_size)
        except UnsupportedModel as reason:
            ids = self.stop_ids, num_ids(self.tokenizer)
            return HuggingFaceGenerator(self.module, *ids, self_check=True, reason=reason)


def resolve_dtype(name: str) -> torch.dtype:
    """``--dtype`` as torch knows it; auto is bf16 on an accelerator and fp32 on a CPU."""
    if name == "auto":
        name = "bf16" if dist.device().type == "cuda" else "fp32"
    return getattr(torch, _DTYPES[name])
