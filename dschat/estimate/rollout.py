"""Estimates the memory of the actor's rollout form: weights, KV cache, work space."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from dschat.config import RLHFConfig
from dschat.estimate.models import Sizes
from dschat.estimate.result import Device
from dschat.hybrid.rollout_choice import RolloutChoice, rollout_choice
from dschat.hybrid.weight_stream import bucket_bytes
from dschat.inference import EngineConfig, UnsupportedModel, model_spec
from dschat.inference.hf_generator import MAX_ROWS
from dschat.inference.model.architectures import ModelSpec, check_shares
from dschat.inference.speculation import MAX_DRAFTED


class RolloutBytes(NamedTuple):
    """Bytes of one process on its device."""

    weights: int  # a copy for the rollout; 0 if it reads the training weights
    cache: int  # keys and values
    work: int  # space of a generation step, or of the weight refresh before it
    logits: int  # of the sequences that sample a token
    form: str  # a phrase for the report


@dataclass(frozen=True)
class RolloutEstimator:
    """Estimates the rollout form of an actor on a device.

    Attributes:
        model: the actor's transformers config.
        sizes: of the actor without adapters.
        num_adapters: elements of the adapters.
    """

    config: RLHFConfig
    model: PretrainedConfig
    sizes: Sizes
    num_adapters: int
    dtype: torch.dtype
    num_processes: int
    device: Device

    def estimate(self, held: int) -> RolloutBytes:
        """Memory of the rollout form, with ``held`` bytes on the device before the first rollout:
        the size of the cache depends on the free memory then.

        Raises:
            UserError: the run would refuse ``--rollout_layout``, ``--rollout_lora`` or
                ``--inference_tp_size``.
        """
        try:
            spec = model_spec(self.model) if self.config.enable_hybrid_engine else None
        except UnsupportedModel:
            spec = None
        return self._of_module() if spec is None else self._of_engine(spec, held)

    def _of_module(self) -> RolloutBytes:
        c, shape, size = self.config, self.sizes.shape, self.dtype.itemsize
        sharded = c.actor_zero_stage == 3
        rows = min(MAX_ROWS, c.samples_under_way * c.inference_tp_size)
        seq_len = c.max_prompt_seq_len + c.max_answer_seq_len
        per_token = 2 * shape.num_layers * shape.kv_width * size if shape else 0
        form = "an unsharded copy" if sharded else "training weights"
        return RolloutBytes(
            weights=size * self.sizes.total * sharded,
            cache=round(rows * seq_len * per_token),
            work=0,
            logits=self._sampling(rows, self.model.get_text_config().vocab_size),
            form=f"Hugging Face generate loop on {form}",
        )

    def _of_engine(self, spec: ModelSpec, held: int) -> RolloutBytes:
        c, device, tp = self.config, self.device, self.config.inference_tp_size
        check_shares(spec, tp)
        choice = self._choice()
        weights = self._copy(choice)
        engine = EngineConfig.of_rollout(c)
        seq_len = engine.seq_len(spec.max_positions)
        token_bytes = spec.token_bytes(tp, self.dtype.itemsize)
        free = max(0, device.memory - held) - weights
        captures = engine.captures(device.on_gpu)
        page = engine.tokens_per_page(seq_len, captures, token_bytes, free)
        page_bytes = page * token_bytes
        pages = max(engine.num_pages(seq_len, page, page_bytes, free), 1)
        drafted = 0 if c.speculate == "off" else MAX_DRAFTED
        source = "its own copy" if choice.layout == "copy" else "training weights"
        return RolloutBytes(
            weights=weights,
            cache=(pages + 1) * page_bytes,  # one page for rows that pad a captured batch
            work=max(self._step(spec, engine), self._refresh()),
            logits=self._sampling(engine.max_num_seqs + drafted, spec.vocab_size),
            form=(
                f"inference engine on {source}, TP {tp}, up to {engine.max_num_seqs} sequences of "
                f"{seq_len}"
            ),
        )

    def _choice(self) -> RolloutChoice:
        """What the run chooses; it looks at the training weights where this looks at the flags."""
        c, on_gpu = self.config, self.device.on_gpu
        sharded, has_adapters = c.actor_zero_stage == 3, bool(c.actor_lora_dim)
        is_elsewhere = on_gpu and c.offloads_parameters("actor")
        whole = not sharded or (self.num_processes == 1 and not is_elsewhere)
        return rollout_choice(
            c.rollout_layout,
            c.rollout_lora,
            has_adapters=has_adapters,
            frozen_base=has_adapters and c.only_optimize_lora,
            sharded=sharded,
            readable=whole and c.inference_tp_size == 1,
            on_cpu=not on_gpu,
        )

    def _copy(self, choice: RolloutChoice) -> int:
        """Bytes of the weights that the rollout keeps for itself."""
        size, tp, weights = self.dtype.itemsize, self.config.inference_tp_size, 0
        if choice.layout == "copy":
            weights = size * self.sizes.total // tp
            if self.sizes.tied and not self.device.on_gpu:
                weights += size * self.sizes.embedding // tp  # packing copies the tied head
        if self.config.actor_lora_dim and choice.lora == "side":
            weights += size * self.num_adapters // tp
        return weights

    def _step(self, spec: ModelSpec, engine: EngineConfig) -> int:
        """Bytes of the hidden states, projections and MLP of a layer."""
        c = self.config
        tokens = engine.batched_tokens(self.device.on_gpu)
        tokens = min(tokens, engine.max_num_seqs * c.max_prompt_seq_len)
        heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size
        inner = spec.intermediate_size * (2 if spec.gated else 1)
        sharded = (2 * heads + 2 * inner) // c.inference_tp_size
        return tokens * self.dtype.itemsize * (3 * spec.hidden_size + sharded)

    def _refresh(self) -> int:
        """Bytes of a bucket of gathered weights and its largest tensor."""
        if self.num_processes == 1 or self.config.actor_zero_stage != 3:
            return 0
        whole, largest = (self.dtype.itemsize * n for n in (self.sizes.total, self.sizes.largest))
        return max(min(bucket_bytes(self.device.kind), whole), largest) + largest

    def _sampling(self, rows: int, vocab_size: int) -> int:
        """Bytes of a step's logits, of their fp32 copy if they are 16-bit, and of the
        probabilities.
        """
        c, size = self.config, self.dtype.itemsize
        copies = 1 + (size != 4) + (c.min_answer_seq_len > 0)
        if c.top_k or c.top_p < 1 or c.min_p:
            copies += 3  # the filtered and the sorted logits, and their ids
        return rows * vocab_size * (size + 4 * copies)
