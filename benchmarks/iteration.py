"""Measures a training iteration of each step against the same work on padded batches.

    python benchmarks/iteration.py                          # every case of this machine
    python benchmarks/iteration.py --cases ppo grpo-prefix --rounds 3
    python benchmarks/iteration.py --cases grpo-prefix --trl_python other/venv/bin/python

Sides, each in its own process:

- dschat: this checkout with default flags. dschat-padded: with --packing off.
- deepspeed-chat: Hugging Face models under DeepSpeed engines, every sequence padded to the maximum
  lengths, all logits, transformers' `generate` on prompts padded on the left.
  deepspeed-chat-longest (sft, rm, dpo): padded to the longest row of the batch only.
- trl: TRL's GRPOTrainer (grpo-prefix), if --trl_python has it.

Models have random weights: nothing is downloaded. In each round all sides get the same prompts;
answers are generated to lengths drawn from a seed, then replaced by drawn tokens, so that all sides
score and train on the same ones. Losses are reported to show that. The sides stay loaded and take
turns after a warm-up round; where memory is the question (vocab-150k) or scarce, one runs after the
other. zero3 runs in two processes under ZeRO-3 and ZeRO-2. One JSON line per case and side:

- generate_s (weight refresh included), score_s (old and reference log-probs, values, scores,
  advantages), train_s, iteration_s: medians over the rounds, with spread.
- tokens_per_s: answer tokens / generate_s; prompt and answer tokens / score_s, / train_s and
  / iteration_s. samples_per_s: answers, rows or pairs / iteration_s.
- tflops: model TFLOP/s of each part and device. Only real tokens count; a prompt counts once in
  generation and with each of its answers elsewhere. Gradient checkpointing counts as no work.
- peak_gib: peak memory of the process (the largest of the ranks), loaded_gib: before the first
  round.
- ratio: this side / the first side, of seconds (within each round) and peak_gib.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from iteration_cases import CASES, Case, find_case, rlhf_config, rollout_rows, write_models
from iteration_counts import count, rates
from iteration_worker import Spec
from report import (
    ROOT,
    environment,
    figures,
    free_port,
    note,
    rounded,
    spread,
    take_turns,
)

from dschat.distributed import device
from dschat.distributed.memory import free_bytes

DSCHAT, PADDED, REFERENCE, LONGEST, TRL = SIDES = (
    "dschat",
    "dschat-padded",
    "deepspeed-chat",
    "deepspeed-chat-longest",
    "trl",
)
PARTS = ("generate_s", "score_s", "train_s", "iteration_s")


def main() -> None:
    args = parse()
    if device().type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed logs its choice to stdout
    about = environment(device())
    for name in args.cases:
        case = find_case(name, args.tiny)
        reason = unavailable(case)
        if reason:
            note(f"{name}: skipped, {reason}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            in_new_process(write_models, case, Path(folder))
            for line in measure(name, case, args, Path(folder)):
                head = {"benchmark": "iteration", "case": name, "side": line.pop("side")}
                print(json.dumps(head | about | line), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each side")
    parser.add_argument("--tiny", action="store_true", help="tiny models and rows, to try it out")
    parser.add_argument("--trl_python", default=sys.executable, help="Python interpreter with TRL")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} must be at least 1")
    return args


def unavailable(case: Case) -> str:
    """Why ``case`` cannot run on this machine, in a few words; "" if it can."""
    gpus = torch.cuda.device_count()
    if case.needs_gpu and not gpus:
        return "it needs a CUDA device"
    if gpus and case.ranks > gpus:
        return f"it needs {case.ranks} CUDA devices, torch sees {gpus}"
    return ""


def in_new_process(function: Any, *args: Any) -> None:
    """Call ``function`` in a process of its own, so that this one stays small."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=args)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"{function.__name__} failed; see above")


# -- sides -----------------------------------------------------------------------------------------


def sides_of(name: str, case: Case, args: argparse.Namespace) -> list[tuple[str, int]]:
    """Side and ZeRO stage of everything to measure; says which sides are left out."""
    left_out = {LONGEST} if case.is_rlhf else set()
    if case.task != "grpo":
        left_out.add(TRL)
    if 3 in case.stages:
        left_out.add(REFERENCE)  # `generate` fails there
    chosen = [side for side in args.sides if side not in left_out]
    reasons = {}
    if TRL in chosen and device().type == "cuda":
        reasons[TRL] = "its settings here are for a CPU"
    elif TRL in chosen:
        from learning import has_trl  # imported here, since it needs datasets

        if not has_trl(args.trl_python):
            reasons[TRL] = f"no TRL in {args.trl_python} (pip install trl)"
    # Logits, their log-softmax and the gradients of both.
    needed = 4 * 4 * case.logits
    if needed > free_bytes(device()):
        for side in {REFERENCE, LONGEST} & set(chosen):
            reasons[side] = f"its logits need {needed / 2**30:.0f} GiB of free memory"
    for side, reason in reasons.items():
        note(f"{name}: {side} skipped, {reason}")
    # NOTE: TRL runs without DeepSpeed here.
    return [
        (side, 0 if side == TRL else stage)
        for stage in case.stages
        for side in chosen
        if side not in reasons
    ]


