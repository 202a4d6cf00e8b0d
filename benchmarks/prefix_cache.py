"""Measures the prefix cache: a system prompt that all prompts share, and turns of a conversation.

    python benchmarks/prefix_cache.py
    python benchmarks/prefix_cache.py --cases chat --model opt-1.3b --device cuda --dtype bf16

Two engines with the same random weights and pages, one of which finds no prefixes, run by turns
after a warm-up. One JSON line per case goes to stdout:

- prefix: 64 prompts of 512 common and 32 own tokens. prefill_tokens computed, prefill_s, and wall_s
  of the whole call with 16 new tokens each.
- chat: time to the first token of each turn, which has 150 new tokens and an answer of 64.

ratio_*: without / with, of the medians.
"""

import argparse
import json
import random
import sys
import time

import torch
from report import environment, spread
from rollout_sides import make_module
from rollout_workloads import MODELS, Case
from torch import nn

from dschat.hybrid.weight_stream import weight_stream
from dschat.inference import EngineConfig, InferenceEngine, SamplingParams

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PAGE = 32
SIDES = ("with", "without")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--model", choices=MODELS, default="opt-125m")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--scale", type=float, default=1.0, help="of all numbers of tokens")
    args = parser.parse_args()
    device = torch.device(args.device)
    module = make_module(Case(args.model, 0, 0, 0, 0), device, DTYPES[args.dtype])
    for name in args.cases:
        line = CASES[name](module, device, args.rounds, args.scale)
        head = {"benchmark": "prefix_cache", "case": name, "model": args.model, "dtype": args.dtype}
        print(json.dumps(head | environment(device) | line), flush=True)


def engines(
    module: nn.Module, device: torch.device, num_seqs: int, length: int
) -> dict[str, InferenceEngine]:
    made = {}
    for side in SIDES:
        sizes = EngineConfig(max_num_seqs=num_seqs, max_seq_len=length, page_size=PAGE)
        made[side] = InferenceEngine(module.config, module.dtype, device, sizes)
        made[side].weights.load(weight_stream(module, device))
    made["without"].cache.keeps_prefixes = False
    return made


def prefix(module: nn.Module, device: torch.device, rounds: int, scale: float) -> dict:
    common, own, new = (max(1, round(scale * n)) for n in (512, 32, 16))
    draw = random.Random(0)
    ids = range(3, module.config.vocab_size)
    system = draw.choices(ids, k=common)
    prompts = [system + draw.choices(ids, k=own) for _ in range(64)]
    sides = engines(module, device, 64, common + own + new)
    sampling = SamplingParams(max_new_tokens=new, ignore_eos=True)
    timings: dict[str, dict[str, list[float]]] = {s: {"prefill_s": [], "wall_s": []} for s in SIDES}
    tokens = {}
    for number in range(rounds + 1):
        for side, engine in sides.items():
            engine.forget_prefixes()
            started = time.perf_counter()
            engine.generate(prompts, sampling)
            wall_s = time.perf_counter() - started
            tokens[side] = engine.stats.prefill_tokens
            if number:
                timings[side]["prefill_s"].append(engine.stats.prefill_s)
                timings[side]["wall_s"].append(wall_s)
            sys.stderr.write(f"prefix, round {number}, {side}: {wall_s:.2f} s\n")
    line = summary(timings)
    return line | {"prefill_tokens": tokens, "ratio_tokens": tokens["without"] / tokens["with"]}


def chat(module: nn.Module, device: torch.device, rounds: int, scale: float) -> dict:
    asked, new = (max(2, round(scale * n)) for n in (150, 64))
    sides = engines(module, device, 1, 5 * (asked + new))
    sampling = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
    turns = [f"turn{number}_s" for number in range(1, 6)]
    timings: dict[str, dict[str, list[float]]] = {s: {t: [] for t in turns} for s in SIDES}
    ids = range(3, module.config.vocab_size)
    for number in range(rounds + 1):
        for side, engine in sides.items():
            engine.forget_prefixes()
            draw, history = random.Random(number), []
            for turn in turns:
                history += draw.choices(ids, k=asked)
                started = time.perf_counter()
                answer = engine.stream(history, sampling)
                history.append(next(answer))
                first_s = time.perf_counter() - started
                history += answer
                if number:
                    timings[side][turn].append(first_s)
            sys.stderr.write(f"chat, round {number}, {side}: {first_s:.3f} s\n")
    return summary(timings)


def summary(timings: dict[str, dict[str, list[float]]]) -> dict:
    line: dict = {side: {n: spread(v) for n, v in timings[side].items()} for side in SIDES}
    for name in timings["with"]:
        without, found = (line[side][name]["median"] for side in reversed(SIDES))
        line[f"ratio_{name.removesuffix('_s')}"] = round(without / found, 3)
    return line


CASES = {"prefix": prefix, "chat": chat}

if __name__ == "__main__":
    main()
