"""A causal LM to talk to: its checkpoint, tokenizer and generator, and a conversation with it,
whose prompts are formatted as in training.
"""

import logging
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Optional

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dschat.distributed as dist
from dschat.chat.load import FLAG, present
from dschat.config import UserError
from dschat.data.segments import prompt_text_ids
from dschat.inference import EngineConfig, InferenceEngine, UnsupportedModel
from dschat.inference.generators.hf_generator import HuggingFaceGenerator, module_engine
from dschat.inference.protocol import SamplingParams
from dschat.models.chat_template import bare_template, default_template
from dschat.models.checkpoint import Checkpoint
from dschat.models.continued_text import StreamDecoder
from dschat.models.long_rows import num_positions
from dschat.models.tokenizer import num_ids, stop_ids

logger = logging.getLogger("dschat")

MAX_SEQ_LEN = 32_768  # tokens of prompt and answer, even if the model has more positions
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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
        checkpoint = Checkpoint(present(path), FLAG, trust_remote_code)
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

    def warn_without_template(self, what: str, flag: str) -> None:
        """Warn that ``what`` is done without the chat template, if the model came with one."""
        own = self.checkpoint.own_tokenizer
        if own.chat_template or bare_template(self.tokenizer) != default_template(own):
            logger.warning("%s without its chat template; see %s", what, flag)

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
    return _DTYPES[name]


def check_system(tokenizer: PreTrainedTokenizerBase, system: Optional[str]) -> None:
    """Raise ``UserError`` if the tokenizer's chat template refuses this system message."""
    prompt_text_ids(tokenizer, Conversation(system).messages("?"))


@dataclass
class Conversation:
    """A system message and the exchanges (prompt, answer) so far, oldest first."""

    system: Optional[str] = None
    exchanges: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, text: str) -> list[dict[str, str]]:
        """The conversation as chat messages, with ``text`` as the last user message."""
        turns = [("system", self.system)] if self.system else []
        for prompt, answer in self.exchanges:
            turns += [("user", prompt), ("assistant", answer)]
        return [{"role": role, "content": content} for role, content in [*turns, ("user", text)]]

    def fit(
        self, tokenizer: PreTrainedTokenizerBase, text: str, max_len: int
    ) -> tuple[list[int], int]:
        """The ids of `messages` within ``max_len`` tokens, without as many of the oldest exchanges
        as needed; and the number of those left out. With all of them left out the ids may still
        exceed ``max_len``. ``UserError`` where the chat template refuses the messages.
        """
        for num_dropped in range(len(self.exchanges) + 1):
            recent = Conversation(self.system, self.exchanges[num_dropped:])
            ids = prompt_text_ids(tokenizer, recent.messages(text))
            if len(ids) <= max_len:
                break
        return ids, num_dropped


class Chat:
    """Conversation with a model.

    Args:
        generator: streams the tokens of an answer.
        stop_ids: tokens that end an answer and are not shown.
        sampling: sampling parameters; every answer gets another seed.
    """

    def __init__(
        self,
        generator: InferenceEngine | HuggingFaceGenerator,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: tuple[int, ...],
        sampling: SamplingParams,
        system: Optional[str] = None,
    ) -> None:
        self.conversation = Conversation(system)
        self._generator = generator
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._sampling = sampling
        self._num_answers = 0

    def reset(self) -> None:
        """Start a new conversation with the same system message."""
        self.conversation = Conversation(self.conversation.system)

    def set_system(self, system: Optional[str]) -> None:
        """Set or remove the system message; ``UserError`` if the chat template refuses it."""
        check_system(self._tokenizer, system)
        self.conversation.system = system

    def reply(self, text: str) -> Iterator[str]:
        """Yields the answer to ``text`` in pieces, then adds both to the conversation.

        Closing the iterator stops the answer. The part generated so far is added; without any, the
        conversation is unchanged.

        Raises:
            UserError: ``text`` leaves no position for an answer, or the chat template refuses it.
        """
        ids, sampling = self._request(text)
        conversation = self.conversation  # `reset` may replace it while the answer streams
        decoder, answer, complete = StreamDecoder(self._tokenizer), "", False
        try:
            with closing(self._generator.stream(ids, sampling)) as tokens:
                for token in tokens:
                    piece = "" if token in self._stop_ids else decoder.push(token)
                    answer, piece = printable(answer, piece)
                    if piece:
                        yield piece
            answer, piece = printable(answer, decoder.finish())
            complete = True
            if piece:
                yield piece
        finally:
            if answer.strip() or complete:
                conversation.exchanges.append((text, answer.strip()))

    def _request(self, text: str) -> tuple[list[int], SamplingParams]:
        """The prompt ids, and sampling parameters within the model's positions.

        Drops the oldest exchanges so that ``max_new_tokens`` positions, or half of all if that is
        less, are left for the answer.
        """
        longest, positions = self._sampling.max_new_tokens, self._generator.max_positions
        limit = sys.maxsize if positions is None else positions - min(longest, positions // 2)
        ids, num_dropped = self.conversation.fit(self._tokenizer, text, limit)
        if positions is not None:
            if len(ids) >= positions:
                raise UserError(
                    f"too long: {len(ids)} tokens, and the model has {positions} positions"
                )
            longest = min(longest, positions - len(ids))
        if num_dropped:
            logger.warning("conversation too long: dropped its %d oldest exchanges", num_dropped)
            del self.conversation.exchanges[:num_dropped]
        # As in training: every answer has its own random numbers, reproducible from the seed.
        seed = self._sampling.seed * 1_000_003 + self._num_answers
        self._num_answers += 1
        return ids, replace(self._sampling, seed=seed, max_new_tokens=longest)


def printable(answer: str, piece: str) -> tuple[str, str]:
    """``answer`` + ``piece``, and ``piece``, made safe for a terminal.

    Drops white space before an answer's first character and carriage returns; replaces control
    characters, which a terminal would execute, by U+FFFD.
    """
    piece = (piece if answer else piece.lstrip()).replace("\r", "")
    safe = "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in piece)
    return answer + safe, safe
