"""Measures the inference engine against transformers' `generate` on the same weights.

    python benchmarks/rollout.py                                  # every case of this device
    python benchmarks/rollout.py --cases opt-125m ragged
    python benchmarks/rollout.py --device cuda --dtype bf16 --cases opt-1.3b gpt2
    python benchmarks/rollout.py --cases zero3 lora tp2           # each in two processes
    python benchmarks/rollout.py --backend vllm --cases ragged    # and vLLM, where it is installed

Models have random weights: nothing is downloaded. The engine loads the weights of the module that
`generate` runs. Both answer the same prompts in turn (engine, generate, engine, generate, ...)
after one warm-up each, and every answer has its full length: EOS is ignored. One JSON line per case
goes to stdout, progress to stderr:

- tokens_per_s: useful answer tokens / wall time of the whole call. Tokens that `generate` computes
  for finished rows do not count.
- prefill_tokens_per_s: prompt tokens, each prompt once, / seconds of prefill. The engine times its
  steps; for `generate`, it is a separate call that stops after the first token.
- decode_tokens_per_s: the other tokens / the rest of the wall time. If prompts prefill while others
  decode (ragged, samples), the engine's mixed steps count as prefill.
- ratio: engine / generate, of the medians. ratio_paired: the same within each round, with spread.
  With --backend vllm also vllm_ratio and vllm_ratio_paired: engine / vLLM.

The engine also returns every token's log-prob; `generate` does not.

Cases with an actor that two ranks train with DeepSpeed (measured by rollout_hybrid.py; the script
launches itself again, with one thread per rank on a CPU unless --threads is given):

- zero3: a rollout with its refresh under ZeRO-3 against ZeRO-0 (ratio "cost"), the refresh's
  collectives and its peak of extra memory.
- lora: separate adapters on a frozen base against merged ones, and the bytes of a refresh.
- tp2: tensor parallelism of 2 against none: the same greedy tokens, and bytes per rank.

Cases with two engines, with and without a feature, on a model of their own (rollout_reuse.py says
what they report): prefix, chat, alike, partial.

    python benchmarks/rollout.py --cases prefix chat alike partial
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import rollout_reuse
import torch
from report import (
    ROOT,
    environment,
    figures,
    free_port,
    machine_rates,
    ratios,
    rounded,
    spread,
    take_turns,
)
from rollout_sides import RATES, EngineSide, GenerateSide, VLLMSide, make_module
from rollout_workloads import CASES, MODELS, Case
from transformers.utils import logging as transformers_logging

import dschat.distributed as dist

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
    if dist.world_size() > 1:
        measure_as_rank(args, device, dtype)
        return
    alone = [n for n in args.cases if n in rollout_reuse.CASES or CASES[n].ranks == 1]
    common = about(args, device, dtype) if alone else {}
    for name in args.cases:
        if name in rollout_reuse.CASES:
            line = rollout_reuse.measure(name, args, device, dtype)
            first = {"benchmark": "rollout", "case": name} | common
            print(json.dumps(first | line), flush=True)
            continue
        if name not in alone:
            launch_ranks(name, args)
            continue
        case = chosen_case(name, args.model)
        line = measure(name, case, device, dtype, args.rounds, args.backend)
        print(json.dumps(head(name, case, common) | line), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    num_gpus = torch.cuda.device_count()
    on_gpu = num_gpus > 0
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=[*CASES, *rollout_reuse.CASES],
        help="default: all that the devices allow; on a CPU all but "
        + ", ".join(n for n in CASES if CASES[n].needs_gpu),
    )
    parser.add_argument("--model", choices=MODELS, help="default: the model of the case")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if on_gpu else "fp32")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's choice")
    parser.add_argument("--backend", choices=["vllm"], help="measure it, too")
    parser.add_argument("--commit", help="to record outside a git checkout")
    parser.add_argument(
        "--profile",
        metavar="CASE",
        choices=[name for name in CASES if CASES[name].ranks == 1],
        help="only profile the engine in this case, to stderr",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of tokens in prefix to partial")
    parser.add_argument("--rows", type=int, default=16, help="prompts of alike and partial")
    parser.add_argument("--actor", help="a trained checkpoint for alike")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} must be at least 1")
    if args.device == "cuda" and not on_gpu:
        parser.error("--device cuda: torch sees no CUDA device; use --device cpu")
    fitting = [n for n, c in CASES.items() if c.ranks == 1 or not on_gpu or c.ranks <= num_gpus]
    if not args.cases:
        args.cases = [n for n in fitting if args.device == "cuda" or not CASES[n].needs_gpu]
        args.cases += rollout_reuse.CASES
    for name in set(args.cases) & set(CASES):
        ranks = CASES[name].ranks
        if name not in fitting:
            parser.error(f"--cases {name} needs {ranks} CUDA devices; torch sees {num_gpus}")
        if ranks > 1 and on_gpu and args.device == "cpu":
            parser.error(f"--cases {name} uses this machine's CUDA devices; drop --device cpu")
    return args


def chosen_case(name: str, model: str | None) -> Case:
    case = CASES[name]
    # Targets hold for the case's own model only.
    return replace(case, model=model, targets={}) if model else case


def about(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict:
    """Code and machine."""
    given = {"dtype": args.dtype} | ({"commit": args.commit} if args.commit else {})
    return environment(device) | given | machine_rates(device, dtype)


def head(name: str, case: Case, common: dict) -> dict:
    """The beginning of the case's line."""
    return {"benchmark": "rollout", "case": name} | common | asdict(case)


