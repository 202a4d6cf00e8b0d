"""Compares ways to draw prompts on a mix of easy, hard and impossible ones, at equal numbers of
generated answers.

python benchmarks/prompt_mix.py [--seeds 1234 1 2] [--answers 20480] [--out FOLDER]

The task is that of recipe arithmetic. SFT makes the easy prompts, of three digits, right; it
reaches the result of the hard ones, of four, in one case out of six; the impossible ones are hard
ones with a wrong reference. Prints the accuracy on held-out hard prompts, one JSON line per run.
"""

import argparse
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import yaml

from dschat.builtin.arithmetic import arithmetic_rows

ROOT = Path(__file__).parents[1]
WAYS = {
    "uniform": [],
    "adaptive": ["--prompt_sampling", "adaptive"],
    "dynamic": ["--dynamic_sampling"],
    "adaptive, dynamic": ["--prompt_sampling", "adaptive", "--dynamic_sampling"],
    "curriculum": ["--prompt_sampling", "curriculum:level"],
}
EACH = 256  # prompts of each of the three kinds
_NO_ANSWER = "999"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1, 2])
    parser.add_argument("--answers", type=int, default=20_480)
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--out", type=Path, default=Path("output/prompt_mix"))
    args = parser.parse_args()
    write_data(args.out)
    recipe = yaml.safe_load((ROOT / "training/recipes/arithmetic.yaml").read_text())
    sft = args.out / "sft"
    if not (sft / "config.json").exists():
        data = ["--data_path", args.out / "sft.jsonl", "--max_eval_samples", 0]
        columns = ["--columns", "prompt=prompt", "chosen=demonstration", "--text_as", "chat"]
        run("step1_sft", recipe["step1"], 1234, sft, *data, *columns)
    for seed in args.seeds:
        for way in args.ways:
            folder = args.out / f"{way.replace(', ', '_')}_{seed}"
            metrics = folder / "metrics.jsonl"
            if not metrics.exists():
                data = ["--data_path", args.out / "prompts.jsonl", "--text_as", "chat"]
                data += ["--eval_data_path", args.out / "held_out.jsonl"]
                each = 2 if "dynamic" in way else 1  # its rollouts take twice as many, or more
                steps = {"max_steps": args.answers // 256 // each, "eval_steps": 10 // each}
                sizes = {"generation": 32, "training": 128}
                steps |= {f"per_device_{name}_batch_size": size for name, size in sizes.items()}
                settings = recipe["step3"] | steps
                model = ["--actor_model_name_or_path", sft]
                run("step3_rlhf", settings, seed, folder, *data, *model, *WAYS[way])
            rows = [json.loads(line) for line in metrics.open()]
            print(json.dumps({"way": way, "seed": seed} | figures(rows, args.answers)), flush=True)


def write_data(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    rows, rng = arithmetic_rows(), random.Random(0)
    short = []
    for signs in itertools.product((1, -1), repeat=2):
        for a, *others in itertools.product(range(1, 10), repeat=3):
            b, c = (sign * digit for sign, digit in zip(signs, others, strict=True))
            if min(a + b, a + b + c) >= 0:
                shown = {"demonstration": f"{a + b},{a + b + c}", "reference": str(a + b + c)}
                short.append({"prompt": f"{a}{b:+}{c:+}="} | shown)
    rng.shuffle(short)
    hard, other = rows["train"][:EACH], rows["train"][EACH : 2 * EACH]
    kinds = [short[:EACH], hard, [row | {"reference": _NO_ANSWER} for row in other]]
    prompts = [
        {"prompt": row["prompt"], "reference": row["reference"], "level": level}
        for level, kind in enumerate(kinds)
        for row in kind
    ]
    held_out = [{k: row[k] for k in ("prompt", "reference")} for row in rows["eval"]]
    sft = rows["train"][1024:14_000] + 4 * short
    tables = {"sft": sft, "prompts": prompts, "held_out": held_out}
    for name, table in tables.items():
        rng.shuffle(table)
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))


def run(step: str, settings: dict, seed: int, out: Path, *flags: object) -> None:
    words = [sys.executable, str(ROOT / step / "main.py"), "--output_dir", str(out)]
    for name, value in settings.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    words += ["--seed", str(seed), "--save_steps", "0", "--disable_tqdm", *map(str, flags)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def figures(rows: list[dict], answers: int) -> dict[str, float]:
    """Accuracy after quarters of so many generated answers, and the share of mixed prompts."""
    taken, at, mixed = 0.0, [], []
    for row in rows:
        if "eval/pass@1" in row:
            at.append((taken, row["eval/pass@1"]))
        elif taken < answers:
            taken += 8 * row.get("sampling/prompts", 32)
            alike = row.get("sampling/waste", row["frac_reward_zero_std"])
            mixed.append(row.get("sampling/mixed", 1 - alike))
    budgets = [answers * quarter // 4 for quarter in range(5)]
    accuracy = np.interp(budgets, *zip(*at, strict=True)).round(3).tolist()
    return {"accuracy": dict(zip(budgets, accuracy, strict=True)), "mixed": float(np.mean(mixed))}


if __name__ == "__main__":
    main()
