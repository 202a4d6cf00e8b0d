"""Finds the model of ``--path``, its tokenizer and the longest sequences that it takes."""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from dschat.chat.load import causal_lm, load_generator, resolve_dtype
from dschat.config import UserError
from dschat.inference.protocol import Generator
from dschat.models.fit import check_fit
from dschat.models.model_kind import load_config
from dschat.models.row_length import num_positions
from dschat.models.tokenizer import load_tokenizer, stop_ids
from dschat.offline.flags import PromptsConfig

FLAG = "--path"
_MAX_SEQ_LEN = 32_768  # tokens of prompt + answer, even if the model has more positions


@dataclass
class Model:
    """A causal LM whose weights are not loaded yet.

    ``stop_ids``: tokens that end an answer. ``positions``: longest prompt + answer.
    """

    path: str  # as the user wrote it
    name: str  # as `from_pretrained` takes it
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    positions: int
    dtype: torch.dtype

    @classmethod
    def find(cls, path: str, dtype: str, trust_remote_code: bool = False) -> "Model":
        """Check ``path`` by its configuration, tokenizer and list of weights.

        Raises:
            UserError: not a causal LM with a tokenizer.
        """
        name = causal_lm(path, trust_remote_code)
        tokenizer = load_tokenizer(name, FLAG, trust_remote_code)
        config = load_config(name, FLAG, trust_remote_code)
        check_fit(config, name, FLAG, "lm")
        return cls(
            path,
            name,
            config,
            tokenizer,
            stop_ids(tokenizer),
            min(num_positions(config) or _MAX_SEQ_LEN, _MAX_SEQ_LEN),
            resolve_dtype(dtype),
        )

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

    def generator(self, config: PromptsConfig, longest_prompt: int) -> Generator:
        """Load the weights, for prompts of at most ``longest_prompt`` tokens."""
        max_len = longest_prompt + config.max_new_tokens
        options = config.trust_remote_code, config.max_num_seqs, max_len
        return load_generator(self.name, self.dtype, self.tokenizer, *options)[0]
