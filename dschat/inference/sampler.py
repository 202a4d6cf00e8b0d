"""Draws the next token of each sequence in a step.

Adds to `dschat.inference.sampling` what depends on sequences: their random numbers, the minimum
answer length, and the same tokens on all ranks of a tensor-parallel group. `Sampler` takes them
from the host's sequences, `StepSampling` from tensors, for a captured step.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dschat.config import UserError
from dschat.distributed import RankGroup
from dschat.inference.kernels import cpu
from dschat.inference.kernels.cuda.dispatch import StepKernels
from dschat.inference.protocol import SamplingParams
from dschat.inference.sampling import SamplingNumbers, sample, uniforms
from dschat.inference.sequence import Sequence

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
        group: RankGroup,
    ) -> None:
        self.sampling, self._device, self._group = sampling, device, group
        self.num_tokens = num_tokens
        self.stops = [t for t in sorted(stops) if 0 <= t < num_tokens]  # that can be drawn
        if sampling.min_new_tokens and len(self.stops) == num_tokens:
            raise UserError("min_new_tokens: every token ends an answer, so none may be drawn")
        self._stops = torch.tensor(self.stops, dtype=torch.int64, device=device)

    def draw(
        self, logits: Tensor, places: list[tuple[Sequence, int]]
    ) -> tuple[list[int], list[float]]:
        """Collective in the group. A token and its log-prob for each place, from its row of
        ``logits`` (R, V).

        ``places``: a sequence, and how many positions after its last token, 0 or more within its
        draft, the token is drawn for.
        """
        sampling, uniform, forbidden = self.sampling, None, None
        if sampling.temperature > 0:
            missing = [s for s, ahead in places if not ahead and len(s.uniforms) <= len(s.draft)]
            refill_uniforms(missing, sampling)
            numbers = [s.uniforms[-1 - ahead] for s, ahead in places]
            uniform = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        if sampling.min_new_tokens and len(self._stops):
            youngest = sampling.min_new_tokens
            too_short = [len(s.answer) + ahead < youngest for s, ahead in places]
            if any(too_short):
                forbidden = (torch.tensor(too_short, device=self._device), self._stops)
        kernels = cpu.load() if self._kernel_applies(logits, forbidden) else None
        if kernels is not None and uniform is not None:
            tokens, logprobs = kernels.draw(logits, sampling.temperature, uniform, self.num_tokens)
        else:
            tokens, logprobs = sample(logits, sampling, uniform, forbidden, self.num_tokens)
        # Logits are the same on all ranks of a group; the broadcast guarantees the same tokens.
        tokens = self._group.broadcast(tokens)
        return tokens.tolist(), logprobs.tolist()

    def _kernel_applies(self, logits: Tensor, forbidden: tuple[Tensor, Tensor] | None) -> bool:
        """Whether the CPU kernel can draw: from the whole distribution, without truncation."""
        s = self.sampling
        return (
            s.temperature > 0
            and forbidden is None
            and not s.truncates
            and logits.device.type == "cpu"
            and logits.dtype == torch.float32
            and logits.is_contiguous()
            and cpu.load() is not None
        )


def refill_uniforms(sequences: list[Sequence], sampling: SamplingParams) -> None:
    """Set the random numbers of the next positions, last position first: a drawn token removes
    one.
    """
    if not sequences:
        return
    ahead = min(_AHEAD, max(s.prompt.max_new_tokens for s in sequences))
    prompt = torch.tensor([s.prompt.number for s in sequences]).unsqueeze(1)
    number = torch.tensor([s.prompt.first_sample + s.sample for s in sequences]).unsqueeze(1)
    first = [s.prompt.first_position + len(s.answer) for s in sequences]
    position = torch.tensor(first).unsqueeze(1)
    position = position + torch.arange(ahead - 1, -1, -1)
    shape = position.shape
    drawn = uniforms(sampling.seed, prompt.expand(shape), number.expand(shape), position)
    for sequence, numbers in zip(sequences, drawn.tolist(), strict=True):
        sequence.uniforms = numbers


class SamplingKind(NamedTuple):
    """What a captured step knows of a sampling: which operations it takes."""

    params: SamplingParams  # NOTE: the numbers only say what applies; top_k alone is the real one
    num_stops: int  # size of the buffer of stop ids; 0: there are none
    forbids: bool  # whether young answers draw no stop id


class StepSampling:
    """Numbers, seed and stop ids of a sampling, at fixed addresses on ``device``."""

    @torch.inference_mode(False)
    def __init__(self, device: torch.device) -> None:
        self._numbers = torch.ones(3, dtype=torch.float64, device=device)
        self._seed = torch.zeros(1, dtype=torch.int64, device=device)
        self._stops: dict[int, Tensor] = {}  # by size

    @torch.inference_mode(False)
    def load(
        self,
        sampling: SamplingParams,
        stops: list[int],
        put: Callable[[Callable[[], object]], None],
    ) -> SamplingKind:
        """``stops``: ids below the vocabulary size. ``put`` queues the copies to the device."""
        s = sampling
        values = torch.tensor([s.logprob_temperature, s.top_p, s.min_p], dtype=torch.float64)
        seed = torch.tensor([s.seed])
        put(lambda: self._numbers.copy_(values))
        put(lambda: self._seed.copy_(seed))
        num_stops = 0
        if stops:
            num_stops = max(16, 1 << (len(stops) - 1).bit_length())
            # A repeated id changes nothing.
            ids = torch.tensor(stops + stops[:1] * (num_stops - len(stops)))
            if num_stops not in self._stops:
                self._stops[num_stops] = torch.zeros_like(ids, device=self._seed.device)
            buffer = self._stops[num_stops]
            put(lambda: buffer.copy_(ids))
        applies = SamplingParams(
            temperature=s.temperature if s.temperature in (0, 1) else 0.5,
            top_p=0.5 if s.top_p < 1 else 1.0,
            top_k=s.top_k,
            min_p=0.5 if s.min_p > 0 else 0.0,
        )
        return SamplingKind(applies, num_stops, bool(stops) and s.min_new_tokens > 0)

    def draw(
        self,
        logits: Tensor,
        kind: SamplingKind,
        key: Tensor | tuple[Tensor, ...],
        too_short: Tensor,
        num_tokens: int,
        kernels: StepKernels | None = None,
    ) -> tuple[Tensor, Tensor]:
        """A token and its log-prob for each row of ``logits`` (R, V).

        ``key``: prompt, sample and position in the answer, (R,) int64 each. ``too_short`` (R,)
        bool: answers that may not end yet.
        """
        params = kind.params
        stops = self.stops(kind)
        forbidden = (too_short, stops) if kind.forbids and stops is not None else None
        if kernels is not None and kernels.runs("draw"):
            memory = self._numbers, self._seed
            return kernels.draw(logits, params, *memory, key, forbidden, num_tokens)
        uniform = None if params.temperature == 0 else uniforms(self._seed, *key)
        numbers = SamplingNumbers(*self._numbers.unbind())
        return sample(logits, params, uniform, forbidden, num_tokens, numbers)

    def stops(self, kind: SamplingKind) -> Tensor | None:
        """Ids that end an answer."""
        return self._stops.get(kind.num_stops)

    def is_stop(self, tokens: Tensor, kind: SamplingKind) -> Tensor:
        """Whether each of ``tokens`` (R,) ends its answer; (R,) bool."""
        return (tokens.unsqueeze(1) == self._stops[kind.num_stops]).any(1)
