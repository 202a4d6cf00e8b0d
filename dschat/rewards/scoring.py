"""Scores the answers of a rollout by all sources, prompt by prompt while others are generated, and
combines the scores into one weighted sum per sample.

A failure is a `RewardError` with the same message on every rank.
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

import dschat.distributed as dist
from dschat.config import UserError
from dschat.config.reward import RewardSourcesConfig
from dschat.rewards.call import MissingColumn, Value
from dschat.rewards.function import RewardFunction
from dschat.rewards.samples import Samples
from dschat.user_code.calls import Fault, shortened

logger = logging.getLogger("dschat")

_PROMPT_SHOWN = 80  # characters
_SKIP = ", or pass --on_reward_error skip"

Sample = tuple[int, int]  # row of its prompt, number among the answers to that


class RewardError(UserError):
    """A reward function failed. Every rank raises the first rank's message."""


@dataclass
class SourceScores:
    """One source's scores of this rank's samples.

    Attributes:
        values: (S,) NaN where the source failed under ``on_reward_error`` skip.
        scores: (S,) fp32; the sum of one score per token, and 0 for None.
        applies: (S,) bool, False for None.
        counts: (S,) bool, False for further rows of the same episode, in means.
        token_scores: (S,) of (A,) for one score per token, else empty; None if no sample has any.
    """

    name: str
    weight: float
    values: Sequence[float | list[float] | None]

    def repeated(self, copies: Sequence[int]) -> "SourceScores":
        """Each score as many times as ``copies`` says, as one number."""
        whole = [sum(v) if isinstance(v, list) else v for v in self.values]
        values = [v for v, count in zip(whole, copies, strict=True) for _ in range(count)]
        return SourceScores(self.name, self.weight, values)

    def __post_init__(self) -> None:
        by_token = [value if isinstance(value, list) else [] for value in self.values]
        self.token_scores = by_token if any(by_token) else None
        sums = [sum(v) if isinstance(v, list) else v or 0.0 for v in self.values]
        self.scores = torch.tensor(sums, dtype=torch.float32)
        self.applies = torch.tensor([v is not None for v in self.values], dtype=torch.bool)
        self.counts = torch.ones_like(self.applies)


