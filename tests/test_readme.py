"""The Python snippet of README runs on tiny models; test_docs.py has its commands."""

import forked
from documentation import blocks, text_of


def test_the_snippet_runs():
    """In a folder where ``output/demo`` holds an (untrained) actor and reward model."""
    prepare = """
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from dschat.builtin.tiny_model import resolve_model
source = resolve_model("builtin/tiny")
tokenizer = AutoTokenizer.from_pretrained(source)
for folder in ("step1_sft", "step2_reward"):
    tokenizer.save_pretrained("output/demo/" + folder)
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(source).save_pretrained("output/demo/step1_sft")
AutoModelForSequenceClassification.from_pretrained(source, num_labels=1).save_pretrained(
    "output/demo/step2_reward"
)
"""
    call, notebook, standalone = blocks(text_of("README.md"), "python")
    rows = [{"prompt": f"{i} + 1?", "solution": str(i + 1)} for i in range(20)]
    prepare += f"import json, pathlib\nrows = {rows}\n"
    prepare += "pathlib.Path('questions.jsonl').write_text('\\n'.join(map(json.dumps, rows)))\n"
    short = "max_steps=1, max_answer_seq_len=8, per_device_generation_batch_size=2"
    short += ", per_device_training_batch_size=16"
    call = call.replace("[correct])", f"[correct], {short})")
    standalone = standalone.replace("step3_rlhf/actor", "step1_sft")
    check = "\nassert trainer.iteration == 2 and abs(actor_loss) < 10 and critic_loss > 0\n"
    result = forked.run("-c", prepare + call + notebook + check + standalone, limit_s=300.0)
    assert result.code == 0, result.stderr[-3000:]
    lines = result.stdout.splitlines()
    printed = [line.split() for line in lines if line.count(" ") == 1]
    assert len(printed) == 2
    assert abs(float(printed[0][1])) < 1e-4  # before any update the actor is the reference
