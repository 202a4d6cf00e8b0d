"""Measures the cost of checkpoints in step 3: the same run with the default interval and without.

    python benchmarks/saving.py
    python benchmarks/saving.py --sizes llama-22m --rounds 5

Both sides alternate, each in its own process with one thread, on random weights. A run has 21
iterations, so two checkpoints at the default interval of 10, each with actor, critic, their Adam
states and the moving average. The time runs from the end of the first iteration until the last
checkpoint is complete. Evaluation is off. One JSON line per size; `cost` is with / without - 1, the
median and the range over rounds.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

from plan_against_peaks import COMMON, ROOT, SIZES, fields, run_step, save_models, write_texts

ITERATIONS = 21
_RUNNER = """
import runpy, sys, time
from dschat.runtime import checkpointing
from dschat.rlhf import reporter

times, step, wait = [], reporter.Reporter.step, checkpointing.CheckpointManager.wait

def timed(*args):
    step(*args)
    times.append(time.perf_counter())

def waited(*args):
    began = time.perf_counter()
    wait(*args)
    times.append(time.perf_counter())
    blocked.append(times[-1] - began)

blocked = []
reporter.Reporter.step, checkpointing.CheckpointManager.wait = timed, waited
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    sys.stderr.write(f"\\nseconds {times[-1] - times[0]} {sum(blocked)}\\n")
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["llama-22m", "opt-60m"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed logs its choice to stdout
    import torch
    from report import environment

    about = environment(torch.device("cpu")) | {"threads": 1}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_texts(work)
        for size in args.sizes:
            save_models(work / size, SIZES[size])
            line = {"benchmark": "saving", "case": size, **about}
            print(json.dumps(line | compare(work, size, args.rounds)), flush=True)


def compare(work: Path, size: str, rounds: int) -> dict:
    pairs = [(seconds(work, size, saves=True), seconds(work, size)) for _ in range(rounds)]
    costs = sorted(with_it[0] / without[0] - 1 for with_it, without in pairs)
    return {
        "cost": round(median(costs), 4),
        "cost_range": [round(costs[0], 4), round(costs[-1], 4)],
        "iteration_s": round(median(without[0] for _, without in pairs) / (ITERATIONS - 1), 2),
        "waited_s": round(median(with_it[1] for with_it, _ in pairs), 2),
        "checkpoint_mib": round(pairs[0][0][2] / 2**20),
    }


def seconds(work: Path, size: str, saves: bool = False) -> tuple[float, float, int]:
    """Seconds of a run's iterations, seconds spent waiting for files, bytes of a checkpoint."""
    given = fields(work, size, 3) | COMMON | {"max_steps": ITERATIONS, "eval_steps": 0}
    given |= {"max_eval_samples": 0} | ({} if saves else {"save_steps": 0})
    printed = run_step(work, size, 3, given, ["-c", _RUNNER])
    lines = [line for line in printed.splitlines() if line.startswith("seconds ")]
    total, waited = map(float, lines[-1].split()[1:])
    newest = max((work / "out" / "checkpoints").glob("step_*"), default=None)
    files = [] if newest is None else [p for p in newest.rglob("*") if p.is_file()]
    print(f"{size}: {total:.1f} s, saves: {saves}, waited {waited:.2f} s", file=sys.stderr)
    return total, waited, sum(path.stat().st_size for path in files)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
