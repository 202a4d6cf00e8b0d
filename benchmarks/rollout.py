"""How fast does the inference engine answer, against transformers' `generate` on the same weights?

    python benchmarks/rollout.py                                  # every case of this device
    python benchmarks/rollout.py --cases opt-125m ragged
    python benchmarks/rollout.py --device cuda --dtype bf16 --cases opt-1.3b gpt2
    python benchmarks/rollout.py --cases zero3 lora tp2           # each in two processes

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

Of an actor that two ranks train with DeepSpeed, other lines (rollout_hybrid.py says how they are
measured; the script launches itself again, one thread a rank on a CPU unless --threads says more):

- zero3: a rollout with its refresh under ZeRO-3 against ZeRO-0 (ratio "cost"), the refresh's
  collectives and its peak of extra memory.
- lora: adapters beside a frozen base against merged ones, and the bytes of a refresh.
- tp2: tensor parallelism of 2 against none: the same greedy tokens, and bytes per rank.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
from report import ROOT, environment, machine_rates, rounded, spread
from rollout_cases import CASES, MODELS, Case
from rollout_sides import RATES, EngineSide, GenerateSide, make_module
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
    alone = [name for name in args.cases if CASES[name].ranks == 1]
    common = about(args, device, dtype) if alone else {}
    for name in args.cases:
        if name not in alone:
            launch_ranks(name, args)
            continue
        case = chosen_case(name, args.model)
        line = measure(name, case, device, dtype, args.rounds)
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
        choices=CASES,
        help="default: all that there are devices for; on a CPU all but "
        + ", ".join(n for n in CASES if CASES[n].needs_gpu),
    )
    parser.add_argument("--model", choices=MODELS, help="in place of the case's own")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if on_gpu else "fp32")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's choice")
    parser.add_argument("--commit", help="what to record where there is no git checkout")
    parser.add_argument(
        "--profile",
        metavar="CASE",
        choices=[name for name in CASES if CASES[name].ranks == 1],
        help="only print where the engine's time goes in this case, to stderr",
    )
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} must be at least 1")
    if args.device == "cuda" and not on_gpu:
        parser.error("--device cuda: torch sees no CUDA device; use --device cpu")
    fitting = [n for n, c in CASES.items() if c.ranks == 1 or not on_gpu or c.ranks <= num_gpus]
    if not args.cases:
        args.cases = [n for n in fitting if args.device == "cuda" or not CASES[n].needs_gpu]
    for name in args.cases:
        ranks = CASES[name].ranks
        if name not in fitting:
            parser.error(f"--cases {name} needs {ranks} CUDA devices; torch sees {num_gpus}")
        if ranks > 1 and on_gpu and args.device == "cpu":
            parser.error(f"--cases {name} takes the CUDA devices that are here; drop --device cpu")
    return args


def chosen_case(name: str, model: str | None) -> Case:
    case = CASES[name]
    # Targets are those of the case's own model.
    return replace(case, model=model, targets={}) if model else case


def about(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict:
    """Code and machine."""
    told = {"dtype": args.dtype} | ({"commit": args.commit} if args.commit else {})
    return environment(device) | told | machine_rates(device, dtype)


def head(name: str, case: Case, common: dict) -> dict:
    """The beginning of the case's line."""
    return {"benchmark": "rollout", "case": name} | common | asdict(case)


# -- several processes -----------------------------------------------------------------------------


def launch_ranks(name: str, args: argparse.Namespace) -> None:
    """Run one case in processes of its own: this script again, under DeepSpeed's launcher.

    Its JSON line goes to stdout, whatever else it and DeepSpeed say to stderr.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "warning"]
    command += ["--no_local_rank", "--num_gpus", str(CASES[name].ranks)]
    command += ["--master_port", str(port), str(Path(__file__).resolve()), "--cases", name]
    command += ["--rounds", str(args.rounds), "--device", args.device, "--dtype", args.dtype]
    for flag in ("model", "commit"):
        value = getattr(args, flag)
        command += [f"--{flag}", value] if value else []
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads or 1)}
    # The ninja that compiles DeepSpeed's communication op is found beside Python.
    for variable, first in (("PATH", Path(sys.executable).parent), ("PYTHONPATH", ROOT)):
        parts = (str(first), environment.get(variable))
        environment[variable] = os.pathsep.join(filter(None, parts))
    found = False
    # NOTE: the launcher does not pass signals on; its process group gets them.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        for line in process.stdout:
            is_result = line.startswith('{"benchmark": ')
            found = found or is_result
            print(line, end="", file=sys.stdout if is_result else sys.stderr, flush=True)
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        raise
    finally:
        process.wait()
    # NOTE: the launcher ends with 0 after some failures.
    if not found:
        sys.exit(f"{name}: its processes failed (exit code {process.returncode}); see above")


def measure_as_rank(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
    """Collective. What `launch_ranks` launched: rank 0 prints the lines."""
    # Here alone, since DeepSpeed takes seconds to import and talks meanwhile.
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
