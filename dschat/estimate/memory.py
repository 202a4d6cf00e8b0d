"""Estimates the memory of steps 1 and 2 on one device, in every mode; the base class for step 3."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from dschat.config import CommonConfig, RewardConfig, SupervisedConfig, UserError
from dschat.config.fields import AUTO
from dschat.estimate.activations import Batch, Work
from dschat.estimate.devices import Device
from dschat.estimate.models import Models, Sizes, Use
from dschat.estimate.zero import Held, Training, frozen_bytes, training_bytes
from dschat.observability.flops import ModelShape
from dschat.runtime.deepspeed_engine import ZeroSettings, dtype_on
from dschat.runtime.token_budget import FIRST_TRIAL_TOKENS

Config = TypeVar("Config", bound=CommonConfig)
Items = Counter[str]  # item -> bytes
Moments = list[tuple[str, Items]]


@dataclass(frozen=True)
class Mode:
    """Memory of one device at the peak of a mode."""

    name: str
    items: Items
    moment: str = ""  # of the peak, if the mode has several moments

    @property
    def total(self) -> int:
        return self.items.total()


@dataclass(frozen=True)
class Model:
    """A model of a step. ``held``: memory between passes, by item; ``gathered``: bytes that a pass
    gathers.
    """

    name: str
    use: Use
    sizes: Sizes
    work: Work
    zero: ZeroSettings
    held: dict[str, Held]
    gathered: int

    @property
    def num_bytes(self) -> int:
        """Of its weights."""
        return self.use.dtype.itemsize * self.sizes.total

    @property
    def shape(self) -> ModelShape:
        """For FLOPs. Raises ``UserError`` where they are not known."""
        if self.sizes.shape is None:
            raise UserError(f"FLOPs of {self.use.flag} {self.use.name} are not known")
        return self.sizes.shape


@dataclass(frozen=True)
class Learner(Model):
    """A model that is trained."""

    training: Training


class RolloutBytes(NamedTuple):
    """Bytes of the actor's rollout form in one process, on its device."""

    weights: int  # a copy for the rollout; 0 if it reads the training weights
    cache: int  # keys and values
    work: int  # space and logits of a generation step, or space of the weight refresh before it
    in_engine: bool  # not by `generate` of transformers
    form: str  # a phrase for the report


@dataclass(frozen=True)
class StepEstimate:
    """Memory of a step on one device. ``host``: bytes of host memory by item; ``present``: the
    models that are loaded, the trained ones first; ``rollout``: of step 3.
    """

    number: int
    config: CommonConfig
    device: Device
    num_processes: int
    models: list[str]  # one line per model
    modes: list[Mode]
    host: Items
    present: Sequence[Model] = ()
    rollout: RolloutBytes | None = None

    @property
    def peak(self) -> Mode:
        return max(self.modes, key=lambda mode: mode.total)

    @property
    def fits(self) -> bool:
        """Whether it fits into device and host memory."""
        on_host = self.device.host_memory is None or self.host.total() <= self.device.host_memory
        return on_host and self.peak.total <= self.device.memory


# On a CPU, of the activations: what a micro-batch of other lengths leaves unused between the blocks
# that malloc keeps. Measured on SmolLM2 with chats: 0.6 (PPO) to 0.8 (reward model); 0 where all
# rows are equally long.
HOLES = 0.8


