"""Defines the `Generator` protocol, its request (`SamplingParams`) and its result (`Rollout`).

Prompts and answers are ragged lists of token ids, without padding. `InferenceEngine` and
`HuggingFaceGenerator` implement the protocol; training, evaluation and chat use nothing else of
them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from dschat.config import UserError
from dschat.config.fields import flag, require_valid
from dschat.config.rollout import RolloutConfig, temperature_problem

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How to draw answers. The defaults sample from the model's own distribution."""

    max_new_tokens: int = flag(64, "most tokens of an answer", ge=1)
    temperature: float = 1.0  # 0: greedy
    top_p: float = flag(1.0, "least mass of the tokens", gt=0, le=1, remedy="; 1 turns it off")
    top_k: int = flag(0, "number of likeliest tokens", ge=0, remedy="; 0 turns it off")
    min_p: float = flag(0.0, "share of the likeliest", ge=0, lt=1, remedy="; 0 turns it off")
    seed: int = 0
    n: int = flag(1, "answers per prompt", ge=1)
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's EOS
    ignore_eos: bool = False
    min_new_tokens: int = 0  # EOS and stop tokens are not drawn before this many tokens

    def __post_init__(self) -> None:
        require_valid(self, prefix="")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise UserError(
                f"min_new_tokens {self.min_new_tokens} must be between 0 and max_new_tokens "
                f"({self.max_new_tokens})"
            )
        if problem := temperature_problem(self.temperature):
            raise UserError(problem)

    @classmethod
    def from_config(cls, config: RolloutConfig, seed: int, n: int) -> "SamplingParams":
        """The sampling of step 3's flags, for ``n`` answers per prompt."""
        return cls(
            max_new_tokens=config.max_answer_seq_len,
            min_new_tokens=config.min_answer_seq_len,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            seed=seed,
            n=n,
        )

    @property
    def logprob_temperature(self) -> float:
        """T of every log-prob in the system; 1 when decoding is greedy."""
        return self.temperature if self.temperature > 0 else 1.0

    @property
    def truncates(self) -> bool:
        """Whether some tokens are too unlikely to be drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def end_ids(self, eos_ids: tuple[int, ...]) -> frozenset[int]:
        """Tokens that end an answer, for a model whose EOS tokens are ``eos_ids``."""
        return frozenset(self.stop_token_ids) | frozenset(() if self.ignore_eos else eos_ids)

    def known_ends(self, eos_ids: tuple[int, ...], num_tokens: int) -> list[int]:
        """The `end_ids` below ``num_tokens``, which can be drawn; sorted.

        Raises:
            UserError: an answer may not end yet, and every token would end it.
        """
        ends = [i for i in sorted(self.end_ids(eos_ids)) if 0 <= i < num_tokens]
        if self.min_new_tokens and len(ends) == num_tokens:
            raise UserError("min_new_tokens: every token ends an answer, so none may be drawn")
        return ends


def prompt_problem(number: int, ids: object, vocab_size: int | None = None) -> str | None:
    """One line that says why ``ids`` is not a prompt; None if it is one.

    ``vocab_size``: ids from this one on are a problem; None: not checked.
    """
    if not isinstance(ids, (list, tuple)) or not all(
        issubclass(k, Integral) for k in set(map(type, ids))
    ):
        return (
            f"prompt {number} is {repr(ids)[:60]}, not a list of token ids; encode text with the "
            "tokenizer first"
        )
    if not ids:
        return f"prompt {number} is empty; a prompt needs at least one token"
    if vocab_size is not None and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(t for t in ids if not 0 <= t < vocab_size)
        return f"prompt {number} has the id {wrong}, outside the vocabulary of {vocab_size}"
    return None


class Answer(NamedTuple):
    """One answer: its tokens, their log-probs, and why it ended."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


@dataclass
class Rollout:
    """Answers, prompt-major (the ``n`` samples of a prompt are adjacent). S = prompts x n."""

    token_ids: list[list[int]] = field(default_factory=list)  # S, ragged, EOS included
    logprobs: list[list[float]] = field(default_factory=list)  # S, ragged; of raw logits / T
    finish_reasons: list[FinishReason] = field(default_factory=list)  # S
    # S, ragged; False: the environment's, between two turns. None: the model drew all tokens.
    drawn: list[list[bool]] | None = None
    # S, (prompt + answer, routers, k): the experts of every token, -1 of the last. None: not kept.
    experts: "list[Tensor] | None" = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, i: int) -> Answer:
        """Answer ``i`` of S. This also makes a rollout iterable."""
        return Answer(self.token_ids[i], self.logprobs[i], self.finish_reasons[i])

    def part(self, start: int, stop: int) -> "Rollout":
        """Answers ``start`` to ``stop``."""
        return Rollout(*(rows and rows[start:stop] for rows in vars(self).values()))

    @classmethod
    def joined(cls, parts: "Iterable[Rollout]") -> "Rollout":
        """The answers of all ``parts``."""
        rollout, parts = cls(), list(parts)
        for part in parts:
            rollout.token_ids += part.token_ids
            rollout.logprobs += part.logprobs
            rollout.finish_reasons += part.finish_reasons
        if parts and all(part.experts is not None for part in parts):
            rollout.experts = [rows for part in parts for rows in part.experts or ()]
        return rollout

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


# Called with the number of a prompt in the call and its answers, when all of these are complete.
Answered = Callable[[int, Rollout], None]


class Generator(Protocol):
    """Generates answers. ``indices``: each prompt's index in the rollout of all ranks (default:
    0, 1, ...).

    A sequence's random numbers depend only on (seed, prompt index, sample index, position), so the
    answers do not depend on how prompts are split into batches or over ranks.

    ``answered``: called for each prompt, as early as is known that all its answers are complete.
    """

    def generate(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams,
        indices: list[int] | None = None,
        *,
        answered: Answered | None = None,
    ) -> Rollout: ...
