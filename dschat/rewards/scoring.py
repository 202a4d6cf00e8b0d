"""Scores the answers of a rollout by all sources, prompt by prompt while others are generated.

A failure is a `RewardError` with the same message on every rank.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

import dschat.distributed as dist
from dschat.config import UserError
from dschat.config.reward import RewardSourcesConfig
from dschat.rewards.call import MissingColumn, Value, Values
from dschat.rewards.samples import Samples
from dschat.user_code.calls import Fault, shortened

logger = logging.getLogger("dschat")

_PROMPT_SHOWN = 80  # characters
_SKIP = ", or pass --on_reward_error skip"

Sample = tuple[int, int]  # row of its prompt, number among the answers to that


class RewardError(UserError):
    """A reward function or the endpoint failed. Every rank raises the first rank's message."""


@dataclass
class SourceScores:
    """One source's scores of this rank's samples."""

    name: str
    weight: float
    scores: Tensor  # (S,) fp32; NaN where the source failed under on_reward_error=skip
    token_scores: list[list[float]] | None = None  # (S,) of (A,); `scores` is then their sum
    applies: Tensor | None = None  # (S,) bool, False where the source returned None (scores 0)


class RewardSource(Protocol):
    """Scores samples in calls that follow each other. ``label`` names it in messages.

    ``overlaps``: it scores in the background after `score` returns. ``takes_parts``: it may get the
    prompts of a rollout a few at a time.
    """

    name: str
    label: str
    weight: float
    overlaps: bool
    takes_parts: bool

    def score(self, samples: Samples, in_one_call: bool = False) -> "list[Future[Values]]":
        """Start scoring. ``in_one_call``: of a function, however many workers there are."""


class Scoring:
    """The answers of a rollout being scored by all sources.

    Add each prompt's samples as soon as all of them are there. Sources that take parts (an
    endpoint, functions in a pool of several workers) begin with some of them while others are
    generated; the other sources get all of them in one call, in `start`. What makes up a call
    depends on the order in which prompts complete, never on a clock. A call has as many prompts as
    half a worker's share of those that are left: calls are large at first, and the last ones small,
    so that little is left to score after the last answer (guided self-scheduling, Polychronopoulos
    and Kuck 1987).

    Args:
        prompts: ids of each prompt that may be added.
        num_certain: as many of the first prompts will be part of the rollout; the others may be.
    """

    def __init__(
        self,
        sources: Sequence[RewardSource],
        config: RewardSourcesConfig,
        prompts: Sequence[Sequence[int]] = (),
        num_certain: int = 0,
    ) -> None:
        self._sources, self._config, self._prompts = sources, config, prompts
        self._early = [source for source in sources if source.takes_parts]
        self._num_certain = self._num_left = num_certain
        # Functions tell the answers to two prompts apart by their ids: equal ones wait for `start`.
        self._uses = Counter(map(tuple, prompts))
        self._samples: dict[int, Samples] = {}  # by row of the prompt
        self._waiting: list[int] = []
        self._calls: dict[str, list[tuple[list[Sample], list[Future[Values]]]]] = {
            source.name: [] for source in sources
        }

    def add(self, row: int, samples: Samples) -> None:
        """Take all samples of the prompt in ``row``."""
        self._samples[row] = samples
        if not self._early or row >= self._num_certain or self._uses[tuple(self._prompts[row])] > 1:
            return
        self._waiting.append(row)
        if 2 * self._config.reward_workers * len(self._waiting) >= self._num_left:
            rows, self._waiting = sorted(self._waiting), []
            self._num_left -= len(rows)
            part = Samples.joined([self._samples[row] for row in rows])
            for source in self._early:
                futures = source.score(part, in_one_call=True)
                self._calls[source.name].append((self._numbered(rows), futures))

    def start(self, rows: Sequence[int] | None = None) -> None:
        """Start scoring what has not begun of the prompts in ``rows``, ascending (default: all);
        the others are left out.
        """
        if not self._sources:
            return
        rows = sorted(self._samples) if rows is None else rows
        self._samples = {row: self._samples[row] for row in rows}
        self._num_left -= len(self._waiting)
        self._waiting = []
        samples, numbered = Samples.joined(list(self._samples.values())), self._numbered(rows)
        # Background sources first: a source that runs in this thread blocks the loop.
        for source in sorted(self._sources, key=lambda source: not source.overlaps):
            calls = self._calls[source.name]
            begun = {sample for call, _ in calls for sample in call}
            left = [place for place, sample in enumerate(numbered) if sample not in begun]
            for places in samples.apart(left):
                futures = source.score(samples.pick(places))
                calls.append(([numbered[place] for place in places], futures))

    def result(self) -> list[SourceScores]:
        """Collective. Wait for the scores: one entry per source, in their order.

        Raises:
            RewardError: a source failed on any rank and ``on_reward_error`` is error.
        """
        if not self._sources:
            return []
        samples = Samples.joined(list(self._samples.values()))
        values = [self._values(source) for source in self._sources]
        scores = [
            _scores(source, row, samples) for source, row in zip(self._sources, values, strict=True)
        ]
        complaints = [_complaint(row, samples, self._config.reward_timeout_s) for row in values]
        num_failed = [int(source.scores.isnan().sum()) for source in scores]
        ranks = dist.gather_objects((complaints, num_failed, len(samples)))
        for number, source in enumerate(self._sources):
            line = next((lines[number] for lines, _, _ in ranks if lines[number]), None)
            if line is None:
                continue
            if self._config.on_reward_error == "error":
                raise RewardError(f"{source.label} {line}")
            lost = sum(counts[number] for _, counts, _ in ranks)
            total = sum(size for _, _, size in ranks)
            line = line.removesuffix(_SKIP)
            logger.warning("%d of %d samples have no score: %s %s", lost, total, source.label, line)
        return scores

    def _numbered(self, rows: Sequence[int]) -> list[Sample]:
        return [(row, number) for row in rows for number in range(len(self._samples[row]))]

    def _values(self, source: RewardSource) -> Values:
        """Waits for the value of each sample, or the fault in its place."""
        values: dict[Sample, Value | Fault] = {}
        for samples, futures in self._calls[source.name]:
            results = [value for future in futures for value in future.result()]
            values |= zip(samples, results, strict=True)
        return [values[sample] for sample in sorted(values)]


