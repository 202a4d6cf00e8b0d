"""Estimates the memory of step 3 on one device, in rollout, scoring and training.

The actor exists in its training and its rollout form; critic, reference, reward model
and teacher are optional.
"""

from collections.abc import Sequence
from dataclasses import replace

from dschat.config import RLHFConfig
from dschat.estimate.activations import Batch
from dschat.estimate.memory import (
    Items,
    Learner,
    Model,
    Moments,
    RolloutBytes,
    StepEstimate,
    StepEstimator,
    held_by,
    token_budget,
)
from dschat.estimate.models import Sizes, Use
from dschat.hybrid import RolloutChoice, rollout_choice, runs_module
from dschat.hybrid.weight_stream import bucket_bytes
from dschat.inference import EngineConfig, UnsupportedModel, model_spec
from dschat.inference.generators.hf_generator import max_rows
from dschat.inference.model.spec import ModelSpec, check_shares
from dschat.inference.model.states import state_bytes


class RLHFEstimator(StepEstimator[RLHFConfig]):
    """Estimates step 3."""

    def estimate(self) -> StepEstimate:
        """The memory of the step on one device.

        Raises:
            UserError: the run would refuse ``--rollout_layout``, ``--rollout_lora`` or
                ``--inference_tp_size``.
        """
        c, learners = self._config, self._learners()
        actor, frozen = learners[0], self._frozen_models(learners[0])
        present = [*learners, *frozen.values()]
        on_device, on_host = held_by(present)
        if c.enable_ema:
            on_device["moving average"] = 4 * -(-actor.sizes.trained // self._num_processes)
        # The first optimizer step allocates Adam's moments, after the first rollout.
        later = sum(learner.training.moments.device for learner in learners)
        rollout = self._rollout(actor, on_device.total() + self._device.libraries - later)
        on_device.update(self._rollout_items(rollout, stays=True))

        columns = c.longest_row, c.max_answer_seq_len
        rows = Batch(c.per_device_training_batch_size, *columns)
        batch, num_micro_batches = self._micro_batch(rows, c.mini_batch_size(1))
        batch = self._with_shared_prompts(batch)
        on_host["activations"] = self._kept_on_host(learners, batch)
        scored = self._with_shared_prompts(self._micro_batch(rows, c.rollout_samples(1))[0])

        # A frozen base serves as the reference, with the adapters off.
        readers: dict[str, Model] = {"reference": actor} if c.needs_reference else {}
        readers |= frozen
        scoring = [(model.name, self._forward(model, scored)) for model in learners]
        last = scored._replace(num_read=1)  # a reward model reads the last token only
        for name, model in readers.items():
            read = last if model.work == "value" else scored
            scoring.append((name, self._forward(model, read)))
        generation = self._rollout_items(rollout, stays=False) + Items(activations=rollout.work)
        if c.enable_ema:  # evaluations generate from a copy of their own, with the same cache
            whole = self._models.sizes(actor.use.frozen).total * self._dtype.itemsize
            generation["rollout copy"] += max(rollout.weights, whole // c.inference_tp_size)
        training: Moments = []
        for model in learners:
            # Pretraining text doubles the actor's micro-batches.
            count = num_micro_batches * (2 if model is actor and c.unsupervised_dataset_name else 1)
            moments = self._moments(model, batch, count)
            training += [(f"{model.name}, {moment}", items) for moment, items in moments]
        modes = {
            "rollout": [("", self._without_states(generation, learners))],
            "scoring": scoring,
            "training": training,
        }
        return self._finished(3, on_device, on_host, modes, present, rollout)

    # -- models ------------------------------------------------------------------------------------

    def _sizes(self, use: Use) -> Sizes:
        sizes = super()._sizes(use)
        if self._config.share_base and use.kind == "score":  # the rest is the actor's
            return replace(sizes, total=sizes.trained, linear=(0, 0))
        return sizes

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
        if c.needs_reference and not actor.use.only_adapters:
            use = actor.use.frozen
            models["reference"] = self._frozen("reference", use, "policy", actor.zero)
        if name := c.reward_model_name_or_path:
            use, flag = self._use("critic_", "score"), "--reward_model_name_or_path"
            use = use.reading if c.share_base else use.frozen
            use, zero = replace(use, name=name, flag=flag), self._zero("critic")
            models["reward model"] = self._frozen("reward", use, "value", zero)
        if name := c.teacher_model_name_or_path:
            use = replace(actor.use.frozen, name=name, flag="--teacher_model_name_or_path")
            models["teacher"] = self._frozen("teacher", use, "policy", actor.zero)
        return models

    # -- the rollout -------------------------------------------------------------------------------

    def _rollout(self, actor: Learner, held: int) -> RolloutBytes:
        """Memory of the actor's rollout form, with ``held`` bytes on the device before the first
        rollout: the size of the cache depends on the free memory then.
        """
        c, tp = self._config, self._config.inference_tp_size
        if c.rollout_backend == "vllm" and (sizes := self._models.attention(actor.use)):
            weights = self._copy(RolloutChoice("copy", "merge"), actor)
            return self._in_engine(actor, sizes, held, weights, f"vLLM on its own copy, TP {tp}")
        try:
            spec = model_spec(self._models.config(actor.use)) if c.enable_hybrid_engine else None
        except UnsupportedModel:
            spec = None
        quantized = bool(actor.zero.weight_bits)
        if spec is None or runs_module(quantized, c.rollout_layout, c.rollout_lora, tp):
            return self._in_module(actor, held)
        spec = spec.in_dtype(self._dtype)
        check_shares(spec, tp)
        choice = planned_choice(c, self._num_processes, self._device.on_gpu)
        source = "its own copy" if choice.layout == "copy" else "training weights"
        form = f"inference engine on {source}, TP {tp}"
        return self._in_engine(actor, spec, held, self._copy(choice, actor), form)

    def _in_module(self, actor: Learner, held: int) -> RolloutBytes:
        """Transformers' module, in the engine where that can follow its attention."""
        c, shape, size = self._config, actor.sizes.shape, self._dtype.itemsize
        sharded, base = c.actor_zero_stage == 3, self._models.sizes(actor.use.frozen)
        form = f"transformers' module on {'an unsharded copy' if sharded else 'training weights'}"
        whole = size * base.total
        spec = self._models.attention(actor.use) if c.enable_hybrid_engine else None
        if spec is not None:
            weights = whole * sharded
            if not self._device.on_gpu:  # packed copies of linear layers that are not quantized
                weights += whole - size * base.linear[0] * bool(actor.zero.weight_bits)
            return self._in_engine(actor, spec, held, weights, f"inference engine with {form}")
        rows = min(c.samples_under_way, max_rows(c.longest_row))
        text = self._models.config(actor.use).get_text_config()
        per_token = 2 * shape.num_layers * shape.kv_width * size if shape else 0
        return RolloutBytes(
            weights=whole * sharded,
            cache=round(rows * c.longest_row * per_token),
            work=self._sampling(rows, text.vocab_size),
            in_engine=False,
            form=form,
        )

    def _in_engine(
        self, actor: Learner, spec: ModelSpec, held: int, weights: int, form: str
    ) -> RolloutBytes:
        c, device, tp = self._config, self._device, self._config.inference_tp_size
        engine = EngineConfig.of_rollout(c)
        seq_len = engine.seq_len(spec.max_positions)
        token_bytes = spec.token_bytes(tp, self._dtype.itemsize)
        captures = engine.captures(device.on_gpu)
        states, copied = state_bytes(spec.states, engine.max_num_seqs, captures)
        free = max(0, device.memory - held) - weights - states - copied
        page = engine.tokens_per_page(seq_len, captures, token_bytes, free)
        page_bytes = page * token_bytes
        pages = max(engine.num_pages(seq_len, page, page_bytes, free), 1)
        return RolloutBytes(
            weights=weights,
            # One page more, for rows that pad a captured batch.
            cache=(pages + 1) * page_bytes + states,
            work=max(self._step(spec, engine) + copied, self._refresh(actor)),
            in_engine=True,
            form=f"{form}, up to {engine.max_num_seqs} sequences of {seq_len}",
        )

    def _copy(self, choice: RolloutChoice, actor: Learner) -> int:
        """Bytes of the weights that the rollout keeps for itself."""
        size, tp, weights = self._dtype.itemsize, self._config.inference_tp_size, 0
        base = self._models.sizes(actor.use.frozen)
        if choice.layout == "copy":
            weights = size * base.total // tp
        if actor.use.lora_dim and choice.lora == "side":
            weights += size * actor.sizes.trained // tp
        return weights

    def _step(self, spec: ModelSpec, engine: EngineConfig) -> int:
        """Bytes of the hidden states, projections and MLP of a layer, and of the logits."""
        c = self._config
        tokens = engine.batched_tokens(self._device.on_gpu)
        tokens = min(tokens, engine.max_num_seqs * c.max_prompt_seq_len)
        heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size
        inner = spec.intermediate_size * (2 if spec.gated else 1)
        sharded = (2 * heads + 2 * inner) // c.inference_tp_size
        hidden = tokens * self._dtype.itemsize * (3 * spec.hidden_size + sharded)
        return hidden + self._sampling(engine.max_num_seqs, spec.vocab_size)

    def _refresh(self, actor: Learner) -> int:
        """Bytes of a bucket of gathered weights and its largest tensor."""
        if self._num_processes == 1 or self._config.actor_zero_stage != 3:
            return 0
        base, size = self._models.sizes(actor.use.frozen), self._dtype.itemsize
        whole, largest = size * base.total, size * base.largest
        return max(min(bucket_bytes(self._device.kind), whole), largest) + largest

    def _sampling(self, rows: int, vocab_size: int) -> int:
        """Bytes of a step's logits, of their fp32 copy if they are 16-bit, and of the
        probabilities.
        """
        c, size = self._config, self._dtype.itemsize
        copies = 1 + (size != 4) + (c.min_answer_seq_len > 0)
        if c.top_k or c.top_p < 1 or c.min_p:
            copies += 3  # the filtered and the sorted logits, and their ids
        return rows * vocab_size * (size + 4 * copies)

    def _rollout_items(self, rollout: RolloutBytes, stays: bool) -> Items:
        """The rollout's weights and cache, as far as they stay or are freed after a rollout."""
        c, items = self._config, Items()
        if c.unpin_actor_parameters != stays:
            items["rollout copy"] = rollout.weights
        if c.release_inference_cache != stays:
            items["KV cache"] = rollout.cache
        return items

    # -- modes -------------------------------------------------------------------------------------

    def _with_shared_prompts(self, batch: Batch) -> Batch:
        """``batch`` where a step has all answers to its prompts, and rows, not tokens, fill it."""
        c, rows = self._config, batch.num_rows
        samples = c.num_samples_per_prompt
        if samples == 1 or token_budget(c) or c.mini_batch_size(1) % samples:
            return batch
        # A micro-batch may have the last answers to one prompt and the first ones to another.
        straddles = bool(rows % samples and samples % rows)
        prompts = min(rows, -(-rows // samples) + straddles)
        return batch._replace(num_prompts=prompts, prompt_len=c.max_prompt_seq_len)

    def _without_states(self, generation: Items, learners: Sequence[Learner]) -> Items:
        """``generation``, less the optimizer states that are moved away meanwhile."""
        items = generation.copy()
        if self._config.offloads("rollout") and self._device.on_gpu:
            for learner in learners:
                states = learner.training.moments + learner.training.masters
                items["optimizer states"] -= states.device
        return items


def planned_choice(c: RLHFConfig, num_processes: int, on_gpu: bool) -> RolloutChoice:
    """What the run chooses; it looks at the training weights where this looks at the flags."""
    sharded, has_adapters = c.actor_zero_stage == 3, bool(c.actor_lora_dim)
    is_elsewhere = on_gpu and c.offloads_parameters("actor")
    whole = not sharded or (num_processes == 1 and not is_elsewhere)
    return rollout_choice(
        c.rollout_layout,
        c.rollout_lora,
        has_adapters=has_adapters,
        frozen_base=has_adapters and c.only_optimize_lora,
        sharded=sharded,
        readable=whole and c.inference_tp_size == 1,
        on_cpu=not on_gpu,
    )
