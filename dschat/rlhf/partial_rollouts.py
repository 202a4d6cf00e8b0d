"""Rollouts that end when enough prompts are answered, and take the rest into the next iteration.

More prompts are under way than a rollout needs, so that the longest answers hold up nobody. An
answer that is continued has tokens of several versions of the policy, each with the log-prob that
it was drawn with; ``--rollout_is`` weighs every token by the present policy's probability over
that. The samples of a prompt stay together.
"""

import math
import time
from dataclasses import asdict
from typing import Any

import dschat.distributed as dist
from dschat.config import UserError
from dschat.inference.engine import InferenceEngine
from dschat.inference.partial import OpenPrompt, advance, rollout_of
from dschat.inference.protocol import Rollout, SamplingParams
from dschat.rlhf.early_scoring import EarlyScoring
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.metrics import generation_metrics
from dschat.rlhf.prompt_queue import PromptQueue
from dschat.rlhf.prompt_table import PromptTable
from dschat.rlhf.rollout_collector import PendingRollout, RolloutCollector, RolloutSource


class PartialRollouts(RolloutSource):
    """Holds this rank's prompts that are under way, the oldest first.

    Args:
        oversample: prompts under way in addition to a rollout's, as a share of those.
        max_staleness: iterations after which a prompt's answers are completed, however long.
        more: where the additional prompts come from.
    """

    def __init__(
        self,
        engine: DeepSpeedRLHFEngine,
        collector: RolloutCollector,
        oversample: float,
        max_staleness: int,
        more: PromptQueue,
    ) -> None:
        self._engine, self._collector, self._more = engine, collector, more
        self._oversample, self._max_staleness = oversample, max_staleness
        self._table, self._open = PromptTable(), list[OpenPrompt]()
        self._ages: list[int] = []  # rollouts that each prompt has been part of

    def state_dict(self) -> dict[str, Any]:
        """Collective. JSON-able state of all ranks that the next rollout depends on."""
        mine = {
            "table": vars(self._table),
            "open": [asdict(prompt) for prompt in self._open],
            "ages": list(self._ages),  # NOTE: the next iteration changes the list in place
        }
        return {"under_way": dist.gather_objects(mine)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ranks take their own prompts, or equal shares where their number has changed."""
        self._table, self._open, self._ages = PromptTable(), [], []
        parts = state.get("under_way", [])
        is_own = len(parts) == dist.world_size()
        for part in [parts[dist.rank()]] if is_own else parts:
            self._add(PromptTable(**part["table"]), [OpenPrompt(**p) for p in part["open"]])
            self._ages += part["ages"]
        if not is_own:
            order = sorted(range(len(self._ages)), key=lambda i: -self._ages[i])
            self._keep(dist.my_share(order))

    def generate(self, prompts: PromptTable, sampling: SamplingParams) -> PendingRollout:
        """Collective. As many answered prompts as ``prompts``, the oldest first: these or others
        that are under way.
        """
        started = time.perf_counter()
        wanted = len(prompts.ids)
        self._start(prompts)
        missing = wanted + math.ceil(self._oversample * wanted) - len(self._open)
        self._start(self._more.take(sum(dist.gather_objects(max(0, missing))), prompts))
        counts = dist.gather_objects((len(self._open), wanted))
        before = sum(count for count, _ in counts[: dist.rank()])
        numbers = list(range(before, before + len(self._open)))
        num_due = sum(age >= self._max_staleness for age in self._ages)
        with self._engine.rollout_mode() as generator:
            if not isinstance(generator, InferenceEngine):
                raise UserError(
                    "--partial_rollout needs the hybrid engine, which does not run this model"
                )
            early = self._collector.early_scoring(self._table, wanted)

            def answered(row: int, answers: Rollout) -> None:
                # Those after the oldest ``wanted`` may have to wait for the next rollout.
                if early is not None and row < wanted:
                    early.add(row, answers)

            advance(generator, self._open, sampling, numbers, wanted, num_due, answered)
            metrics = generation_metrics(self._engine.rollout.last_refresh, generator)
        rollout = self._take(wanted, sum(w for _, w in counts[: dist.rank()]), metrics, early)
        rollout.num_prompts = sum(w for _, w in counts)
        rollout.metrics["time/generate_s"] = time.perf_counter() - started
        return rollout

    def _take(
        self, wanted: int, first: int, metrics: dict[str, float], early: EarlyScoring | None
    ) -> PendingRollout:
        """Collective. The oldest ``wanted`` complete prompts; the others grow older."""
        done = [i for i, prompt in enumerate(self._open) if prompt.is_complete][:wanted]
        staleness = [self._open[i].staleness for i in done]
        answered = rollout_of([self._open[i] for i in done])
        rollout = self._collector.pending(self._table.pick(done), answered, first, early, done)
        self._keep([i for i in range(len(self._open)) if i not in set(done)])
        self._ages = [age + 1 for age in self._ages]
        carried = sum(prompt.num_tokens for prompt in self._open)
        oldest = max(dist.gather_objects(max(staleness, default=0)))
        total, count, prompts, tokens = dist.sum_floats(
            [float(sum(staleness)), float(len(staleness)), float(len(self._open)), float(carried)]
        )
        rollout.metrics = metrics | {
            "rollout/staleness": total / max(count, 1.0),
            "rollout/staleness_max": float(oldest),
            "rollout/carried_prompts": prompts,
            "rollout/carried_tokens": tokens,
        }
        return rollout

    def _start(self, prompts: PromptTable) -> None:
        self._add(prompts, [OpenPrompt(ids) for ids in prompts.ids])
        self._ages += [0] * len(prompts.ids)

    def _add(self, table: PromptTable, opened: list[OpenPrompt]) -> None:
        self._table = self._table.concat(table)
        self._open += opened

    def _keep(self, rows: list[int]) -> None:
        self._table = self._table.pick(rows)
        self._open = [self._open[i] for i in rows]
        self._ages = [self._ages[i] for i in rows]