def _complaint(values: Values, samples: Samples, timeout_s: float) -> str | None:
    """One line for the faults in ``values``, with a prompt and the remedy; None without faults.

    The fault of one sample takes precedence over that of a call with several.
    """
    faults = [(row, value) for row, value in enumerate(values) if isinstance(value, Fault)]
    if not faults:
        return None
    sizes = Counter(fault for _, fault in faults)
    row, fault = next(((r, f) for r, f in faults if sizes[f] == 1), faults[0])
    if isinstance(fault, MissingColumn):
        return fault.problem
    several = f"{sizes[fault]} samples, the first on " if sizes[fault] > 1 else ""
    prompt = shortened(" ".join(samples.prompts[row].split()), _PROMPT_SHOWN)
    remedy = f"raise --reward_timeout_s {timeout_s:g} or fix it" if fault.timed_out else "fix it"
    return f"{fault.problem} on {several}the prompt {prompt!r}; {remedy}{_SKIP}"


def _scores(source: RewardSource, values: Values, samples: Samples) -> SourceScores:
    """Values as tensors; NaN for a fault, 0 for None."""
    by_token = any(isinstance(value, list) for value in values)
    scores, tokens = [], []
    for value, ids in zip(values, samples.answer_ids, strict=True):
        if isinstance(value, Fault):
            value = float("nan")
        if isinstance(value, list):
            scores.append(sum(value))
            tokens.append(value)
        else:  # one score for the whole answer goes to its last token
            scores.append(value or 0.0)
            tokens.append([0.0] * (len(ids) - 1) + [value or 0.0] if ids else [])
    return SourceScores(
        source.name,
        source.weight,
        torch.tensor(scores, dtype=torch.float32),
        tokens if by_token else None,
        torch.tensor([value is not None for value in values], dtype=torch.bool),
    )
