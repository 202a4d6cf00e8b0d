"""Policies of rollouts that take more than an iteration's prompts: dynamic and partial.

A partial rollout generates until enough prompts have all their answers; the others are continued in
a later call, so a long answer does not hold up a rollout. What was drawn keeps its log-probs, of
the weights that drew it; keys and values are computed again, by the present weights.
"""

import logging
import math
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import dschat.distributed as dist
from dschat.config import RLHFConfig, UserError
from dschat.data.batches import PromptTable
from dschat.inference.generators.engine import InferenceEngine
from dschat.inference.protocol import Answered, FinishReason, Generator, Rollout, SamplingParams
from dschat.inference.requests.sequence import Request
from dschat.losses import clip_scores, group_has_variance, group_stats
from dschat.rewards.scoring import Scoring
from dschat.rlhf.advantages import source_stats
from dschat.rlhf.collector import Collector, RolloutPolicy
from dschat.rlhf.experience import Experience, joined
from dschat.rlhf.prompts import PromptQueue

logger = logging.getLogger("dschat")


@dataclass
class OpenPrompt:
    """A prompt and its answers so far: none, or ``SamplingParams.n`` of them."""

    ids: list[int]
    token_ids: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    finish_reasons: list[FinishReason | None] = field(default_factory=list)  # None: unfinished
    experts: list[Tensor | None] = field(default_factory=list)  # of complete answers, if kept
    staleness: int = 0  # calls of `advance` since the one that drew its first token

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        experts = [e if e is None else e.tolist() for e in self.experts]
        return asdict(replace(self, experts=[])) | {"experts": experts}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "OpenPrompt":
        """From a `state`."""
        saved = state.get("experts", [None] * len(state["token_ids"]))  # older ones have none
        experts = [e and torch.tensor(e, dtype=torch.int16) for e in saved]
        return cls(**state | {"experts": experts})

    @property
    def is_complete(self) -> bool:
        return bool(self.finish_reasons) and None not in self.finish_reasons

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


def _is_served(requests: list[Request], wanted: int, num_due: int) -> bool:
    """Whether a rank has what it waits for: complete prompts, and some of them by all means."""
    complete = [request.is_complete for request in requests]
    return sum(complete) >= wanted and all(complete[:num_due])


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
    complete on every rank, and the first ``num_due`` of them are. Prompts that were complete before
    count.

    ``numbers``: of the prompts in the rollout, on which the draws depend (with ``sampling.seed``
    and the position in the answer). ``answered``: see `Generator`; called for prompts that were
    complete before, too.
    """
    mine = [p.request(sampling, number) for p, number in zip(prompts, numbers, strict=True)]
    rows = {request: row for row, request in enumerate(mine)}

    def report(request: Request) -> None:
        if answered is not None and request in rows and request.is_complete:
            answered(rows.pop(request), request.rollout())

    with closing(engine.core()) as core:
        ranks = core.add_all(mine, (wanted, num_due))
        for request in mine:
            report(request)
        for event in core.events(until=lambda: all(_is_served(of, *n) for of, n in ranks)):
            if event.is_last:
                report(event.sequence.request)
    for open_prompt, request in zip(prompts, mine, strict=True):
        open_prompt.follow(request)


def policy_of(args: RLHFConfig, more: PromptQueue) -> RolloutPolicy:
    """The policy that the flags ask for. ``more``: prompts in addition to an iteration's."""
    if args.dynamic_sampling:
        return DynamicSampling(args.max_sampling_rounds, more)
    if args.partial_rollout:
        return PartialRollouts(args.oversample, args.staleness_bound, more)
    return RolloutPolicy(more)


