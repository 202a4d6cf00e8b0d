"""Continuous batching over requests that arrive and are cancelled while others run.

Every request has its own sampling and end tokens. Its answers are those that `generate` gives to
its prompt as the only one, with the same seed.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from dschat.config import UserError
from dschat.distributed import RankGroup
from dschat.inference.eager_loop import EagerLoop
from dschat.inference.engine import InferenceEngine
from dschat.inference.protocol import SamplingParams
from dschat.inference.sampler import Sampler, refill_uniforms
from dschat.inference.scheduler import Scheduler
from dschat.inference.sequence import Event, Prompt, Sequence
from dschat.inference.stats import GenerationStats
from dschat.observability.device_span import DeviceSpan

_MAX_SAMPLERS = 256

T = TypeVar("T")
Key = tuple[int, int, int]  # prompt, first sample and first position, on which the draws depend


@dataclass(eq=False)
class Request(Prompt):
    """A prompt with sampling of its own.

    Attributes:
        end_ids: tokens that end an answer.
        num_top: likeliest tokens to record at each position of the answers.
        top: those tokens and their log-probs, by sample and position.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    end_ids: frozenset[int] = frozenset()
    num_top: int = 0
    top: dict[int, list[list[tuple[int, float]]]] = field(default_factory=dict)
    sampler: Sampler | None = None  # shared with all requests of like sampling


class OpenBatch:
    """The requests that ``engine`` answers together. Not for captured steps.

    Between two steps, requests may be added and cancelled; `InferenceEngine.generate` may not run
    while there are any. The ranks of a tensor-parallel group take the same steps, with the requests
    of all of them: they add with `add_all`.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        if engine.captures:
            raise UserError("requests of their own sampling need --no_cuda_graphs")
        self._engine = engine
        self.stats = GenerationStats(max_num_seqs=engine.max_num_seqs)
        self.stats.num_pages = engine.cache.num_pages
        sizes = engine.max_num_seqs, engine.max_num_batched_tokens
        self._scheduler = Scheduler(engine.cache, *sizes)
        sampler = _RequestSampler(engine)
        runner = engine.step_runner()
        self._loop = _RequestLoop(runner, self._scheduler, sampler, self.stats, frozenset())

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def add(
        self, ids: list[int], sampling: SamplingParams, num_top: int = 0, key: Key = (0, 0, 0)
    ) -> Request:
        """Queue a request for ``sampling.n`` answers.

        Raises:
            UserError: an empty prompt, an id outside the vocabulary, or a prompt too long for the
                cache or the model.
        """
        if (problem := self._engine.problem([(ids, 0, sampling.max_new_tokens)])) is not None:
            raise UserError(problem)
        return self._queue(ids, sampling, key, num_top)

    def add_all(
        self, asked: list[tuple[list[int], SamplingParams, Key]], more: T
    ) -> tuple[list[Request], list[T]]:
        """Collective in the group. Queue what every rank asks for, in rank order.

        Returns this rank's requests, and what each rank gives as ``more``.

        Raises:
            UserError: as `add`, on all ranks.
        """
        entries = [(ids, number, s.max_new_tokens) for ids, s, (number, *_) in asked]
        pooled = [value for _, value in self._engine.gathered(entries, (asked, more))]
        requests = [[self._queue(*request) for request in part] for part, _ in pooled]
        return requests[self._engine.group.rank], [value for _, value in pooled]

    def _queue(
        self, ids: list[int], sampling: SamplingParams, key: Key, num_top: int = 0
    ) -> Request:
        number, first_sample, first_position = key
        limit = sampling.max_new_tokens
        request = Request(
            *(list(ids), number, sampling.n, limit, first_sample, first_position),
            sampling=sampling,
            end_ids=sampling.end_ids(self._engine.stop_ids),
            num_top=num_top,
        )
        self.stats.prompts += 1
        self._scheduler.add([request])
        return request

    def cancel(self, request: Request, sample: int | None = None) -> None:
        """End a request, or one of its samples."""
        self._scheduler.drop(request, sample)

    def clear(self) -> None:
        """Cancel all requests."""
        self._scheduler.clear()

    def step(self) -> list[Event]:
        """Collective in the group. (sequence, token, whether it is the sequence's last one) for
        every token of a step.
        """
        return self._loop.step(self._scheduler.schedule(), DeviceSpan(self._engine.device))


class _RequestLoop(EagerLoop):
    def is_end(self, sequence: Sequence, token: int) -> bool:
        assert isinstance(sequence.prompt, Request)
        return token in sequence.prompt.end_ids


class _RequestSampler(Sampler):
    """Draws each request's rows with its own sampling."""

    def __init__(self, engine: InferenceEngine) -> None:
        super().__init__(SamplingParams(), frozenset(), *_device_of(engine))
        self._engine = engine
        self._samplers: dict[tuple[SamplingParams, frozenset[int]], Sampler] = {}

    def draw(
        self, logits: Tensor, places: list[tuple[Sequence, int]]
    ) -> tuple[list[int], list[float]]:
        """See `Sampler.draw`."""
        alike: dict[Sampler, list[int]] = {}
        for i, (sequence, _) in enumerate(places):
            request = sequence.prompt
            assert isinstance(request, Request)
            if not sequence.uniforms and request.sampling.temperature > 0:
                refill_uniforms([sequence], request.sampling)
            if request.sampler is None:
                request.sampler = self._sampler(request)
            alike.setdefault(request.sampler, []).append(i)
        tokens, logprobs = [0] * len(places), [0.0] * len(places)
        for sampler, rows in alike.items():
            some = logits if len(alike) == 1 else logits[rows]
            drawn = sampler.draw(some, [places[i] for i in rows])
            for i, token, logprob in zip(rows, *drawn, strict=True):
                tokens[i], logprobs[i] = token, logprob
        _record_top(logits, [sequence for sequence, _ in places])
        return tokens, logprobs

    def _sampler(self, request: Request) -> Sampler:
        """The sampler of all requests that differ in seed, length and number of answers only."""
        shared = replace(request.sampling, seed=0, n=1, max_new_tokens=2**31)
        key = shared, request.end_ids
        if key not in self._samplers:
            if len(self._samplers) >= _MAX_SAMPLERS:  # clients choose the keys
                self._samplers.clear()
            self._samplers[key] = Sampler(shared, request.end_ids, *_device_of(self._engine))
        return self._samplers[key]


def _device_of(engine: InferenceEngine) -> tuple[int, torch.device, RankGroup]:
    return engine.num_tokens, engine.device, engine.group


def _record_top(logits: Tensor, sequences: Rows[Sequence]) -> None:
    """Record each request's likeliest tokens; row i of ``logits`` is of sequence i."""
    for i, sequence in enumerate(sequences):
        request = sequence.prompt
        assert isinstance(request, Request)
        if request.num_top:
            row = logits[i].double() / request.sampling.logprob_temperature
            best = row.log_softmax(-1).topk(min(request.num_top, len(row)))
            pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            request.top.setdefault(sequence.sample, []).append(pairs)
