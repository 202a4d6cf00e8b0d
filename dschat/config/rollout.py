"""The knobs of a rollout: how answers are sampled, and how the hybrid engine generates them.

They are part of `dschat.config.RLHFConfig`. It must not know training.
"""

from dataclasses import dataclass
from typing import Literal, Optional

from dschat.config.errors import require
from dschat.config.fields import flag

# Sampling: logits / T, and their gradients, stay within fp32.
TEMPERATURES = (0.01, 100.0)


def temperature_problem(temperature: float) -> str:
    """What keeps it from being one, in one line; empty where nothing does."""
    low, high = TEMPERATURES
    if temperature == 0 or low <= temperature <= high:
        return ""
    return f"temperature {temperature} must be 0 (greedy) or between {low} and {high:g}"


@dataclass
class RolloutConfig:
    """Rollouts of step 3. Counts are of the whole rollout, unless the name says per_device."""

    max_prompt_seq_len: int = flag(
        256, "Longest prompt in tokens; longer ones are dropped and counted."
    )
    max_answer_seq_len: int = flag(256, "Longest answer in tokens.")
    per_device_generation_batch_size: int = flag(16, "Prompts per rollout batch and process.")
    generation_batches: int = flag(1, "Rollout batches per update; they form one experience.")
    num_samples_per_prompt: int = flag(1, "Answers sampled for each prompt.")
    temperature: float = flag(1.0, "Sampling temperature: 0 (greedy), or 0.01 to 100.")
    top_p: float = flag(1.0, "Nucleus sampling: keep the smallest set of tokens with this mass.")
    top_k: int = flag(0, "Keep the k likeliest tokens; 0: all.")
    min_p: float = flag(0.0, "Drop tokens less likely than this share of the likeliest one.")
    min_answer_seq_len: int = flag(0, "No EOS before an answer has this many tokens.")
    # the hybrid engine
    enable_hybrid_engine: bool = flag(
        True, "Generate with the inference engine; without it, with the Hugging Face module."
    )
    inference_tp_size: int = flag(1, "Processes that share the actor while it generates.")
    rollout_layout: Literal["auto", "copy", "zero_copy"] = flag(
        "auto", "Weights of the rollout: a copy laid out for speed, or training's own, in place."
    )
    rollout_lora: Literal["auto", "merge", "side"] = flag(
        "auto", "LoRA in the rollout: merged into the copy, or beside the frozen base."
    )
    cuda_graphs: bool = flag(True, "On CUDA, capture decode steps once and replay them.")
    release_inference_cache: bool = flag(False, "Free the key-value cache after every rollout.")
    unpin_actor_parameters: bool = flag(False, "Free the rollout weights after every rollout.")
    tp_gather_partition_size: int = flag(8, "Layers gathered at once when weights are refreshed.")
    offload_training_states: bool = flag(
        False, "Keep optimizer states in CPU memory while the actor generates."
    )
    max_num_seqs: int = flag(256, "Sequences that decode together, per tensor-parallel group.")
    max_num_batched_tokens: Optional[int] = flag(
        None, "Tokens computed in one step; longer prompts come in pieces."
    )
    kv_cache_gib: Optional[float] = flag(
        None, "Size of the key-value cache; default: what max_num_seqs need, within free memory."
    )
    kv_page_size: Optional[int] = flag(
        None, "Tokens of a page of the cache; default: a whole sequence."
    )

    def rollout_prompts(self, world_size: int) -> int:
        """Prompts in one experience, over all processes."""
        return self.per_device_generation_batch_size * self.generation_batches * world_size

    def rollout_samples(self, world_size: int) -> int:
        """Sequences in one experience, over all processes."""
        return self.rollout_prompts(world_size) * self.num_samples_per_prompt

    def validate_rollout(self) -> None:
        """Raise ``UserError`` (flag and remedy in one line) for the first knob that cannot work."""
        for name in (
            "max_prompt_seq_len",
            "max_answer_seq_len",
            "per_device_generation_batch_size",
            "generation_batches",
            "num_samples_per_prompt",
            "inference_tp_size",
            "tp_gather_partition_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_page_size",
        ):
            value = getattr(self, name)
            require(value is None or value >= 1, f"--{name} {value} must be at least 1")
        problem = temperature_problem(self.temperature)
        require(not problem, f"--{problem}")
        require(0 < self.top_p <= 1, f"--top_p {self.top_p} must be in (0, 1]; 1 turns it off")
        require(self.top_k >= 0, f"--top_k {self.top_k} must not be negative; 0 turns it off")
        require(0 <= self.min_p < 1, f"--min_p {self.min_p} must be in [0, 1); 0 turns it off")
        require(
            0 <= self.min_answer_seq_len <= self.max_answer_seq_len,
            f"--min_answer_seq_len {self.min_answer_seq_len} must be between 0 and "
            f"--max_answer_seq_len {self.max_answer_seq_len}",
        )
        require(
            self.kv_cache_gib is None or self.kv_cache_gib > 0,
            f"--kv_cache_gib {self.kv_cache_gib} must be positive",
        )
        require(
            self.inference_tp_size == 1 or self.enable_hybrid_engine,
            f"--inference_tp_size {self.inference_tp_size} needs --enable_hybrid_engine",
        )
        require(
            self.inference_tp_size == 1 or self.rollout_layout != "zero_copy",
            "--rollout_layout zero_copy needs --inference_tp_size 1",
        )
