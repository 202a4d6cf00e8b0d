"""The scripts of examples/, with stand-ins for packages that the project does not need."""

import importlib.util
import json

import forked
import pytest
from python_process import ROOT


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


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
