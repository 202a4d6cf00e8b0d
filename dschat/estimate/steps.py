"""Estimates the memory of steps 1 and 2 on one device, in every mode; the base class for step 3."""

import math
from dataclasses import replace
from typing import Generic, TypeVar

import torch

from dschat.checkpoint import MAX_FILE_BYTES
from dschat.config import CommonConfig, RewardConfig, SupervisedConfig
from dschat.config.fields import AUTO
from dschat.estimate.activations import Batch, Work
from dschat.estimate.device import Device
from dschat.estimate.models import Models, Use
from dschat.estimate.modes import Holding, Items, Mode, StepEstimate, fullest, summed
from dschat.estimate.zero import NOTHING, Held, Training, frozen_bytes, training_bytes
from dschat.runtime.deepspeed_engine import DTYPES, ZeroSettings
from dschat.runtime.token_budget import FIRST_TRIAL_TOKENS

_REFERENCE = "reference weights"
Config = TypeVar("Config", bound=CommonConfig)


class StepEstimator(Generic[Config]):
    """Estimates one step on one device: memory of its models and of their passes."""

    def __init__(self, models: Models, device: Device, num_processes: int, config: Config) -> None:
        self._models, self._device = models, device
        self._num_processes, self._config = num_processes, config
        name = config.training_dtype
        if name == "auto":
            name = "bf16" if device.on_gpu else "fp32"
        self._dtype: torch.dtype = DTYPES[name]

    def _zero(self, model: str = "") -> ZeroSettings:
        """As `dschat.runtime.deepspeed_engine.zero_settings`, for the device of the estimate."""
        return ZeroSettings.of(self._config, model, self._dtype)

    def _training(self, use: Use, zero: ZeroSettings) -> Training:
        s = self._models.sizes(use)
        args = (s.total, s.trained, s.largest, zero, self._num_processes, self._device.on_gpu)
        return training_bytes(*args)

    def _line(self, role: str, use: Use, zero: ZeroSettings) -> str:
        s = self._models.sizes(use)
        trained = f", {count(s.trained)} of them trained (LoRA)" if use.lora_dim else ""
        dtype = str(self._dtype).removeprefix("torch.")
        return f"{role}: {count(s.total)} parameters{trained}, {zero.describe()}, {dtype}"

    def _micro_batch(self, rows: Batch, step_rows: int, share: float = 1.0) -> tuple[Batch, int]:
        """The largest micro-batch of an optimizer step of ``step_rows`` sequences, and how many
        there are: ``rows``, or as many of them as hold ``share`` of the token budget. Where that is
        auto, the smallest that it tries: more are taken only where they fit.
        """
        budget = self._config.max_tokens_per_micro_batch
        if budget:
            tokens = FIRST_TRIAL_TOKENS if budget == AUTO else int(budget)
            num_rows = max(1, math.ceil(share * tokens / rows.seq_len))
            rows = rows._replace(num_rows=min(num_rows, step_rows))
        return rows, math.ceil(step_rows / rows.num_rows)

    def _retained(self, small: int) -> int | None:
        """Bytes that malloc retains of ``small`` bytes in freed small blocks; None on a GPU."""
        return None if self._device.on_gpu else small

    def _moments(
        self,
        use: Use,
        training: Training,
        work: Work,
        batch: Batch,
        num_micro_batches: int,
        small: int = 0,
    ) -> list[tuple[str, Items]]:
        """The moments of an optimizer step that may be its peak, without persistent memory.

        ``small``: bytes of freed small blocks that malloc retains from other passes.
        """
        run = self._models.run(use, work, batch, train=True)
        retained = self._retained(max(small, run.small))
        several = num_micro_batches > 1
        activations, logits, gradients = run.peak(
            training.per_gradient, several and training.accumulates, retained
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
            items = {"activations": retained or 0, "gradients": gradients, "buffers": buffers}
            moments.append((moment, items))
        return moments

    def _leftover(self, use: Use, training: Training, work: Work, batch: Batch) -> int:
        """Bytes of small blocks that malloc retains after an optimizer step."""
        small = self._models.run(use, work, batch, train=True).small
        return small + training.per_gradient * self._models.sizes(use).in_small

    def _forward(self, use: Use, gathered: int, work: Work, batch: Batch, leftover: int) -> Items:
        """A pass without gradients; ``leftover``: see `_leftover`."""
        run = self._models.run(use, work, batch, train=False)
        activations, logits, _ = run.peak(0, False, self._retained(leftover))
        return {"activations": activations, "logits": logits, "buffers": gathered}

    def _finished(
        self,
        number: int,
        lines: list[str],
        held: Holding,
        modes: list[Mode],
        uses: list[Use],
        leftover: int,
    ) -> StepEstimate:
        """The estimate: every mode with the persistent memory added.

        On a CPU host memory is device memory, and saving the models in ``uses``, one file at a
        time, is a mode of its own: a file holds copies, and the small ones reuse blocks that malloc
        retains.
        """
        sizes = max((self._models.sizes(use.frozen) for use in uses), key=lambda s: s.total)
        written = min(self._dtype.itemsize * sizes.total, MAX_FILE_BYTES)
        persistent = {**held.device, "libraries": self._device.libraries}
        # One process writes; it may use the host memory of all processes.
        host = {**held.host, "file being written": written // self._device.processes_here}
        host = {name: value for name, value in host.items() if value}
        if not self._device.on_gpu:
            persistent, host = summed(persistent, held.host), {}
            retained = self._retained(leftover) or 0
            reused = min(retained, written * sizes.in_small // sizes.total)
            saving = {"file being written": written - reused, "activations": retained}
            modes = [*modes, Mode("saving", saving)]
        modes = [replace(mode, items=summed(persistent, mode.items)) for mode in modes]
        config = self._config
        return StepEstimate(number, config, self._device, self._num_processes, lines, modes, host)


class SupervisedEstimator(StepEstimator[SupervisedConfig]):
    """Estimates steps 1 and 2: a policy or a reward model, and a reference if the loss needs it."""

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
            config.packing,
        )

    def estimate(self) -> StepEstimate:
        """The memory of the step on one device."""
        c, zero, use = self._config, self._zero(), self._use
        training = self._training(use, zero)
        work: Work = "sft" if use.kind == "lm" else "value"
        rows = 1 if self._pairs is None else 2  # a pair is two sequences
        # KTO's mismatched answers, a third of a row's tokens, have a forward of their own.
        share = 2 / 3 if self._pairs is not None and self._pairs.loss == "kto" else 1.0
        columns = c.max_seq_len, 1 if work == "value" else c.max_seq_len - 1
        batch = Batch(rows * c.per_device_train_batch_size, *columns)
        batch, num_micro_batches = self._micro_batch(batch, rows * c.global_batch_size(1), share)
        moments = self._moments(use, training, work, batch, num_micro_batches)
        leftover = self._leftover(use, training, work, batch)
        held_out = Batch(rows * c.per_device_eval_batch_size, *columns)
        held_out, _ = self._micro_batch(held_out, held_out.num_rows, share)
        evaluation = [("", self._forward(use, training.gathered, work, held_out, leftover))]
        held, lines = trained_holding("model", training), [self._line("model", use, zero)]
        if self._pairs is not None and self._pairs.trains_policy:
            weights, gathered = self._reference(self._pairs, zero)
            held += Holding({_REFERENCE: weights.device}, {_REFERENCE: weights.host})
            lines.append(f"reference: {reference_of(self._pairs)}")
            if not self._pairs.precompute_ref_logprobs:
                moments.append(self._reference_pass(gathered, batch, leftover))
                evaluation.append(self._reference_pass(gathered, held_out, leftover))
        return self._finished(
            1 if self._pairs is None else 2,
            lines,
            held,
            [fullest("training", moments), fullest("evaluation", evaluation)],
            [use],
            leftover,
        )

    def _reference(self, config: RewardConfig, zero: ZeroSettings) -> tuple[Held, int]:
        """Weights of the reference's copy, if any, and the bytes gathered by its pass."""
        if not config.loads_reference:
            return NOTHING, self._training(self._use, zero).gathered
        total = self._models.sizes(self._use.frozen).total
        frozen = zero.frozen(config.offload_reference_model)
        return frozen_bytes(total, frozen, self._num_processes)

    def _reference_pass(self, gathered: int, batch: Batch, leftover: int) -> tuple[str, Items]:
        return "reference", self._forward(self._use.frozen, gathered, "sft", batch, leftover)


def reference_of(config: RewardConfig) -> str:
    """What serves as the reference, for the report."""
    if config.loads_reference:
        return "a copy of the model"
    if config.precompute_ref_logprobs:
        return "its log-probs, computed before training"
    return "the model without adapters"


def trained_holding(name: str, t: Training) -> Holding:
    """Memory of a trained model between passes."""
    optimizer = t.masters + t.moments
    parts = {f"{name} weights": t.weights, "optimizer states": optimizer, "gradients": t.gradients}
    device = {item: held.device for item, held in parts.items()}
    host = {item: held.host for item, held in parts.items()}
    return Holding({**device, "buffers": t.buffers}, host)


def count(number: int) -> str:
    """``6.658B`` for 6,658,473,984 parameters."""
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return str(number)
