"""How fast does the inference engine answer, against transformers' `generate` on the same weights?

    python benchmarks/rollout.py                                  # every case of this device
    python benchmarks/rollout.py --cases opt-125m ragged
    python benchmarks/rollout.py --device cuda --dtype bf16 --cases opt-1.3b gpt2

Models have random weights, made from their configs: nothing is downloaded. The engine is filled
from the very module that `generate` runs. Both answer the same prompts in turns (engine, generate,
engine, generate, ...) after one warm-up each, and no answer ends before its length: EOS is ignored.
One JSON line a case goes to stdout, progress to stderr:

- tokens_per_s: useful answer tokens / wall time of the whole call. A token is useful up to its
  answer's own length; what `generate` computes for rows that are done is not.
- prefill_tokens_per_s: tokens of the prompts, each prompt once, / seconds of prefill. The engine
  times its steps; of `generate`, it is a call of its own that stops after the first token.
- decode_tokens_per_s: the other tokens / the rest of the wall time. Where prompts come in while
  others decode (ragged, samples), the engine's steps with both in them count as prefill.
- ratio: engine / generate, of the medians. ratio_paired: the same within each round, with spread.

The engine also returns every token's log-prob; `generate` is not asked for any.
"""

import argparse
import json
import sys
from dataclasses import asdict, replace

import torch
from report import environment, machine_rates, rounded, spread
from rollout_cases import CASES, MODELS, Case
from rollout_sides import RATES, EngineSide, GenerateSide, make_module
from transformers.utils import logging as transformers_logging

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    args = parse()
    transformers_logging.set_verbosity_error()
    if args.threads:
        torch.set_num_threads(args.threads)
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    if args.profile:
        profile(chosen_case(args.profile, args.model), device, dtype)
        return
    common = environment(device) | {"dtype": args.dtype}
    if args.commit:
        common["commit"] = args.commit
    common |= machine_rates(device, dtype)
    names = args.cases or [n for n, c in CASES.items() if device.type == "cuda" or not c.needs_gpu]
    for name in names:
        case = chosen_case(name, args.model)
        line = {"benchmark": "rollout", "case": name} | common | asdict(case)
        line |= measure(name, case, device, dtype, args.rounds)
        print(json.dumps(line), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=CASES,
        help="default: all; on a CPU all but " + ", ".join(n for n in CASES if CASES[n].needs_gpu),
    )
    parser.add_argument("--model", choices=MODELS, help="in place of the case's own")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if on_gpu else "fp32")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's default")
    parser.add_argument("--commit", help="what to record where there is no git checkout")
    parser.add_argument(
        "--profile",
        metavar="CASE",
        choices=CASES,
        help="only print where the engine's time goes in this case, to stderr",
    )
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} must be at least 1")
    if args.device == "cuda" and not on_gpu:
        parser.error("--device cuda: torch sees no CUDA device; use --device cpu")
    return args


def chosen_case(name: str, model: str | None) -> Case:
    case = CASES[name]
    # Targets are those of the case's own model.
    return replace(case, model=model, targets={}) if model else case


# -- measuring -------------------------------------------------------------------------------------


def measure(name: str, case: Case, device: torch.device, dtype: torch.dtype, rounds: int) -> dict:
    """Both sides in turns; what the case's line says about them."""
    module = make_module(case, device, dtype)
    sides = {
        "engine": EngineSide(case, module, device),
        "generate": GenerateSide(case, module, device),
    }
    rates: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for number in range(rounds + 1):  # the first is the warm-up
        for side, runner in sides.items():
            found = runner.run(seed=number).rates()
            if number:
                rates[side].append(found)
            figures = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
            note = f"round {number} of {rounds}" if number else "warm-up"
            print(f"{name}: {note}, {side}: {figures}", file=sys.stderr, flush=True)
    line: dict = {
        "parameters": sum(p.numel() for p in module.parameters()),
        "answer_tokens": case.samples * sum(case.lengths()),
        "rounds": rounds,
    }
    for side, runner in sides.items():
        spreads = {rate: spread([r[rate] for r in rates[side]]) for rate in RATES}
        line[side] = spreads | runner.facts()
    return line | compare(line, rates)


def compare(line: dict, rates: dict[str, list[dict[str, float]]]) -> dict:
    """Engine / generate: of the medians, and within each round. Keys as in ``Case.targets``."""
    ratio, paired = {}, {}
    for rate in RATES:
        key = "tokens" if rate == "tokens_per_s" else rate.partition("_")[0]
        ratio[key] = rounded(line["engine"][rate]["median"] / line["generate"][rate]["median"])
        pairs = zip(rates["engine"], rates["generate"], strict=True)
        paired[key] = spread([ours[rate] / theirs[rate] for ours, theirs in pairs])
    return {"ratio": ratio, "ratio_paired": paired}


def profile(case: Case, device: torch.device, dtype: torch.dtype) -> None:
    """Where the engine's time goes, by operator, after a warm-up."""
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
