"""Defines the cases of `rollout.py` and `gpu.py`: models, number of prompts and tokens."""

import math
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    OPTConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from dschat.inference import UnsupportedModel, model_spec

MEAN_RAGGED_TOKENS = 20  # before truncation to new_tokens


def llama(
    hidden: int, layers: int, heads: int, mlp: int, vocab: int, kv_heads: int | None = None
) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=mlp,
        vocab_size=vocab,
        max_position_embeddings=2048,
    )


def opt(hidden: int, layers: int, heads: int, **more: Any) -> OPTConfig:
    sizes = {"hidden_size": hidden, "word_embed_proj_dim": hidden, "ffn_dim": 4 * hidden}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads}
    return OPTConfig(**sizes | more)


# Of 1B to 3B, with the layers of their families: windows, mixtures of experts, sinks, states.
FAMILIES = {
    "gemma3-1b": partial(
        Gemma3TextConfig,
        hidden_size=1152,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        intermediate_size=6912,
        sliding_window=512,
        max_position_embeddings=2048,
    ),
    "qwen3-moe-3b": partial(
        Qwen3MoeConfig,
        hidden_size=2048,
        num_hidden_layers=20,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=768,
        max_position_embeddings=2048,
    ),
    "gpt-oss-3b": partial(
        GptOssConfig,
        hidden_size=1440,
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=16,
        num_experts_per_tok=4,
        intermediate_size=1440,
        max_position_embeddings=2048,
    ),
    "qwen3.5-2b": partial(  # three layers of four are gated delta nets
        Qwen3_5TextConfig,
        hidden_size=2048,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        intermediate_size=6144,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        max_position_embeddings=2048,
    ),
}

_SMALL: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1376,
    "tie_word_embeddings": True,
}
_WINDOWS, _FULL = ["sliding_attention"], ["full_attention"]

MODELS = {
    **FAMILIES,
    "opt-125m": OPTConfig,
    "opt-1.3b": lambda: opt(2048, 24, 32),
    "opt-13b": lambda: opt(5120, 40, 40),
    "gpt2": GPT2Config,
    "llama-7b": LlamaConfig,  # transformers' defaults are the sizes of Llama 7B
    "llama3-8b": lambda: llama(4096, 32, 32, 14_336, 128_256, kv_heads=8),
    "llama-384x6": lambda: llama(384, 6, 6, 1024, 32_000),
    "llama-27m": lambda: LlamaConfig(**_SMALL),
    "gemma3-27m": lambda: Gemma3TextConfig(
        **_SMALL,
        sliding_window=64,
        layer_types=_WINDOWS * 5 + _FULL + _WINDOWS * 2,
        query_pre_attn_scalar=64,
    ),
    "qwen3-moe-36m": lambda: Qwen3MoeConfig(
        **_SMALL | {"hidden_size": 384},
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=384,
    ),
    "qwen3.5-27m": lambda: Qwen3_5TextConfig(
        **_SMALL | {"hidden_size": 448, "intermediate_size": 1216},
        layer_types=(["linear_attention"] * 3 + _FULL) * 2,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    ),
    "llama-tiny": lambda: llama(128, 4, 4, 344, 2048),
    "llama3-tiny": lambda: llama(64, 2, 4, 96, 256, kv_heads=2),
    "opt-tiny": lambda: opt(32, 2, 4, ffn_dim=64, vocab_size=256, max_position_embeddings=128),
    "gpt2-tiny": lambda: GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=256, n_positions=64),
}


def runs_blocks(model: str) -> bool:
    """Whether the engine's own decoder runs ``model``."""
    try:
        return model_spec(MODELS[model]()) is not None
    except UnsupportedModel:
        return False


@dataclass(frozen=True)
class Case:
    """One benchmark case."""

    model: str
    prompts: int
    prompt_tokens: int  # of every prompt; of the longest with ``shortest``
    new_tokens: int  # of every answer; of the longest if ragged or with ``shortest``
    slots: int  # sequences that decode together, on all sides
    samples: int = 1  # answers per prompt
    ragged: bool = False  # answers of geometric lengths, which nobody knows before
    shortest: tuple[int, int] = ()  # tokens of a prompt and an answer; lengths are uniform
    common: int = 0  # tokens that all prompts begin with, beside their own
    temperature: float = 1.0  # 0: greedy
    needs_gpu: bool = False  # on a CPU only if named with --cases

    @property
    def max_len(self) -> int:
        return self.common + self.prompt_tokens + self.new_tokens

    @property
    def answer_tokens(self) -> int:
        return self.samples * sum(self.lengths())

    def lengths(self) -> list[int]:
        """Tokens of each prompt's answers.

        If ragged: evenly spaced quantiles of the geometric distribution, in a fixed random order.
        With so few independent draws the mean, and so the ratio, would depend on the seed.
        """
        draw = random.Random(0)
        if not self.ragged:
            least = self.shortest[1] if self.shortest else self.new_tokens
            return [draw.randint(least, self.new_tokens) for _ in range(self.prompts)]
        log_continue = math.log1p(-1 / MEAN_RAGGED_TOKENS)
        tails = [(i + 0.5) / self.prompts for i in range(self.prompts)]  # P(length > l)
        lengths = [math.ceil(math.log(tail) / log_continue) for tail in tails]
        draw.shuffle(lengths)
        return [min(length, self.new_tokens) for length in lengths]

    def make_prompts(self) -> list[list[int]]:
        """Random ids."""
        draw, vocab = random.Random(1), range(3, MODELS[self.model]().vocab_size)
        least = self.shortest[0] if self.shortest else self.prompt_tokens
        common = draw.choices(vocab, k=self.common)
        lengths = [draw.randint(least, self.prompt_tokens) for _ in range(self.prompts)]
        return [common + draw.choices(vocab, k=length) for length in lengths]


CASES = {
    "opt-125m": Case("opt-125m", 16, 64, 64, 16),
    "llama-384x6": Case("llama-384x6", 16, 64, 64, 16),
    "llama-tiny": Case("llama-tiny", 16, 64, 64, 16),
    "ragged": Case("opt-125m", 64, 64, 64, 16, ragged=True),
    "samples": Case("opt-125m", 16, 256, 64, 64, samples=4),
    "even": Case("llama-27m", 8, 32, 48, 16),
    "even-samples": Case("llama-27m", 8, 32, 48, 16, samples=4),
    "uneven": Case("llama-27m", 64, 200, 120, 16, shortest=(16, 8)),
    "shared": Case("llama-27m", 32, 64, 120, 16, shortest=(8, 8), common=128),
    # For comparison with the figures in DeepSpeed#8271 and DeepSpeed#8352.
    "opt-1.3b": Case("opt-1.3b", 8, 256, 128, 8, needs_gpu=True),
    "gpt2": Case("gpt2", 1, 128, 32, 1, temperature=0.0, needs_gpu=True),
    "llama-7b": Case("llama-7b", 64, 512, 512, 64, needs_gpu=True),
}
