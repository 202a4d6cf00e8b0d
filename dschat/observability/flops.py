"""Counts the model FLOPs of training and generation from shapes and lengths.

*Model* FLOPs: two per multiply-add of the matrix products that the algorithm needs on real tokens,
however they are computed. Padding, norms and softmax do not count. Attention counts causally,
T(T+1)/2 query-key pairs, so that a prefill plus the decode steps after it equal one forward pass.
Narayanan et al. 2021 (arXiv 2104.04473, eq. 3), and DeepSpeed-Chat after them, count all T^2 pairs:
slightly more.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger("dschat")

Head = Literal["lm", "score", "none"]

_WITHOUT_MATRICES = (nn.Embedding, nn.Conv1d, nn.Conv2d)
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
# Values of a config's ``layer_types`` whose layers compare no queries with keys.
_WITHOUT_PAIRS = ("linear_attention", "mamba", "conv", "moe", "mlp")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that determine its matrix products; layers' sizes are means."""

    num_layers: int
    hidden: int
    layer_weights: float  # elements of a layer's matrices that a token is multiplied with
    outer_weights: int  # the same outside of layers, without the head: OPT's projections
    vocab: int
    query_width: float  # query heads x head size; 0 without attention
    kv_width: float  # key heads x head size
    embed_dim: int  # width of the head


def shape_of(model: PreTrainedModel) -> ModelShape | None:
    """The ``ModelShape`` of a transformers model, on any device or sharded; None if not known.

    Matrices are the parameters with two or three dimensions of its text decoder, in whatever kind
    of layer: attention, MLP, state space. Of experts as many count as a token is routed to. Not
    counted: embeddings, convolutions, scans of recurrent layers, adapters, what attention saves by
    a window or an indexer, and repeated runs of one layer (HRM).
    """
    try:
        return _shape_of(model)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, ArithmeticError):
        _log_unknown(type(model).__name__)
        return None


@cache
def _log_unknown(family: str) -> None:
    logger.info("FLOPs of a %s are not known: no TFLOP/s in metrics, no times in --plan", family)


def _shape_of(model: PreTrainedModel) -> ModelShape:
    config, head = model.config.get_text_config(decoder=True), model.get_output_embeddings()
    num_layers, active = config.num_hidden_layers, _first(config, *_EXPERTS_PER_TOKEN)
    outer_inner = [0.0, 0.0]
    for path, module in model.get_decoder().named_modules(remove_duplicate=False):
        if module is head or "lora_" in path or isinstance(module, _WITHOUT_MATRICES):
            continue
        for name, p in module.named_parameters(recurse=False):
            # ZeRO-3's shards are flat, quantized weights are packed.
            flat = getattr(p, "whole_shape", getattr(p, "ds_shape", p.shape))
            shape = torch.Size(flat)
            if len(shape) in (2, 3) and "bias" not in name:
                share = min(1.0, active / shape[0]) if active and len(shape) == 3 else 1.0
                outer_inner[any(map(str.isdigit, path.split(".")))] += share * shape.numel()
    outer, inner = outer_inner
    if not inner:
        raise ValueError("no matrix in a layer")
    kinds = getattr(config, "layer_types", None) or [""] * num_layers
    layers = getattr(config, "per_layer_config", [config] * num_layers)
    layers = zip(layers, kinds, strict=False)
    widths = [_attention_widths(layer) for layer, kind in layers if kind not in _WITHOUT_PAIRS]
    query, key = (sum(width) / num_layers for width in zip((0.0, 0.0), *widths, strict=True))
    embed_dim = getattr(model.get_input_embeddings(), "embedding_dim", config.hidden_size)
    sizes = (inner / num_layers, round(outer), config.vocab_size, query, key, embed_dim)
    return ModelShape(num_layers, config.hidden_size, *sizes)


def _attention_widths(config: PretrainedConfig) -> tuple[float, float]:
    """Heads x head size of a layer's queries and keys; if values have another size, the mean."""
    heads = _first(config, "num_attention_heads")
    if heads is None:
        return 0.0, 0.0
    size = _first(config, "head_dim") or config.hidden_size // heads
    if (plain := _first(config, "qk_nope_head_dim")) is not None:  # DeepSeek's latent attention
        size = plain + config.qk_rope_head_dim
    size = (size + (_first(config, "v_head_dim") or size)) / 2
    return heads * size, (_first(config, "num_key_value_heads") or heads) * size


def _first(config: PretrainedConfig, *names: str) -> Any:
    """The first of ``names`` that the config has; of a list with one entry per layer the mean."""
    values = (getattr(config, name, None) for name in names)
    value = next((value for value in values if value is not None), None)
    return sum(value) / len(value) if isinstance(value, (list, tuple)) else value


def _layer_linear_flops(shape: ModelShape) -> int:
    """FLOPs of one token in the linears of all layers, forward."""
    return round(2 * shape.num_layers * shape.layer_weights)


def _attention_flops(shape: ModelShape, seq_len: int, past_len: int = 0) -> int:
    """FLOPs of the scores and the weighted values: ``seq_len`` queries after ``past_len`` keys."""
    pairs = seq_len * past_len + seq_len * (seq_len + 1) // 2
    return round(2 * 2 * shape.num_layers * shape.query_width) * pairs