class Scoring:
    """The answers of a rollout being scored by all functions.

    Add each prompt's samples as soon as all of them are there. Functions in a pool of several
    workers begin with some of them while others are generated; the other functions get all of them
    in one call, in `start`. What makes up a call depends on the order in which prompts complete,
    never on a clock. A call has as many prompts as half a worker's share of the prompts left:
    calls are large at first, and the last ones small, so that little is left to score after the
    last answer (guided self-scheduling, Polychronopoulos and Kuck 1987).

    Args:
        prompts: ids of each prompt that may be added.
        num_certain: as many of the first prompts will be part of the rollout; the others may be.

    Attributes:
        others: scores that the answers came with.
        copies: rows of each sample, where an episode may have several.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        config: RewardSourcesConfig,
        prompts: Sequence[Sequence[int]] = (),
        num_certain: int = 0,
    ) -> None:
        self._functions, self._config, self._prompts = functions, config, prompts
        self._early = [function for function in functions if function.num_parts > 1]
        self._num_certain = self._num_left = num_certain
        # Functions tell the answers to two prompts apart by their ids: equal ones wait for `start`.
        self._uses = Counter(map(tuple, prompts))
        self._samples: dict[int, Samples] = {}  # by row of the prompt
        self._waiting: list[int] = []
        self._calls: dict[str, list[tuple[list[Sample], Future[list[Value]]]]] = {
            function.name: [] for function in functions
        }
        self.others: list[SourceScores] = []
        self.copies: list[int] | None = None

    def add(self, row: int, samples: Samples) -> None:
        """Take all samples of the prompt in ``row``."""
        self._samples[row] = samples
        if not self._early or row >= self._num_certain or self._uses[tuple(self._prompts[row])] > 1:
            return
        self._waiting.append(row)
        if 2 * self._config.reward_workers * len(self._waiting) >= self._num_left:
            rows, self._waiting = sorted(self._waiting), []
            self._num_left -= len(rows)
            samples, numbered = self._joined(rows)
            for function in self._early:
                self._calls[function.name].append((numbered, function.score(samples)))

    def start(self, rows: Sequence[int] | None = None) -> None:
        """Start scoring what has not begun of the prompts in ``rows``, ascending (default: all);
        the others are left out.
        """
        if not self._functions:
            return
        rows = sorted(self._samples) if rows is None else rows
        self._samples = {row: self._samples[row] for row in rows}
        self._num_left -= len(self._waiting)
        self._waiting = []
        samples, numbered = self._joined(rows)
        # Background functions first: a function that runs in this thread blocks the loop.
        for function in sorted(self._functions, key=lambda function: not function.overlaps):
            calls = self._calls[function.name]
            begun = {sample for call, _ in calls for sample in call}
            left = [place for place, sample in enumerate(numbered) if sample not in begun]
            for neighbours in samples.apart(left):
                for places in samples.cuts(neighbours, function.num_parts):
                    future = function.score(samples.pick(places))
                    calls.append(([numbered[place] for place in places], future))

    def result(self) -> list[SourceScores]:
        """Collective. Wait for the scores: one entry per function, in their order; then `others`.

        Raises:
            RewardError: a function failed on any rank and ``on_reward_error`` is error.
        """
        found = self._results() + self.others
        return found if self.copies is None else [s.repeated(self.copies) for s in found]

    def _results(self) -> list[SourceScores]:
        """Collective. See `result`; without `others`."""
        if not self._functions:
            return []
        samples, _ = self._joined(list(self._samples))
        values = [self._values(function) for function in self._functions]
        scores = [*map(_scores, self._functions, values)]
        complaints = [_complaint(row, samples, self._config.reward_timeout_s) for row in values]
        num_failed = [int(source.scores.isnan().sum()) for source in scores]
        ranks = dist.gather_objects((complaints, num_failed, len(samples)))
        for number, function in enumerate(self._functions):
            line = next((lines[number] for lines, _, _ in ranks if lines[number]), None)
            if line is None:
                continue
            label = function.label
            if self._config.on_reward_error == "error":
                raise RewardError(f"{label} {line}")
            lost = sum(counts[number] for _, counts, _ in ranks)
            total = sum(size for _, _, size in ranks)
            line = line.removesuffix(_SKIP)
            logger.warning("%d of %d samples have no score: %s %s", lost, total, label, line)
        return scores

    def _joined(self, rows: Sequence[int]) -> tuple[Samples, list[Sample]]:
        """The samples of the prompts in ``rows``, and which ones they are."""
        numbered = [(row, number) for row in rows for number in range(len(self._samples[row]))]
        return Samples.joined([self._samples[row] for row in rows]), numbered

    def _values(self, function: RewardFunction) -> list[Value]:
        """Waits for the value of each sample, or the fault in its place."""
        values: dict[Sample, Value] = {}
        for samples, future in self._calls[function.name]:
            values |= zip(samples, future.result(), strict=True)
        return [values[sample] for sample in sorted(values)]


def _complaint(values: list[Value], samples: Samples, timeout_s: float) -> str | None:
    """One line for the faults in ``values``, with a prompt and the remedy; None without faults.

    The fault of one sample takes precedence over the fault of a call with several samples.
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


def _scores(function: RewardFunction, values: list[Value]) -> SourceScores:
    valid = [math.nan if isinstance(value, Fault) else value for value in values]
    return SourceScores(function.name, function.weight, valid)


def combine(
    sources: list[SourceScores], scale: "RunningScale | None"
) -> tuple[Tensor, list[list[float]] | None]:
    """Collective with ``scale``. The weighted sum of the sources' scores.

    ``scale``, running statistics that these samples enter, normalizes each source. A source adds 0
    where it returned None. A source of weight 0 adds nothing, not even NaN.

    Returns:
        scores (S,) float64, NaN where a weighted source failed; and the weighted sum of token
        scores, (S,) of (A,), if a weighted source gave any. The scores include the token scores:
        the difference belongs to the answer as a whole.
    """
    if scale is not None:
        scale.update({source.name: source.scores[_scored(source)] for source in sources})
    total = torch.zeros(len(sources[0].scores), dtype=torch.float64)
    by_token: list[list[float]] | None = None
    for source in sources:
        if not source.weight:
            continue
        mean, std = (0.0, 1.0) if scale is None else scale.mean_and_std(source.name)
        normal = (source.scores.double() - mean) / std
        total += source.weight * torch.where(source.applies, normal, 0.0)
        if source.token_scores is not None:
            factor = source.weight / std
            by_token = _added(by_token or [[] for _ in total], source.token_scores, factor)
    return total, by_token