class DynamicSampling(RolloutPolicy):
    """Samples in rounds until enough prompts have answers of different scores; then the rollout is
    scored already. Dynamic sampling of DAPO (arXiv 2503.14476, section 3.2).

    The first such prompts in the order of the rounds are kept, whichever rank has them. Later
    rounds sample as many prompts of ``more`` as are likely missing.
    """

    def __init__(self, max_rounds: int, more: PromptQueue) -> None:
        super().__init__(more)
        self._max_rounds = max_rounds

    def rollout(
        self, collector: Collector, prompts: PromptTable, sampling: SamplingParams
    ) -> tuple[Experience, None]:
        needed, asked = sum(dist.gather_objects(len(prompts.ids))), prompts
        rounds, sums = list[Experience](), dict[str, float]()
        found = list[int]()  # numbers of prompts whose scores differ, over all ranks
        sampled = 0
        while len(rounds) < self._max_rounds and len(found) < needed:
            if rounds:
                likely = math.ceil((needed - len(found)) * sampled / max(len(found), 1))
                asked = self.more.take(min(needed, likely), prompts)
            e = collector.score(*collector.ask(sampling, asked, sampled))
            rounds.append(e)
            found += _with_variance(e, collector, sampling.n, sampled)
            for name, value in e.metrics.items():
                added = value if _adds_up(name) else value * e.num_prompts
                sums[name] = sums.get(name, 0.0) + added
            sampled += e.num_prompts
        kept = found[:needed]
        if not kept:
            logger.warning(
                "none of %d sampled prompts (%d rounds) has answers of different scores: this "
                "iteration trains nothing",
                *(sampled, len(rounds)),
            )
        every = joined(rounds)
        score, num_scored = dist.sum_floats(
            [float(every.scores.double().sum()), float(every.scored.sum())]
        )
        e = _renumbered(every, kept, sampling.n)
        e.num_prompts = len(kept)
        e.metrics = {n: v if _adds_up(n) else v / sampled for n, v in sums.items()} | {
            "sampling/rounds": float(len(rounds)),
            "sampling/prompts": float(sampled),
            "sampling/kept_prompts": float(len(kept)),
            "sampling/waste": 1 - len(kept) / sampled,
            "sampling/scores": score / max(num_scored, 1.0),
        }
        return e, None


def _with_variance(e: Experience, collector: Collector, n: int, before: int) -> list[int]:
    """Collective. Numbers of this round's prompts whose clipped scores differ, or are not finite;
    of an estimator by source, those of any source. Answers without a score do not count.
    ``before``: prompts of earlier rounds.
    """
    groups, clip = e.numbers // n - before, collector.clip
    if collector.args.estimator.by_source:
        by_source = source_stats(e.by_source(collector.weights), groups, e.num_prompts)
    else:
        scores = torch.where(e.scores.isfinite(), clip_scores(e.scores, clip), e.scores)
        stats = group_stats(scores[e.scored], groups[e.scored], e.num_prompts)
        by_source = dist.all_reduce_sum(stats).unsqueeze(0)
    differ = torch.zeros(e.num_prompts, dtype=torch.bool)
    for stats in by_source:
        differ |= group_has_variance(stats) | ~stats.isfinite().all(dim=0)
    return (before + differ.nonzero().flatten()).tolist()


