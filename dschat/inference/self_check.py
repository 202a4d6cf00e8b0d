"""Holds a generator's log-probs against plain forwards of the same module, without a cache."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from dschat.config.errors import first_line
from dschat.inference.protocol import Generator, Rollout, SamplingParams
from dschat.losses import token_logprobs
from dschat.models.training_engine import evaluating

# Largest difference of a sequence's mean log-prob, in nats, that counts as rounding. Observed: 1e-6
# to 1e-4 in fp32, 0.9 to 30 with wrong results. In 16 bits a MoE router may choose another expert.
_TOLERANCE = {torch.float32: 0.01}
_TOLERANCE_16_BIT = 0.25
_NEW, _SHORT, _LONG, _LONGEST = 8, 5, 40, 4096  # tokens of an answer, and of the two prompts
_FAILURES = (AttributeError, LookupError, RuntimeError, TypeError)


def decoding_problem(
    generator: Generator,
    module: nn.Module,
    scope: AbstractContextManager[None],
    num_ids: int,
    positions: int,
    windows: Iterable[int | None] = (),
    plain_scope: AbstractContextManager[None] | None = None,
) -> str | None:
    """One line that says why ``generator`` does not compute what ``module`` does; None if it does.

    Compares two answers each to a random prompt that is longer than all ``windows`` and a short
    one, within ``positions``. ``scope``: the generator runs in it, and the plain forward in
    ``plain_scope``.
    """
    new = max(1, min(_NEW, positions // 2))
    longest = max([_LONG, *(2 + window for window in windows if window)])
    longest = max(1, min(longest, _LONGEST, positions - new))
    draw = torch.Generator().manual_seed(0)
    shapes = (longest,), (min(_SHORT, longest),)
    prompts = [torch.randint(num_ids, shape, generator=draw).tolist() for shape in shapes]
    try:
        with scope:
            rollout = generator.generate(prompts, SamplingParams(new, n=2, ignore_eos=True))
    except _FAILURES as error:
        if isinstance(error, torch.AcceleratorError) or "memory" in str(error):
            raise
        return f"its cache fails ({first_line(error)})"
    with plain_scope or nullcontext():
        gap = _gap_to_plain(module, prompts, rollout, 2)
    if gap <= _TOLERANCE.get(next(module.parameters()).dtype, _TOLERANCE_16_BIT):
        return None
    return f"with its cache log-probs differ by {gap:.2g} nats from those that training computes"


@torch.no_grad()
def _gap_to_plain(module: nn.Module, prompts: list[list[int]], rollout: Rollout, n: int) -> float:
    """The largest mean, over an answer, of |its log-prob - that of a plain forward|; inf for NaN.

    ``rollout``: ``n`` answers of equal length to each of ``prompts``.
    """
    device, gaps = next(module.parameters()).device, []
    with evaluating(module):
        for p, prompt in enumerate(prompts):
            answers = rollout.token_ids[p * n : (p + 1) * n]
            ids = torch.tensor([prompt + answer for answer in answers], device=device)
            logits = module(input_ids=ids, use_cache=False).logits[:, len(prompt) - 1 : -1]
            plain = token_logprobs(logits, ids[:, len(prompt) :]).cpu()
            drawn = torch.tensor(rollout.logprobs[p * n : (p + 1) * n])
            gaps.append((drawn - plain).abs().mean(1))
    return float(torch.cat(gaps).nan_to_num(nan=torch.inf).max())
