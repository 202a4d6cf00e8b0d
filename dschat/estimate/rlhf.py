"""Estimates the memory of step 3 on one device, in rollout, scoring, training and evaluation.

The actor exists in its training and its rollout form; critic, reference and reward model are
optional.
"""

from dataclasses import replace
from typing import Any, Literal

from dschat.config import RLHFConfig
from dschat.estimate.activations import Batch, Work
from dschat.estimate.device import Device
from dschat.estimate.models import Models, Use
from dschat.estimate.modes import Holding, Items, Mode, StepEstimate, fullest, summed
from dschat.estimate.rollout import RolloutBytes, rollout_bytes
from dschat.estimate.steps import StepEstimator, count, trained_holding
from dschat.estimate.zero import Held, frozen_bytes


class RLHFEstimator(StepEstimator[RLHFConfig]):
    """Estimates step 3."""

    def __init__(
        self, models: Models, device: Device, num_processes: int, config: RLHFConfig
    ) -> None:
        super().__init__(models, device, num_processes, config)
        self._actor = self._use("actor", "lm")
        self._critic = self._use("critic", "score")
        name, flag = config.reward_model_name_or_path, "--reward_model_name_or_path"
        self._reward = replace(self._critic, name=name, flag=flag).frozen
        self._zeros = {name: self._zero(name) for name in ("actor", "critic")}
        self._trained = {
            name: self._training(use, self._zeros[name]) for name, use, _ in self._learners()
        }
        # A frozen base serves as the reference, with the adapters off.
        self._is_reference = bool(config.actor_lora_dim) and config.only_optimize_lora
        self._frozen = self._frozen_models()
        columns = config.max_prompt_seq_len + config.max_answer_seq_len, config.max_answer_seq_len
        rows = Batch(config.per_device_training_batch_size, *columns)
        self._batch, self._num_micro_batches = self._micro_batch(rows, config.mini_batch_size(1))
        self._scored, _ = self._micro_batch(rows, config.rollout_samples(1))
        rows = Batch(config.eval_batch_size, *columns)
        self._evaluated, _ = self._micro_batch(rows, config.eval_batch_size)

    def _use(self, model: str, kind: Literal["lm", "score"]) -> Use:
        c = self._config

        def setting(name: str) -> Any:
            return getattr(c, f"{model}_{name}")

        return Use(
            setting("model_name_or_path"),
            f"--{model}_model_name_or_path",
            kind,
            self._dtype,
            setting("dropout") or 0.0,
            c.attn_implementation,
            c.trust_remote_code,
            setting("gradient_checkpointing"),
            setting("lora_dim"),
            tuple(setting("lora_modules")),
            c.only_optimize_lora,
            c.packing,
        )

    def _frozen_models(self) -> dict[str, tuple[Held, int]]:
        """Reference and reward model, if loaded: their weights and the bytes a pass gathers."""
        c, models = self._config, {}
        for name, is_loaded, use, zero, offload in (
            (
                "reference",
                c.needs_reference and not self._is_reference,
                self._actor.frozen,
                self._zeros["actor"],
                c.offload_reference_model,
            ),
            (
                "reward",
                bool(c.reward_model_name_or_path),
                self._reward,
                self._zeros["critic"],
                c.offload_reward_model,
            ),
        ):
            if is_loaded:
                total = self._models.sizes(use).total
                models[name] = frozen_bytes(total, zero.frozen(offload), self._num_processes)
        return models

    def estimate(self) -> StepEstimate:
        """The memory of the step on one device."""
        held = self._holding()
        rollout = self._rollout(held)
        leftover = 0
        for name, use, work in self._learners():
            leftover = max(leftover, self._leftover(use, self._trained[name], work, self._batch))
        modes = [
            self._rollout_mode(rollout, leftover),
            fullest("scoring", self._scoring(leftover)),
            fullest("training", self._updates()),
            fullest("evaluation", self._evaluation(rollout, leftover)),
        ]
        held += Holding(self._rollout_items(rollout, stays=True))
        uses = [use for _, use, _ in self._learners()]
        return self._finished(3, self._lines(rollout), held, modes, uses, leftover)

    def _learners(self) -> list[tuple[str, Use, Work]]:
        """The models that train: the actor, and with gae a critic."""
        actor: tuple[str, Use, Work] = ("actor", self._actor, "policy")
        return [actor, ("critic", self._critic, "value")] if self._config.has_critic else [actor]

    # -- persistent memory -------------------------------------------------------------------------

    def _holding(self) -> Holding:
        held = Holding()
        for name, training in self._trained.items():
            held += trained_holding(name, training)
        for name, (weights, _) in self._frozen.items():
            item = f"{name} weights"
            held += Holding({item: weights.device}, {item: weights.host})
        if self._config.enable_ema:
            shard = -(-self._models.sizes(self._actor).trained // self._num_processes)
            held += Holding({"moving average": 4 * shard})
        return held

    def _rollout(self, held: Holding) -> RolloutBytes:
        first = sum(held.device.values()) + self._device.libraries
        # The first optimizer step allocates Adam's moments, after the first rollout.
        first -= sum(training.moments.device for training in self._trained.values())
        actor = self._models.sizes(self._actor)
        return rollout_bytes(
            self._config,
            self._models.config(self._actor),
            self._models.sizes(self._actor.frozen),
            actor.trained if self._actor.lora_dim else 0,
            self._dtype,
            self._num_processes,
            self._device,
            first,
        )

    def _rollout_items(self, rollout: RolloutBytes, stays: bool) -> Items:
        """The rollout's weights and cache: the persistent ones, or those freed after a rollout."""
        c = self._config
        return {
            "rollout copy": rollout.weights if c.unpin_actor_parameters != stays else 0,
            "KV cache": rollout.cache if c.release_inference_cache != stays else 0,
        }

    # -- modes -------------------------------------------------------------------------------------

    def _rollout_mode(self, rollout: RolloutBytes, leftover: int) -> Mode:
        items = self._generation(rollout, leftover)
        if self._config.offload_training_states and self._device.on_gpu:
            for name, training in self._trained.items():
                away = training.moments.device
                if self._zeros[name].used_stage > 0:
                    away += training.masters.device
                items = summed(items, {"optimizer states": -away})
        return Mode("rollout", items)

    def _generation(self, rollout: RolloutBytes, leftover: int) -> Items:
        return {
            "activations": max(rollout.work, self._retained(leftover) or 0),
            "logits": rollout.logits,
            **self._rollout_items(rollout, stays=False),
        }

    def _scoring(self, leftover: int) -> list[tuple[str, Items]]:
        passes = [
            (name, self._forward(use, self._trained[name].gathered, work, self._scored, leftover))
            for name, use, work in self._learners()
        ]
        return passes + self._frozen_passes(self._scored, leftover)

    def _frozen_passes(self, batch: Batch, leftover: int) -> list[tuple[str, Items]]:
        passes: list[tuple[str, Items]] = []
        if self._config.needs_reference:
            use, gathered = self._actor, self._trained["actor"].gathered
            if not self._is_reference:
                use, gathered = self._actor.frozen, self._frozen["reference"][1]
            passes.append(("reference", self._forward(use, gathered, "policy", batch, leftover)))
        if "reward" in self._frozen:
            gathered = self._frozen["reward"][1]
            last = batch._replace(num_read=1)
            items = self._forward(self._reward, gathered, "value", last, leftover)
            passes.append(("reward model", items))
        return passes

    def _updates(self) -> list[tuple[str, Items]]:
        """The moments of the optimizer steps of actor and critic."""
        c, moments, small = self._config, [], 0
        for _, use, work in self._learners():
            small = max(small, self._models.run(use, work, self._batch, train=True).small)
        for name, use, work in self._learners():
            # Pretraining text doubles the actor's micro-batches.
            several = 2 if name == "actor" and c.unsupervised_dataset_name else 1
            num_micro_batches = several * self._num_micro_batches
            for moment, items in self._moments(
                use, self._trained[name], work, self._batch, num_micro_batches, small
            ):
                moments.append((f"{name}, {moment}", items))
        return moments

    def _evaluation(self, rollout: RolloutBytes, leftover: int) -> list[tuple[str, Items]]:
        """Held-out prompts: generation, then reference and reward model read the answers.

        The moving average generates from a second copy of the weights, with the same cache.
        """
        copy: Items = {}
        if self._config.enable_ema:
            whole = self._models.sizes(self._actor.frozen).total * self._dtype.itemsize
            copy = {"rollout copy": max(rollout.weights, whole // self._config.inference_tp_size)}
        rollout_items = self._rollout_items(rollout, stays=False)
        return [
            ("generation", summed(self._generation(rollout, leftover), copy)),
            *(
                (name, summed(items, copy, rollout_items))
                for name, items in self._frozen_passes(self._evaluated, leftover)
            ),
        ]

    def _lines(self, rollout: RolloutBytes) -> list[str]:
        reference = "the actor without adapters" if self._is_reference else "a copy of the actor"
        reward = "none"
        if "reward" in self._frozen:
            reward = f"{count(self._models.sizes(self._reward).total)} parameters"
        return [
            *(self._line(name, use, self._zeros[name]) for name, use, _ in self._learners()),
            f"reference: {reference if self._config.needs_reference else 'none'}; "
            f"reward model: {reward}",
            f"rollout: {rollout.form}",
        ]
