"""Compares the predicted seconds of a step-3 iteration with measured ones: a CPU, three sizes.

    python benchmarks/plan_against_seconds.py
    python benchmarks/plan_against_seconds.py --sizes llama-10m --turns 5

Each turn measures this machine (`dschat.estimate.cpu_passes`), runs step 3 for a few iterations in
its own process, and measures it again. Answers have their full length. Predicted: the plan's
seconds with either measurement; a turn's ratio is their mean over the median iteration, without the
first. One JSON line per size: the median over the turns, with all of them.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from plan_against_peaks import ROOT, THREADS, llama, run_step, save_models, write_texts

import dschat  # noqa: F401 before torch: it sets how OpenMP's threads wait

SIZES = {
    "tiny": llama(128, 384, 2, 4, 1024),  # the shape of builtin/tiny
    "llama-10m": llama(320, 864, 6, 5, 8192),
    "llama-22m": llama(448, 1216, 6, 7, 16384),
    "llama-35m": llama(512, 1376, 9, 8, 12288),
}
ITERATIONS = 5
STEP3 = {
    "max_prompt_seq_len": 64,
    "max_answer_seq_len": 64,
    "min_answer_seq_len": 64,
    "per_device_generation_batch_size": 16,
    "per_device_training_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "eval_batch_size": 4,
    "max_eval_samples": 4,
    "max_steps": ITERATIONS,
}
UNSEEN = {"enable_tensorboard": False, "disable_tqdm": True}
PHASES = {"generate": ("refresh", "prefill", "decode"), "score": ("score",)}
PHASES["train"] = ("train", "update")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    os.environ |= THREADS
    os.environ["OMP_NUM_THREADS"] = THREADS["OMP_NUM_THREADS"] = str(args.threads)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch
    from report import environment

    about = environment(torch.device("cpu")) | {"threads": args.threads}
    turns: dict[str, list[dict[str, Any]]] = {size: [] for size in args.sizes}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_texts(work)
        for _ in range(args.turns):
            for size in args.sizes:
                save_models(work / size, SIZES[size])
                turns[size].append(turn(work, size))
                sys.stderr.write(f"{size}: {json.dumps(turns[size][-1])}\n")
    for size, results in turns.items():
        line = {"benchmark": "plan_against_seconds", "case": size, **about}
        ratios = [result["ratio"] for result in results]
        line |= {"ratio": round(statistics.median(ratios), 3), "turns": results}
        print(json.dumps(line), flush=True)


def turn(work: Path, size: str) -> dict[str, Any]:
    """Seconds of an iteration and its phases, predicted before and after, and measured."""
    before = predicted(work, size)
    run_step(work, size, 3, fields(work, size) | UNSEEN)
    after = predicted(work, size)
    rows = read_metrics(work / "out" / "metrics.jsonl")[1:]
    measured = {name: median_of(rows, f"time/{name}_s") for name in ("iteration", *PHASES)}
    means = {name: (before[name] + after[name]) / 2 for name in measured}
    return {
        "ratio": round(means["iteration"] / measured["iteration"], 3),
        "measured_s": {name: round(value, 4) for name, value in measured.items()},
        "predicted_s": {name: round(value, 4) for name, value in means.items()},
        "of": [round(before["iteration"], 4), round(after["iteration"], 4)],
    }


def fields(work: Path, size: str) -> dict[str, Any]:
    scorer = str(work / size / "score")
    return {
        "actor_model_name_or_path": str(work / size / "lm"),
        "critic_model_name_or_path": scorer,
        "reward_model_name_or_path": scorer,
        "data_path": [str(work / "prompts.jsonl")],
        **STEP3,
    }


def predicted(work: Path, size: str) -> dict[str, float]:
    """Seconds of an iteration and its phases, as the machine is now."""
    from dschat.estimate.devices import measure_cpu
    from dschat.estimate.timing import Timer

    models, estimate = estimated(work, size)
    time = Timer(models, measure_cpu(), per_node=1).time(estimate)
    seconds = {phase.name: phase.total_s for phase in time.phases}
    parts = {name: sum(seconds.get(p, 0) for p in names) for name, names in PHASES.items()}
    return parts | {"iteration": time.total_s}


@cache
def estimated(work: Path, size: str) -> tuple[Any, Any]:
    """The models and the memory estimate of a size."""
    from dschat.estimate import Request
    from dschat.estimate.models import Models
    from dschat.estimate.run import make_estimator

    request = Request({3: fields(work, size)}, num_processes=1, processes_here=1)
    models = Models()
    return models, make_estimator(request, models)(request.config(3))


def read_metrics(path: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "time/iteration_s" in row]


def median_of(rows: list[dict[str, float]], name: str) -> float:
    return statistics.median(row[name] for row in rows)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
