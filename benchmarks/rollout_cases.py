"""The questions that `rollout.py` answers: which model, how many prompts, how many tokens.

Names go in, `Case` and transformers configs come out. It must not know how anything is measured.
"""

import math
import random
from dataclasses import dataclass, field

from transformers import GPT2Config, LlamaConfig, OPTConfig

MEAN_RAGGED_TOKENS = 20  # before the bound


def _llama(hidden: int, layers: int, heads: int, mlp: int, vocab: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=mlp,
        vocab_size=vocab,
        max_position_embeddings=512,
    )


MODELS = {
    "opt-125m": OPTConfig,
    "opt-1.3b": lambda: OPTConfig(
        hidden_size=2048,
        ffn_dim=8192,
        num_hidden_layers=24,
        num_attention_heads=32,
        word_embed_proj_dim=2048,
    ),
    "gpt2": GPT2Config,
    "llama-384x6": lambda: _llama(384, 6, 6, 1024, 32_000),
    "llama-tiny": lambda: _llama(128, 4, 4, 344, 2048),
}


@dataclass(frozen=True)
class Case:
    """A question: this model, so many prompts and tokens. ``targets`` are what ratios should
    reach; a ``cost`` should not exceed it."""

    model: str
    prompts: int  # of each rank
    prompt_tokens: int
    new_tokens: int  # of every answer; of the longest, if ragged
    slots: int  # sequences that decode together, on both sides
    samples: int = 1  # answers per prompt
    ragged: bool = False  # each answer has its own, geometrically distributed length
    temperature: float = 1.0  # 0: greedy
    needs_gpu: bool = False  # too much for a CPU, unless asked for by name
    ranks: int = 1  # processes, each with a device or a core of its own
    targets: dict[str, float] = field(default_factory=dict)

    def lengths(self) -> list[int]:
        """Tokens of each prompt's answers.

        If ragged: evenly spaced quantiles of the geometric distribution, in a fixed random order.
        Independent draws of so few would have a mean, and with it a ratio, of the seed's choosing.
        """
        if not self.ragged:
            return [self.new_tokens] * self.prompts
        log_go_on = math.log1p(-1 / MEAN_RAGGED_TOKENS)
        tails = [(i + 0.5) / self.prompts for i in range(self.prompts)]  # P(length > l)
        lengths = [math.ceil(math.log(tail) / log_go_on) for tail in tails]
        random.Random(0).shuffle(lengths)
        return [min(length, self.new_tokens) for length in lengths]


CASES = {
    "opt-125m": Case("opt-125m", 16, 64, 64, 16, targets={"tokens": 1.6, "decode": 1.9}),
    "llama-384x6": Case("llama-384x6", 16, 64, 64, 16, targets={"tokens": 2.2}),
    "llama-tiny": Case("llama-tiny", 16, 64, 64, 16, targets={"tokens": 4.0}),
    "ragged": Case("opt-125m", 64, 64, 64, 16, ragged=True, targets={"tokens": 2.7}),
    "samples": Case("opt-125m", 16, 256, 64, 64, samples=4),
    "zero3": Case("opt-125m", 8, 64, 64, 8, ranks=2, targets={"cost": 1.15}),
    "lora": Case("opt-125m", 8, 64, 64, 8, ranks=2),
    "tp2": Case("opt-125m", 8, 64, 64, 16, temperature=0.0, ranks=2),
    # DeepSpeed#8271 and DeepSpeed#8352 have figures of others for these two.
    "opt-1.3b": Case("opt-1.3b", 8, 256, 128, 8, needs_gpu=True),
    "gpt2": Case("gpt2", 1, 128, 32, 1, temperature=0.0, needs_gpu=True),
}
