"""Finds the model of ``--path``, its tokenizer and the longest sequences; shows its progress."""

import logging
import sys
import time
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
from dschat.observability import console
from dschat.offline.flags import PromptsConfig

logger = logging.getLogger("dschat")

FLAG = "--path"
_INTERVAL_S = 30.0  # between two log lines
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

    def generator(self, config: PromptsConfig, max_len: int) -> Generator:
        """Load the weights, for at most ``max_len`` tokens of prompt + answer."""
        options = config.trust_remote_code, config.max_num_seqs, max_len
        return load_generator(self.name, self.dtype, self.tokenizer, *options)[0]


class Progress:
    """Shows progress: a bar on a terminal, else a log line every half minute.

    Args:
        total, done: prompts, over all starts of the command.
    """

    def __init__(self, total: int, done: int, description: str) -> None:
        self._total, self._done, self._first = total, done, done
        self._description, self._tokens = description, 0
        self._started = self._logged = time.monotonic()
        self._bar = console.progress(total, description, done=done)

    def advance(self, prompts: int, tokens: int) -> None:
        """Add answered prompts, with the tokens of their answers."""
        self._done += prompts
        self._tokens += tokens
        rate = self._tokens / self._elapsed_s
        self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self._bar.update(prompts)
        now = time.monotonic()
        if not sys.stderr.isatty() and now - self._logged >= _INTERVAL_S:
            self._logged = now
            logger.info("%s", self.line())

    def line(self) -> str:
        """``answers: 512 of 3,000 prompts, 1,234 tokens/s, 75 s left``"""
        new, elapsed_s = self._done - self._first, self._elapsed_s
        left_s = (self._total - self._done) * elapsed_s / max(new, 1)
        left = f", {left_s:.0f} s left" if self._done < self._total else ""
        return (
            f"{self._description}: {self._done:,} of {self._total:,} prompts, "
            f"{self._tokens / elapsed_s:,.0f} tokens/s{left}"
        )

    def close(self) -> None:
        self._bar.close()

    @property
    def _elapsed_s(self) -> float:
        return max(time.monotonic() - self._started, 1e-9)
