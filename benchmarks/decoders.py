"""Measures rollouts of our decoder and transformers' own module on a CPU against
`generate`, by family.

    python benchmarks/decoders.py                       # one of each build, every case
    python benchmarks/decoders.py llama --cases even --rounds 5
    python benchmarks/decoders.py --found --cases even  # families that were found, not listed

Models of 20M to 60M parameters with random weights, T 1, in fp32. `generate` gets batches of 16,
the longest answers first, padded on the left. Cases:

    even     8 prompts of 32 tokens, 48 new ones
    ragged   64 prompts of 16 to 200 tokens, 8 to 120 new ones, 16 slots
    samples  even, four samples of each prompt
    shared   32 prompts with 128 tokens in common and 8 to 64 of their own, 8 to 120 new ones

The sides take turns. One JSON line per case goes to stdout: seconds of each side (median and range
over the rounds), and how many times as fast as `generate` the decoders are, by medians.
"""

import argparse
import json
import random
import time
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from report import environment, rounded, spread, take_turns
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dschat.inference import EngineConfig, InferenceEngine, SamplingParams, UnsupportedModel
from dschat.inference.generators.hf_generator import module_engine

CPU, SLOTS, VOCAB = torch.device("cpu"), 16, 8192
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1376,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "tie_word_embeddings": True,
}
WINDOWS, FULL, LINEAR = ["sliding_attention"] * 5, ["full_attention"], ["linear_attention"] * 3
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {
        "sliding_window": 64,
        "layer_types": [*WINDOWS, *FULL, *WINDOWS[:2]],
        "query_pre_attn_scalar": 64,
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 384,
        "hidden_size": 384,
    },
    "opt": {"ffn_dim": 2048, "word_embed_proj_dim": 512},
    "gpt2": {"n_positions": 1024},
    "qwen3_5_text": {
        "layer_types": [*LINEAR, *FULL] * 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "hidden_size": 448,
        "intermediate_size": 1216,
    },
}
USUAL = [*FAMILIES]  # what is measured without --found
MOE = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
MOE |= {"n_routed_experts": 8, "moe_intermediate_size": 256}
LATENT = {"kv_lora_rank": 128, "q_lora_rank": 192, "v_head_dim": 64, "num_key_value_heads": 8}
LATENT |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32}
FOUND: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 64},
    "deepseek_v3": MOE | LATENT | {"n_group": 2, "topk_group": 1},
    "dots1": MOE,
    "ernie4_5": {},
    "exaone4": {"sliding_window": 64},
    "glm4_moe": MOE,
    "granitemoe": MOE | {"intermediate_size": 256},
    "helium": {},
    "minicpm3": LATENT,
    "minimax_m2": MOE | {"intermediate_size": 256},
    "nemotron": {},
    "olmoe": MOE | {"intermediate_size": 256},
    "phi": {"tie_word_embeddings": False},
    "stablelm": {},
    "starcoder2": {},
    "hunyuan_v1_dense": {},
    "laguna": MOE | {"shared_expert_intermediate_size": 256, "sliding_window": 64},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
    "granitemoehybrid": MOE
    | {"layer_types": ["mamba", "mamba", "attention", "mamba"] * 2, "mamba_n_heads": 16}
    | {"mamba_d_head": 64, "mamba_d_state": 64, "intermediate_size": 256},
    "persimmon": {},
}
FAMILIES |= FOUND
TINY = {"hidden_size": 32, "head_dim": 4, "intermediate_size": 48, "word_embed_proj_dim": 32}


class Work(NamedTuple):
    """Prompts, and the new tokens of each one's answers."""

    prompts: list[list[int]]
    new_tokens: list[int]
    samples: int = 1


