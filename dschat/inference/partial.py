"""Generates until enough prompts have all their answers; the others are continued in a later call.

A long answer then does not hold up a rollout. What was drawn keeps its log-probs, of the weights
that drew it; keys and values are computed again, by the present weights.
"""

from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dschat.inference.engine import InferenceEngine
from dschat.inference.protocol import Answered, FinishReason, SamplingParams
from dschat.inference.sequence import Request


@dataclass
class OpenPrompt:
    """A prompt and its answers so far: none, or ``SamplingParams.n`` of them."""

    ids: list[int]
    token_ids: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    finish_reasons: list[FinishReason | None] = field(default_factory=list)  # None: goes on
    experts: list[Tensor | None] = field(default_factory=list)  # of complete answers, if kept
    staleness: int = 0  # calls of `advance` since the one that drew its first token

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        experts = [e if e is None else e.tolist() for e in self.experts]
        return asdict(replace(self, experts=[])) | {"experts": experts}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "OpenPrompt":
        """From a `state`."""
        experts = [e and torch.tensor(e, dtype=torch.int16) for e in state.get("experts", ())]
        return cls(**state | {"experts": experts})

    @property
    def is_complete(self) -> bool:
        return bool(self.finish_reasons) and None not in self.finish_reasons

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    def request(self, sampling: SamplingParams, number: int) -> Request:
        """A request that continues the answers."""
        request = Request(self.ids, sampling, number)
        if self.token_ids:
            stopped = [reason == "stop" for reason in self.finish_reasons]
            request.resume(zip(self.token_ids, self.logprobs, stopped, strict=True))
            for sequence, experts in zip(request.sequences, self.experts, strict=True):
                sequence.experts = experts
        return request

    def follow(self, request: Request) -> None:
        """Take over the answers of ``request``."""
        self.staleness += bool(self.token_ids)
        begun = [s for s in request.sequences if s.answer]
        self.token_ids = [s.answer for s in begun]
        self.logprobs = [s.logprobs for s in begun]
        self.finish_reasons = [s.finish_reason for s in begun]
        self.experts = [None if s.experts is None else s.experts.cpu() for s in begun]


@dataclass
class _Wanted:
    """What a rank waits for: prompts to be complete, and some of them by all means."""

    requests: list[Request]
    number: int
    num_due: int

    @property
    def is_served(self) -> bool:
        complete = [request.is_complete for request in self.requests]
        return sum(complete) >= self.number and all(complete[: self.num_due])


def advance(
    engine: InferenceEngine,
    prompts: list[OpenPrompt],
    sampling: SamplingParams,
    numbers: list[int],
    wanted: int,
    num_due: int = 0,
    answered: Answered | None = None,
) -> None:
    """Collective in the tensor-parallel group. Continue ``prompts`` until ``wanted`` of them are
    complete on every rank, those before included, and the first ``num_due`` of them are.

    ``numbers``: of the prompts in the rollout, on which the draws depend (with ``sampling.seed``
    and the position in the answer). ``answered``: see `Generator`; called for those before, too.
    """
    mine = [p.request(sampling, number) for p, number in zip(prompts, numbers, strict=True)]
    rows = {request: row for row, request in enumerate(mine)}

    def report(request: Request) -> None:
        if answered is not None and request in rows and request.is_complete:
            answered(rows.pop(request), request.rollout())

    # NOTE: nothing is drafted, because where the answers stop would depend on it.
    with closing(engine.core()) as core:
        ranks = [
            _Wanted(requests, *counts) for requests, counts in core.add_all(mine, (wanted, num_due))
        ]
        for request in mine:
            report(request)
        for event in core.events(until=lambda: all(rank.is_served for rank in ranks)):
            if event.is_last:
                report(event.sequence.request)
    for open_prompt, request in zip(prompts, mine, strict=True):
        open_prompt.follow(request)
