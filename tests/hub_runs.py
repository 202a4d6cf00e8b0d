"""Runs a short GRPO training of the built-in model as a user does, for tests with hubs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from dschat.builtin.tiny_model import TINY_NAME, resolve_model

ROOT = Path(__file__).resolve().parents[1]
FLAGS = """
    --actor_model_name_or_path model --data_split 0,0,1 --advantage_estimator grpo
    --num_samples_per_prompt 4 --per_device_generation_batch_size 2 --kl_coef 0
    --per_device_training_batch_size 8 --max_steps 2 --max_eval_samples 0 --save_steps 0
    --max_prompt_seq_len 320 --max_answer_seq_len 180 --max_turn_tokens 16
    --text_as chat --output_dir out
"""


def train(folder, *flags, **variables):
    """What each of the two iterations logged."""
    model = shutil.copytree(resolve_model(TINY_NAME), folder / "model")
    ends = [1, *range(30, 90)]  # random weights hardly ever draw the only one
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    words = [sys.executable, ROOT / "step3_rlhf" / "main.py", *FLAGS.split(), *flags]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(words, cwd=folder, env=os.environ | variables, capture_output=True)
    assert not done.returncode, done.stderr.decode()[-3000:]
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert len(found) == 2
    for metrics in found:
        assert metrics["rollout/sequences"] == 8
        assert metrics["rollout/logprob_gap"] < 1e-5  # the tokens that were drawn are trained
    return found
