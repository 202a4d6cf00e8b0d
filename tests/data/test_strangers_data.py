"""Three files in three formats train all three steps, with flags alone."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset

ROOT = Path(__file__).resolve().parents[2]


def write_files(folder: Path) -> None:
    """A German spreadsheet, chats in the form of ShareGPT, prompts alone."""
    with open(folder / "review.csv", "w", encoding="utf-8-sig", newline="") as file:
        rows = csv.writer(file, delimiter=";")
        rows.writerow(["Question", "better", "worse", "who"])
        for i in range(60):
            rows.writerow([f"What is {i} plus 1?", f"It is {i + 1}.", "No idea; sorry.", "Ada"])
    with open(folder / "chats.jsonl", "w", encoding="utf-8") as file:
        for i in range(60):
            asked = {"from": "human", "value": f"Say the number {i}, bitte – schön."}
            said = {"from": "gpt", "value": f"{i}"}
            file.write(json.dumps({"id": i, "conversations": [asked, said]}) + "\n")
    prompts = [f"Name the day after day {i}." for i in range(60)]
    Dataset.from_dict({"prompt": prompts}).to_parquet(folder / "ask.parquet")


@pytest.mark.slow
def test_three_files_in_three_formats(tmp_path):
    write_files(tmp_path)
    review, chats, ask = (tmp_path / n for n in ("review.csv", "chats.jsonl", "ask.parquet"))
    flags = ["--step1.data_path", str(chats), "--step2.data_path", str(review)]
    flags += ["--step2.columns", "prompt=Question", "chosen=better", "rejected=worse"]
    flags += ["--step3.data_path", str(ask)]
    flags += ["--data_split", "1,1,1", "--max_steps", "2"]
    flags += ["--per_device_train_batch_size", "4", "--per_device_generation_batch_size", "4"]
    flags += ["--per_device_training_batch_size", "4", "--max_answer_seq_len", "8"]
    flags += ["--actor_model", "builtin/tiny", "--reward_model", "builtin/tiny"]
    command = [sys.executable, "train.py", *flags, "--output_dir", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for model in ("step1_sft", "step2_reward", "step3_rlhf/actor", "step3_rlhf/critic"):
        assert (tmp_path / "out" / model / "model.safetensors").is_file()
