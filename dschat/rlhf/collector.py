"""Collects rollouts: the actor answers prompts, and reward functions score the answers.

A prompt with all its answers is a group. Reward functions get a group as soon as it is complete,
while others are generated. A rollout policy says which prompts are asked and what of them is kept.
Prompts come in any form in which a caller gives them, or from a rank's queue.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, count
from typing import Any

from torch import Tensor

import dschat.distributed as dist
from dschat.config import UserError
from dschat.data.batches import PromptTable, position_of, seek
from dschat.inference.protocol import Generator, Rollout, SamplingParams, prompt_problem
from dschat.models.continued_text import whole_texts
from dschat.rewards.call import Samples
from dschat.rewards.scoring import SourceScores
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.experience import Experience, from_rollout
from dschat.rlhf.metrics import generation_metrics
from dschat.rlhf.rollout_scorer import Collected, RolloutScorer

PromptBatch = PromptTable | list[list[int]] | Mapping[str, Tensor | list[list[int]]]


def prompt_table(batch: PromptBatch, columns: Mapping[str, Any] | None = None) -> PromptTable:
    """Any form of prompt batch as a table, without padding; ``UserError`` for another type.
    ``columns``: further ones, each a list, array or tensor of one value per prompt.
    """
    table = _table(batch)
    for name, values in (columns or {}).items():
        table.columns[name] = values.tolist() if hasattr(values, "tolist") else list(values)
        if (count := len(table.columns[name])) != len(table):
            raise UserError(f"columns: {name} has {count} values for {len(table)} prompts")
    return table


def _table(batch: PromptBatch) -> PromptTable:
    if isinstance(batch, PromptTable):
        return replace(batch, ids=_checked(batch.ids), columns=dict(batch.columns))
    if not isinstance(batch, Mapping):
        return PromptTable(_checked(batch))
    if "input_ids" not in batch:
        raise UserError(f"a prompt batch needs input_ids; it has {', '.join(map(str, batch))}")
    rows = _checked(batch["input_ids"])
    if (mask := batch.get("attention_mask")) is not None:
        masks = _checked(mask)
        if list(map(len, masks)) != list(map(len, rows)):
            raise UserError("a prompt batch's attention_mask has another shape than its input_ids")
        rows = _checked([list(compress(row, keep)) for row, keep in zip(rows, masks, strict=True)])
    return PromptTable(rows)


class PromptQueue:
    """Prompts for rollouts that take more than a batch of them, for the whole run.

    From ``batches``. Without it, or once it is exhausted on any rank, the prompts that the
    caller falls back on.
    """

    def __init__(self, batches: Iterator[PromptBatch] | None = None) -> None:
        self._batches = batches
        self._left = PromptTable()  # of all ranks, drawn and not yet taken

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state that the next rollout depends on, the same on all ranks."""
        return {"left": vars(self._left), "taken": position_of(self._batches)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._left = PromptTable(**state["left"])
        seek(self._batches, state["taken"])

    def take(self, size: int, fallback: PromptTable) -> PromptTable:
        """Collective. This rank's share of the next ``size`` prompts, whose order does not depend
        on the number of ranks.
        """
        while len(self._left.ids) < size:
            batch = None if self._batches is None else next(self._batches, None)
            prompts = fallback if batch is None else prompt_table(batch)
            for of_rank, is_exhausted in dist.gather_objects((prompts, batch is None)):
                self._left = self._left.concat(of_rank)
                if is_exhausted:  # on one rank, therefore on all
                    self._batches = None
        rows = list(range(len(self._left.ids)))
        taken, self._left = self._left.pick(rows[:size]), self._left.pick(rows[size:])
        return taken.pick(dist.my_share(rows[:size]))


def _checked(rows: Iterable[Any]) -> list[list[int]]:
    prompts = [ids.tolist() if isinstance(ids, Tensor) else ids for ids in rows]
    for problem in filter(None, map(prompt_problem, count(), prompts)):
        raise UserError(problem)
    return [list(map(int, prompt)) for prompt in prompts]


@dataclass
class Group:
    """A prompt with its finished answers."""

    number: int  # of the prompt, over all ranks
    prompts: PromptTable  # one for each answer: an environment may have added to the prompt
    answers: Rollout
    rewards: list[list[float]] | None = None  # of an environment, for each token of each answer


Ask = Callable[..., Collected]  # see `Collector.ask`


class RolloutPolicy:
    """What a rollout asks and what it keeps: all answers to an iteration's prompts, in one round.

    ``more``: prompts in addition to an iteration's, for policies that ask for them.
    """

    def __init__(self, more: PromptQueue) -> None:
        self._more = more

    def rollout(self, prompts: PromptTable, num_samples: int, ask: Ask) -> Collected:
        """Collective. The rollout of an iteration that takes ``prompts`` of this rank, with
        ``num_samples`` answers to each. ``ask``: `Collector.ask`.
        """
        return ask(prompts)

    def state_dict(self) -> dict[str, Any]:
        """Collective. JSON-able state that the next rollout depends on, the same on all ranks."""
        return self._more.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._more.load_state_dict(state)


class Collector:
    """Collects the rollouts of a run.

    Attributes:
        cuts_rounds: whether functions may score the answers of a call of the generator during the
            next; the same on every rank: tensor-parallel ranks generate together.
    """

    cuts_rounds = True

    def __init__(
        self, engine: DeepSpeedRLHFEngine, scorer: RolloutScorer, policy: RolloutPolicy
    ) -> None:
        self.scorer, self.policy = scorer, policy
        self._engine, self._functions = engine, scorer.functions

    def state_dict(self) -> dict[str, Any]:
        """Collective. JSON-able state that the next rollout depends on, the same on all ranks."""
        return self.scorer.state_dict() | self.policy.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scorer.load_state_dict(state)
        self.policy.load_state_dict(state)

    def collect(self, prompts: PromptTable, sampling: SamplingParams) -> Collected:
        """Collective. The rollout of an iteration that takes ``prompts`` of this rank, each
        answered ``sampling.n`` times.

        The caller may do other work before `Collected.score`, while reward functions run.
        """
        if prompts.ids:
            self._functions.check_columns(prompts.columns)
        return self.policy.rollout(prompts, sampling.n, partial(self.ask, sampling))

    def ask(
        self,
        sampling: SamplingParams,
        prompts: PromptTable,
        before: int = 0,
        wanted: int | None = None,
        through: Callable[[Generator], Generator] = lambda generator: generator,
    ) -> Collected:
        """Collective. One round of a rollout: answers to this rank's ``prompts``.

        Args:
            before: prompts of earlier rounds, over all ranks.
            wanted: groups that are kept, the first ones; None: all.
            through: what answers, given the actor's generator.
        """
        started = time.perf_counter()
        num_asked = len(prompts.ids)
        counts = dist.gather_objects((num_asked, num_asked if wanted is None else wanted))
        first, first_kept = (before + sum(of[: dist.rank()]) for of in zip(*counts, strict=True))
        is_cut = self.cuts_rounds and self._functions.overlaps and wanted is None
        calls = self.scorer.args.generation_batches if is_cut else 1
        with self._engine.rollout_mode() as generator:
            answered = self.answers_of(through(generator), prompts, sampling, first, calls, wanted)
            answered.metrics |= generation_metrics(self._engine.rollout.last_refresh, generator)
        # Draws depend on the numbers of all prompts that are asked; those of an experience are
        # consecutive over the ranks' kept ones.
        answered.experience.numbers += (first_kept - first) * sampling.n
        answered.num_prompts = sum(num_kept for _, num_kept in counts)
        answered.metrics["time/generate_s"] = time.perf_counter() - started
        return answered

    def answers_of(
        self,
        generator: Generator,
        prompts: PromptTable,
        sampling: SamplingParams,
        first: int,
        calls: int = 1,
        wanted: int | None = None,
    ) -> Collected:
        """Collective. Answer ``prompts`` in ``calls`` calls of ``generator``, and start the reward
        functions on the answers.

        ``first``: the number of this rank's first prompt among all ranks' prompts. ``wanted``:
        groups to keep, the first ones; default: all.
        """
        num_asked, groups, metrics = len(prompts.ids), list[Group](), dict[str, float]()
        wanted = num_asked if wanted is None else wanted
        scoring = self._functions.scoring(prompts.ids, wanted)

        def add(group: Group) -> None:
            groups.append(group)
            if self._functions.names:
                scoring.add(group.number - first, self._samples(group))

        size = max(1, -(-num_asked // calls))
        for start in range(0, calls * size, size):
            rows = list(range(num_asked))[start : start + size]
            part, numbers = prompts.pick(rows), [first + row for row in rows]
            metrics |= self.answers(generator, part, sampling, numbers, add)
            groups = sorted(groups, key=lambda group: group.number)[:wanted]
            scoring.start([group.number - first for group in groups])
        assert len(groups) == wanted, "the generator did not report all prompts"
        e = self._experience(groups, first * sampling.n)
        others = self._scores_of(groups)
        return Collected(e, len(groups), metrics, self.scorer, scoring, others)

    def answers(
        self,
        generator: Generator,
        prompts: PromptTable,
        sampling: SamplingParams,
        numbers: list[int],
        add: Callable[[Group], None],
    ) -> dict[str, float]:
        """Collective. Answer ``prompts``, which have these ``numbers``, and ``add`` each group as
        soon as it is complete; returns metrics.
        """

        def answered(row: int, answers: Rollout) -> None:
            add(Group(numbers[row], prompts.pick([row] * len(answers)), answers))

        generator.generate(prompts.ids, sampling, numbers, answered=answered)
        return {}

    def prompt_texts(self, prompts: PromptTable) -> list[str]:
        """The texts of prompts; decoded where only their ids are known."""
        decode = self._engine.tokenizer.decode
        return prompts.texts or [decode(ids, skip_special_tokens=True) for ids in prompts.ids]

    def _samples(self, group: Group) -> Samples:
        """``group`` as reward functions get it."""
        prompts, answers = group.prompts, group.answers
        return Samples(
            prompts=self.prompt_texts(prompts),
            answers=whole_texts(self._engine.tokenizer, prompts.ids, answers.token_ids),
            prompt_ids=prompts.ids,
            answer_ids=answers.token_ids,
            finish_reasons=list(answers.finish_reasons),
            columns=prompts.columns,
            chats=prompts.sources or [],
            decode=partial(self._engine.tokenizer.decode, clean_up_tokenization_spaces=False),
        )

    def _experience(self, groups: list[Group], first: int) -> Experience:
        """``first``: the number of the first sequence."""
        ids = [ids for group in groups for ids in group.prompts.ids]
        answers = Rollout.joined(group.answers for group in groups)
        if any(group.answers.drawn is not None for group in groups):
            answers.drawn = [drawn for group in groups for drawn in group.answers.drawn or ()]
        if groups and answers.experts is None and self.scorer.args.moe_routing_replay:
            raise UserError(
                "--moe_routing_replay needs the inference engine, which does not run this model"
            )
        pad_id = self._engine.tokenizer.pad_token_id
        e = from_rollout(ids, answers, pad_id, first)
        for name in ("sources", "inputs"):
            values = [v for group in groups for v in getattr(group.prompts, name) or ()]
            setattr(e, name, values or None)
        return e

    def _scores_of(self, groups: list[Group]) -> list[SourceScores]:
        """The scores that the groups came with."""
        return []
