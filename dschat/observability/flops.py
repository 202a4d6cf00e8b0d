"""Counts the model FLOPs of training and generation from shapes and lengths.

*Model* FLOPs: two per multiply-add of the matrix products that the algorithm needs on real tokens,
however they are computed. Padding, norms and softmax do not count. Attention counts causally,
T(T+1)/2 query-key pairs, so that a prefill plus the decode steps after it equal one forward pass.
Narayanan et al. 2021 (arXiv 2104.04473, eq. 3), and DeepSpeed-Chat after them, count all T^2 pairs
(``causal=False`` here): slightly more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PretrainedConfig

Head = Literal["lm", "score", "none"]


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a dense decoder that determine its matrix products."""

    num_layers: int
    hidden: int
    intermediate: int  # width of the MLP
    vocab: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    gated_mlp: bool  # three matrices in the MLP (gate, up, down) instead of two
    embed_dim: int  # width of embeddings and head; two projections if it is not ``hidden``


def shape_of(config: PretrainedConfig) -> ModelShape:
    """The ``ModelShape`` of a transformers config.

    Configs do not say whether the MLP is gated. Families with RMSNorm or SiLU count as gated (Llama
    and its successors), others not (OPT, GPT-2, GPT-NeoX, BLOOM, Phi). Mixtures of experts and
    encoders do not fit this shape.

    Raises:
        ValueError: the config has none of the known names of a size.
    """

    def read(*names: str, default: int | None = None) -> int:
        for name in names:
            if getattr(config, name, None) is not None:
                return int(getattr(config, name))
        if default is None:
            raise ValueError(f"{type(config).__name__} has no {' or '.join(names)}")
        return default

    hidden = read("hidden_size", "n_embd", "d_model")
    num_heads = read("num_attention_heads", "n_head", "n_heads")
    activation = str(getattr(config, "hidden_act", None))
    return ModelShape(
        num_layers=read("num_hidden_layers", "n_layer", "n_layers"),
        hidden=hidden,
        intermediate=read(
            "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", default=4 * hidden
        ),
        vocab=read("vocab_size"),
        num_heads=num_heads,
        num_kv_heads=read("num_key_value_heads", default=num_heads),
        head_dim=read("head_dim", default=hidden // num_heads),
        gated_mlp=getattr(config, "rms_norm_eps", None) is not None or activation == "silu",
        embed_dim=read("word_embed_proj_dim", default=hidden),
    )


def _layer_linear_flops(shape: ModelShape) -> int:
    """FLOPs of one token in the linears of all layers, forward."""
    heads = 2 * shape.num_heads + 2 * shape.num_kv_heads  # query and output; key and value
    attention = shape.hidden * heads * shape.head_dim
    mlp = shape.hidden * shape.intermediate * (3 if shape.gated_mlp else 2)
    return 2 * shape.num_layers * (attention + mlp)


def _attention_flops(shape: ModelShape, seq_len: int, past_len: int, causal: bool) -> int:
    """FLOPs of the scores and the weighted values: ``seq_len`` queries after ``past_len`` keys."""
    new_pairs = seq_len * (seq_len + 1) // 2 if causal else seq_len**2
    pairs = seq_len * past_len + new_pairs
    return 2 * 2 * shape.num_layers * shape.num_heads * shape.head_dim * pairs


def _head_flops(shape: ModelShape, head: Head) -> int:
    """FLOPs of one token in the head, forward."""
    width = {"lm": shape.vocab, "score": 1, "none": 0}[head]
    return 2 * shape.embed_dim * width


def _projection_flops(shape: ModelShape) -> int:
    """FLOPs of one token between ``embed_dim`` and ``hidden``, both ways, if the two differ."""
    return 2 * 2 * shape.embed_dim * shape.hidden if shape.embed_dim != shape.hidden else 0


def transformer_flops(
    shape: ModelShape, seq_len: int, head: Head = "lm", causal: bool = True
) -> int:
    """FLOPs of one forward pass over ``seq_len`` tokens, with the head on every token.

    ``head``: "lm" (vocabulary), "score" (reward model, critic: one number) or "none".
    """
    per_token = _layer_linear_flops(shape) + _projection_flops(shape) + _head_flops(shape, head)
    return seq_len * per_token + _attention_flops(shape, seq_len, 0, causal)


def prefill_flops(shape: ModelShape, prompt_len: int) -> int:
    """FLOPs of prefilling one prompt; the LM head runs on its last token only."""
    return transformer_flops(shape, prompt_len, head="none") + _head_flops(shape, "lm")


def decode_flops(shape: ModelShape, prompt_len: int, answer_len: int) -> int:
    """FLOPs of the decode steps of one answer after its prefill.

    ``answer_len - 1`` steps: the prefill samples the first token, and the last one is not fed back.
    """
    steps = max(0, answer_len - 1)
    per_token = _layer_linear_flops(shape) + _projection_flops(shape) + _head_flops(shape, "lm")
    return steps * per_token + _attention_flops(shape, steps, prompt_len, causal=True)


def training_flops(
    shape: ModelShape,
    seq_len: int,
    gradient_checkpointing: bool = False,
    head: Head = "lm",
    frozen_base: bool = False,
    causal: bool = True,
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
    outside = seq_len * (_projection_flops(shape) + _head_flops(shape, head))
    layers = seq_len * _layer_linear_flops(shape)
    attention = _attention_flops(shape, seq_len, 0, causal)
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
    actor_flags: tuple[bool, Head, bool] = (actor_gradient_checkpointing, "lm", actor_frozen_base)
    critic_flags: tuple[bool, Head, bool]
    critic_flags = (critic_gradient_checkpointing, "score", critic_frozen_base)
    for i, (prompt_len, answer_len) in enumerate(zip(prompt_lens, answer_lens, strict=True)):
        seq_len = prompt_len + answer_len
        if i % num_samples_per_prompt == 0:
            generate += prefill_flops(actor, prompt_len)
        generate += decode_flops(actor, prompt_len, answer_len)
        score += actor_forwards * transformer_flops(actor, seq_len)
        if teacher is not None:
            score += transformer_flops(teacher, seq_len)
        if reward is not None:
            score += transformer_flops(reward, seq_len, head="score")
        if critic is not None:
            score += transformer_flops(critic, seq_len, head="score")
            train += ppo_epochs * training_flops(critic, seq_len, *critic_flags)
        if train_actor:
            train += ppo_epochs * training_flops(actor, seq_len, *actor_flags)
    effective = generate + score + train
    return {"generate": generate, "score": int(score), "train": train, "effective": int(effective)}


def tflops_per_s(flops: float, seconds: float, num_devices: int = 1) -> float:
    """10^12 FLOPs per second and device; 0 if ``seconds`` is 0."""
    return flops / seconds / num_devices / 1e12 if seconds > 0 else 0.0
