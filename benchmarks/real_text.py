"""Trains all three steps on preference pairs of real text, from random weights.

    python benchmarks/real_text.py --train_file train.jsonl --eval_file eval.jsonl

Trains a 4k byte-level BPE on the file, initializes a small Llama, then runs the steps, step 2 with
several seeds. Two baselines without word order accompany the reward model's accuracy: "always the
shorter answer", and a logistic regression on bag-of-words differences. Prints one JSON line.
"""

import argparse
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch
from report import ROOT, note
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

SUPERVISED = "--max_seq_len 256 --per_device_train_batch_size 16 --num_warmup_steps 20"
SFT = f"{SUPERVISED} --data_split 1,0,0 --learning_rate 1e-3"
REWARD = f"{SUPERVISED} --data_split 0,1,0 --learning_rate 2e-4"
RLHF = """--data_split 0,0,1 --max_prompt_seq_len 192 --max_answer_seq_len 48 --max_eval_samples 100
    --per_device_generation_batch_size 32 --per_device_training_batch_size 16
    --actor_learning_rate 1e-4 --critic_learning_rate 3e-4 --num_warmup_steps 5"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--eval_file", required=True)
    parser.add_argument("--output_dir", default="output/real_text")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--sft_epochs", type=int, default=3)
    parser.add_argument("--rm_epochs", type=int, default=2)
    parser.add_argument("--ppo_steps", type=int, default=30)
    args = parser.parse_args()
    out = Path(args.output_dir)
    train, held_out = read(args.train_file), read(args.eval_file)
    base = out / "base"
    if not (base / "config.json").exists():
        make_base(base, train)

    data = ("--data_path", args.train_file, "--eval_data_path", args.eval_file)
    sft, ppo = out / "step1_sft", out / "step3_rlhf"
    words = ("--model_name_or_path", f"{base}", "--num_train_epochs", f"{args.sft_epochs}")
    run("step1_sft", sft, SFT, *data, *words)
    rewards = {seed: out / f"step2_reward_seed{seed}" for seed in args.seeds}
    for seed, folder in rewards.items():
        words = ("--model_name_or_path", f"{sft}", "--num_train_epochs", f"{args.rm_epochs}")
        run("step2_reward", folder, REWARD, *data, *words, "--seed", f"{seed}")
    models = ("--actor_model_name_or_path", f"{sft}")
    models += ("--critic_model_name_or_path", f"{rewards[args.seeds[0]]}")
    run("step3_rlhf", ppo, RLHF, *data, *models, "--max_steps", f"{args.ppo_steps}")
    accuracies = [evaluations(folder)[-1]["eval/accuracy"] for folder in rewards.values()]
    sft_rows, ppo_rows = evaluations(sft), evaluations(ppo)
    mean, interval = mean_and_interval(accuracies)
    result = {
        "sft_perplexity": [row["eval/perplexity"] for row in (sft_rows[0], sft_rows[-1])],
        "rm_accuracy": accuracies,
        "rm_accuracy_mean": mean,
        "rm_accuracy_95": interval,
        "baseline_shorter": sum(len(r["chosen"]) < len(r["rejected"]) for r in held_out)
        / len(held_out),
        "baseline_bag_of_words": bag_of_words(train, held_out),
        "ppo_score": [row["eval/score"] for row in (ppo_rows[0], ppo_rows[-1])],
        "ppo_kl": ppo_rows[-1]["eval/kl"],
    }
    print(json.dumps(result))


def read(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]


def run(step: str, folder: Path, flags: str, *words: str) -> None:
    """Run a step unless its folder is complete, so that an interrupted benchmark resumes."""
    if (folder / "COMPLETE").exists():
        return
    note(f"== {step}")
    words = (*flags.split(), *words, "--output_dir", f"{folder}", "--overwrite_output_dir")
    subprocess.run([sys.executable, str(ROOT / step / "main.py"), *words], check=True, cwd=ROOT)


def evaluations(folder: Path) -> list[dict]:
    rows = read(str(folder / "metrics.jsonl"))
    return [row for row in rows if any(name.startswith("eval/") for name in row)]


def make_base(folder: Path, rows: list[dict]) -> None:
    """A 4k tokenizer trained on the rows, and a Llama of 4.3M random weights."""
    bpe = ByteLevelBPETokenizer()
    texts = [row[column] for row in rows for column in ("prompt", "chosen", "rejected")]
    bpe.train_from_iterator(texts, vocab_size=4096, special_tokens=["<|pad|>", "<|end|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token="<|end|>", pad_token="<|pad|>"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def mean_and_interval(values: list[float]) -> tuple[float, list[float]]:
    """The mean and Student's 95% confidence interval of a few runs."""
    t_975 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776}.get(len(values) - 1, 2.0)
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, [0.0, 1.0]
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    half = t_975 * deviation / math.sqrt(len(values))
    return mean, [mean - half, mean + half]


def bag_of_words(train: list[dict], held_out: list[dict], epochs: int = 200) -> float:
    """Held-out accuracy of a logistic regression on differences of word counts, L2-regularised."""
    counts = [
        [Counter(row[side].lower().split()) for side in ("chosen", "rejected")] for row in train
    ]
    words = sorted(w for w, n in sum((c + r for c, r in counts), Counter()).items() if n >= 3)
    index = {word: i for i, word in enumerate(words)}

    def features(rows: list[dict]) -> torch.Tensor:
        x = torch.zeros(len(rows), len(words))
        for i, row in enumerate(rows):
            for side, sign in (("chosen", 1.0), ("rejected", -1.0)):
                for word in row[side].lower().split():
                    if word in index:
                        x[i, index[word]] += sign
        return x.sign() * x.abs().log1p()

    x, weights = features(train), torch.zeros(len(words), requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=epochs)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = -torch.nn.functional.logsigmoid(x @ weights).mean() + 3e-3 * weights.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return float(((features(held_out) @ weights) > 0).float().mean())


if __name__ == "__main__":
    main()
