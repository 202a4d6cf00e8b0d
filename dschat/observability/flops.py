"""What a run measures about itself: wall time, model FLOPs, peak memory, means over tokens.

Comes in: numbers, 0-d tensors, a transformers config. Goes out: plain floats for the log. The FLOP
counts are pure functions of shapes and lengths. This module must not know ranks (the trainer
all-reduces ``MetricSums.as_tensor``), sinks, losses or models beyond their config's numbers.

How throughput is counted. *Model* FLOPs: two per multiply-add of the matrix products that the
algorithm needs on real tokens, however they are carried out; padding, norms and softmax are not
counted. Attention is counted causally, T(T+1)/2 query-key pairs, so that a prefill and the decode
steps after it add up to one forward pass. Narayanan et al. 2021 (arXiv 2104.04473, eq. 3), and
DeepSpeed-Chat after them, count all T^2 pairs (``causal=False`` here): slightly more.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Head = Literal["lm", "score", "none"]


class Timers:
    """Named wall clocks: ``with timers("generate"): ...``, then ``timers.pop()``.

    On a CUDA device both ends wait for the device, so that a block is charged for the kernels it
    launched and not for those before it. Times of one name add up; a block that raises has none.
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        self._seconds: dict[str, float] = {}

    def _now_s(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start_s = self._now_s()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + self._now_s() - start_s

    def pop(self) -> dict[str, float]:
        """Seconds by name since the last ``pop``; starts again from nothing."""
        seconds, self._seconds = self._seconds, {}
        return seconds


class MetricSums:
    """Sums with their counts, by name: micro-batches add up, then ranks, then one division.

    ``sums.add({"policy/clipfrac_avg": m["clipped"]}, count=m["tokens"])`` for every micro-batch;
    over ranks ``sums.load_tensor(names, all_reduced(sums.as_tensor(names, device)))``;
    ``sums.means()``. Tensors stay where they are until one of the last three is called: adding
    never synchronises.
    """

    def __init__(self) -> None:
        self._totals: dict[str, tuple[Tensor, Tensor]] = {}  # name -> 0-d float64 sum, count

    def add(self, sums: Mapping[str, Tensor | float], count: Tensor | float = 1) -> None:
        """Add every sum to its name, and ``count`` (what it is a sum over) to that name's count."""
        count = _as_float64(count)
        for name, value in sums.items():
            total, total_count = self._totals.get(name, (0.0, 0.0))
            self._totals[name] = (total + _as_float64(value), total_count + count)

    def as_tensor(self, names: Sequence[str], device: str | torch.device = "cpu") -> Tensor:
        """(N, 2) float64 on ``device``: sum and count of each of ``names``, 0 where none was added.

        NOTE: pass the same names in the same order on every rank, not this rank's own: a rank
        without rows has fewer.
        """
        out = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
        for row, name in enumerate(names):
            for column, value in enumerate(self._totals.get(name, ())):
                out[row, column] = value
        return out

    def load_tensor(self, names: Sequence[str], totals: Tensor) -> None:
        """Replace the totals of ``names`` by (N, 2) ``totals``: ``as_tensor`` summed over ranks."""
        for name, row in zip(names, totals.detach().double().unbind(0), strict=True):
            self._totals[name] = (row[0], row[1])

    def means(self) -> dict[str, float]:
        """Sum / count by name. A name whose count is 0 is left out: no data is not a value."""
        names = list(self._totals)
        rows = self.as_tensor(names).tolist()
        return {name: total / n for name, (total, n) in zip(names, rows, strict=True) if n > 0}


def _as_float64(value: Tensor | float) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).detach()


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a dense decoder that its matrix products depend on."""

    num_layers: int
    hidden: int
    intermediate: int  # width of the MLP
    vocab: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    gated_mlp: bool  # three matrices in the MLP (gate, up, down) instead of two
    embed_dim: int  # width of embeddings and head; two projections where it is not ``hidden``


def shape_of(config: Any) -> ModelShape:
    """Read a ``ModelShape`` off a transformers config, by the names that model families use.

    No config says whether its MLP is gated. Families with RMSNorm or a SiLU are taken to be (Llama
    and all that follow it), the others not (OPT, GPT-2, GPT-NeoX, BLOOM, Phi). Mixtures of experts
    and encoders are not described by this shape.

    Raises:
        ValueError: the config has none of the known names for a size.
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
    own_pairs = seq_len * (seq_len + 1) // 2 if causal else seq_len**2
    pairs = seq_len * past_len + own_pairs
    return 2 * 2 * shape.num_layers * shape.num_heads * shape.head_dim * pairs


def _head_flops(shape: ModelShape, head: Head) -> int:
    """FLOPs of one token in the head, forward."""
    width = {"lm": shape.vocab, "score": 1, "none": 0}[head]
    return 2 * shape.embed_dim * width


def _projection_flops(shape: ModelShape) -> int:
    """FLOPs of one token between ``embed_dim`` and ``hidden``, both ways, where the two differ."""
    return 2 * 2 * shape.embed_dim * shape.hidden if shape.embed_dim != shape.hidden else 0


