"""Generates until enough prompts have all their answers; the others are continued in a later call.

A long answer then does not hold up a rollout. What was drawn keeps its log-probs, of the weights
that drew it; keys and values are computed again, by the present weights.
"""

from dataclasses import dataclass, field

from dschat.inference.engine import InferenceEngine
from dschat.inference.finished_answers import rollout_of_sequences
from dschat.inference.protocol import Answered, FinishReason, Rollout, SamplingParams
from dschat.inference.sequence import Prompt, Sequence


@dataclass
class OpenPrompt:
    """A prompt and its answers so far: none, or ``SamplingParams.n`` of them."""

    ids: list[int]
    token_ids: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    finish_reasons: list[FinishReason | None] = field(default_factory=list)  # None: goes on
    staleness: int = 0  # calls of `advance` since the one that drew its first token

    @property
    def is_complete(self) -> bool:
        return bool(self.finish_reasons) and None not in self.finish_reasons

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


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
    entries = [(p.ids, k, sampling.max_new_tokens) for p, k in zip(prompts, numbers, strict=True)]
    state = prompts, wanted, num_due
    fresh: list[Prompt] = []
    begun: list[Sequence] = []
    groups: list[_Group] = []
    ranks: list[_Rank] = []
    for part, (opened, rank_wanted, rank_due) in engine.gathered(entries, state):
        is_mine = len(ranks) == engine.group.rank
        rank = _Rank(rank_wanted, rank_due, answered if is_mine else None)
        ranks.append(rank)
        for i, (entry, open_prompt) in enumerate(zip(part, opened, strict=True)):
            ids, number, limit = entry
            prompt = Prompt(ids, number, sampling.n, limit)
            group = _Group.of(prompt, open_prompt, rank, i, i < rank_due)
            groups.append(group)
            if not group.samples:
                fresh.append(group.prompt)
            elif not group.missing:
                rank.complete(group)
            begun += [s for s in group.samples.values() if not _is_over(s)]
    by_prompt = {group.prompt: group for group in groups}

    def is_enough() -> bool:
        return all(rank.is_served for rank in ranks)

    for sequence, _, finished in engine.steps(fresh, sampling, begun=begun, until=is_enough):
        group = by_prompt[sequence.prompt]
        group.samples[sequence.sample] = sequence
        if finished:
            group.missing -= 1
            if not group.missing:
                group.rank.complete(group)
    mine = [group for group in groups if group.rank is ranks[engine.group.rank]]
    for open_prompt, group in zip(prompts, mine, strict=True):
        group.write(open_prompt)


def rollout_of(prompts: list[OpenPrompt]) -> Rollout:
    """The answers of complete ``prompts``."""
    rollout = Rollout()
    for prompt in prompts:
        rollout.token_ids += prompt.token_ids
        rollout.logprobs += prompt.logprobs
        rollout.finish_reasons += [reason for reason in prompt.finish_reasons if reason]
    assert len(rollout.finish_reasons) == len(rollout), "a prompt is not complete"
    return rollout


@dataclass(eq=False)
class _Rank:
    """What a rank still waits for."""

    wanted: int
    due: int
    answered: Answered | None

    def complete(self, group: "_Group") -> None:
        self.wanted -= 1
        self.due -= group.is_due
        if self.answered is not None:
            self.answered(group.row, rollout_of_sequences(group.ordered()))

    @property
    def is_served(self) -> bool:
        return self.wanted <= 0 and self.due <= 0


@dataclass(eq=False)
class _Group:
    """A prompt and its samples, by number."""

    prompt: Prompt
    samples: dict[int, Sequence]
    missing: int
    rank: _Rank
    row: int  # among the rank's prompts
    is_due: bool

    @classmethod
    def of(
        cls, prompt: Prompt, opened: OpenPrompt, rank: _Rank, row: int, is_due: bool
    ) -> "_Group":
        samples = {}
        answers = zip(opened.token_ids, opened.logprobs, opened.finish_reasons, strict=True)
        for i, (tokens, logprobs, reason) in enumerate(answers):
            samples[i] = Sequence(prompt, i, list(tokens), list(logprobs), reason == "stop")
        missing = prompt.num_samples - sum(map(_is_over, samples.values()))
        return cls(prompt, samples, missing, rank, row, is_due)

    def ordered(self) -> list[Sequence]:
        return [self.samples[i] for i in sorted(self.samples)]

    def write(self, opened: OpenPrompt) -> None:
        opened.staleness += bool(opened.token_ids)
        samples = self.ordered()
        opened.token_ids = [s.answer for s in samples]
        opened.logprobs = [s.logprobs for s in samples]
        opened.finish_reasons = [_finish_reason(s) for s in samples]


def _is_over(sequence: Sequence) -> bool:
    return _finish_reason(sequence) is not None


def _finish_reason(sequence: Sequence) -> FinishReason | None:
    if sequence.stopped:
        return "stop"
    return "length" if len(sequence.answer) == sequence.prompt.max_new_tokens else None
