"""Collects rollouts: the actor answers prompts, and reward functions score the answers.

A prompt with all its answers is a group. Reward functions get a group as soon as it is complete,
while others are generated. A rollout policy says which prompts are asked and what of them is kept.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import dschat.distributed as dist
from dschat.config import RLHFConfig, UserError
from dschat.data.batches import PromptTable
from dschat.environments.conversations import Conversations
from dschat.inference.protocol import Generator, Rollout, SamplingParams
from dschat.models.continued_text import whole_texts
from dschat.rewards.reward_functions import REWARD_MODEL, RewardFunctions
from dschat.rewards.samples import Samples
from dschat.rewards.scoring import (
    RunningScale,
    Scoring,
    SourceScores,
    any_applies,
    by_answer,
    combine,
    source_means,
)
from dschat.rlhf.batching import Moves
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.experience import Experience, from_rollout
from dschat.rlhf.forwards import reward_scores
from dschat.rlhf.metrics import generation_metrics
from dschat.rlhf.prompts import PromptQueue

logger = logging.getLogger("dschat")


@dataclass
class Group:
    """A prompt with its finished answers."""

    number: int  # of the prompt, over all ranks
    prompts: PromptTable  # one for each answer: an environment may have added to the prompt
    answers: Rollout
    rewards: list[list[float]] | None = None  # of an environment, for each token of each answer
    # Of agents, whose episodes may have several rows: the rows' numbers, and each episode with its
    # prompt.
    numbers: list[int] | None = None
    agents: tuple[PromptTable, list[Conversations]] | None = None


class RolloutPolicy:
    """What a rollout asks and what it keeps: all answers to an iteration's prompts, in one round.

    ``more``: prompts in addition to an iteration's, for policies that ask for them.
    """

    def __init__(self, more: PromptQueue) -> None:
        self.more = more

    def rollout(
        self, collector: "Collector", prompts: PromptTable, sampling: SamplingParams
    ) -> tuple[Experience, Scoring | None]:
        """Collective. See `Collector.collect`; ``collector`` asks and scores."""
        return collector.ask(sampling, prompts)

    def state_dict(self) -> dict[str, Any]:
        """Collective. JSON-able state that the next rollout depends on, the same on all ranks."""
        return self.more.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.more.load_state_dict(state)


class Collector:
    """Collects the rollouts of a run, and scores them by all sources: reward model, reward
    functions, environment.

    Attributes:
        cuts_rounds: whether functions may score the answers of a call of the generator during the
            next; the same on every rank: tensor-parallel ranks generate together.
        scale: running statistics of each source's scores.
        weights: by name, of the sources that have one.
    """

    cuts_rounds = True

    def __init__(
        self,
        engine: DeepSpeedRLHFEngine,
        args: RLHFConfig,
        functions: RewardFunctions,
        policy: RolloutPolicy,
        others: Sequence[str] = (),
    ) -> None:
        """``others``: names of further sources, of weight 1.

        Raises:
            UserError: nothing scores.
        """
        has_model = engine.reward is not None or args.has_teacher
        if not (has_model or functions.names or others):
            raise UserError(
                "nothing scores the answers: name a reward model (--critic_model_name_or_path), or "
                "give --reward_fn or reward_fns=[...]"
            )
        self.args, self.functions, self.policy = args, functions, policy
        self.scale = RunningScale()
        self._engine = engine
        self._warned = False  # of answers without a score
        weights = {} if engine.reward is None else {REWARD_MODEL: args.reward_model_weight}
        weights |= functions.weights | dict.fromkeys(others, 1.0)
        self.weights = {name: weight for name, weight in weights.items() if weight}
        terms = [f"{name} x {w:g}" if w else f"{name} (logged)" for name, w in weights.items()]
        bound = "not clipped" if self.clip is None else f"clipped to +-{self.clip:g}"
        logger.info("score: %s, %s", " + ".join(terms) or "none, the teacher alone", bound)

    @property
    def clip(self) -> float | None:
        """The bound that clips an answer's score in its reward; None: not clipped."""
        alone = self._engine.reward is not None and not any(self.functions.weights.values())
        return self.args.clip_where(model_alone=alone)

    def state_dict(self) -> dict[str, Any]:
        """Collective. JSON-able state that the next rollout depends on, the same on all ranks."""
        own = {"scale": self.scale.state_dict(), "programs": self.functions.state_dict()}
        return own | self.policy.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale.load_state_dict(state["scale"])
        self.functions.load_state_dict(state.get("programs", {}))
        self.policy.load_state_dict(state)

    def collect(
        self, prompts: PromptTable, sampling: SamplingParams
    ) -> tuple[Experience, Scoring | None]:
        """Collective. The rollout of an iteration that takes ``prompts`` of this rank, each
        answered ``sampling.n`` times; and its reward functions, which may still run: the caller may
        do other work before `score`. None: it has its scores.
        """
        if prompts.ids:
            self.functions.check_columns(prompts.columns)
        return self.policy.rollout(self, prompts, sampling)

    # -- answers -----------------------------------------------------------------------------------

    def ask(
        self,
        sampling: SamplingParams,
        prompts: PromptTable,
        before: int = 0,
        wanted: int | None = None,
        through: Callable[[Generator], Generator] = lambda generator: generator,
    ) -> tuple[Experience, Scoring]:
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
        is_cut = self.cuts_rounds and self.functions.overlaps and wanted is None
        calls = self.args.generation_batches if is_cut else 1
        with self._engine.rollout_mode() as generator:
            e, scoring = self.answers_of(
                through(generator), prompts, sampling, first, calls, wanted
            )
            e.metrics |= generation_metrics(self._engine.rollout.last_refresh, generator)
        # Draws depend on the numbers of all prompts that are asked; the numbers of an experience
        # are consecutive over the ranks' kept prompts.
        e.numbers += (first_kept - first) * sampling.n
        e.num_prompts = sum(num_kept for _, num_kept in counts)
        e.metrics["time/generate_s"] = time.perf_counter() - started
        return e, scoring

    def answers_of(
        self,
        generator: Generator,
        prompts: PromptTable,
        sampling: SamplingParams,
        first: int,
        calls: int = 1,
        wanted: int | None = None,
    ) -> tuple[Experience, Scoring]:
        """Collective. Answer ``prompts`` in ``calls`` calls of ``generator``, and start the reward
        functions on the answers.

        ``first``: the number of this rank's first prompt among all ranks' prompts. ``wanted``:
        groups to keep, the first ones; default: all.
        """
        num_asked, groups, metrics = len(prompts.ids), list[Group](), dict[str, float]()
        wanted = num_asked if wanted is None else wanted
        scoring = self.functions.scoring(prompts.ids, wanted)

        def add(group: Group) -> None:
            groups.append(group)
            if self.functions.names:
                scoring.add(group.number - first, self._samples(group))

        size = max(1, -(-num_asked // calls))
        for start in range(0, calls * size, size):
            rows = list(range(num_asked))[start : start + size]
            part, numbers = prompts.pick(rows), [first + row for row in rows]
            metrics |= self.answers(generator, part, sampling, numbers, add)
            groups = sorted(groups, key=lambda group: group.number)[:wanted]
            scoring.start([group.number - first for group in groups])
        assert len(groups) == wanted, "the generator did not report all prompts"
        scoring.others = self._scores_of(groups)
        e = self._experience(groups, first * sampling.n)
        if any(group.agents for group in groups):
            scoring.copies = e.rows_of_episodes
        e.metrics = metrics
        return e, scoring

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
        if groups and answers.experts is None and self.args.moe_routing_replay:
            raise UserError(
                "--moe_routing_replay needs the inference engine, which does not run this model"
            )
        pad_id = self._engine.tokenizer.pad_token_id
        e = from_rollout(ids, answers, pad_id, first)
        for name in ("sources", "inputs", "places"):
            values = [v for group in groups for v in getattr(group.prompts, name) or ()]
            setattr(e, name, values or None)
        if self.args.teacher_prompt:
            e.columns = [
                {name: of[row] for name, of in group.prompts.columns.items()}
                for group in groups
                for row in range(len(group.prompts))
            ]
        return e

    def _scores_of(self, groups: list[Group]) -> list[SourceScores]:
        """The scores that the groups came with."""
        return []

    # -- scores ------------------------------------------------------------------------------------

    def score(
        self, e: Experience, scoring: Scoring | None, moves: Moves | None = None
    ) -> Experience:
        """Collective. Wait for ``scoring`` and fill in the scores of ``e``, not clipped, and their
        metrics. ``moves``: of the answers, since `collect`.

        A sequence that a weighted reward function failed on is dropped. A sequence that every
        weighted source declined (None) stays, but is not ``scored``. A NaN of the reward model
        stays, for the trainer to detect. Without a source, where a teacher is all that is learned
        from, all scores are 0.

        Raises ``RewardError`` on all ranks where a reward function failed on one of them.
        """
        if scoring is None:
            return e
        sources = self.sources(e, scoring, self.args.per_device_training_batch_size, moves)
        if not sources:
            return e
        for source in sources:
            source.counts = e.first_rows
        e.metrics |= source_means("objective/scores", sources, with_std=True)
        e.metrics |= self.functions.logged()
        scores, token_scores = combine(sources, self.scale if self.args.normalize_reward else None)
        e.scores = scores.float()
        for row, values in enumerate(token_scores or ()):
            e.token_scores[row, : len(values)] = torch.tensor(values)
        e.scored = any_applies(sources)
        e.source_scores = by_answer([s for s in sources if s.weight], e.num_sequences)
        failed = torch.zeros(e.num_sequences, dtype=torch.bool)
        for source in sources:
            if source.name != REWARD_MODEL and source.weight:
                failed |= source.scores.isnan()
        e.metrics |= self.policy.more.observe(e, self.clip)
        counts = [float(failed.sum()), float((~e.scored & ~failed).sum()), float(len(failed))]
        num_failed, num_declined, total = dist.sum_floats(counts)
        if num_failed or num_declined:
            e.metrics["rollout/unscored"] = num_failed + num_declined
        if num_declined and not self._warned:
            self._warned = True
            logger.warning(
                "%.0f of %.0f answers have no score: every source returned None; such answers are "
                "%s (counted as rollout/unscored)",
                *(num_declined, total),
                "learned from the teacher alone" if self.args.has_teacher else "not trained on",
            )
        return e.pick((~failed).nonzero().flatten().tolist()) if num_failed else e

    def sources(
        self, e: Experience, scoring: Scoring, size: int, moves: Moves | None = None
    ) -> list[SourceScores]:
        """Collective. Every source's scores of ``e``, after waiting for reward functions.

        ``size``: sequences per forward of the reward model, unless there is a token budget.
        """
        of_model = []
        if self._engine.reward is not None:  # before the wait: the functions run meanwhile
            values = reward_scores(self._engine, e, size).tolist()
            for row in reversed(range(len(values) - 1)):
                if e.numbers[row] == e.numbers[row + 1]:  # an agent's last row stands for all
                    values[row] = values[row + 1]
            of_model = [SourceScores(REWARD_MODEL, self.args.reward_model_weight, values)]
        others = scoring.result()
        return of_model + (others if moves is None else [*map(moves.scores, others)])
