"""Flags of the rollout: batch sizes, sampling, and the hybrid engine.

Part of `dschat.config.RLHFConfig`.
"""

import math
import os
from dataclasses import dataclass
from typing import Any, Literal, Optional

from dschat.config.errors import UserError, require
from dschat.config.fields import flag, speed_flag

# Within these bounds logits / T and their gradients stay finite in fp32.
TEMPERATURES = (0.01, 100.0)


def temperature_problem(temperature: float) -> str:
    """Why ``temperature`` is invalid, in one line; empty if it is valid."""
    low, high = TEMPERATURES
    if temperature == 0 or low <= temperature <= high:
        return ""
    return f"temperature {temperature} must be 0 (greedy) or between {low} and {high:g}"


@dataclass
class RolloutConfig:
    """Rollouts."""

    max_prompt_seq_len: int = flag(
        256,
        "Maximum prompt length in tokens; longer prompts are dropped and counted.",
        short=True,
        ge=1,
    )
    max_answer_seq_len: int = flag(256, "Maximum answer length in tokens.", short=True, ge=1)
    per_device_generation_batch_size: int = flag(
        16, "Prompts per generation batch and process.", short=True, ge=1
    )
    generation_batches: int = flag(1, "Generation batches per rollout.", ge=1)
    num_samples_per_prompt: int = flag(1, "Answers per prompt.", short=True, ge=1)
    temperature: float = flag(1.0, "Sampling temperature: 0 (greedy) or 0.01 to 100.")
    top_p: float = flag(
        1.0,
        "Nucleus sampling: keep the smallest set of tokens with this probability.",
        gt=0,
        le=1,
        remedy="; 1 turns it off",
    )
    top_k: int = flag(0, "Keep the k most likely tokens; 0: all.", ge=0, remedy="; 0 turns it off")
    min_p: float = flag(
        0.0,
        "Drop tokens below this fraction of the top token's probability.",
        ge=0,
        lt=1,
        remedy="; 0 turns it off",
    )
    min_answer_seq_len: int = flag(0, "Minimum answer length in tokens: no EOS before.")
    partial_rollout: bool = flag(
        False,
        "End a rollout when enough prompts are answered, and continue the others in the next one.",
    )
    oversample: float = flag(
        0.5,
        "Extra prompts under way with --partial_rollout, as a share of a rollout's.",
        gt=0,
        needs="partial_rollout",
    )
    max_staleness: Optional[int] = flag(
        None,
        "With --partial_rollout: complete a prompt's answers after N iterations; default: 2.",
        ge=1,
        needs="partial_rollout",
    )
    moe_routing_replay: bool = flag(
        False,
        "Mixtures of experts: train each token with the experts that the rollout chose for it.",
    )
    # the hybrid engine
    enable_hybrid_engine: bool = speed_flag(
        True, "Generate with the inference engine, not with the Hugging Face model."
    )
    rollout_backend: Literal["auto", "engine", "vllm"] = speed_flag(
        "auto", "What generates: the inference engine (auto), or vLLM in the same process."
    )
    inference_tp_size: int = speed_flag(
        1, "Tensor-parallel size of generation, in processes.", ge=1
    )
    rollout_layout: Literal["auto", "copy", "zero_copy"] = speed_flag(
        "auto", "Rollout weights: a copy, or training's own in place (auto: on a GPU, if possible)."
    )
    rollout_lora: Literal["auto", "merge", "side"] = speed_flag(
        "auto", "LoRA in the rollout: merged into the copy, or applied beside the base weights."
    )
    cuda_graphs: Optional[bool] = speed_flag(
        None, "Run decode steps as CUDA graphs, or fail; default: where they can be captured."
    )
    release_inference_cache: bool = speed_flag(False, "Free the KV cache after every rollout.")
    unpin_actor_parameters: bool = speed_flag(
        False, "Free the rollout weights after every rollout."
    )
    tp_gather_partition_size: int = speed_flag(
        8, "Layers gathered at once in a weight refresh.", ge=1
    )
    max_num_seqs: int = speed_flag(
        256, "Maximum concurrent sequences per tensor-parallel group.", ge=1
    )
    max_num_batched_tokens: Optional[int] = speed_flag(
        None, "Maximum tokens per engine step; longer prompts are prefilled in chunks.", ge=1
    )
    kv_cache_gib: Optional[float] = speed_flag(
        None, "KV cache size in GiB; default: room for --max_num_seqs, within free memory.", gt=0
    )
    kv_page_size: Optional[int] = speed_flag(
        None,
        "Tokens per KV cache page; default: 32, or without CUDA graphs a whole sequence where "
        "memory is enough.",
        ge=1,
    )

    @property
    def staleness_bound(self) -> int:
        """Iterations after which a prompt under way is completed."""
        return self.max_staleness or 2

    def rollout_prompts(self, world_size: int) -> int:
        """Prompts in one rollout, over all processes; at least the prompts of an optimizer step,
        for which DeepSpeed-Chat's gradient accumulation takes several rollouts of one policy.
        """
        config: Any = self  # the step's dataclass has the other flags
        prompts = self.per_device_generation_batch_size * self.generation_batches * world_size
        return max(prompts, config.mini_batch_size(world_size) // self.num_samples_per_prompt)

    def rollout_samples(self, world_size: int) -> int:
        """Sequences in one rollout, over all processes."""
        return self.rollout_prompts(world_size) * self.num_samples_per_prompt

    @property
    def num_mini_batches(self) -> int:
        """Optimizer steps in one PPO epoch over a full rollout. The processes cancel out."""
        return self.mini_batches_of(self.rollout_prompts(1), 1)

    def mini_batches_of(self, num_prompts: int, world_size: int) -> int:
        """Those over the answers to so many prompts of all processes; one, where fewer prompts than
        a full rollout's do not fill it. ``UserError`` where the division is not exact.
        """
        config: Any = self
        mini = config.mini_batch_size(world_size)
        samples = num_prompts * self.num_samples_per_prompt
        if samples < mini and num_prompts < self.rollout_prompts(world_size):
            return 1
        require(
            samples % mini == 0,
            f"--per_device_training_batch_size x --gradient_accumulation_steps x processes = {mini}"
            f" does not divide the {samples} sequences of a rollout ({num_prompts} prompts x "
            "--num_samples_per_prompt); choose numbers that divide",
        )
        return int(samples // mini)

    def divisible_prompts(self, num_prompts: int, world_size: int) -> int:
        """The most of so many prompts that `mini_batches_of` divides; all where it divides none."""
        config: Any = self
        mini = config.mini_batch_size(world_size)
        answers = {n: n * self.num_samples_per_prompt for n in range(num_prompts, 0, -1)}
        return next((n for n, a in answers.items() if a < mini or a % mini == 0), num_prompts)

    @property
    def samples_under_way(self) -> int:
        """Most sequences that a process generates together."""
        extra = self.oversample if self.partial_rollout else 0.0
        return math.ceil((1 + extra) * self.rollout_prompts(1)) * self.num_samples_per_prompt

    def validate_rollout(self) -> None:
        problem = temperature_problem(self.temperature)
        require(not problem, f"--{problem}")
        require(
            0 <= self.min_answer_seq_len <= self.max_answer_seq_len,
            f"--min_answer_seq_len {self.min_answer_seq_len} must be between 0 and "
            f"--max_answer_seq_len {self.max_answer_seq_len}",
        )
        is_in_place = self.rollout_layout == "zero_copy"
        engine = "--enable_hybrid_engine", self.enable_hybrid_engine
        size, staleness, partial = self.inference_tp_size, self.max_staleness, self.partial_rollout
        for given, is_set, needed, is_met in (
            (f"--inference_tp_size {size}", size > 1, *engine),
            ("--partial_rollout", partial, *engine),
            ("--moe_routing_replay", self.moe_routing_replay, *engine),
            (f"--max_staleness {staleness}", staleness is not None, "--partial_rollout", partial),
            ("--rollout_layout zero_copy", is_in_place, "--inference_tp_size 1", size == 1),
        ):
            require(is_met or not is_set, f"{given} needs {needed}")
        if self.rollout_backend == "vllm":
            self._require_of_vllm()

    def _require_of_vllm(self) -> None:
        truncates = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        masks = truncates or self.min_answer_seq_len > 0
        lacks = {
            "--no-enable_hybrid_engine": not self.enable_hybrid_engine,
            "--partial_rollout": self.partial_rollout,
            "--moe_routing_replay": self.moe_routing_replay,
            "--rollout_layout zero_copy": self.rollout_layout == "zero_copy",
            "--rollout_lora side": self.rollout_lora == "side",
            # vLLM's log-probs are of the logits themselves, or of what is drawn from.
            "--top_k, --top_p, --min_p or --min_answer_seq_len with --temperature "
            f"{self.temperature:g}": masks and self.temperature not in (0, 1),
        }
        for flags, is_set in lacks.items():
            require(
                not is_set,
                f"--rollout_backend vllm does not go with {flags}; drop it, or use "
                "--rollout_backend engine",
            )


VARIABLE = "DSCHAT_CUDA_KERNELS"
# Of captured decode steps. state: reads, embeds and advances the rows; it needs attention.
STEP_PARTS = ("attention", "norm", "product", "draw", "state")
# liger: norms and gated MLPs of training and scoring.
PARTS = (*STEP_PARTS, "liger")


def cuda_kernels() -> frozenset[str]:
    """The parts that are on. Set: the listed parts, separated by commas; 0 or empty: none; 1 or
    unset: all, since they are faster than torch (docs/lab/measured-gpu.md).

    Raises:
        UserError: an unknown part.
    """
    value = os.environ.get(VARIABLE, "1")
    if value in ("", "0"):
        return frozenset()
    if value == "1":
        return frozenset(PARTS)
    parts = frozenset(value.split(","))
    if unknown := sorted(parts - set(PARTS)):
        known = ", ".join(PARTS)
        raise UserError(f"{VARIABLE}: unknown part {unknown[0]!r}; list some of {known}, or 1")
    return parts
