"""Draws the next token of each sequence in a step, as its request's sampling says.

Adds to `dschat.inference.sampling` what depends on sequences: their random numbers, the minimum
answer length, and the same tokens on all ranks of a tensor-parallel group. `Sampler` takes them
from the host's sequences, `StepSampling` from tensors, for a captured step.

There the numbers of a sampling are columns at fixed addresses, so that a step serves requests of
different sampling without a number from the host. Only which operations are needed is part of the
step (`SamplingKind`): what any of its rows needs, and it changes nothing in rows that do without.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dschat.distributed import RankGroup
from dschat.inference.kernels import cpu
from dschat.inference.kernels.cuda import operators
from dschat.inference.model.step_kernels import StepKernels
from dschat.inference.protocol import SamplingParams
from dschat.inference.requests.sequence import Draws, Request, Sequence
from dschat.inference.sampling import RowNumbers, sample, uniforms

_AHEAD = 128  # positions per batch of random numbers
_MAX_DRAWS = 256  # kept for later requests
_FEWEST_STOPS = 16  # columns of stop ids, so that few kinds differ in their number
_ALL = 1 << 30  # of top-k: every token may be drawn

Place = tuple[Sequence, int]  # and a position: 0 is the next one, more are after forced tokens
Put = Callable[[Callable[[], object]], object]  # queues work for the device


class Sampler:
    """Samples for requests; requests of like sampling together.

    Args:
        num_tokens: ids from this one on are never drawn.
        group: tensor-parallel ranks, which all get the same tokens.
    """

    def __init__(self, num_tokens: int, device: torch.device, group: RankGroup) -> None:
        self.num_tokens, self._device, self._group = num_tokens, device, group
        self._draws: dict[object, Draws] = {}

    def prepare(self, request: Request, stop_ids: tuple[int, ...]) -> None:
        """Set `Request.draws`. ``stop_ids``: the model's.

        Raises:
            UserError: an answer may not end yet, and every token would end it.
        """
        s = request.sampling
        end_ids = s.end_ids(stop_ids)
        key = s.temperature, s.top_p, s.top_k, s.min_p, s.min_new_tokens, end_ids
        if key not in self._draws:
            stops = s.known_ends(stop_ids, self.num_tokens)
            if len(self._draws) >= _MAX_DRAWS:  # clients choose the keys
                self._draws.clear()
            ids = torch.tensor(stops, dtype=torch.int64, device=self._device)
            self._draws[key] = Draws(s, end_ids, stops, ids)
        request.draws = self._draws[key]

    def draw(self, logits: Tensor, places: list[Place]) -> tuple[list[int], list[float]]:
        """Collective in the group. A token and its log-prob for each place, from its row of
        ``logits`` (R, V).
        """
        _refill_uniforms(places)
        special = [i for i, (s, _) in enumerate(places) if s.request.forced or s.request.shape]
        raw = logits
        if special:
            logits = logits.clone()
            for i in special:
                if (shape := places[i][0].request.shape) is not None:
                    logits[i] = shape(places[i][0], raw[i])
        tokens, logprobs = [0] * len(places), [0.0] * len(places)
        alike: dict[Draws, list[int]] = {}
        for i, (s, _) in enumerate(places):
            alike.setdefault(s.request.draws, []).append(i)
        for rows in alike.values():
            of_rows = logits if len(alike) == 1 else logits[rows]
            drawn = self._draw_alike(of_rows, [places[i] for i in rows])
            for i, token, logprob in zip(rows, *drawn, strict=True):
                tokens[i], logprobs[i] = token, logprob
        for i in special:
            s, ahead = places[i]
            place = len(s.answer) + ahead
            if place < len(s.request.forced):
                tokens[i] = s.request.forced[place]
            scores = raw[i].double() / s.request.sampling.logprob_temperature
            logprobs[i] = float(scores[tokens[i]] - scores.logsumexp(-1))
        for i, (s, _) in enumerate(places):
            if s.request.num_top:
                _record_top(raw[i], s)
        return tokens, logprobs

    def _draw_alike(self, logits: Tensor, places: list[Place]) -> tuple[list[int], list[float]]:
        """`draw` for places whose requests have the same `Draws`."""
        draws, uniform, forbidden = places[0][0].request.draws, None, None
        sampling = draws.sampling
        if sampling.temperature > 0:
            numbers = [s.uniforms[-1 - ahead] for s, ahead in places]
            uniform = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        if sampling.min_new_tokens and draws.stops:
            youngest = sampling.min_new_tokens
            too_short = [s.num_drawn + ahead < youngest for s, ahead in places]
            if any(too_short):
                forbidden = (torch.tensor(too_short, device=self._device), draws.stops_K)
        # The CPU kernel draws from the whole distribution.
        plain = uniform is not None and forbidden is None and not sampling.truncates
        fits = logits.device.type == "cpu" and logits.dtype == torch.float32
        kernels = cpu.load() if plain and fits and logits.is_contiguous() else None
        if kernels is not None and uniform is not None:
            tokens, logprobs = kernels.draw(logits, sampling.temperature, uniform, self.num_tokens)
        else:
            tokens, logprobs = sample(logits, sampling, uniform, forbidden, self.num_tokens)
        # Logits are the same on all ranks of a group; the broadcast guarantees the same tokens.
        tokens = self._group.broadcast(tokens)
        return tokens.tolist(), logprobs.tolist()


def _refill_uniforms(places: list[Place]) -> None:
    """Set the random numbers of the next positions of the sequences that have too few.

    The last position is first: a drawn token removes one.
    """
    sequences = [
        s
        for s, ahead in places
        if not ahead and len(s.uniforms) <= len(s.forced) and s.request.sampling.temperature > 0
    ]
    if not sequences:
        return
    requests = [s.request for s in sequences]
    longest = max(len(s.forced) for s in sequences)
    ahead = min(max(_AHEAD, longest + 1), max(r.max_new_tokens for r in requests))
    keys = [
        (r.sampling.seed, r.number, r.first_sample + s.sample, r.first_position + s.num_drawn)
        for r, s in zip(requests, sequences, strict=True)
    ]
    seed, prompt, number, first = torch.tensor(keys).unsqueeze(-1).unbind(1)  # (S, 1) each
    position = first + torch.arange(ahead - 1, -1, -1)
    shape = position.shape
    drawn = uniforms(seed.expand(shape), prompt.expand(shape), number.expand(shape), position)
    for sequence, numbers in zip(sequences, drawn.tolist(), strict=True):
        sequence.uniforms = numbers


def _record_top(logits: Tensor, sequence: Sequence) -> None:
    """Record the likeliest tokens of a row ``logits`` (V,)."""
    request = sequence.request
    row = logits.double() / request.sampling.logprob_temperature
    best = row.log_softmax(-1).topk(min(request.num_top, len(row)))
    pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    request.top.setdefault(sequence.sample, []).append(pairs)


class SamplingKind(NamedTuple):
    """What a captured step knows of the sampling of its rows: which operations it takes."""

    params: SamplingParams  # NOTE: the numbers only say what applies; top_k is the largest or more
    has_greedy: bool  # whether some rows may be greedy in a step that draws
    num_stops: int  # columns of stop ids; 0: there are none
    forbids: bool  # whether young answers draw no stop id

    @classmethod
    def of(cls, sequences: Iterable[Sequence]) -> "SamplingKind":
        """The kind of a step of ``sequences``.

        Where their numbers differ, there are two kinds, with truncation and without. Else clients
        of a server would choose how many steps are captured.
        """
        draws = {s.request.draws for s in sequences}
        samplings = [d.sampling for d in draws]
        drawn = [s for s in samplings if s.temperature > 0]
        has_greedy = False
        if not drawn:
            params = SamplingParams(temperature=0.0)
        elif len({(s.temperature, s.top_p, s.top_k, s.min_p) for s in samplings}) == 1:
            s = drawn[0]
            params = SamplingParams(
                temperature=1.0 if s.temperature == 1 else 0.5,
                top_p=0.5 if s.top_p < 1 else 1.0,
                top_k=_power_of_two(s.top_k),
                min_p=0.5 if s.min_p > 0 else 0.0,
            )
        else:
            params, has_greedy = SamplingParams(temperature=0.5), True
            if any(s.truncates for s in drawn):
                params = replace(params, top_p=0.5, top_k=_ALL, min_p=0.5)
        num_stops = max(len(d.stops) for d in draws)
        return cls(
            params,
            has_greedy,
            max(_FEWEST_STOPS, _power_of_two(num_stops)) if num_stops else 0,
            any(d.sampling.min_new_tokens and d.stops for d in draws),
        )


def _upload(values: Tensor, target: Tensor, put: Put) -> None:
    """Queue the copy of ``values``, which are on the host, to ``target``."""
    # NOTE: fresh memory, which torch does not give to others before the copy is done.
    host = torch.empty(target.shape, dtype=target.dtype, pin_memory=target.is_cuda)
    put(partial(target.copy_, host.copy_(values), non_blocking=True))


class StepSampling:
    """Sampling and stop ids of ``num_rows`` rows, at fixed addresses on ``device``."""

    @torch.inference_mode(False)
    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._columns = torch.zeros(6, num_rows, dtype=torch.int64, device=device)
        # Seed, whether it is greedy, and top-k; then temperature, top-p and min-p.
        self._integers, numbers = self._columns.split(3)
        self._numbers = numbers.view(torch.float64)
        self._numbers.fill_(1.0)
        self._stops: dict[int, Tensor] = {}  # (S, columns) by number of columns

    @torch.inference_mode(False)
    def prepare(self, kind: SamplingKind) -> None:
        """Make the memory that steps of ``kind`` read, before one is captured."""
        if kind.num_stops and kind.num_stops not in self._stops:
            shape = self._columns.shape[1], kind.num_stops
            stops = torch.full(shape, -1, dtype=torch.int64, device=self._columns.device)
            self._stops[kind.num_stops] = stops

    @torch.inference_mode(False)
    def load(self, sequences: list[Sequence], kind: SamplingKind, put: Put) -> None:
        """In later steps row b draws for the b-th sequence."""
        samplings = [s.request.sampling for s in sequences]
        integers = [(s.seed, s.temperature == 0, s.top_k or _ALL) for s in samplings]
        # A row without top-p keeps all tokens, also those that round to nothing.
        numbers = [
            (s.logprob_temperature, s.top_p if s.top_p < 1 else torch.inf, s.min_p)
            for s in samplings
        ]
        columns = torch.zeros(self._columns.shape, dtype=torch.int64)
        columns[:3, : len(sequences)] = torch.tensor(integers).T
        values = columns[3:].view(torch.float64).fill_(1.0)
        values[:, : len(sequences)] = torch.tensor(numbers, dtype=torch.float64).T
        _upload(columns, self._columns, put)
        if kind.num_stops:
            self._load_stops([s.request.draws for s in sequences], kind.num_stops, put)

    def _load_stops(self, draws: list[Draws], width: int, put: Put) -> None:
        rows = {d: i for i, d in enumerate(dict.fromkeys(draws))}
        different = torch.tensor([d.stops + [-1] * (width - len(d.stops)) for d in rows])
        _upload(different[[rows[d] for d in draws]], self._stops[width][: len(draws)], put)

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
        params, size = kind.params, len(logits)
        stops = self._stops[kind.num_stops] if kind.num_stops else None
        forbidden = None
        if kind.forbids and stops is not None:
            forbidden = too_short, stops[:size]
        integers, numbers = self._integers[:, :size], self._numbers[:, :size]
        if kernels is not None and kernels.runs("draw"):
            counters = key if isinstance(key, Tensor) else torch.stack(list(key))
            is_greedy = kind.has_greedy or params.temperature == 0
            truncates = params.top_k > 0, params.top_p < 1, params.min_p > 0
            return operators.draw(
                *(logits.contiguous(), numbers, integers, counters),
                *(is_greedy, params.temperature > 0, *truncates),
                *(forbidden or (None, None)),
                num_tokens,
            )
        seed, is_greedy, top_k = integers
        uniform = None if params.temperature == 0 else uniforms(seed, *key)
        temperature, top_p, min_p = numbers.unsqueeze(-1)
        greedy = is_greedy.unsqueeze(-1) > 0 if kind.has_greedy else None
        rows = RowNumbers(temperature, top_p, min_p, top_k.unsqueeze(-1), greedy)
        return sample(logits, params, uniform, forbidden, num_tokens, rows)

    def stops(self, kind: SamplingKind) -> Tensor | None:
        """Ids that end the answer of each row, (S, columns), filled up with -1."""
        return self._stops.get(kind.num_stops)

    def is_stop(self, tokens: Tensor, kind: SamplingKind) -> Tensor:
        """Whether each of ``tokens`` (B,), of the first rows, ends its answer; (B,) bool."""
        stops = self._stops[kind.num_stops][: len(tokens)]
        return (tokens.unsqueeze(1) == stops).any(1)


def _power_of_two(count: int) -> int:
    """The next one; 0 for 0."""
    return 1 << (count - 1).bit_length() if count else 0