def works(scale: int) -> dict[str, Work]:
    """The cases; with ``scale`` below 1, of a part of their tokens."""
    draw = random.Random(0)

    def ids(count: int) -> list[int]:
        return [draw.randrange(2, VOCAB) for _ in range(max(1, count // scale))]

    def up_to(low: int, high: int, count: int) -> list[int]:
        return [max(1, draw.randint(low, high) // scale) for _ in range(count)]

    even = [ids(32) for _ in range(8)]
    system = ids(128)
    return {
        "even": Work(even, [max(1, 48 // scale)] * 8),
        "ragged": Work([ids(scale * n) for n in up_to(16, 200, 64)], up_to(8, 120, 64)),
        "samples": Work(even, [max(1, 48 // scale)] * 8, 4),
        "shared": Work([system + ids(scale * n) for n in up_to(8, 64, 32)], up_to(8, 120, 32)),
    }


class Decoder(NamedTuple):
    engine: InferenceEngine
    in_module: bool
    work: Work

    def run(self, number: int) -> float:
        sampling = SamplingParams(max(self.work.new_tokens), n=self.work.samples, ignore_eos=True)
        self.engine.release_cache()  # no prefixes of the round before
        started = time.perf_counter()
        if self.in_module:
            with self.engine.weights.in_use():
                self._generate(sampling)
        else:
            self._generate(sampling)
        return time.perf_counter() - started

    def _generate(self, sampling: SamplingParams) -> None:
        self.engine.generate(self.work.prompts, sampling, max_new_tokens=self.work.new_tokens)


class Generate(NamedTuple):
    module: PreTrainedModel
    work: Work

    @torch.no_grad()
    def run(self, number: int) -> float:
        started = time.perf_counter()
        each = zip(self.work.new_tokens, self.work.prompts, strict=True)
        rows = [pair for pair in each for _ in range(self.work.samples)]
        rows.sort(key=lambda pair: -pair[0])
        for first in range(0, len(rows), SLOTS):
            batch = rows[first : first + SLOTS]
            width, new = max(len(ids) for _, ids in batch), batch[0][0]
            gaps = [width - len(ids) for _, ids in batch]
            tokens = [[1] * gap + ids for gap, (_, ids) in zip(gaps, batch, strict=True)]
            masks = [[0] * gap + [1] * (width - gap) for gap in gaps]
            self.module.generate(
                torch.tensor(tokens),
                attention_mask=torch.tensor(masks),
                do_sample=True,
                top_k=0,
                max_new_tokens=new,
                min_new_tokens=new,
                pad_token_id=1,
            )
        return time.perf_counter() - started


def measure(family: str, cases: list[str], rounds: int, tiny: bool) -> None:
    torch.manual_seed(0)
    sizes = SIZES | FAMILIES[family] | (TINY if tiny else {})
    sizes["head_dim"] = sizes.get("qk_rope_head_dim", sizes["head_dim"])  # what is rotated
    module = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes), dtype=torch.float32)
    module.eval()
    limits = EngineConfig(max_num_seqs=SLOTS, max_seq_len=512, stop_ids=(0,))
    engines = {"module": module_engine(module, limits)}
    with suppress(UnsupportedModel):
        engines["blocks"] = InferenceEngine(module.config, torch.float32, CPU, limits)
        engines["blocks"].weights.load(module.state_dict().items())
    for case in cases:
        work = works(8 if tiny else 1)[case]
        sides: dict[str, Any] = {
            name: Decoder(made, name == "module", work) for name, made in engines.items()
        }
        sides["generate"] = Generate(module, work)
        seconds = take_turns(f"{family}, {case}", sides, rounds, "{:.2f} s".format)
        spreads = {name: spread(values[1:]) for name, values in seconds.items()}
        middle = {name: values["median"] for name, values in spreads.items()}
        line = {
            "family": family,
            "parameters": sum(p.numel() for p in module.parameters()),
            "case": case,
            "seconds": spreads,
            "ratio": {name: rounded(middle["generate"] / middle[name]) for name in engines},
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help=f"of these; default: {', '.join(USUAL)}")
    parser.add_argument("--cases", nargs="+", default=[*works(1)], choices=[*works(1)])
    parser.add_argument("--found", action="store_true", help=f"{', '.join(FOUND)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="tiny models and few tokens")
    args = parser.parse_args()
    print(json.dumps(environment(CPU)), flush=True)
    for family in args.families or (FOUND if args.found else USUAL):
        measure(family, args.cases, args.rounds, args.tiny)


if __name__ == "__main__":
    main()