class Worker:
    """The process of a side: one per rank."""

    def __init__(
        self, label: str, commands: list[list[str]], environments: list[dict[str, str]]
    ) -> None:
        self.label = label
        self.processes = [
            subprocess.Popen(
                command,
                env=os.environ | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for command, variables in zip(commands, environments, strict=True)
        ]

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


def start(side: str, stage: int, name: str, case: Case, folder: Path, args: Any) -> Worker:
    """Start the processes of a side."""
    here, label = Path(__file__).resolve().parent, f"{name}, {side}, ZeRO-{stage}"
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if side == TRL:
        task = write_trl_task(case, folder, args.rounds)
        command = [args.trl_python, str(here / "iteration_trl.py"), task]
        return Worker(label, [command], [variables])
    variables["PYTHONPATH"] = paths
    if side in (REFERENCE, LONGEST):
        variables["DSCHAT_CPU_MATMUL"] = "plain"  # torch's own products, as DeepSpeed-Chat's
    spec = json.dumps(asdict(Spec(name, side, stage, str(folder), args.tiny)))
    command = [sys.executable, str(here / "iteration_worker.py"), spec]
    if case.ranks == 1:
        return Worker(label, [command], [variables])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables |= meeting | {"WORLD_SIZE": str(case.ranks)}
    variables.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    numbers = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(case.ranks)]
    return Worker(label, [command] * case.ranks, [variables | number for number in numbers])


def write_trl_task(case: Case, folder: Path, rounds: int) -> str:
    """The file that tells `iteration_trl.py` what to train on."""
    from learning_settings import trl_settings

    config = rlhf_config(case, folder, stage=0, max_steps=rounds + 1, dtype="fp32")
    rows = [rollout_rows(case, number, rank=0) for number in range(rounds + 1)]
    task = {
        "model": str(folder / "actor"),
        "folder": str(folder / "trl"),
        "settings": trl_settings(config),
        "steps_per_rollout": config.num_mini_batches * config.ppo_epochs,
        "prompts": [" ".join(f"t{i}" for i in ids) for prompts, _ in rows for ids in prompts],
        "answers": [answers for _, answers in rows],
    }
    path = folder / "trl.json"
    path.write_text(json.dumps(task))
    return str(path)


# -- measuring -------------------------------------------------------------------------------------


def measure(name: str, case: Case, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run all sides of a case; the fields of each side's line."""
    sides = sides_of(name, case, args)
    groups = [sides] if case.in_turns else [[side] for side in sides]
    results: dict[str, dict[str, Any]] = {}
    for group in groups:
        workers: dict[str, Worker] = {}
        try:
            for side, stage in group:
                label = f"{side}, ZeRO-{stage}"
                workers[label] = start(side, stage, name, case, folder, args)
                results[label] = {"loaded": workers[label].reply()}
            for label, (_, *rounds) in take_turns(name, workers, args.rounds, _seconds).items():
                results[label]["rounds"] = rounds  # without the warm-up
        finally:
            for worker in workers.values():
                worker.close()
    first = next(iter(results.values()))
    return [
        {"side": side, "zero_stage": stage}
        | described(case, args.rounds)
        | summary(case, **found)
        | {"ratio": ratio(found["rounds"], first["rounds"])}
        for (side, stage), found in zip(sides, results.values(), strict=True)
    ]


def _seconds(measured: dict[str, Any]) -> str:
    return figures({part: measured[part] for part in PARTS if part in measured})


def described(case: Case, rounds: int) -> dict[str, Any]:
    names = ("task", "model", "rows", "samples", "micro_batch", "ranks")
    about = {name: getattr(case, name) for name in names}
    lengths = {name: asdict(getattr(case, name)) for name in ("prompt", "answer")}
    return about | lengths | {"rounds": rounds}


def summary(case: Case, loaded: dict[str, Any], rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and spread over the measured rounds, which are numbered from 1."""
    line: dict[str, Any] = {
        part: spread([r[part] for r in rounds]) for part in PARTS if part in rounds[0]
    }
    per_round = [rates(count(case, number), r) for number, r in enumerate(rounds, 1)]
    for rate in ("tokens_per_s", "tflops"):
        parts = per_round[0][rate]
        line[rate] = {part: spread([r[rate][part] for r in per_round]) for part in parts}
    line["samples_per_s"] = spread([r["samples_per_s"] for r in per_round])
    line["threads"] = loaded["threads"]
    line["loaded_gib"] = rounded(loaded["peak_gib"])
    line["peak_gib"] = rounded(rounds[-1]["peak_gib"])
    line["losses"] = [r["losses"] for r in rounds]
    return line


def ratio(rounds: list[dict[str, Any]], first: list[dict[str, Any]]) -> dict[str, Any]:
    """These rounds / the first side's: seconds within each round, and the peaks of memory."""
    pairs = list(zip(rounds, first, strict=True))
    seconds = {
        part: spread([a[part] / b[part] for a, b in pairs]) for part in PARTS if part in rounds[0]
    }
    return seconds | {"peak_gib": rounded(rounds[-1]["peak_gib"] / first[-1]["peak_gib"])}


if __name__ == "__main__":
    main()
