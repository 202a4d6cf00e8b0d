"""Seam 3: what a generator is asked (`SamplingParams`), what it answers (`Rollout`), and its
protocol.

Ragged lists of token ids in, ragged lists out, no padding. This module must not know which model or
engine generates, nor how prompts were made.
"""

from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, NamedTuple, Protocol

from dschat.config import UserError
from dschat.config.fields import require_types
from dschat.config.rollout import temperature_problem

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How to draw answers. The defaults sample from the model's own distribution."""

    max_new_tokens: int = 64
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int = 0
    n: int = 1  # answers per prompt
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own EOS
    ignore_eos: bool = False
    min_new_tokens: int = 0  # before so many are out, no token that ends an answer is drawn

    def __post_init__(self) -> None:
        require_types(self, prefix="")
        checks = {
            f"max_new_tokens {self.max_new_tokens} must be at least 1": self.max_new_tokens >= 1,
            f"min_new_tokens {self.min_new_tokens} must be between 0 and max_new_tokens "
            f"({self.max_new_tokens})": 0 <= self.min_new_tokens <= self.max_new_tokens,
            temperature_problem(self.temperature): not temperature_problem(self.temperature),
            f"top_p {self.top_p} must be in (0, 1]; 1 turns it off": 0 < self.top_p <= 1,
            f"top_k {self.top_k} must not be negative; 0 turns it off": self.top_k >= 0,
            f"min_p {self.min_p} must be in [0, 1); 0 turns it off": 0 <= self.min_p < 1,
            f"n {self.n} must be at least 1": self.n >= 1,
        }
        for message, holds in checks.items():
            if not holds:
                raise UserError(message)

    @property
    def logprob_temperature(self) -> float:
        """The T of every log-prob in the system: greedy decoding reports them at T = 1."""
        return self.temperature if self.temperature > 0 else 1.0

    def end_ids(self, eos_ids: tuple[int, ...]) -> frozenset[int]:
        """The tokens that end an answer of a model whose own EOS are ``eos_ids``."""
        return frozenset(self.stop_token_ids) | frozenset(() if self.ignore_eos else eos_ids)


def prompt_problem(number: int, ids: Any) -> str | None:
    """What keeps ``ids`` from being a prompt, in one line; None where nothing does."""
    if isinstance(ids, (list, tuple)) and all(issubclass(k, Integral) for k in set(map(type, ids))):
        return None if ids else f"prompt {number} is empty; a prompt needs at least one token"
    return (
        f"prompt {number} is {repr(ids)[:60]}, not a list of token ids; encode text with the "
        "tokenizer first"
    )


class Answer(NamedTuple):
    """One answer: its tokens, their log-probs, and what ended it."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


@dataclass
class Rollout:
    """Answers, prompt-major: the ``n`` samples of a prompt stand together. S = prompts x n."""

    token_ids: list[list[int]] = field(default_factory=list)  # S x its own length, EOS included
    logprobs: list[list[float]] = field(default_factory=list)  # of those tokens, raw logits / T
    finish_reasons: list[FinishReason] = field(default_factory=list)  # S

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, i: int) -> Answer:
        """Answer ``i`` of S; iterating over a rollout yields them all."""
        return Answer(self.token_ids[i], self.logprobs[i], self.finish_reasons[i])

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


class Generator(Protocol):
    """Answers prompts. ``indices`` are the prompts' numbers in the whole rollout (default: 0, 1,
    ...).

    A sequence's random numbers depend on (seed, its prompt's number, its sample number, position)
    alone, so the answers do not depend on how prompts are spread over batches or ranks.
    """

    def generate(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams,
        indices: list[int] | None = None,
    ) -> Rollout: ...
