"""Runs the training commands on a real model, in forks, and reads what they leave."""

import json
from pathlib import Path

import forked

LIMIT_S = 1000
SCRIPTS = {"sft": "step1_sft", "reward": "step2_reward", "rlhf": "step3_rlhf"}
# What a clock decides.
NOT_COMPARED = ("time/", "throughput/", "memory/")
ROWS = [
    ("What is the capital of France?", "Paris."),
    ("Name three colours.", "Red, green and blue."),
    ("Say hello in Japanese.", "こんにちは 👋🏽"),
    ("What is 45 plus 76?", "45 plus 76 is 121."),
    ("Write a loop in Python.", "for i in range(10):\n    print(i)\n"),
    ("Hi", "Hello! How can I help you today?"),
    ("What does <|im_end|> mean?", "It ends a turn, as </s> does elsewhere."),
    ("Count to five.", "1, 2, 3, 4, 5"),
]
SPLITS = {"sft": "1,0,0", "reward": "0,1,0", "rlhf": "0,0,1"}
COMMON = "--report_to none --disable_tqdm --lr_scheduler_type constant"
SUPERVISED = "--num_train_epochs 4 --max_steps 4 --max_seq_len 128"


def command(step: str, model: Path, out: Path, *flags: str) -> list[str]:
    """A step's, on all of the rows, which lie beside its output."""
    data = out.parent / "rows.jsonl"
    rows = [
        {"question": prompt, "chosen": answer, "rejected": ROWS[i - 1][1]}
        for i, (prompt, answer) in enumerate(ROWS)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"{SCRIPTS[step]}/main.py", *COMMON.split(), "--data_split", SPLITS[step]]
    words += [] if step == "rlhf" else SUPERVISED.split()
    words += ["--actor_model_name_or_path" if step == "rlhf" else "--model_name_or_path"]
    words += [str(model), "--data_path", str(data), "--eval_data_path", str(data)]
    return [*words, "--output_dir", str(out), *" ".join(flags).split()]


def run(argv: list[str], code: int = 0, **options) -> forked.Outcome:
    """The outcome of a command that exits with ``code``."""
    done = forked.run(*argv, limit_s=LIMIT_S, **options)
    assert done.code == code, done.stderr[-3000:]
    return done


def metrics(out: Path) -> list[dict]:
    """The rows of metrics.jsonl, without times."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(NOT_COMPARED)} for row in rows]


def logged(out: Path, name: str) -> list[float]:
    return [row[name] for row in metrics(out) if name in row]
