"""Measures the inference engine against transformers' `generate` on the same weights.

    python benchmarks/rollout.py                                  # every case of this device
    python benchmarks/rollout.py --cases opt-125m ragged
    python benchmarks/rollout.py --cases even --model gemma3-27m --sides engine module generate
    python benchmarks/rollout.py --cases ragged --sides engine vllm generate

Models have random weights: nothing is downloaded. In fp32 on a CPU, in bf16 on a GPU. The sides are
dschat's engine with its own decoder (engine) or with transformers' module as its decoder (module),
vLLM where it is installed, and `generate`. They have the weights of one module and answer the same
prompts in turn, after one warm-up each, and every answer has its full length: EOS is ignored. The
engine also returns every token's log-prob; `generate` does not. One JSON line per case goes to
stdout, progress to stderr:

- tokens_per_s: by side, useful answer tokens / wall time of the whole call. Tokens that `generate`
  computes for finished rows do not count.
- ratio: of each side to `generate`, or the last side, within each round, with spread.
- prefill_tokens, decode_steps: by side, prompt tokens and steps that it computes.

Cases with two engines, with and without a feature, on a model of their own (rollout_reuse.py says
what they report): prefix, chat, alike, partial.
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from typing import Any

import rollout_reuse
import torch
from report import environment, flags, ratios, spread, take_turns
from rollout_sides import SIDES, EngineSide, make_module
from rollout_workloads import CASES, MODELS, Case
from transformers.utils import logging as transformers_logging

import dschat.distributed as dist
from dschat.inference import UnsupportedModel


def main() -> None:
    args, device = parse(), dist.device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    transformers_logging.set_verbosity_error()
    if args.profile:
        profile(chosen_case(args.profile, args.model), device, dtype)
        return
    for name in args.cases:
        if name in rollout_reuse.CASES:
            line = rollout_reuse.measure(name, args, device, dtype)
        else:
            case = chosen_case(name, args.model)
            line = measure(name, case, args.sides, args.rounds, device, dtype)
        print(json.dumps({"benchmark": "rollout", "case": name} | environment(device) | line))


def parse() -> argparse.Namespace:
    parser = flags(__doc__, rounds=5)
    on_gpu = dist.device().type == "cuda"
    usual = [name for name, case in CASES.items() if on_gpu or not case.needs_gpu]
    choices = [*CASES, *rollout_reuse.CASES]
    usual += rollout_reuse.CASES
    parser.add_argument("--cases", nargs="+", choices=choices, default=usual)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["engine", "generate"])
    parser.add_argument("--model", choices=MODELS, help="default: the model of the case")
    only = "only profile the engine in this case, to stderr"
    parser.add_argument("--profile", metavar="CASE", choices=CASES, help=only)
    parser.add_argument("--scale", type=float, default=1.0, help="of tokens in prefix to partial")
    parser.add_argument("--rows", type=int, default=16, help="prompts of alike and partial")
    parser.add_argument("--actor", help="a trained checkpoint for alike")
    return parser.parse_args()


def chosen_case(name: str, model: str | None) -> Case:
    return replace(CASES[name], model=model or CASES[name].model)


def measure(
    name: str, case: Case, sides: list[str], rounds: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Measure all sides in turn; returns the fields of the case's line."""
    module = make_module(case, device, dtype)
    if "vllm" in sides:
        dist.init()
    runners: dict[str, Any] = {}
    for side in sides:
        try:
            runners[side] = SIDES[side](case, module, device)
        except UnsupportedModel as reason:
            print(f"{name}: {side} skipped, {reason}", file=sys.stderr)
    results = take_turns(name, runners, rounds, "{:.4g} s".format)
    seconds = {side: measured for side, (_, *measured) in results.items()}  # without the warm-up
    base = "generate" if "generate" in runners else sides[-1]
    return asdict(case) | {
        "parameters": sum(p.numel() for p in module.parameters()),
        "rounds": rounds,
        "tokens_per_s": {
            k: spread([case.answer_tokens / s for s in v]) for k, v in seconds.items()
        },
        "ratio": {k: ratios(seconds[base], v) for k, v in seconds.items() if k != base},
        "facts": {side: runner.facts() for side, runner in runners.items()},
    }


def profile(case: Case, device: torch.device, dtype: torch.dtype) -> None:
    """Print the engine's time by operator, after a warm-up."""
    side = EngineSide(case, make_module(case, device, dtype), device)
    side.run(seed=0)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as recorded:
        side.run(seed=1)
    order = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(recorded.key_averages().table(sort_by=order, row_limit=30), file=sys.stderr)


if __name__ == "__main__":
    main()
