"""Compares a generator's log-probs with those of plain forwards, before its first rollout.

Plain forwards have no cache, as in training. A family whose cached decoding is another function is
refused.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from dschat.config.errors import UserError, first_line
from dschat.inference.protocol import Generator, SamplingParams
from dschat.models.heads import LanguageModel
from dschat.models.packing.rows import pack
from dschat.models.training_engine import evaluating

# Largest difference of a sequence's mean log-prob, in nats, that counts as rounding. Observed in
# fp32: 3e-7 to 6e-6 in tiny models of all families, 0.07 to 30 with wrong results; larger models
# round more. In 16 bits a MoE router may choose another expert.
_TOLERANCE, _TOLERANCE_16_BIT = 1e-3, 0.25
_NEW, _SHORT, _LONG, _LONGEST = 8, 5, 40, 4096  # tokens of an answer, and of the two prompts
_FAILURES = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_FORWARD_TOKENS = 2048


class Checked(Generator, Protocol):
    """A generator of ids below ``num_tokens``, of sequences up to ``max_positions``."""

    num_tokens: int

    @property
    def max_positions(self) -> int | None: ...


def decoding_problem(
    generator: Checked,
    module: nn.Module,
    scope: AbstractContextManager[None] | None = None,
    windows: Iterable[int | None] = (),
) -> str | None:
    """One line that says why ``generator`` does not compute what ``module`` does; None if it does.

    Compares two answers each to a random prompt that is longer than all ``windows`` and a short
    one. ``scope``: the generator runs in it, and the plain forward does not.
    """
    positions = generator.max_positions or 64
    new = max(1, min(_NEW, positions // 2))
    longest = max([_LONG, *(2 + window for window in windows if window)])
    longest = max(1, min(longest, _LONGEST, positions - new))
    draw, num_ids = torch.Generator().manual_seed(0), generator.num_tokens
    lengths = longest, min(_SHORT, longest)
    prompts = [torch.randint(num_ids, (n,), generator=draw).tolist() for n in lengths]
    try:
        with scope or nullcontext():
            rollout = generator.generate(prompts, SamplingParams(new, n=2, ignore_eos=True))
    except _FAILURES as error:
        if isinstance(error, (torch.AcceleratorError, UserError)) or "memory" in str(error):
            raise
        return f"its cache fails ({first_line(error)})"
    plain = LanguageModel(module, packing="off")
    plain.check(plain.base.device)
    pairs = [(prompts[i // 2], answer) for i, answer in enumerate(rollout.token_ids)]
    gaps = torch.tensor(rollout.logprobs) - torch.stack(plain_logprobs(plain, pairs))
    gap = float(gaps.abs().mean(1).nan_to_num(nan=torch.inf).max())
    if gap <= (_TOLERANCE if plain.base.dtype == torch.float32 else _TOLERANCE_16_BIT):
        return None
    return f"with its cache log-probs differ by {gap:.2g} nats from those that training computes"


@torch.no_grad()
def plain_logprobs(
    model: LanguageModel, pairs: list[tuple[list[int], list[int]]], temperature: float = 1.0
) -> list[Tensor]:
    """Log-probs of each answer to its prompt (fp32, on the CPU). A few rows run at a time."""
    logprobs: list[Tensor] = []
    size = max(1, _FORWARD_TOKENS // max(len(prompt) + len(answer) for prompt, answer in pairs))
    with evaluating(model.base):
        for some in (pairs[i : i + size] for i in range(0, len(pairs), size)):
            reads = [range(len(p) - 1, len(p) + len(answer) - 1) for p, answer in some]
            rows = pack([prompt + answer for prompt, answer in some], reads).to(model.base.device)
            logprobs += model(rows, temperature)[0].cpu().split([*map(len, reads)])
    return logprobs