def any_applies(sources: list[SourceScores]) -> Tensor:
    """Samples that at least one weighted source scored (returned other than None): (S,) bool.

    All True if no source has a weight: then training does not use the scores.
    """
    weighted = [source for source in sources if source.weight]
    applies = torch.full((len(sources[0].scores),), not weighted)
    for source in weighted:
        applies |= source.applies
    return applies


def by_answer(sources: list[SourceScores], num_answers: int) -> list[dict[str, float]]:
    """The raw scores of each answer, by the names of the sources that scored it."""
    rows: list[dict[str, float]] = [{} for _ in range(num_answers)]
    for source in sources:
        for row, score, applies in zip(rows, source.scores, source.applies, strict=True):
            if applies:
                row[source.name] = float(score)
    return rows


def source_means(
    prefix: str, sources: list[SourceScores], with_std: bool = False
) -> dict[str, float]:
    """Collective. Mean raw score of each source over the samples it scored, ``prefix/NAME``;
    ``with_std`` also the standard deviation, ``prefix/NAME_std``.

    Samples where it failed or returned None do not count.
    """
    sums = []
    for source in sources:
        scores = source.scores[_scored(source)].double()
        sums += [float(len(scores)), float(scores.sum()), float(scores.square().sum())]
    totals = iter(dist.sum_floats(sums))
    metrics = {}
    for source, number, total, squares in zip(sources, totals, totals, totals, strict=True):
        mean = total / max(number, 1.0)
        metrics[f"{prefix}/{source.name}"] = mean
        if with_std:
            variance = squares / max(number, 1.0) - mean**2
            metrics[f"{prefix}/{source.name}_std"] = math.sqrt(max(variance, 0.0))
    return metrics


def _scored(source: SourceScores) -> Tensor:
    """Samples with a score, one of each episode: (S,) bool."""
    return torch.isfinite(source.scores) & source.applies & source.counts


def _added(sums: list[list[float]], rows: list[list[float]], factor: float) -> list[list[float]]:
    """``sums`` + ``factor`` x ``rows``; the shorter of two rows is padded with 0."""
    return [
        [a + factor * b for a, b in zip_longest(total, row, fillvalue=0.0)]
        for total, row in zip(sums, rows, strict=True)
    ]


class RunningScale:
    """Running mean and standard deviation of each source's scores over all ranks.

    Counts, means and sums of squared deviations, in float64, are merged by Chan, Golub and LeVeque
    (1979), "Updating formulae and a pairwise algorithm for computing sample variances", eq. 2.1.
    """

    def __init__(self) -> None:
        self._moments: dict[str, tuple[float, float, float]] = {}  # name -> count, mean, M2

    def update(self, scores: dict[str, Tensor]) -> None:
        """Collective. Add ``scores`` (n,) of each source; n may be 0 and differ across ranks."""
        local = {name: _moments_of(values) for name, values in scores.items()}
        for rank_moments in dist.gather_objects(local):
            for name, moments in rank_moments.items():
                self._moments[name] = _merged(self._moments.get(name, (0.0, 0.0, 0.0)), moments)

    def mean_and_std(self, name: str) -> tuple[float, float]:
        """Population mean and standard deviation so far; 1 if all scores were equal."""
        count, mean, m2 = self._moments.get(name, (0.0, 0.0, 0.0))
        std = math.sqrt(m2 / count) if count else 0.0
        # Scores are fp32: rounding leaves a tiny deviation among equal ones.
        return mean, std if std > 1e-7 * max(1.0, abs(mean)) else 1.0

    def state_dict(self) -> dict[str, list[float]]:
        """Name -> count, mean and sum of squared deviations."""
        return {name: list(moments) for name, moments in self._moments.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._moments = {name: (float(n), float(m), float(s)) for name, (n, m, s) in state.items()}


def _moments_of(values: Tensor) -> tuple[float, float, float]:
    if not len(values):
        return 0.0, 0.0, 0.0
    values = values.double()
    mean = values.mean()
    return float(len(values)), float(mean), float((values - mean).square().sum())


def _merged(
    a: tuple[float, float, float], b: tuple[float, float, float]
) -> tuple[float, float, float]:
    """Count, mean and sum of squared deviations of the union of two sets."""
    count, difference = a[0] + b[0], b[1] - a[1]
    divisor = max(count, 1.0)
    mean = a[1] + difference * b[0] / divisor
    return count, mean, a[2] + b[2] + difference**2 * a[0] * b[0] / divisor
