"""Measures what ptx is for: whether a skill of the SFT model survives step 3's reward for another.

    OMP_NUM_THREADS=1 python benchmarks/ptx.py [--seeds 1 2 3] [--output_dir output/ptx]

One SFT model learns sums (``builtin/arithmetic``) and to sort four digits. Step 3 rewards right
sums alone, without KL: once without ptx, once with the sorting demonstrations as text. Prints one
JSON line: the share of held-out rows that the SFT model and every actor answer right.
"""

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import torch
from report import ROOT, environment, flags

from dschat.builtin.tiny_model import tiny_tokenizer
from dschat.data.segments import render_chat

HELD_OUT = 500
SFT = """--model_name_or_path builtin/tiny --data_split 1,0,1 --learning_rate 2e-3
    --per_device_train_batch_size 32 --num_train_epochs 5 --num_warmup_steps 40
    --max_seq_len 48 --save_steps 0 --overwrite_output_dir"""
RLHF = """--data_path builtin/arithmetic --data_split 1,0,1 --reward_fn exact_match
    --reward_args exact_match.pattern=\\d+ --advantage_estimator grpo --kl_coef 0
    --num_samples_per_prompt 8 --per_device_generation_batch_size 32
    --per_device_training_batch_size 128 --actor_learning_rate 1e-3 --num_warmup_steps 5
    --max_steps 60 --max_prompt_seq_len 24 --max_answer_seq_len 12 --overwrite_output_dir"""


def write_sorting(folder: Path) -> None:
    """Every row of four digits in random order: training rows, held-out rows, and text for ptx."""
    digits = ["".join(row) for row in itertools.product("123456789", repeat=4)]
    random.Random(0).shuffle(digits)
    rows, texts, tokenizer = [], [], tiny_tokenizer()
    for row in digits:
        prompt = {"role": "user", "content": f"sort {row}"}
        answer = {"role": "assistant", "content": "".join(sorted(row))}
        rows.append({"prompt": [prompt], "answer": answer["content"]})
        text = render_chat(tokenizer, [prompt, answer]).removesuffix(tokenizer.eos_token)
        texts.append({"text": text})
    parts = {"sort": rows[HELD_OUT:], "sort_eval": rows[:HELD_OUT], "sort_text": texts[HELD_OUT:]}
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def run(script: str, *words: str) -> None:
    subprocess.run([sys.executable, *script.split(), *words], cwd=ROOT, check=True)


def right(models: list[Path], data: str, out: Path) -> list[float]:
    """The share of rows whose last number is the reference, for each model."""
    words = ("--path", *map(str, models), "--data_path", data, "--max_new_tokens", "12")
    words += ("--reward_fn", "exact_match", "--reward_args", "exact_match.pattern=\\d+")
    run("-m dschat eval", *words, "--task", "score", "--out", str(out))
    return [found["value"] for found in json.loads(out.read_text())["metrics"]]


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output_dir", type=Path, default=Path("output/ptx"))
    args = parser.parse_args()
    out = args.output_dir.resolve()
    out.mkdir(parents=True, exist_ok=True)
    write_sorting(out)
    data = ("--data_path", "builtin/arithmetic", f"{out / 'sort.jsonl'}")
    run("step1_sft/main.py", *data, *SFT.split(), "--output_dir", f"{out / 'sft'}")
    with_text = ("--unsupervised_dataset_name", f"{out / 'sort_text.jsonl'}", "--unsup_coef", "4")
    models = [out / "sft"]
    for seed, words in itertools.product(args.seeds, ((), with_text)):
        actor = out / f"{'ptx' if words else 'plain'}-{seed}"
        common = (*RLHF.split(), "--actor_model_name_or_path", f"{out / 'sft'}")
        run("step3_rlhf/main.py", *common, *words, "--seed", f"{seed}", "--output_dir", f"{actor}")
        models.append(actor / "actor")
    found: dict = {"case": "ptx", "seeds": args.seeds}
    for skill, path in (("sums", "builtin/arithmetic"), ("sort", f"{out / 'sort_eval.jsonl'}")):
        sft, *actors = right(models, path, out / f"{skill}.json")
        found[skill] = {"sft": sft, "without": actors[::2], "with": actors[1::2]}
    sys.stdout.write(json.dumps(found | environment(torch.device("cpu"))) + "\n")


if __name__ == "__main__":
    main()
