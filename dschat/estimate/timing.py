"""Computes the phases of one optimizer step, or iteration of step 3, from its memory estimate.

Every row counts at its mean lengths: those of ``--plan_tokens``, else the longest ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dschat.config import RewardConfig, RLHFConfig, SupervisedConfig, UserError
from dschat.config.fields import AUTO
from dschat.estimate.devices import DeviceSpeed
from dschat.estimate.models import Models
from dschat.estimate.result import StepEstimate
from dschat.estimate.seconds import (
    Fleet,
    Phase,
    Rows,
    TimedModel,
    decode,
    forward,
    joined,
    prefill,
    refresh,
    training,
    update,
)
from dschat.estimate.shares import ENGINE, HF_LOOP, Shares
from dschat.estimate.steps import Learner, Model
from dschat.observability.flops import Head
from dschat.runtime.token_budget import FIRST_TRIAL_TOKENS

# --old_logprobs auto recomputes one of so many answers (`dschat.rlhf.forwards`).
_CHECKED_SHARE = 8


@dataclass(frozen=True)
class StepTime:
    """The phases of one optimizer step (step 3: one iteration).

    Attributes:
        rows: its sequences over all devices.
        per_example: sequences of one example of the data: 2 for a pair.
    """

    fleet: Fleet
    rows: Rows
    phases: list[Phase]
    per_example: int = 1

    @property
    def total_s(self) -> float:
        return sum(phase.total_s for phase in self.phases)


@dataclass(frozen=True)
class Timer:
    """Times estimates on one kind of GPU.

    Attributes:
        tokens: mean prompt and answer; None: the longest.
    """

    models: Models
    speed: DeviceSpeed
    per_node: int
    tokens: tuple[int, int] | None = None

    def time(self, estimate: StepEstimate) -> StepTime:
        """The phases of ``estimate``'s step. Raises ``UserError`` where FLOPs are not known."""
        config = estimate.config
        if isinstance(config, RLHFConfig):
            return self._rlhf(estimate, config)
        assert isinstance(config, SupervisedConfig)
        return self._supervised(estimate, config)

    def _fleet(self, count: int, shares: Shares) -> Fleet:
        return Fleet(self.speed, count, min(self.per_node, count), shares)

    def _model(self, model: Model) -> TimedModel:
        use, sizes = model.use, self.models.sizes(model.use)
        head: Head = "lm" if use.kind == "lm" else "score"
        if sizes.shape is None:
            raise UserError(f"FLOPs of {use.flag} {use.name} are not known")
        return TimedModel(
            sizes.shape,
            sizes.total,
            sizes.trained if isinstance(model, Learner) else 0,
            head,
            use.dtype.itemsize,
            model.zero.used_stage,
            bool(use.lora_dim) and use.only_optimize_lora,
            use.gradient_checkpointing,
            model.zero.offload_optimizer,
            model.zero.offload_parameters,
        )

    # -- steps 1 and 2 -----------------------------------------------------------------------------

    def _supervised(self, estimate: StepEstimate, config: SupervisedConfig) -> StepTime:
        count = estimate.num_processes
        fleet = self._fleet(count, ENGINE)
        pairs = config if isinstance(config, RewardConfig) else None
        per_example = 1 if pairs is None else 2
        seq_len = min(config.max_seq_len, sum(self.tokens or (config.max_seq_len,)))
        rows = Rows(per_example * config.global_batch_size(count), seq_len, 0)
        batches = self._batches(config, rows, count, config.gradient_accumulation_steps)
        models = [self._model(model) for model in estimate.present]
        phases = [training(fleet, models[0], rows, batches), update(fleet, models[0], 1)]
        if pairs is not None and pairs.trains_policy and not pairs.precompute_ref_logprobs:
            reference = forward(fleet, models[-1], rows, batches)
            phases.insert(0, replace(reference, name="reference"))
        return StepTime(fleet, rows, phases, per_example)

    @staticmethod
    def _batches(
        config: RLHFConfig | SupervisedConfig, rows: Rows, count: int, by_rows: int
    ) -> int:
        """Micro-batches of an optimizer step on one device."""
        budget = config.max_tokens_per_micro_batch
        if not budget:
            return by_rows
        tokens = FIRST_TRIAL_TOKENS if budget == AUTO else int(budget)
        return math.ceil(rows.tokens / count / tokens)

    # -- step 3 ------------------------------------------------------------------------------------

    def _rlhf(self, estimate: StepEstimate, config: RLHFConfig) -> StepTime:
        count = estimate.num_processes
        longest = config.max_prompt_seq_len, config.max_answer_seq_len
        prompt, answer = map(min, zip(self.tokens or longest, longest, strict=True))
        rows = Rows(config.rollout_samples(count), prompt, answer, config.num_samples_per_prompt)
        fleet = self._fleet(count, ENGINE if _in_engine(estimate) else HF_LOOP)
        phases = [
            *self._generation(fleet, estimate, config, rows),
            self._scoring(fleet, estimate, config, rows),
            *self._training(fleet, estimate, config, rows),
        ]
        return StepTime(fleet, rows, [phase for phase in phases if phase.total_s])

    def _generation(
        self, fleet: Fleet, estimate: StepEstimate, config: RLHFConfig, rows: Rows
    ) -> list[Phase]:
        """Refresh, prefill, decode: as many sequences at once as the flags and the cache take."""
        actor, tp_size = self._model(estimate.present[0]), config.inference_tp_size
        phases = []
        if any(mode.items.get("rollout copy") for mode in estimate.modes):
            phases.append(refresh(fleet, actor, tp_size))
        shape, per_group = actor.shape, rows.count / (fleet.count / tp_size)
        token_bytes = 2 * shape.num_layers * shape.kv_width * actor.itemsize
        cache = max(mode.items.get("KV cache", 0) for mode in estimate.modes)
        room = token_bytes * (rows.prompt + rows.answer / 2)
        cached = cache * tp_size / room if room else math.inf
        concurrent = max(1.0, min(config.max_num_seqs, per_group, cached))
        return [
            *phases,
            prefill(fleet, actor, rows, tp_size),
            decode(fleet, actor, rows, concurrent, tp_size),
        ]

    def _scoring(
        self, fleet: Fleet, estimate: StepEstimate, config: RLHFConfig, rows: Rows
    ) -> Phase:
        """One pass of every model over the rollout; the actor's as ``--old_logprobs`` says."""
        parts = {"recompute": 1.0, "rollout": 0.0, "auto": 1 / _CHECKED_SHARE}
        passes = [(model, 1.0) for model in estimate.present[1:]]
        passes.insert(0, (estimate.present[0], parts[config.old_logprobs]))
        frozen_names = {model.name for model in estimate.present}
        if config.needs_reference and "reference" not in frozen_names:
            passes.append((estimate.present[0], 1.0))  # the actor without its adapters
        rows_each = config.per_device_training_batch_size
        phases = []
        for model, part in passes:
            if not part:
                continue
            read = replace(rows, count=part * rows.count)
            by_rows = math.ceil(read.count / fleet.count / rows_each)
            batches = self._batches(config, read, fleet.count, by_rows)
            phases.append(forward(fleet, self._model(model), read, batches))
        return joined("score", phases)

    def _training(
        self, fleet: Fleet, estimate: StepEstimate, config: RLHFConfig, rows: Rows
    ) -> list[Phase]:
        """Optimizer steps of actor and critic over all epochs."""
        steps = config.ppo_epochs * config.num_mini_batches
        mini_batch = replace(rows, count=config.mini_batch_size(fleet.count))
        batches = self._batches(config, mini_batch, fleet.count, config.gradient_accumulation_steps)
        phases, updates = [], []
        for model in estimate.present:
            if not isinstance(model, Learner):
                continue
            several = 2 if model.name == "actor" and config.unsupervised_dataset_name else 1
            trained = replace(rows, count=several * config.ppo_epochs * rows.count)
            timed = self._model(model)
            phases.append(training(fleet, timed, trained, several * steps * batches))
            updates.append(update(fleet, timed, steps))
        return [joined("train", phases), joined("update", updates)]


def _in_engine(estimate: StepEstimate) -> bool:
    return "inference engine" in estimate.models[-1]


def bottleneck(phases: Sequence[Phase]) -> str:
    """The longest phase, and what it waits for."""
    longest = max(phases, key=lambda phase: phase.total_s)
    return f"{longest.name}, {longest.bound}"
