"""The scripts of examples/, with stand-ins for packages that the project does not need."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
from python_process import ROOT


class Countdown:
    """Entry k asks for k; scores the digit, and half for a longer text that begins with it."""

    def __init__(self, name, size=1, seed=0):
        assert name == "countdown"
        self.entries = [
            {"question": f"Say {k}", "answer": str(k), "metadata": {"k": k}} for k in range(size)
        ]

    def __getitem__(self, number):
        return self.entries[number]

    def score_answer(self, answer, entry):
        right = str(entry["metadata"]["k"])
        return 1.0 if answer == right else 0.5 * answer.startswith(right)


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def test_rows_and_scores_of_reasoning_gym(tmp_path, monkeypatch):
    gym = SimpleNamespace(create_dataset=Countdown)
    monkeypatch.setitem(sys.modules, "reasoning_gym", gym)
    example = load("reasoning_gym_tasks")
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "rows.jsonl"), "countdown"])
    example.main()
    rows = [json.loads(line) for line in Path(tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == example.SIZE
    assert (rows[7]["question"], rows[7]["answer"], rows[7]["task"]) == ("Say 7", "7", "countdown")
    columns = {name: [row[name] for row in rows[:3]] for name in ("task", "entry")}
    assert example.score([" 0\n", "1.", "7"], **columns) == [1.0, 0.5, 0.0]


# Runs in a process of its own: the loop of the file, then the trainer on the same prompts.
BOTH = """
import json
import sys
from dataclasses import replace

sys.path.append(sys.argv[1])
import dschat.distributed as dist
import grpo_loop as example
from dschat import DeepSpeedPPOTrainer, DeepSpeedRLHFEngine
from dschat.data.segments import prompt_text_ids
from dschat.models.tokenizer import load_tokenizer

size = {"num_samples_per_prompt": 4, "max_answer_seq_len": 8, "per_device_generation_batch_size": 4}
size["per_device_training_batch_size"] = int(sys.argv[2])
size["gradient_accumulation_steps"] = int(sys.argv[3])
settings = replace(example.SETTINGS, **size)
loop = example.main(settings, iterations=10)

tokenizer = load_tokenizer(example.MODEL, "actor")
engine = DeepSpeedRLHFEngine(example.MODEL, None, tokenizer, 10, settings)
chats = [[{"role": "user", "content": question}] for question in example.QUESTIONS]
prompts = [prompt_text_ids(tokenizer, chat) for chat in chats]
trainer = DeepSpeedPPOTrainer(engine, settings, reward_fns=[
    lambda prompts, answers: [example.letters(answer) for answer in answers]
])
both = []
for row in loop:
    trainer.train_rlhf(trainer.generate_experience(prompts))
    m = trainer.metrics
    loss = m["loss/policy_avg"] + settings.kl_coef * m["loss/kl_avg"]
    both.append([row, {"score": m["objective/scores"], "loss": loss, "kl": m["loss/kl_avg"]}])
dist.shutdown()
json.dump(both, open("both.json", "w"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("micro_batch", "accumulated"), [(16, 1), (4, 4), (4, 2)])
def test_the_grpo_loop_computes_what_the_trainer_does(tmp_path, micro_batch, accumulated):
    script = tmp_path / "both.py"
    script.write_text(BOTH)
    given = [str(ROOT / "examples"), str(micro_batch), str(accumulated)]
    done = forked.run(str(script), *given, cwd=str(tmp_path), limit_s=240.0)
    assert done.code == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "both.json").read_text())
    assert len(rows) == 10
    for loop, trainer in rows:
        assert loop == pytest.approx(trainer, abs=1e-6)
    assert rows[-1][0]["score"] > rows[0][0]["score"]
