"""Measures a training iteration of each step against the same work on padded batches.

    python benchmarks/iteration.py                          # every case of this machine
    python benchmarks/iteration.py --cases ppo grpo-prefix --rounds 3

Sides, each in its own process:

- dschat: this checkout with default flags. dschat-padded: with --packing off.
- deepspeed-chat: Hugging Face models under DeepSpeed engines, every sequence padded to the maximum
  lengths, all logits, transformers' `generate` on prompts padded on the left.
  deepspeed-chat-longest (sft, rm, dpo): padded to the longest row of the batch only.

Models have random weights: nothing is downloaded. In each round all sides get the same prompts;
answers are generated to lengths drawn from a seed, then replaced by drawn tokens, so that all sides
score and train on the same ones. Losses are reported to show that. The sides stay loaded and take
turns after a warm-up round; where memory is the question (vocab-150k) or scarce, one runs after the
other. zero3 runs in two processes under ZeRO-3 and ZeRO-2. row-64k-2 is a step of SFT on one row of
64k tokens that two ranks share, with gradient checkpointing. One JSON line per case and side:

- generate_s (weight refresh included), score_s (old and reference log-probs, values, scores,
  advantages), train_s, iteration_s: medians over the rounds, with spread.
- loaded_gib, peak_gib: memory of the process (the largest of the ranks) before the first round, and
  at most. held_gib, round_gib: before the last round, and at most in it.
- ratio: this side / the first side, of seconds (within each round) and peak_gib.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from iteration_cases import CASES, Case, find_case, write_models
from report import ROOT, environment, figures, flags, free_port, note, rounded, spread, take_turns

import dschat.distributed as dist
from dschat.distributed.memory import free_bytes, peak_bytes, peak_memory_gib, restart_peak

DSCHAT, PADDED, REFERENCE, LONGEST = SIDES = (
    "dschat",
    "dschat-padded",
    "deepspeed-chat",
    "deepspeed-chat-longest",
)
PARTS = ("generate_s", "score_s", "train_s", "iteration_s")


def main() -> None:
    args = parse()
    if args.worker:
        work(*json.loads(args.worker))
        return
    if dist.device().type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed logs its choice to stdout
    about = environment(dist.device())
    for name in args.cases:
        if reason := unavailable(find_case(name, args.tiny)):
            note(f"{name}: skipped, {reason}")
            continue
        for line in measure(name, args.sides, args.rounds, args.tiny):
            head = {"benchmark": "iteration", "case": name, "side": line.pop("side")}
            print(json.dumps(head | about | line), flush=True)


def parse() -> argparse.Namespace:
    parser = flags(__doc__, rounds=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--tiny", action="store_true", help="tiny models and rows, to try it out")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # arguments of `work`
    return parser.parse_args()


def unavailable(case: Case) -> str:
    """Why ``case`` cannot run on this machine, in a few words; "" if it can."""
    gpus = torch.cuda.device_count()
    if case.needs_gpu and not gpus:
        return "it needs a CUDA device"
    if gpus and case.ranks > gpus:
        return f"it needs {case.ranks} CUDA devices, torch sees {gpus}"
    return ""


# -- one rank of a side ----------------------------------------------------------------------------


def work(name: str, tiny: bool, side: str, stage: int, folder: str) -> None:
    """Load a side, then run a round for every line on stdin. Rank 0 replies with JSON lines: one
    when everything is loaded, one after each round. All other output goes to stderr.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    from dschat.observability import console
    from dschat.startup.performance import return_freed_memory

    def reply(message: dict[str, Any], held: int = 0) -> None:
        device = dist.device()
        peaks = peak_memory_gib(device), held / 2**30, peak_bytes(device) / 2**30
        most = map(max, zip(*dist.gather_objects(peaks), strict=True))
        message |= dict(zip(("peak_gib", "held_gib", "round_gib"), most, strict=True))
        if dist.is_main_process():
            print(json.dumps(message), file=replies, flush=True)

    # The gap between the generator's log-probs and those of the given answers is no mistake here.
    console.setup("error")
    dist.init()
    made = make_side(side, find_case(name, tiny), Path(folder), stage)
    reply({"threads": torch.get_num_threads()})
    for line in sys.stdin:
        held = restart_peak(dist.device())
        measured = made.run(int(line))
        reply(measured, held)
        return_freed_memory()  # the other sides run next
    dist.shutdown()


def make_side(side: str, case: Case, folder: Path, stage: int) -> Any:
    """The side, loaded; its ``run(number)`` returns the seconds of a round."""
    from iteration_dschat import RLHFSide, SupervisedSide
    from iteration_padded import PaddedRLHF, PaddedSupervised

    if side in (DSCHAT, PADDED):
        packing = {"packing": "off"} if side == PADDED else {}
        return (RLHFSide if case.is_rlhf else SupervisedSide)(case, folder, stage, **packing)
    if case.is_rlhf:
        return PaddedRLHF(case, folder, stage)
    return PaddedSupervised(case, folder, stage, to_longest=side == LONGEST)


