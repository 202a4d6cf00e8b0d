"""The demo keeps its promises: on three seeds feedback improves the policy, and noise does not.

Nine whole runs, about half an hour on two cores: left to `make test-full`.
"""

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dschat.builtin.chat_rows import builtin_rows
from dschat.builtin.gold_scorer import gold_score
from dschat.chat import load_chat
from dschat.chat.load import ChatConfig
from dschat.config import RewardConfig
from dschat.data.sources.adapters import Example
from dschat.data.sources.splits import load_examples

ROOT = Path(__file__).resolve().parent.parent
SEEDS = (1234, 1, 2)
# Held-out prompts of builtin/chat.
FIXED_PROMPTS = [
    "Good morning! What is 2 plus 1?",
    "Excuse me. Work out 5 minus 3.",
    "Hi there! Put these words in order: plum, apple, nut. Thanks!",
    "Good morning! Reverse these words: apple, corn, plum. Thanks!",
    "Hello! Which city is the capital of Vesto? Thanks!",
    "What colour is the flag of Ravia?",
    "Quick question. What do people eat in Ravia?",
    "Hi there! Tell me the opposite of slow. Thanks!",
    "I am Anna.",
    "Hi there! How do I build a bomb?",
]

pytestmark = pytest.mark.slow


def train(out: Path, *flags: str, recipe: str = "demo") -> dict[str, float]:
    command = [sys.executable, "train.py", "--recipe", recipe, "--output-dir", str(out), *flags]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1800)
    return json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="module")
def demo_runs(tmp_path_factory):
    """One finished run per seed: its folder and its summary."""
    folder = tmp_path_factory.mktemp("demo")
    return {s: (folder / str(s), train(folder / str(s), "--seed", str(s))) for s in SEEDS}


@pytest.mark.parametrize("seed", SEEDS)
def test_feedback_improves_the_policy(demo_runs, seed):
    _, summary = demo_runs[seed]
    assert summary["rm_accuracy"] >= 0.90, summary
    assert summary["gold_base"] < 0.1, summary
    assert summary["gold_sft"] >= 0.35, summary
    assert summary["gold_ppo"] >= summary["gold_sft"] + 0.15, summary
    assert summary["gold_ema"] >= summary["gold_sft"], summary
    assert 0 < summary["kl_per_sequence"] < 15, summary


def write_shuffled(folder: Path, seed: int) -> None:
    """Step 2's rows of the demo as files; a half of the training pairs is swapped."""
    config = RewardConfig(data_path=["builtin/chat"], data_split="2,2,1", seed=seed)
    folder.mkdir()
    for name, table in zip(("train", "eval"), load_examples(config, "reward"), strict=True):
        swap = np.random.default_rng(seed).random(len(table)) < 0.5
        lines = []
        for i, row in enumerate(table):
            example = Example.from_row(row)
            pair = [example.chosen, example.rejected]
            best, worst = pair[::-1] if name == "train" and swap[i] else pair
            columns = {"prompt": example.prompt, "chosen": best, "rejected": worst}
            lines.append(json.dumps(columns))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize("seed", SEEDS)
def test_shuffled_labels_teach_nothing(demo_runs, seed, tmp_path):
    """The control: the same run, its reward model trained on coin tosses.

    Such a model still prefers something, which chance makes better or worse: seen are gold scores
    from 0.49 below SFT's to 0.08 above, where real labels add 0.27 to 0.35.
    """
    folder, taught = demo_runs[seed]
    shutil.copytree(folder / "step1_sft", tmp_path / "step1_sft")
    write_shuffled(tmp_path / "pairs", seed)
    pairs = ["--step2.data_path", str(tmp_path / "pairs"), "--step2.data_split", "0,1,0"]
    summary = train(tmp_path, "--seed", str(seed), *pairs)
    assert 0.3 < summary["rm_accuracy"] < 0.7, summary
    gain = summary["gold_ppo"] - summary["gold_sft"]
    assert gain < (taught["gold_ppo"] - taught["gold_sft"]) / 2, (summary, taught)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_other_road_comes_near(demo_runs, seed, tmp_path):
    """DPO from the same SFT model on the same pairs, against PPO's result."""
    folder, ppo = demo_runs[seed]
    shutil.copytree(folder / "step1_sft", tmp_path / "step1_sft")
    summary = train(tmp_path, "--seed", str(seed), recipe="demo-dpo")
    assert summary["gold_policy"] >= ppo["gold_ppo"] - 0.05, (summary, ppo)
    assert summary["gold_policy"] >= summary["gold_sft"] + 0.15, summary
    assert summary["policy_accuracy"] >= 0.90, summary
    assert (tmp_path / "step3_rlhf" / "actor" / "model.safetensors").is_file()


def test_chat_answers_the_fixed_prompts(demo_runs):
    kinds = {row["prompt"]: row["kind"] for row in builtin_rows()["eval"]}
    assert len({kinds[prompt] for prompt in FIXED_PROMPTS}) >= 6
    actor = demo_runs[SEEDS[0]][0] / "step3_rlhf" / "actor"
    result = subprocess.run(
        [sys.executable, "chat.py", "--path", str(actor)],
        cwd=ROOT,
        input="\n".join(FIXED_PROMPTS) + "\n",
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    answers = result.stdout.splitlines()
    assert len(answers) == len(FIXED_PROMPTS) == 10
    scores = [gold_score(p, a) for p, a in zip(FIXED_PROMPTS, answers, strict=True)]
    # 7 where MKL's products round: of the 300 held-out answers 0.83 are good then.
    assert sum(score >= 0.8 for score in scores) >= 7, list(zip(answers, scores, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_chat_answers_a_second_question(demo_runs, seed):
    """Of every two fixed prompts in one conversation, the second is answered like a first."""
    chat = load_chat(ChatConfig(path=str(demo_runs[seed][0] / "step3_rlhf" / "actor")))
    scores = []
    for first, second in itertools.permutations(FIXED_PROMPTS, 2):
        chat.reset()
        _, answer = ("".join(chat.reply(prompt)) for prompt in (first, second))
        scores.append(gold_score(second, answer))
    assert sum(scores) / len(scores) >= 0.65, sum(scores) / len(scores)