class StepEstimator(Generic[Config]):
    """Estimates one step on one device: memory of its models and of their passes."""

    def __init__(self, models: Models, device: Device, num_processes: int, config: Config) -> None:
        self._models, self._device = models, device
        self._num_processes, self._config = num_processes, config
        self._dtype = dtype_on(config.training_dtype, device.on_gpu)

    # -- models ------------------------------------------------------------------------------------

    def _use(self, prefix: str, kind: Literal["lm", "score"]) -> Use:
        """The checkpoint of the flags with ``prefix``, and its settings in training."""
        c: Any = self._config

        def setting(name: str) -> Any:
            return getattr(c, prefix + name)

        return Use(
            setting("model_name_or_path"),
            f"--{prefix}model_name_or_path",
            kind,
            self._dtype,
            setting("dropout") if isinstance(c, SupervisedConfig) else setting("dropout") or 0.0,
            c.attn_implementation,
            c.trust_remote_code,
            setting("gradient_checkpointing"),
            setting("lora_dim"),
            tuple(setting("lora_modules")),
            c.only_optimize_lora,
            c.packing,
            self._device.on_gpu and c.offloads("activations"),
        )

    def _zero(self, model: str) -> ZeroSettings:
        return ZeroSettings.of(self._config, model, self._dtype)

    def _sizes(self, use: Use) -> Sizes:
        """The sizes of what is loaded for ``use``."""
        return self._models.sizes(use)

    def _learner(self, name: str, use: Use, work: Work, zero: ZeroSettings) -> Learner:
        sizes, args = self._sizes(use), (zero, self._num_processes, self._device.on_gpu)
        training = training_bytes(sizes.total, sizes.trained, sizes.largest, *args, sizes.linear)
        held = {
            f"{name} weights": training.weights,
            "optimizer states": training.masters + training.moments,
            "gradients": training.gradients,
            "buffers": Held(training.buffers),
        }
        return Learner(name, use, sizes, work, zero, held, training.gathered, training)

    def _frozen(self, name: str, use: Use, work: Work, zero: ZeroSettings) -> Model:
        """A frozen model beside one that is trained with ``zero``."""
        zero, sizes = zero.frozen(self._config, name), self._sizes(use)
        weights, gathered = frozen_bytes(sizes.total, zero, self._num_processes, sizes.linear)
        return Model(name, use, sizes, work, zero, {f"{name} weights": weights}, gathered)

    def _line(self, model: Model) -> str:
        sizes = model.sizes
        trained = f", {sizes.trained:,} of them trained" * (0 < sizes.trained < sizes.total)
        how = f"{model.zero.describe()}, {str(self._dtype).removeprefix('torch.')}"
        return f"{model.name}: {sizes.total:,} parameters{trained}, {how}"

    # -- passes ------------------------------------------------------------------------------------

    def _micro_batch(self, rows: Batch, step_rows: int) -> tuple[Batch, int]:
        """The largest micro-batch of an optimizer step of ``step_rows`` sequences, and how many
        there are: ``rows``, or as many of them as hold the token budget. Where that is auto, the
        smallest that it tries: more are taken only where they fit. With sequence parallelism, what
        a rank computes of them.
        """
        ranks = self._config.sequence_parallel_size
        if tokens := token_budget(self._config):
            num_rows = max(1, math.ceil(tokens * ranks / rows.seq_len))
            rows = rows._replace(num_rows=min(num_rows, step_rows))
        count = math.ceil(step_rows / rows.num_rows) * ranks  # micro-batches of each rank in turn
        lengths = {n: -(-getattr(rows, n) // ranks) for n in ("seq_len", "num_read", "prompt_len")}
        return rows._replace(**lengths), count

    def _moments(self, model: Learner, batch: Batch, num_micro_batches: int) -> Moments:
        """The moments of an optimizer step that may be its peak, without persistent memory."""
        training, several = model.training, num_micro_batches > 1
        from_before = training.partition if several or training.reduces_early else 0
        backward = Items(
            activations=self._models.run(model.use, model.work, batch, train=True),
            gradients=training.per_gradient * model.sizes.trained + from_before,
            buffers=training.backward + training.gathered,
        )
        gradients, space = training.update
        update = Items(buffers=space, gradients=max(gradients, from_before))
        return [("backward pass", backward), ("update", update)]

    def _kept_on_host(self, learners: Sequence[Learner], batch: Batch) -> int:
        """Bytes of host memory for inputs of layers (``--offload activations``), on a GPU."""
        token_bytes = [
            learner.shape.num_layers * learner.shape.hidden * self._dtype.itemsize
            for learner in learners
            if learner.use.gradient_checkpointing
            and learner.use.activations_on_host
            and learner.sizes.shape is not None
        ]
        return batch.num_rows * batch.seq_len * max(token_bytes, default=0)

    def _forward(self, model: Model, batch: Batch) -> Items:
        """A pass without gradients."""
        activations = self._models.run(model.use, model.work, batch, train=False)
        return Items(activations=activations, buffers=model.gathered)

    # -- the result --------------------------------------------------------------------------------

    def _finished(
        self,
        number: int,
        on_device: Items,
        on_host: Items,
        modes: dict[str, Moments],
        present: Sequence[Model],
        rollout: RolloutBytes | None = None,
    ) -> StepEstimate:
        """The estimate: every mode at its fullest moment, with what is held ``on_device`` between
        passes added.

        On a CPU host memory is device memory, and malloc keeps the largest activations in all
        modes, and `HOLES` between blocks of other sizes.
        """
        on_device["libraries"] = self._device.libraries
        if not self._device.on_gpu:
            moments = [items for mode in modes.values() for _, items in mode]
            most = max(items["activations"] for items in moments)
            for items in moments:
                items["activations"] = most
            on_device, on_host = on_device + on_host, Items()
            on_device["kept by malloc"] = round(HOLES * most)
        every = [
            max((Mode(name, on_device + items, m) for m, items in moments), key=lambda m: m.total)
            for name, moments in modes.items()
        ]
        where = self._config, self._device, self._num_processes
        lines = [self._line(model) for model in present]
        lines += [f"rollout: {rollout.form}"] if rollout else []
        return StepEstimate(number, *where, lines, every, +on_host, present, rollout)


class SupervisedEstimator(StepEstimator[SupervisedConfig]):
    """Estimates steps 1 and 2: a policy or a reward model, and a reference if the loss needs it."""

    def estimate(self) -> StepEstimate:
        """The memory of the step on one device."""
        c = self._config
        pairs = c if isinstance(c, RewardConfig) else None
        is_policy = pairs is None or pairs.trains_policy
        use = self._use("", "lm" if is_policy else "score")
        model = self._learner("model", use, "sft" if is_policy else "value", self._zero(""))
        rows = 1 if pairs is None else 2  # a pair is two sequences
        columns = c.max_seq_len, c.max_seq_len - 1 if is_policy else 1
        batch = Batch(rows * c.per_device_train_batch_size, *columns)
        batch, num_micro_batches = self._micro_batch(batch, rows * c.global_batch_size(1))
        moments = self._moments(model, batch, num_micro_batches)
        present: list[Model] = [model]
        if pairs is not None and is_policy:
            reference: Model = model
            if pairs.loads_reference:
                reference = self._frozen("reference", use.frozen, "sft", model.zero)
                present.append(reference)
            if not pairs.precompute_ref_logprobs:
                moments.append(("reference", self._forward(reference, batch)))
        on_device, on_host = held_by(present)
        on_host["activations"] = self._kept_on_host([model], batch)
        number = 1 if pairs is None else 2
        return self._finished(number, on_device, on_host, {"training": moments}, present)


def token_budget(config: CommonConfig) -> int:
    """Tokens of a micro-batch, by its flag: if that is auto, of the first trial; 0 without it."""
    budget = config.max_tokens_per_micro_batch
    return FIRST_TRIAL_TOKENS if budget == AUTO else int(budget)


def held_by(models: Sequence[Model]) -> tuple[Items, Items]:
    """Memory of ``models`` between passes: on the device, in host memory."""
    device, host = Items(), Items()
    for model in models:
        for item, held in model.held.items():
            device[item] += held.device
            host[item] += held.host
    return device, host
