"""Estimates the memory of the actor's rollout form: weights, KV cache, work space.

Layout and LoRA form are those of the run, `dschat.hybrid.rollout_choice`. The choice of the form is
repeated from `dschat.hybrid.rollout_form`.
"""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from dschat.config import RLHFConfig
from dschat.estimate.device import Device
from dschat.estimate.models import Sizes
from dschat.hybrid.rollout_choice import RolloutChoice, rollout_choice
from dschat.inference import UnsupportedModel, model_spec
from dschat.inference.engine_config import EngineConfig
from dschat.observability.flops import shape_of

# The values of `dschat.hybrid.rollout_form` and `dschat.hybrid.weight_stream`.
STAGING = {"cuda": 256 * 2**20, "cpu": 48 * 2**20}  # bytes of a bucket of gathered weights
GENERATE_ROWS = 256  # that the Hugging Face loop decodes together


@dataclass(frozen=True)
class RolloutBytes:
    """Bytes of one process on its device.

    Attributes:
        weights: a copy for the rollout; 0 if it reads the training weights.
        cache: keys and values.
        work: work space of a generation step, or of the weight refresh before it.
        logits: of the sequences that sample a token.
        form: a phrase for the report.
    """

    weights: int
    cache: int
    work: int
    logits: int
    form: str


def rollout_bytes(
    config: RLHFConfig,
    model: PretrainedConfig,
    sizes: Sizes,
    num_adapters: int,
    dtype: torch.dtype,
    num_processes: int,
    device: Device,
    held: int,
) -> RolloutBytes:
    """Memory of the rollout form.

    Args:
        model: the actor's transformers config.
        sizes: of the actor without adapters.
        num_adapters: elements of the adapters.
        held: bytes on the device before the first rollout. The cache size depends on the free
            memory then.

    Raises:
        UserError: ``--rollout_layout`` or ``--rollout_lora`` asks for what is not possible.
    """
    try:
        spec = model_spec(model) if config.enable_hybrid_engine else None
    except UnsupportedModel:
        spec = None
    tp, size = config.inference_tp_size, dtype.itemsize
    free = max(0, device.memory - held)
    engine = EngineConfig.of_rollout(config)
    num_seqs, seq_len = engine.max_num_seqs, engine.seq_len(None)
    shape = shape_of(model)
    whole = size * sizes.total
    if spec is None:
        sharded = config.actor_zero_stage == 3
        per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * size
        rows = min(GENERATE_ROWS, config.rollout_samples(1) * tp)
        logits = _sampling(rows, shape.vocab, size, config)
        form = "an unsharded copy" if sharded else "training weights"
        form = f"Hugging Face generate loop on {form}"
        return RolloutBytes(whole * sharded, rows * seq_len * per_token, 0, logits, form)

    choice = _choice(config, num_processes, device)
    is_copy = choice.layout == "copy"
    weights = whole // tp if is_copy else 0
    if is_copy and sizes.tied and not device.on_gpu:
        weights += size * sizes.embedding // tp  # packing copies the tied head
    if config.actor_lora_dim and choice.lora == "side":
        weights += size * num_adapters // tp
    seq_len = engine.seq_len(spec.max_positions)
    page = engine.tokens_per_page(seq_len, device.on_gpu and config.cuda_graphs is not False)
    per_page = page * 2 * spec.num_layers * (spec.num_kv_heads // tp) * spec.head_size * size
    pages = max(engine.num_pages(seq_len, page, per_page, free - weights), 1)
    tokens = engine.batched_tokens(device.on_gpu)
    tokens = min(tokens, num_seqs * config.max_prompt_seq_len)
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size
    inner = spec.intermediate_size * (2 if spec.gated else 1)
    work = tokens * size * (3 * spec.hidden_size + (2 * heads + 2 * inner) // tp)
    staging = 0
    if num_processes > 1 and config.actor_zero_stage == 3:
        staging = max(min(STAGING[device.kind], whole), size * sizes.largest) + size * sizes.largest
    return RolloutBytes(
        weights=weights,
        cache=(pages + 1) * per_page,  # one page for rows that pad a captured batch
        work=max(work, staging),
        logits=_sampling(num_seqs, spec.vocab_size, size, config),
        form=(
            f"inference engine on {'its own copy' if is_copy else 'training weights'}, TP {tp}, "
            f"up to {num_seqs} sequences of {seq_len}"
        ),
    )


def _choice(config: RLHFConfig, num_processes: int, device: Device) -> RolloutChoice:
    sharded, has_adapters = config.actor_zero_stage == 3, bool(config.actor_lora_dim)
    is_elsewhere = device.on_gpu and config.offloads_parameters("actor")
    whole = not sharded or (num_processes == 1 and not is_elsewhere)
    return rollout_choice(
        config.rollout_layout,
        config.rollout_lora,
        has_adapters=has_adapters,
        frozen_base=has_adapters and config.only_optimize_lora,
        sharded=sharded,
        readable=whole and config.inference_tp_size == 1,
        on_cpu=not device.on_gpu,
    )


def _sampling(rows: int, vocab_size: int, size: int, config: RLHFConfig) -> int:
    """Bytes of a step's logits, of their fp32 copy if they are 16-bit, and of the probabilities."""
    copies = 1 + (size != 4) + (config.min_answer_seq_len > 0)
    if config.top_k or config.top_p < 1 or config.min_p:
        copies += 3  # the filtered and the sorted logits, and their ids
    return rows * vocab_size * (size + 4 * copies)
