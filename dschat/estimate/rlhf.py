"""The memory of step 3 on one device: an actor in two forms, and which of critic, reference and
reward model there are.

Its configuration, the device and the number of processes come in; a ``StepPlan`` with the modes
rollout, scoring, training and evaluation goes out. It must not know how a plan is shown, nor what
to do where it does not fit.
"""

from dataclasses import replace

from dschat.config import RLHFConfig
from dschat.estimate.activations import Work
from dschat.estimate.device import Device
from dschat.estimate.models import Models, Use
from dschat.estimate.modes import Holding, Items, Mode, StepPlan, fullest, summed
from dschat.estimate.rollout import RolloutBytes, rollout_bytes
from dschat.estimate.steps import Step, count, trained_holding
from dschat.estimate.zero import Held, frozen_bytes


class RLHFStep(Step):
    """Step 3."""

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
        seq_len = config.max_prompt_seq_len + config.max_answer_seq_len
        self._batch = (config.per_device_training_batch_size, seq_len)
        self._eval_batch = (config.eval_batch_size, seq_len)

    def _use(self, model: str, kind: str) -> Use:
        c = self._config

        def own(knob: str):
            return getattr(c, f"{model}_{knob}")

        return Use(
            own("model_name_or_path"),
            f"--{model}_model_name_or_path",
            kind,
            self._dtype,
            own("dropout") or 0.0,
            c.attn_implementation,
            c.trust_remote_code,
            own("gradient_checkpointing"),
            own("lora_dim"),
            tuple(own("lora_modules")),
            c.only_optimize_lora,
        )

    def _frozen_models(self) -> dict[str, tuple[Held, int]]:
        """Reference and reward model, those there are: their weights, and what a pass of theirs
        gathers.
        """
        c, found = self._config, {}
        for name, there, use, zero, offload in (
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
            if there:
                total = self._models.sizes(use).total
                found[name] = frozen_bytes(total, zero.frozen(offload), self._num_processes)
        return found

    def plan(self) -> StepPlan:
        """The step on one device."""
        held = self._holding()
        rollout = self._rollout(held)
        left = 0
        for name, use, work in self._learners():
            left = max(left, self._left(use, self._trained[name], work, self._batch))
        modes = [
            self._rollout_mode(rollout, left),
            fullest("scoring", self._scoring(left)),
            fullest("training", self._updates()),
            fullest("evaluation", self._evaluation(rollout, left)),
        ]
        held += Holding(self._rollout_items(rollout, stays=True))
        uses = [use for _, use, _ in self._learners()]
        return self._finished(3, self._lines(rollout), held, modes, uses, left)

    def _learners(self) -> list[tuple[str, Use, Work]]:
        """What is trained: the actor, and with gae a critic."""
        actor: tuple[str, Use, Work] = ("actor", self._actor, "policy")
        return [actor, ("critic", self._critic, "value")] if self._config.has_critic else [actor]

    # -- what is there all the time ----------------------------------------------------------------

    def _holding(self) -> Holding:
        held = Holding()
        for name, training in self._trained.items():
            held += trained_holding(name, training)
        for name, (weights, _) in self._frozen.items():
            item = f"{name} weights"
            held += Holding({item: weights.device}, {item: weights.host})
        if self._config.enable_ema:
            mine = -(-self._models.sizes(self._actor).trained // self._num_processes)
            held += Holding({"moving average": 4 * mine})
        return held

    def _rollout(self, held: Holding) -> RolloutBytes:
        first = sum(held.device.values()) + self._device.libraries
        # Adam's moments are made by the first optimizer step, after the first rollout.
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
        """The rollout's weights and cache: what stays, or what goes after each rollout."""
        c = self._config
        return {
            "rollout copy": rollout.weights if c.unpin_actor_parameters != stays else 0,
            "KV cache": rollout.cache if c.release_inference_cache != stays else 0,
        }

    # -- modes -------------------------------------------------------------------------------------

    def _rollout_mode(self, rollout: RolloutBytes, left: int) -> Mode:
        items = self._generation(rollout, left)
        if self._config.offload_training_states and self._device.on_gpu:
            for name, training in self._trained.items():
                away = training.moments.device
                if self._zeros[name].used_stage in (1, 2):
                    away += training.masters.device
                items = summed(items, {"optimizer states": -away})
        return Mode("rollout", items)

    def _generation(self, rollout: RolloutBytes, left: int) -> Items:
        return {
            "activations": max(rollout.work, self._kept(left) or 0),
            "logits": rollout.logits,
            **self._rollout_items(rollout, stays=False),
        }

    def _scoring(self, left: int) -> list[tuple[str, Items]]:
        passes = [
            (name, self._forward(use, self._trained[name].gathered, work, self._batch, left))
            for name, use, work in self._learners()
        ]
        return passes + self._frozen_passes(self._batch, left)

    def _frozen_passes(self, shape: tuple[int, int], left: int) -> list[tuple[str, Items]]:
        passes: list[tuple[str, Items]] = []
        if self._config.needs_reference:
            use, gathered = self._actor, self._trained["actor"].gathered
            if not self._is_reference:
                use, gathered = self._actor.frozen, self._frozen["reference"][1]
            passes.append(("reference", self._forward(use, gathered, "policy", shape, left)))
        if "reward" in self._frozen:
            gathered = self._frozen["reward"][1]
            items = self._forward(self._reward, gathered, "value", shape, left)
            passes.append(("reward model", items))
        return passes

    def _updates(self) -> list[tuple[str, Items]]:
        """The moments of both models' optimizer steps."""
        c, moments, small = self._config, [], 0
        for _, use, work in self._learners():
            small = max(small, self._models.run(use, work, *self._batch, train=True).small)
        for name, use, work in self._learners():
            # Pretraining text brings the actor as many micro-batches again.
            several = 2 if name == "actor" and c.unsupervised_dataset_name else 1
            num_micro_batches = several * c.gradient_accumulation_steps
            for moment, items in self._moments(
                use, self._trained[name], work, self._batch, num_micro_batches, small
            ):
                moments.append((f"{name}, {moment}", items))
        return moments

    def _evaluation(self, rollout: RolloutBytes, left: int) -> list[tuple[str, Items]]:
        """Held-out prompts: the moving average generates from a second copy (with the one cache
        there is); then reference and reward model read the answers.
        """
        copy: Items = {}
        if self._config.enable_ema:
            whole = self._models.sizes(self._actor.frozen).total * self._dtype.itemsize
            copy = {"rollout copy": max(rollout.weights, whole // self._config.inference_tp_size)}
        own = self._rollout_items(rollout, stays=False)
        return [
            ("generation", summed(self._generation(rollout, left), copy)),
            *(
                (name, summed(items, copy, own))
                for name, items in self._frozen_passes(self._eval_batch, left)
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