# -- several processes -----------------------------------------------------------------------------


def launch_ranks(name: str, args: argparse.Namespace) -> None:
    """Run one case in its own processes: this script again, under DeepSpeed's launcher.

    Its JSON line goes to stdout, all other output to stderr.
    """
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "warning"]
    command += ["--no_local_rank", "--num_gpus", str(CASES[name].ranks)]
    command += ["--master_port", str(free_port()), str(Path(__file__).resolve()), "--cases", name]
    command += ["--rounds", str(args.rounds), "--device", args.device, "--dtype", args.dtype]
    for flag in ("model", "commit"):
        value = getattr(args, flag)
        command += [f"--{flag}", value] if value else []
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads or 1)}
    # The ninja that compiles DeepSpeed's communication op is found beside Python.
    for variable, first in (("PATH", Path(sys.executable).parent), ("PYTHONPATH", ROOT)):
        parts = (str(first), environment.get(variable))
        environment[variable] = os.pathsep.join(filter(None, parts))
    has_result = False
    # NOTE: the launcher does not forward signals; send them to its process group.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        for line in process.stdout:
            is_result = line.startswith('{"benchmark": ')
            has_result = has_result or is_result
            print(line, end="", file=sys.stdout if is_result else sys.stderr, flush=True)
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        raise
    finally:
        process.wait()
    # NOTE: the launcher exits with 0 after some failures.
    if not has_result:
        sys.exit(f"{name}: its processes failed (exit code {process.returncode}); see above")


def measure_as_rank(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
    """Collective. Measures the cases on a rank of `launch_ranks`; rank 0 prints the lines."""
    # Imported here, since DeepSpeed takes seconds to import and logs meanwhile.
    import rollout_hybrid

    dist.init()
    common = about(args, device, dtype) if dist.is_main_process() else {}
    dist.barrier()
    for name in args.cases:
        case = chosen_case(name, args.model)
        line = rollout_hybrid.measure(name, case, dtype, args.rounds)
        if dist.is_main_process():
            print(json.dumps(head(name, case, common) | line), flush=True)
    dist.barrier()
    dist.shutdown()


# -- measuring -------------------------------------------------------------------------------------


def measure(
    name: str,
    case: Case,
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
    backend: str | None = None,
) -> dict:
    """Measure all sides in turn; returns the fields of the case's line."""
    module = make_module(case, device, dtype)
    sides = {
        "engine": EngineSide(case, module, device),
        "generate": GenerateSide(case, module, device),
    }
    if backend is not None:
        dist.init()
        sides[backend] = VLLMSide(case, module, device)
    timings = take_turns(name, sides, rounds, lambda timing: figures(timing.rates()))
    rates = {side: [timing.rates() for timing in done] for side, (_, *done) in timings.items()}
    line: dict = {
        "parameters": sum(p.numel() for p in module.parameters()),
        "answer_tokens": case.samples * sum(case.lengths()),
        "rounds": rounds,
    }
    for side, runner in sides.items():
        spreads = {rate: spread([r[rate] for r in rates[side]]) for rate in RATES}
        line[side] = spreads | runner.facts()
    line |= compare(line, rates, "generate")
    if backend is not None:
        compared = compare(line, rates, backend).items()
        line |= {f"{backend}_{key}": values for key, values in compared}
    return line


def compare(line: dict, rates: dict[str, list[dict[str, float]]], other: str) -> dict:
    """Engine / other: of the medians, and within each round. Keys as in ``Case.targets``."""
    ratio, paired = {}, {}
    for rate in RATES:
        key = "tokens" if rate == "tokens_per_s" else rate.partition("_")[0]
        ratio[key] = rounded(line["engine"][rate]["median"] / line[other][rate]["median"])
        engine, others = ([r[rate] for r in rates[side]] for side in ("engine", other))
        paired[key] = ratios(engine, others)
    return {"ratio": ratio, "ratio_paired": paired}


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
