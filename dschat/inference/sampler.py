"""Drawing the tokens of a step: random numbers, what may not be drawn yet, one choice for a group.

Logits and the sequences they belong to come in; tokens and log-probs go out. It must not know how
logits are computed.
"""

import torch
from torch import Tensor

from dschat.distributed import Group
from dschat.inference.kernels import cpu
from dschat.inference.protocol import SamplingParams
from dschat.inference.sampling import sample, uniforms
from dschat.inference.scheduler import Sequence

_AHEAD = 128  # positions whose random numbers are drawn at once


class Sampler:
    """Draws as ``sampling`` says; ``stops`` end an answer; no id from ``num_tokens`` on is drawn;
    ``group`` must take the same tokens."""

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

    def draw(self, logits: Tensor, drawing: list[Sequence]) -> tuple[list[int], list[float]]:
        """A token and its log-prob for each of ``drawing``, from its row of ``logits`` (R, V)."""
        sampling, uniform, forbidden = self._sampling, None, None
        if sampling.temperature > 0:
            _draw_ahead([s for s in drawing if not s.uniforms], sampling)
            numbers = [s.uniforms.pop() for s in drawing]
            uniform = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        if sampling.min_new_tokens and len(self._stops):
            young = [len(s.answer) < sampling.min_new_tokens for s in drawing]
            if any(young):
                forbidden = (torch.tensor(young, device=self._device), self._stops)
        if self._draws_plainly(logits, forbidden):
            kernels = cpu.load()
            tokens, logprobs = kernels.draw(logits, sampling.temperature, uniform, self._num_tokens)
        else:
            tokens, logprobs = sample(logits, sampling, uniform, forbidden, self._num_tokens)
        # Every rank of a group has the same logits; this makes sure of the same tokens.
        tokens = self._group.broadcast(tokens)
        return tokens.tolist(), logprobs.tolist()

    def _draws_plainly(self, logits: Tensor, forbidden: tuple[Tensor, Tensor] | None) -> bool:
        """Whether the whole distribution is drawn from, on a CPU that has the kernel for it."""
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


def _draw_ahead(sequences: list[Sequence], sampling: SamplingParams) -> None:
    """Random numbers of the next positions, last one first: they are popped."""
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
