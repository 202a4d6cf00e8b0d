"""What README shows runs: its Python snippet on tiny models; its commands parse."""

import re
import shlex
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[list[str]]:
    """Every ``python x.py`` and ``deepspeed x.py`` of the shell blocks, from the script on."""
    found = []
    for block in blocks("sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            script = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
            if script is not None and ROOT.joinpath(words[script]).name != "chat.py":
                found.append(words[script:])
    return found


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
    notebook, standalone = blocks("python")
    standalone = standalone.replace("step3_rlhf/actor", "step1_sft")
    check = "\nassert trainer.iteration == 2 and abs(actor_loss) < 10 and critic_loss > 0\n"
    result = forked.run("-c", prepare + notebook + check + standalone, limit_s=300.0)
    assert result.code == 0, result.stderr[-3000:]
    lines = result.stdout.splitlines()
    printed = [line.split() for line in lines if line.count(" ") == 1]
    assert len(printed) == 2
    assert abs(float(printed[0][1])) < 1e-4  # before any update the actor is the reference


@pytest.mark.parametrize("command", commands(), ids=lambda c: " ".join(c)[:60])
def test_the_commands_parse(command, tmp_path):
    """A flag that the README shows and the script does not know would be an error."""
    from dschat.config import RewardConfig, RLHFConfig, SFTConfig, parser
    from dschat.launch.recipe import parse_args

    script, *flags = command
    if script == "train.py":
        parse_args(flags)
        return
    step = {"step1_sft": SFTConfig, "step2_reward": RewardConfig, "step3_rlhf": RLHFConfig}
    config = parser.parse(step[Path(script).parent.name], flags)
    assert config.data_path in (["Dahoas/rm-static"], ["my_questions.jsonl"])