def transformer_flops(
    shape: ModelShape, seq_len: int, head: Head = "lm", causal: bool = True
) -> int:
    """FLOPs of one forward pass over one sequence of ``seq_len`` tokens, the head on every token.

    ``head``: "lm" (vocabulary), "score" (reward model, critic: one number) or "none".
    """
    per_token = _layer_linear_flops(shape) + _projection_flops(shape) + _head_flops(shape, head)
    return seq_len * per_token + _attention_flops(shape, seq_len, 0, causal)


def prefill_flops(shape: ModelShape, prompt_len: int) -> int:
    """FLOPs of filling the KV cache with one prompt; the LM head runs on its last token only."""
    return transformer_flops(shape, prompt_len, head="none") + _head_flops(shape, "lm")


def decode_flops(shape: ModelShape, prompt_len: int, answer_len: int) -> int:
    """FLOPs of the decode steps of one answer after its prefill.

    That is ``answer_len - 1`` steps: the first token comes from the prefill, the last stays out.
    """
    steps = max(0, answer_len - 1)
    per_token = _layer_linear_flops(shape) + _projection_flops(shape) + _head_flops(shape, "lm")
    return steps * per_token + _attention_flops(shape, steps, prompt_len, causal=True)


def generation_flops(shape: ModelShape, prompt_len: int, answer_len: int) -> int:
    """FLOPs of generating one answer with a KV cache: prefill, then decode. No answer, no FLOPs."""
    if answer_len < 1:
        return 0
    return prefill_flops(shape, prompt_len) + decode_flops(shape, prompt_len, answer_len)


def training_flops(
    shape: ModelShape,
    seq_len: int,
    gradient_checkpointing: bool = False,
    head: Head = "lm",
    frozen_base: bool = False,
    causal: bool = True,
) -> int:
    """FLOPs of forward and backward over one sequence: 3 forward passes, 4 with recomputation.

    The backward pass costs two forward passes, gradients of inputs and of weights. Checkpointing
    runs the layers forward once more, but not what lies outside them (head, embedding projections),
    as in Narayanan et al. 2021, eq. 3. ``frozen_base`` (LoRA): no weight gradients, so 1 for
    backward in the linears, still 2 in attention, whose operands are all activations; the adapters'
    own are not counted.
    """
    again = 1 if gradient_checkpointing else 0
    linear = 2 if frozen_base else 3
    outside = seq_len * (_projection_flops(shape) + _head_flops(shape, head))
    layers = seq_len * _layer_linear_flops(shape)
    attention = _attention_flops(shape, seq_len, 0, causal)
    return linear * outside + (linear + again) * layers + (3 + again) * attention


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
    ptx_lens: Iterable[int] = (),
    actor_forwards: int = 2,
) -> dict[str, int]:
    """FLOPs of one PPO iteration by phase, over all the sequences given (of one rank or of all).

    - ``generate``: every answer with a KV cache; a prompt's prefill once for all its samples.
      Divide by ``time/generate_s``.
    - ``score``: one forward pass each of actor (old log-probs), reference, reward model and critic,
      of those that there are.
    - ``train``: ``ppo_epochs`` x forward and backward of actor and critic, and of the actor over
      the pretraining sequences. Divide by ``time/train_s``.
    - ``effective``: the three together. Divide by ``time/iteration_s``, which includes scoring.

    Args:
        actor, critic, reward: shapes; None for a model that there is not.
        prompt_lens, answer_lens: real tokens of each sequence; samples of a prompt stand together.
        train_actor: False in iterations that warm up the critic.
        actor_frozen_base, critic_frozen_base: only LoRA adapters are trained.
        ptx_lens: tokens of each pretraining sequence of the iteration.
        actor_forwards: scoring passes of the actor's shape: its own and the reference's.
    """
    generate = score = train = 0
    actor_flags = (actor_gradient_checkpointing, "lm", actor_frozen_base)
    critic_flags = (critic_gradient_checkpointing, "score", critic_frozen_base)
    for i, (prompt_len, answer_len) in enumerate(zip(prompt_lens, answer_lens, strict=True)):
        seq_len = prompt_len + answer_len
        if i % num_samples_per_prompt == 0:
            generate += prefill_flops(actor, prompt_len)
        generate += decode_flops(actor, prompt_len, answer_len)
        score += actor_forwards * transformer_flops(actor, seq_len)
        if reward is not None:
            score += transformer_flops(reward, seq_len, head="score")
        if critic is not None:
            score += transformer_flops(critic, seq_len, head="score")
            train += ppo_epochs * training_flops(critic, seq_len, *critic_flags)
        if train_actor:
            train += ppo_epochs * training_flops(actor, seq_len, *actor_flags)
    train += sum(training_flops(actor, ptx_len, *actor_flags) for ptx_len in ptx_lens)
    effective = generate + score + train
    return {"generate": generate, "score": score, "train": train, "effective": effective}


def tflops_per_s(flops: float, seconds: float, num_devices: int = 1) -> float:
    """10^12 FLOPs per second and device; 0 where no time was measured."""
    return flops / seconds / num_devices / 1e12 if seconds > 0 else 0.0
