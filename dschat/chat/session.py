"""Talking to a trained model: a conversation in, an answer out piece by piece, as it is decoded.

Comes in: a ``ChatConfig``, then what the user says. Goes out: pieces of text that never change once
they are out. The prompt is made by the very code that makes training's (``data.segments``), and the
answer by the very engine that training generates with. This module must not know terminals, pipes
or commands (chat.py does), nor anything of training.

torch loads in ``load_chat``, so that ``--help`` and mistakes in the flags answer at once.
"""

import logging
import os
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional, Protocol

import dschat.distributed as dist
from dschat.config import UserError
from dschat.config.fields import flag, require_types
from dschat.data.segments import prompt_text_ids
from dschat.inference.protocol import SamplingParams

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("dschat")

# Where the three steps leave something to talk to, below a folder that is no model itself.
_CHAT_FOLDERS = ("actor", "step3_rlhf/actor", "step1_sft")
_LONGEST = 32_768  # tokens of a conversation, where the model has positions for more
_PAGE_SIZE = 256
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class StreamingGenerator(Protocol):
    """Answers one prompt, token by token."""

    @property
    def max_positions(self) -> int | None: ...

    def stream(self, prompt: list[int], sampling: SamplingParams) -> Iterator[int]: ...


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
    from transformers.utils.logging import disable_progress_bar

    from dschat.inference import InferenceEngine, UnsupportedModel, model_spec
    from dschat.inference.hf_generator import HuggingFaceGenerator
    from dschat.models.config_files import read_generation_config
    from dschat.models.load import load_causal_lm, load_config
    from dschat.models.tokenizer import stop_ids
    from dschat.models.vocabulary import num_ids

    disable_progress_bar()
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


def check_system(tokenizer: Any, system: Optional[str]) -> None:
    """Raise ``UserError`` where the tokenizer's chat template takes no such system message."""
    Conversation(system).prompt_ids(tokenizer, "?")


class Conversation:
    """What was said so far: a system message and exchanges (prompt, answer), oldest first."""

    def __init__(self, system: Optional[str] = None) -> None:
        self.system = system
        self.exchanges: list[tuple[str, str]] = []

    def messages(self, text: str) -> list[dict[str, str]]:
        """The chat messages that ask for an answer to ``text``."""
        turns = [("system", self.system)] if self.system else []
        for prompt, answer in self.exchanges:
            turns += [("user", prompt), ("assistant", answer)]
        return [{"role": role, "content": said} for role, said in [*turns, ("user", text)]]

    def prompt_ids(self, tokenizer: Any, text: str) -> list[int]:
        """The tokens of that, as training would have them.

        Raises:
            UserError: the tokenizer's chat template refuses these messages.
        """
        return prompt_text_ids(tokenizer, self.messages(text))

    def fit(self, tokenizer: Any, text: str, max_len: int) -> tuple[list[int], int]:
        """``prompt_ids`` without the oldest exchanges, as many as must go for ``max_len`` tokens.

        Returns the ids, and how many exchanges to forget. Without any left the ids may still be
        more than ``max_len``.
        """
        kept = Conversation(self.system)
        for num_forgotten in range(len(self.exchanges) + 1):
            kept.exchanges = self.exchanges[num_forgotten:]
            ids = kept.prompt_ids(tokenizer, text)
            if len(ids) <= max_len:
                break
        return ids, num_forgotten


class Chat:
    """A model in conversation.

    Args:
        generator: answers token prompts, one token at a time.
        stop_ids: tokens that end an answer and are no part of it.
        sampling: how to draw; the seed moves on with every answer.
    """

    def __init__(
        self,
        generator: StreamingGenerator,
        tokenizer: Any,
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
        """Forget what was said; the system message stays."""
        self.conversation = Conversation(self.conversation.system)

    def set_system(self, system: Optional[str]) -> None:
        """Put ``system`` before the conversation, or nothing; ``UserError`` where that can't be."""
        check_system(self._tokenizer, system)
        self.conversation.system = system

    def reply(self, text: str) -> Iterator[str]:
        """The answer to ``text``, in pieces; both join the conversation when it ends.

        Closing the iterator stops the answer: then what came out of it is remembered, and nothing
        at all where nothing came.

        Raises:
            UserError: ``text`` leaves the model no position for an answer, or the template refuses.
        """
        ids, sampling = self._request(text)
        conversation = self.conversation  # a reset meanwhile starts another one
        decoder, said, complete = StreamDecoder(self._tokenizer), "", False
        try:
            with closing(self._generator.stream(ids, sampling)) as tokens:
                for token in tokens:
                    piece = "" if token in self._stop_ids else decoder.push(token)
                    said, piece = printable(said, piece)
                    if piece:
                        yield piece
            said, piece = printable(said, decoder.finish())
            complete = True
            if piece:
                yield piece
        finally:
            if said.strip() or complete:
                conversation.exchanges.append((text, said.strip()))

    def _request(self, text: str) -> tuple[list[int], SamplingParams]:
        """The prompt, and how to answer it within the model's positions.

        History makes room for an answer of ``max_new_tokens``, yet never gets less than half.
        """
        longest, positions = self._sampling.max_new_tokens, self._generator.max_positions
        limit = sys.maxsize if positions is None else positions - min(longest, positions // 2)
        ids, num_forgotten = self.conversation.fit(self._tokenizer, text, limit)
        if positions is not None:
            if len(ids) >= positions:
                raise UserError(
                    f"too long: {len(ids)} tokens, and the model has {positions} positions"
                )
            longest = min(longest, positions - len(ids))
        if num_forgotten:
            logger.warning("the conversation got too long: %d exchanges forgotten", num_forgotten)
            del self.conversation.exchanges[:num_forgotten]
        # As in training: draws differ from answer to answer, and repeat with the seed.
        seed = self._sampling.seed * 1_000_003 + self._num_answers
        self._num_answers += 1
        return ids, replace(self._sampling, seed=seed, max_new_tokens=longest)


class StreamDecoder:
    """Tokens one by one into text that is final: no half characters, and spaces where they belong.

    A token's text depends on its neighbours: byte-level tokens end within a character, and
    SentencePiece tokens lose their leading space where they stand first. So tokens are decoded
    together with those of the piece before, and held back while they end within a character. The
    pieces joined are the text of all tokens decoded at once, special tokens left out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the last piece's tokens, then those not out yet
        self._num_out = 0

    def push(self, token: int) -> str:
        """What is certain now that ``token`` has come; often one word, sometimes nothing."""
        self._ids.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        """What was held back; a character that never became whole shows as U+FFFD."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before, now = self._decode(self._ids[: self._num_out]), self._decode(self._ids)
        # NOTE a special token has no text and may not be all of the piece before: the next token
        # would then stand first and lose its space.
        if len(now) <= len(before) or (now.endswith("\ufffd") and not final):
            return ""
        self._ids = self._ids[self._num_out :]
        self._num_out = len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def printable(said: str, piece: str) -> tuple[str, str]:
    """``said`` with ``piece`` after it, and the piece fit to be shown.

    The space that opens an answer is no part of it, and control characters would command the
    terminal: they show as U+FFFD.
    """
    piece = (piece if said else piece.lstrip()).replace("\r", "")
    shown = "".join(
        c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in piece
    )
    return said + shown, shown


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