class Worker:
    """The processes of a side: one per rank."""

    def __init__(self, name: str, tiny: bool, side: str, stage: int, folder: str) -> None:
        self.label, ranks = f"{name}, {side}, ZeRO-{stage}", find_case(name, tiny).ranks
        spec = json.dumps([name, tiny, side, stage, folder])
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", spec]
        variables = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        variables["PYTHONPATH"] = os.pathsep.join(paths)
        if side in (REFERENCE, LONGEST):
            variables["DSCHAT_CPU_MATMUL"] = "plain"  # torch's own products, as DeepSpeed-Chat's
        if ranks > 1:
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            variables |= {"WORLD_SIZE": str(ranks)}
            variables.setdefault("OMP_NUM_THREADS", "1")
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.processes = []
        for rank in range(ranks):
            number = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            self.processes.append(subprocess.Popen(command, env=variables | number, **pipes))

    def reply(self) -> dict[str, Any]:
        """The next reply of rank 0."""
        line = self.processes[0].stdout.readline()
        if not line:
            self.close()
            sys.exit(f"{self.label} failed; see above")
        return json.loads(line)

    def run(self, number: int) -> dict[str, Any]:
        for process in self.processes:
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
        return self.reply()

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait()


# -- measuring -------------------------------------------------------------------------------------


def sides_of(name: str, case: Case, chosen: list[str]) -> dict[str, tuple[str, int]]:
    """Side and ZeRO stage of everything to measure, by label; says which sides are left out."""
    left_out = {LONGEST} if case.is_rlhf else set()
    if case.is_shared:
        left_out = {PADDED, REFERENCE, LONGEST}
    if 3 in case.stages:
        left_out.add(REFERENCE)  # `generate` fails there
    # Logits, their log-softmax and the gradients of both.
    needed = 4 * 4 * case.logits
    if needed > free_bytes(dist.device()):
        for side in {REFERENCE, LONGEST} & set(chosen):
            note(f"{name}: {side} skipped, its logits need {needed / 2**30:.0f} GiB of free memory")
            left_out.add(side)
    sides = [side for side in chosen if side not in left_out]
    return {f"{side}, ZeRO-{n}": (side, n) for n in case.stages for side in sides}


def measure(name: str, chosen: list[str], rounds: int, tiny: bool) -> list[dict[str, Any]]:
    """Run all sides of a case; the fields of each side's line."""
    case, results = find_case(name, tiny), {}
    sides = sides_of(name, case, chosen)
    with tempfile.TemporaryDirectory() as folder:
        write_models(case, Path(folder))
        for group in [[*sides]] if case.in_turns else [[key] for key in sides]:
            workers: dict[str, Worker] = {}
            try:
                for key in group:
                    workers[key] = Worker(name, tiny, *sides[key], folder)
                    results[key] = {"loaded": workers[key].reply()}
                for key, (_, *measured) in take_turns(name, workers, rounds, _seconds).items():
                    results[key]["rounds"] = measured  # without the warm-up
            finally:
                for worker in workers.values():
                    worker.close()
    first = next(iter(results.values()))["rounds"]
    about = {"task": case.task, "model": case.model, "ranks": case.ranks, "rounds": rounds}
    return [
        {"side": side, "zero_stage": stage} | about | summary(**results[key], first=first)
        for key, (side, stage) in sides.items()
    ]


def _seconds(measured: dict[str, Any]) -> str:
    return figures({part: measured[part] for part in PARTS if part in measured})


def summary(
    loaded: dict[str, Any], rounds: list[dict[str, Any]], first: list[dict[str, Any]]
) -> dict[str, Any]:
    """Medians and spread over the measured rounds, and ratios to the rounds of the first side."""
    parts = [part for part in PARTS if part in rounds[0]]
    pairs = list(zip(rounds, first, strict=True))
    ratio: dict[str, Any] = {part: spread([a[part] / b[part] for a, b in pairs]) for part in parts}
    ratio["peak_gib"] = rounded(rounds[-1]["peak_gib"] / first[-1]["peak_gib"])
    return {part: spread([r[part] for r in rounds]) for part in parts} | {
        "threads": loaded["threads"],
        "loaded_gib": rounded(loaded["peak_gib"]),
        **{name: rounded(rounds[-1][name]) for name in ("peak_gib", "held_gib", "round_gib")},
        "losses": [r["losses"] for r in rounds],
        "ratio": ratio,
    }


if __name__ == "__main__":
    main()
