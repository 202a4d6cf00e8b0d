"""Holds a generator's log-probs against plain forwards of the same module, without a cache."""

import torch
from torch import nn

from dschat.inference.protocol import Rollout, SamplingParams
from dschat.losses import token_logprobs
from dschat.models.training_engine import evaluating

# Largest difference of a sequence's mean log-prob, in nats, that counts as rounding. Observed: 1e-6
# to 1e-4 in fp32, 0.9 to 30 with wrong results. In 16 bits a MoE router may choose another expert.
_TOLERANCE = {torch.float32: 0.01}
_TOLERANCE_16_BIT = 0.25
_NEW, _SHORT, _LONG = 8, 5, 40  # tokens of an answer, and of the two prompts


def tolerance(module: nn.Module) -> float:
    """The largest `gap_to_plain` that counts as rounding in the module's precision."""
    return _TOLERANCE.get(next(module.parameters()).dtype, _TOLERANCE_16_BIT)


def probes(
    num_ids: int, positions: int, longest: int = _LONG
) -> tuple[list[list[int]], SamplingParams]:
    """A random prompt of ``longest`` tokens and a short one, two answers each, in ``positions``."""
    new = max(1, min(_NEW, positions // 2))
    longest = max(1, min(longest, positions - new))
    draw = torch.Generator().manual_seed(0)
    shapes = (longest,), (min(_SHORT, longest),)
    prompts = [torch.randint(num_ids, shape, generator=draw).tolist() for shape in shapes]
    return prompts, SamplingParams(new, n=2, ignore_eos=True)


@torch.no_grad()
def gap_to_plain(module: nn.Module, prompts: list[list[int]], rollout: Rollout, n: int) -> float:
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
