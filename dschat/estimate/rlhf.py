"""Estimates the memory of step 3 on one device, in rollout, scoring, training and evaluation.

The actor exists in its training and its rollout form; critic, reference, reward model
and teacher are optional.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dschat.config import RLHFConfig
from dschat.estimate.activations import Batch
from dschat.estimate.result import Items, Mode, StepEstimate, fullest
from dschat.estimate.rollout import RolloutBytes, RolloutEstimator
from dschat.estimate.steps import Learner, Model, Moments, StepEstimator, count, held_by


class RLHFEstimator(StepEstimator[RLHFConfig]):
    """Estimates step 3."""

    def estimate(self) -> StepEstimate:
        """The memory of the step on one device."""
        c, learners = self._config, self._learners()
        frozen = self._frozen_models(learners[0])
        held = held_by([*learners, *frozen.values()])
        if c.enable_ema:
            trained = self._models.sizes(learners[0].use).trained
            held[0]["moving average"] = 4 * -(-trained // self._num_processes)
        rollout = self._rollout(learners, held[0])
        held[0].update(self._rollout_items(rollout, stays=True))

        columns = c.longest_row, c.max_answer_seq_len
        rows = Batch(c.per_device_training_batch_size, *columns)
        batch, num_micro_batches = self._micro_batch(rows, c.mini_batch_size(1))
        scored, _ = self._micro_batch(rows, c.rollout_samples(1))
        evaluated, _ = self._micro_batch(Batch(c.eval_batch_size, *columns), c.eval_batch_size)
        leftover = self._leftover(learners, batch)

        # A frozen base serves as the reference, with the adapters off.
        readers: dict[str, Model] = {"reference": learners[0]} if c.needs_reference else {}
        readers |= frozen
        scoring = [(m.name, self._forward(m, scored, leftover)) for m in learners]
        scoring += self._readings(readers, scored, leftover)
        generation = Items(
            activations=max(rollout.work, self._retained(leftover) or 0), logits=rollout.logits
        ) + self._rollout_items(rollout, stays=False)
        copy = self._rollout_items(rollout, stays=False) + self._average(rollout, learners[0])
        evaluation = [("generation", generation + self._average(rollout, learners[0]))]
        for name, items in self._readings(readers, evaluated, leftover):
            evaluation.append((name, items + copy))
        modes = [
            Mode("rollout", self._without_states(generation, learners)),
            fullest("scoring", scoring),
            fullest("training", list(self._updates(learners, batch, num_micro_batches))),
            fullest("evaluation", evaluation),
        ]
        lines = self._lines(learners, frozen, rollout)
        present = [*learners, *frozen.values()]
        return self._finished(3, lines, held, modes, present, leftover)

    # -- models ------------------------------------------------------------------------------------

    def _learners(self) -> list[Learner]:
        """The models that train: the actor, and with gae a critic."""
        use, zero = self._use("actor_", "lm"), self._zero("actor")
        learners = [self._learner("actor", use, "policy", zero)]
        if self._config.has_critic:
            use, zero = self._use("critic_", "score"), self._zero("critic")
            learners.append(self._learner("critic", use, "value", zero))
        return learners

    def _frozen_models(self, actor: Learner) -> dict[str, Model]:
        """Reference, reward model and teacher, if loaded."""
        c, models = self._config, {}
        if c.needs_reference and not (c.actor_lora_dim and c.only_optimize_lora):
            models["reference"] = self._frozen(
                "reference", actor.use.frozen, "policy", actor.zero, c.offload_reference_model
            )
        if name := c.reward_model_name_or_path:
            use, flag = self._use("critic_", "score").frozen, "--reward_model_name_or_path"
            use, zero = replace(use, name=name, flag=flag), self._zero("critic")
            models["reward model"] = self._frozen(
                "reward", use, "value", zero, c.offload_reward_model
            )
        if name := c.teacher_model_name_or_path:
            use = replace(actor.use.frozen, name=name, flag="--teacher_model_name_or_path")
            offload = c.offload_teacher_model
            models["teacher"] = self._frozen("teacher", use, "policy", actor.zero, offload)
        return models

    def _rollout(self, learners: Sequence[Learner], held: Items) -> RolloutBytes:
        # The first optimizer step allocates Adam's moments, after the first rollout.
        to_come = sum(learner.training.moments.device for learner in learners)
        actor = learners[0].use
        return RolloutEstimator(
            self._config,
            self._models.config(actor),
            self._models.sizes(actor.frozen),
            self._models.sizes(actor).trained if actor.lora_dim else 0,
            self._dtype,
            self._num_processes,
            self._device,
        ).estimate(held.total() + self._device.libraries - to_come)

    def _rollout_items(self, rollout: RolloutBytes, stays: bool) -> Items:
        """The rollout's weights and cache: the persistent ones, or those freed after a rollout."""
        c, items = self._config, Items()
        if c.unpin_actor_parameters != stays:
            items["rollout copy"] = rollout.weights
        if c.release_inference_cache != stays:
            items["KV cache"] = rollout.cache
        return items

    # -- modes -------------------------------------------------------------------------------------

    def _without_states(self, generation: Items, learners: Sequence[Learner]) -> Items:
        """``generation``, less the optimizer states that are moved away meanwhile."""
        items = generation.copy()
        if self._config.offload_training_states and self._device.on_gpu:
            for t in (learner.training for learner in learners):
                items["optimizer states"] -= t.moments.device + t.masters.device
        return items

    def _average(self, rollout: RolloutBytes, actor: Learner) -> Items:
        """The copy of the weights from which the moving average generates, with the same cache."""
        if not self._config.enable_ema:
            return Items()
        whole = self._models.sizes(actor.use.frozen).total * self._dtype.itemsize
        tp_size = self._config.inference_tp_size
        return Items({"rollout copy": max(rollout.weights, whole // tp_size)})

    def _readings(self, readers: dict[str, Model], batch: Batch, leftover: int) -> Moments:
        """The passes of frozen models; the reward model's reads the last token only."""
        last = batch._replace(num_read=1)
        return [
            (name, self._forward(m, last if m.work == "value" else batch, leftover))
            for name, m in readers.items()
        ]

    def _updates(
        self, learners: Sequence[Learner], batch: Batch, num_micro_batches: int
    ) -> Iterator[tuple[str, Items]]:
        """The moments of the optimizer steps of actor and critic."""
        small = max(self._small(learner, batch) for learner in learners)
        for m in learners:
            # Pretraining text doubles the actor's micro-batches.
            several = 2 if m.name == "actor" and self._config.unsupervised_dataset_name else 1
            for moment, items in self._moments(m, batch, several * num_micro_batches, small):
                yield f"{m.name}, {moment}", items

    def _lines(
        self, learners: Sequence[Learner], frozen: dict[str, Model], rollout: RolloutBytes
    ) -> list[str]:
        reference = "a copy of the actor" if "reference" in frozen else "the actor without adapters"
        reward = "none"
        if "reward model" in frozen:
            total = self._models.sizes(frozen["reward model"].use).total
            reward = f"{count(total)} parameters"
        teacher = [self._line(frozen["teacher"])] if "teacher" in frozen else []
        return [
            *(self._line(learner) for learner in learners),
            *teacher,
            f"reference: {reference if self._config.needs_reference else 'none'}; "
            f"reward model: {reward}",
            f"rollout: {rollout.form}",
        ]