def _outer_flops(shape: ModelShape, head: Head) -> int:
    """FLOPs of one token in the matrices outside of layers and in the head, forward."""
    width = {"lm": shape.vocab, "score": 1, "none": 0}[head]
    return 2 * (shape.outer_weights + shape.embed_dim * width)


def transformer_flops(shape: ModelShape, seq_len: int, head: Head = "lm") -> int:
    """FLOPs of one forward pass over ``seq_len`` tokens, with the head on every token.

    ``head``: "lm" (vocabulary), "score" (reward model, critic: one number) or "none".
    """
    per_token = _layer_linear_flops(shape) + _outer_flops(shape, head)
    return seq_len * per_token + _attention_flops(shape, seq_len)


def prefill_flops(shape: ModelShape, prompt_len: int) -> int:
    """FLOPs of prefilling one prompt; the LM head runs on its last token only."""
    return transformer_flops(shape, prompt_len, head="none") + 2 * shape.embed_dim * shape.vocab


def decode_flops(shape: ModelShape, prompt_len: int, answer_len: int) -> int:
    """FLOPs of the decode steps of one answer after its prefill.

    ``answer_len - 1`` steps: the prefill samples the first token, and the last one is not fed back.
    """
    steps = max(0, answer_len - 1)
    per_token = _layer_linear_flops(shape) + _outer_flops(shape, "lm")
    return steps * per_token + _attention_flops(shape, steps, prompt_len)


def training_flops(
    shape: ModelShape,
    seq_len: int,
    gradient_checkpointing: bool = False,
    head: Head = "lm",
    frozen_base: bool = False,
) -> int:
    """FLOPs of forward and backward over one sequence: 3 forward passes, 4 with recomputation.

    The backward pass costs two forward passes: gradients of inputs and of weights. Checkpointing
    recomputes the layers, but not the head and the embedding projections, as in Narayanan et al.
    2021, eq. 3. ``frozen_base`` (LoRA): no weight gradients, so the backward pass costs 1 in the
    linears, but still 2 in attention, whose operands are all activations. The products of adapters
    do not count.
    """
    recompute = 1 if gradient_checkpointing else 0
    linear = 2 if frozen_base else 3
    outside = seq_len * _outer_flops(shape, head)
    layers = seq_len * _layer_linear_flops(shape)
    attention = _attention_flops(shape, seq_len)
    return linear * outside + (linear + recompute) * layers + (3 + recompute) * attention


def rlhf_iteration_flops(
    actor: ModelShape,
    critic: ModelShape | None,
    reward: ModelShape | None,
    prompt_lens: Sequence[int],
    answer_lens: Sequence[int],
    *,
    num_samples_per_prompt: int = 1,
    ppo_epochs: int = 1,
    train_actor: bool = True,
    actor_gradient_checkpointing: bool = False,
    critic_gradient_checkpointing: bool = False,
    actor_frozen_base: bool = False,
    critic_frozen_base: bool = False,
    actor_forwards: float = 2.0,
    teacher: ModelShape | None = None,
) -> dict[str, int]:
    """FLOPs of one PPO iteration by phase, over the given sequences (of one rank or of all).

    - ``generate``: every answer with a KV cache; one prefill per prompt, shared by its samples.
      Divide by ``time/generate_s``.
    - ``score``: one forward pass each of actor (old log-probs), reference, teacher, reward model
      and critic, if present.
    - ``train``: ``ppo_epochs`` x forward and backward of actor and critic; not of pretraining text.
      Divide by ``time/train_s``.
    - ``effective``: the sum of the three. Divide by ``time/iteration_s``, which includes scoring.

    Args:
        actor, critic, reward, teacher: shapes; None for an absent model.
        prompt_lens, answer_lens: real tokens of each sequence; samples of a prompt are adjacent.
        train_actor: False in iterations that warm up the critic.
        actor_frozen_base, critic_frozen_base: only LoRA adapters train.
        actor_forwards: scoring passes of the actor's shape: the policy's, which may cover a part
            of the sequences, and the reference's.
    """
    generate = train = 0
    score = 0.0
    readers: list[tuple[ModelShape | None, Head]]
    readers = [(teacher, "lm"), (reward, "score"), (critic, "score")]
    for i, (prompt_len, answer_len) in enumerate(zip(prompt_lens, answer_lens, strict=True)):
        seq_len = prompt_len + answer_len
        if i % num_samples_per_prompt == 0:
            generate += prefill_flops(actor, prompt_len)
        generate += decode_flops(actor, prompt_len, answer_len)
        score += actor_forwards * transformer_flops(actor, seq_len)
        score += sum(transformer_flops(m, seq_len, head) for m, head in readers if m is not None)
        if critic is not None:
            train += ppo_epochs * training_flops(
                critic, seq_len, critic_gradient_checkpointing, "score", critic_frozen_base
            )
        if train_actor:
            train += ppo_epochs * training_flops(
                actor, seq_len, actor_gradient_checkpointing, "lm", actor_frozen_base
            )
    effective = generate + score + train
    return {"generate": generate, "score": int(score), "train": train, "effective": int(effective)}


def tflops_per_s(flops: float, seconds: float, num_devices: int = 1) -> float:
    """10^12 FLOPs per second and device; 0 if ``seconds`` is 0."""
    return flops / seconds / num_devices / 1e12 if seconds > 0 else 0.0
