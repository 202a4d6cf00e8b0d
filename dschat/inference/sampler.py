"""Draws the next token of each sequence in a step.

Adds to `dschat.inference.sampling` what depends on sequences: their random numbers, the minimum
answer length, and the same tokens on all ranks of a tensor-parallel group.
"""

import torch
from torch import Tensor

from dschat.distributed import Group
from dschat.inference.kernels import cpu
from dschat.inference.protocol import SamplingParams
from dschat.inference.sampling import sample, uniforms
from dschat.inference.scheduler import Sequence

_AHEAD = 128  # positions per batch of random numbers


class Sampler:
    """Samples with ``sampling``.

    Args:
        stops: tokens that end an answer.
        num_tokens: ids from this one on are never drawn.
        group: tensor-parallel ranks, which all get the same tokens.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        stops: frozenset[int],
        num_tokens: int,
        device: torch.device,
        group: Group,
    ) -> None:
        self._sampling, self._device, self._group = sampling, device, group
        self._num_tokens = num_tokens
        known = [t for t in sorted(stops) if 0 <= t < num_tokens]
        self._stops = torch.tensor(known, dtype=torch.int64, device=device)

    def draw(self, logits: Tensor, sequences: list[Sequence]) -> tuple[list[int], list[float]]:
        """Collective in the group. A token and its log-prob for each sequence, from its row of
        ``logits`` (R, V).
        """
        sampling, uniform, forbidden = self._sampling, None, None
        if sampling.temperature > 0:
            _refill_uniforms([s for s in sequences if not s.uniforms], sampling)
            numbers = [s.uniforms.pop() for s in sequences]
            uniform = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        if sampling.min_new_tokens and len(self._stops):
            too_short = [len(s.answer) < sampling.min_new_tokens for s in sequences]
            if any(too_short):
                forbidden = (torch.tensor(too_short, device=self._device), self._stops)
        kernels = cpu.load() if self._kernel_applies(logits, forbidden) else None
        if kernels is not None and uniform is not None:
            tokens, logprobs = kernels.draw(logits, sampling.temperature, uniform, self._num_tokens)
        else:
            tokens, logprobs = sample(logits, sampling, uniform, forbidden, self._num_tokens)
        # Logits are the same on all ranks of a group; the broadcast guarantees the same tokens.
        tokens = self._group.broadcast(tokens)
        return tokens.tolist(), logprobs.tolist()

    def _kernel_applies(self, logits: Tensor, forbidden: tuple[Tensor, Tensor] | None) -> bool:
        """Whether the CPU kernel can draw: from the whole distribution, without truncation."""
        s = self._sampling
        return (
            s.temperature > 0
            and forbidden is None
            and not (s.top_k > 0 or s.top_p < 1 or s.min_p > 0)
            and logits.device.type == "cpu"
            and logits.dtype == torch.float32
            and logits.is_contiguous()
            and cpu.load() is not None
        )


def _refill_uniforms(sequences: list[Sequence], sampling: SamplingParams) -> None:
    """Set the random numbers of the next positions, last position first, as they are popped."""
    if not sequences:
        return
    ahead = min(_AHEAD, sampling.max_new_tokens)
    prompt = torch.tensor([s.prompt.number for s in sequences]).unsqueeze(1)
    number = torch.tensor([s.sample for s in sequences]).unsqueeze(1)
    position = torch.tensor([len(s.answer) for s in sequences]).unsqueeze(1)
    position = position + torch.arange(ahead - 1, -1, -1)
    shape = position.shape
    drawn = uniforms(sampling.seed, prompt.expand(shape), number.expand(shape), position)
    for sequence, numbers in zip(sequences, drawn.tolist(), strict=True):
        sequence.uniforms = numbers
