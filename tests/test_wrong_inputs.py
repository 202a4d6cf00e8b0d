"""The commonest mistakes, each as a real command: one line, exit code 2, nothing written.

Each command is one a newcomer types; the line it prints must name the flag or file, and the remedy.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

STEP1 = ["step1_sft/main.py", "--model_name_or_path", "builtin/tiny"]
STEP2 = ["step2_reward/main.py", "--model_name_or_path", "builtin/tiny"]


def write_files(folder: Path) -> None:
    rows = [{"question": "a", "chosen": "b", "rejected": "c"}] * 3
    (folder / "column.jsonl").write_text("\n".join(map(json.dumps, rows)))
    good = json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"})
    (folder / "broken.jsonl").write_text(f"{good}\n{good}\n{{not json\n")
    (folder / "empty.jsonl").write_text("")


def cases(folder: Path) -> dict[str, tuple[list[str], list[str]]]:
    """name -> (command after the interpreter, words that its one line must hold)."""

    def data(name: str) -> list[str]:
        return ["--data_path", str(folder / name), "--output_dir", str(folder / "out")]

    out = ["--output_dir", str(folder / "out")]
    step3 = ["step3_rlhf/main.py", "--actor_model_name_or_path", "x"]
    step3 += ["--critic_model_name_or_path", "y", *out]
    builtin3 = ["step3_rlhf/main.py", "--actor_model_name_or_path", "builtin/tiny"]
    builtin3 += ["--critic_model_name_or_path", "builtin/tiny", *out]
    return {
        "no such file": ([*STEP1, *data("none.jsonl")], ["none.jsonl", "--data_path"]),
        "no such file, train.py": (
            ["train.py", "--data_path", str(folder / "none.jsonl"), "--output-dir", out[1]],
            ["none.jsonl"],
        ),
        "missing column": ([*STEP2, *data("column.jsonl")], ["question", "--prompt_column"]),
        "broken json": ([*STEP1, *data("broken.jsonl")], ["broken.jsonl:3"]),
        "empty": ([*STEP1, *data("empty.jsonl")], ["empty.jsonl", "empty"]),
        "no such model": (
            ["step1_sft/main.py", "--model_name_or_path", str(folder / "nowhere"), *out],
            ["--model_name_or_path", "nowhere"],
        ),
        "unknown flag": (
            [*STEP1, *out, "--leraning_rate", "1"],
            ["--leraning_rate", "--learning_rate"],
        ),
        "batch that does not divide": (
            [*step3, "--per_device_training_batch_size", "5"],
            ["--per_device_training_batch_size", "divide"],
        ),
        "tensor parallelism in one process": (
            [*builtin3, "--inference_tp_size", "2"],
            ["--inference_tp_size 2", "1 process"],
        ),
        "stage 9": ([*step3, "--actor_zero_stage", "9"], ["--actor_zero_stage", "0, 1, 2 and 3"]),
        "stage 9, train.py": (
            ["train.py", "--step1.zero_stage", "9", "--output-dir", out[1]],
            ["9"],
        ),
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong")
    write_files(folder)
    table = cases(folder)

    def run(command: list[str]) -> subprocess.CompletedProcess:
        argv = [sys.executable, *command]
        return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, [command for command, _ in table.values()]))
    return folder, {name: (table[name][1], r) for name, r in zip(table, results, strict=True)}


@pytest.mark.parametrize("name", list(cases(Path())))
def test_a_mistake_is_one_line_and_exit_code_2(outcomes, name):
    folder, results = outcomes
    words, result = results[name]
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert result.returncode == 2, result.stderr
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert all(word in lines[0] for word in words), lines[0]
    assert not result.stdout.strip()
    assert not (folder / "out").exists()
