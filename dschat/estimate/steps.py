"""The memory of a step's modes on one device.

A step's configuration, the device and the number of processes come in; a ``StepPlan`` goes out.
Steps 1 and 2 are here, and what step 3 shares with them. It must not know how a plan is shown, nor
what to do where it does not fit.
"""

from dataclasses import replace

import torch

from dschat.checkpoint import MAX_FILE_BYTES
from dschat.config import CommonConfig, RewardConfig, SupervisedConfig
from dschat.estimate.activations import Work
from dschat.estimate.device import Device
from dschat.estimate.models import Models, Use
from dschat.estimate.modes import Holding, Items, Mode, StepPlan, fullest, summed
from dschat.estimate.zero import NOTHING, Held, Training, frozen_bytes, training_bytes
from dschat.runtime.deepspeed_engine import DTYPES, ZeroSettings

_REFERENCE = "reference weights"


class Step:
    """One step on one device: how its models lie, and what passes of theirs take."""

    def __init__(
        self, models: Models, device: Device, num_processes: int, config: CommonConfig
    ) -> None:
        self._models, self._device = models, device
        self._num_processes, self._config = num_processes, config
        name = config.training_dtype
        if name == "auto":
            name = "bf16" if device.on_gpu else "fp32"
        self._dtype: torch.dtype = DTYPES[name]

    def _zero(self, model: str = "") -> ZeroSettings:
        """What `deepspeed_setup.zero_settings` makes of the configuration, on the planned device
        instead of this one.
        """
        c = self._config
        return ZeroSettings(
            getattr(c, f"{model}_zero_stage" if model else "zero_stage"),
            self._dtype,
            offload_optimizer=c.offloads_optimizer(model),
            offload_parameters=c.offloads_parameters(model),
            max_grad_norm=c.max_grad_norm,
            overrides=c.deepspeed_overrides(model),
        )

    def _training(self, use: Use, zero: ZeroSettings) -> Training:
        s = self._models.sizes(use)
        args = (s.total, s.trained, s.largest, zero, self._num_processes, self._device.on_gpu)
        return training_bytes(*args)

    def _line(self, role: str, use: Use, zero: ZeroSettings) -> str:
        s = self._models.sizes(use)
        trained = f", {count(s.trained)} of them trained (LoRA)" if use.lora_dim else ""
        dtype = str(self._dtype).removeprefix("torch.")
        return f"{role}: {count(s.total)} parameters{trained}, {zero.describe()}, {dtype}"

    def _kept(self, small: int) -> int | None:
        """What stays of ``small`` bytes in freed small blocks: nothing on a GPU."""
        return None if self._device.on_gpu else small

    def _moments(
        self,
        use: Use,
        training: Training,
        work: Work,
        shape: tuple[int, int],
        num_micro_batches: int,
        small: int = 0,
    ) -> list[tuple[str, Items]]:
        """The moments of an optimizer step that may be its fullest, without what is there all the
        time. ``small``: bytes of freed small blocks that other passes have left.
        """
        run = self._models.run(use, work, *shape, train=True)
        kept = self._kept(max(small, run.small))
        several = num_micro_batches > 1
        activations, logits, gradients = run.peak(
            training.per_gradient, several and training.accumulates, kept
        )
        from_before = training.partition if several or training.reduces_early else 0
        backward = {
            "activations": activations,
            "logits": logits,
            "gradients": gradients + from_before,
            "buffers": training.backward + training.gathered,
        }
        moments = [("backward pass", backward)]
        for moment, (gradients, buffers) in (
            ("reduction", training.reduction),
            ("update", training.update),
        ):
            gradients = max(gradients, from_before)
            items = {"activations": kept or 0, "gradients": gradients, "buffers": buffers}
            moments.append((moment, items))
        return moments

    def _left(self, use: Use, training: Training, work: Work, shape: tuple[int, int]) -> int:
        """Bytes of small blocks that an optimizer step leaves behind: activations, gradients."""
        small = self._models.run(use, work, *shape, train=True).small
        return small + training.per_gradient * self._models.sizes(use).in_small

    def _forward(
        self, use: Use, gathered: int, work: Work, shape: tuple[int, int], left: int
    ) -> Items:
        """A pass without gradients; ``left`` as `_left` says."""
        run = self._models.run(use, work, *shape, train=False)
        activations, logits, _ = run.peak(0, False, self._kept(left))
        return {"activations": activations, "logits": logits, "buffers": gathered}

    def _finished(
        self,
        number: int,
        lines: list[str],
        held: Holding,
        modes: list[Mode],
        uses: list[Use],
        left: int,
    ) -> StepPlan:
        """Every mode with what is always there added; on a CPU host memory is the device's, and the
        models in ``uses`` are saved through it, a file at a time.
        """
        written = max(self._dtype.itemsize * self._models.sizes(use.frozen).total for use in uses)
        written = min(written, MAX_FILE_BYTES)
        always = {**held.device, "libraries": self._device.libraries}
        # One process of the run writes; the others' shares of host memory do for it too.
        host = {**held.host, "file being written": written // self._device.processes_here}
        host = {name: value for name, value in host.items() if value}
        if not self._device.on_gpu:
            always, host = summed(always, held.host), {}
            saving = {"file being written": written, "activations": self._kept(left) or 0}
            modes = [*modes, Mode("saving", saving)]
        modes = [replace(mode, items=summed(always, mode.items)) for mode in modes]
        config = self._config
        return StepPlan(number, config, self._device, self._num_processes, lines, modes, host)


class SupervisedStep(Step):
    """Steps 1 and 2: a policy or a reward model, and for a loss that holds the policy to it the
    reference.
    """

    def __init__(
        self, models: Models, device: Device, num_processes: int, config: SupervisedConfig
    ) -> None:
        super().__init__(models, device, num_processes, config)
        self._pairs = config if isinstance(config, RewardConfig) else None
        trains_policy = self._pairs is None or self._pairs.trains_policy
        self._use = Use(
            config.model_name_or_path,
            "--model_name_or_path",
            "lm" if trains_policy else "score",
            self._dtype,
            config.dropout,
            config.attn_implementation,
            config.trust_remote_code,
            config.gradient_checkpointing,
            config.lora_dim,
            tuple(config.lora_modules),
            config.only_optimize_lora,
        )

    def plan(self) -> StepPlan:
        """The step on one device."""
        c, zero, use = self._config, self._zero(), self._use
        training = self._training(use, zero)
        work: Work = "sft" if use.kind == "lm" else "value"
        rows = 1 if self._pairs is None else 2  # a pair is two sequences
        batch = (rows * c.per_device_train_batch_size, c.max_seq_len)
        moments = self._moments(use, training, work, batch, c.gradient_accumulation_steps)
        left = self._left(use, training, work, batch)
        shape = (rows * c.per_device_eval_batch_size, c.max_seq_len)
        evaluation = [("", self._forward(use, training.gathered, work, shape, left))]
        held, lines = trained_holding("model", training), [self._line("model", use, zero)]
        if self._pairs is not None and self._pairs.trains_policy:
            weights, gathered = self._reference(self._pairs, zero)
            held += Holding({_REFERENCE: weights.device}, {_REFERENCE: weights.host})
            lines.append(f"reference: {reference_of(self._pairs)}")
            if not self._pairs.precompute_ref_logprobs:
                moments += self._reference_pass(gathered, batch, left)
                evaluation += self._reference_pass(gathered, shape, left)
        return self._finished(
            1 if self._pairs is None else 2,
            lines,
            held,
            [fullest("training", moments), fullest("evaluation", evaluation)],
            [use],
            left,
        )

    def _reference(self, config: RewardConfig, zero: ZeroSettings) -> tuple[Held, int]:
        """Weights of the copy, where there is one, and what a pass of the reference gathers."""
        if not config.loads_reference:
            return NOTHING, self._training(self._use, zero).gathered
        total = self._models.sizes(self._use.frozen).total
        frozen = zero.frozen(config.offload_reference_model)
        return frozen_bytes(total, frozen, self._num_processes)

    def _reference_pass(
        self, gathered: int, shape: tuple[int, int], left: int
    ) -> list[tuple[str, Items]]:
        use = self._use.frozen
        blocks = 3 if self._pairs.loss == "kto" else 2  # mismatched answers besides
        shape = (shape[0] // 2 * blocks, shape[1])
        return [("reference", self._forward(use, gathered, "sft", shape, left))]


def reference_of(config: RewardConfig) -> str:
    """What serves as the reference, in words."""
    if config.loads_reference:
        return "a copy of the model"
    by = "its log-probs, computed before training"
    return by if config.precompute_ref_logprobs else "the model without adapters"


def trained_holding(name: str, t: Training) -> Holding:
    """What a trained model holds between passes."""
    optimizer = t.masters + t.moments
    parts = {f"{name} weights": t.weights, "optimizer states": optimizer, "gradients": t.gradients}
    device = {what: held.device for what, held in parts.items()}
    host = {what: held.host for what, held in parts.items()}
    return Holding({**device, "buffers": t.buffers}, host)


def count(number: int) -> str:
    """``6.658B`` for 6,658,473,984 parameters."""
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return str(number)