def _renumbered(e: Experience, kept: list[int], n: int) -> Experience:
    """The sequences of the prompts ``kept``, numbered as if the rollout had no others."""
    places = {number: place for place, number in enumerate(kept)}
    groups = (e.numbers // n).tolist()
    e = e.pick([row for row, group in enumerate(groups) if group in places])
    place = torch.tensor([places[g] for g in (e.numbers // n).tolist()], dtype=torch.int64)
    e.numbers = place * n + e.numbers % n
    # An experience is in the order of its numbers; a rank's rounds already are.
    assert bool((e.numbers[1:] >= e.numbers[:-1]).all())
    return e


def _adds_up(name: str) -> bool:
    """Seconds and counts of rounds are summed; other metrics are means over prompts."""
    return name.startswith("time/") or name in ("rollout/unscored", "throughput/preemptions")


class PartialRollouts(RolloutPolicy):
    """Ends a rollout when enough prompts are answered, and continues the others in the next one.

    More prompts are under way than a rollout needs, so that it need not wait for the longest
    answers. Several versions of the actor draw the tokens of a continued answer. Each token keeps
    the log-prob that it was drawn with, and ``--rollout_is`` weighs it by the present actor's
    probability over that. The samples of a prompt stay together.

    Args:
        oversample: prompts under way in addition to a rollout's, as a share of a rollout's.
        max_staleness: iterations after which a prompt's answers are completed, however long.
        more: where the additional prompts come from.
    """

    def __init__(self, oversample: float, max_staleness: int, more: PromptQueue) -> None:
        super().__init__(more)
        self._oversample, self._max_staleness = oversample, max_staleness
        # This rank's prompts that are under way, the oldest first.
        self._table, self._open = PromptTable(), list[OpenPrompt]()
        self._ages: list[int] = []  # rollouts that each prompt has been part of

    def state_dict(self) -> dict[str, Any]:
        """Collective. JSON-able state of all ranks that the next rollout depends on."""
        mine = {
            "table": vars(self._table),
            "open": [prompt.state() for prompt in self._open],
            "ages": list(self._ages),  # NOTE: the next iteration changes the list in place
        }
        return super().state_dict() | {"under_way": dist.gather_objects(mine)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ranks take their own prompts, or equal shares where their number has changed."""
        super().load_state_dict(state)
        self._table, self._open, self._ages = PromptTable(), [], []
        parts = state.get("under_way", [])
        is_own = len(parts) == dist.world_size()
        for part in [parts[dist.rank()]] if is_own else parts:
            opened = [OpenPrompt.of_state(prompt) for prompt in part["open"]]
            self._add(PromptTable(**part["table"]), opened, part["ages"])
        if not is_own:
            order = sorted(range(len(self._ages)), key=lambda i: -self._ages[i])
            self._leave(dist.my_share(order))

    def rollout(
        self, collector: Collector, prompts: PromptTable, sampling: SamplingParams
    ) -> tuple[Experience, Scoring]:
        """The oldest complete prompts are in the rollout; the others grow older."""
        self._num_wanted = wanted = len(prompts.ids)
        self._start(prompts)
        missing = wanted + math.ceil(self._oversample * wanted) - len(self._open)
        self._start(self.more.take(sum(dist.gather_objects(max(0, missing))), prompts))
        e, scoring = collector.ask(sampling, self._table, 0, wanted, self._through)
        done = [i for i, prompt in enumerate(self._open) if prompt.is_complete][:wanted]
        staleness = [self._open[i].staleness for i in done]
        self._leave([i for i in range(len(self._open)) if i not in set(done)])
        self._ages = [age + 1 for age in self._ages]
        carried = sum(len(ids) for prompt in self._open for ids in prompt.token_ids)
        oldest = max(dist.gather_objects(max(staleness, default=0)))
        total, count, num_open, tokens = dist.sum_floats(
            [float(sum(staleness)), float(len(staleness)), float(len(self._open)), float(carried)]
        )
        e.metrics |= {
            "rollout/staleness": total / max(count, 1.0),
            "rollout/staleness_max": float(oldest),
            "rollout/carried_prompts": num_open,
            "rollout/carried_tokens": tokens,
        }
        return e, scoring

    def _through(self, generator: Generator) -> Generator:
        if not isinstance(generator, InferenceEngine):
            raise UserError(
                "--partial_rollout needs the hybrid engine, which does not run this model"
            )
        self._engine = generator
        return self

    def generate(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams,
        indices: list[int] | None = None,
        *,
        answered: Answered | None = None,
    ) -> Rollout:
        """Continue the prompts until enough are complete on every rank, and all that are due; only
        what is complete is reported, to ``answered``.
        """
        numbers, num_due = indices or [], sum(age >= self._max_staleness for age in self._ages)
        advance(self._engine, self._open, sampling, numbers, self._num_wanted, num_due, answered)
        return Rollout()

    def _start(self, prompts: PromptTable) -> None:
        self._add(prompts, [OpenPrompt(ids) for ids in prompts.ids], [0] * len(prompts.ids))

    def _add(self, table: PromptTable, opened: list[OpenPrompt], ages: list[int]) -> None:
        self._table = self._table.concat(table)
        self._open += opened
        self._ages += ages

    def _leave(self, rows: list[int]) -> None:
        """Leave only ``rows`` under way."""
        self._table = self._table.pick(rows)
        self._open = [self._open[i] for i in rows]
        self._ages = [self._ages[i] for i in rows]
