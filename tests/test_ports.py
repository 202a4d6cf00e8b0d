"""docs/ports.md: scripts of other trainers, ported, run as they stand there on a tiny model."""

import json
import shlex

import pyarrow
import pyarrow.parquet
import pytest
from documentation import PAGES, ROOT, blocks, tables
from forked import Command, run_all

from dschat.builtin.tiny_model import resolve_model

PAGE = PAGES["ports.md"]
(DIFF,) = blocks(PAGE, "diff")
SHORT = (
    "--max_steps 1 --per_device_generation_batch_size 2 --per_device_training_batch_size 16 "
    "--sample_steps 0 --output_dir output"
)


@pytest.fixture
def workplace(tmp_path):
    """The model, the data and the functions of the page."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "my-sft").symlink_to(resolve_model("builtin/tiny"))
    for block in blocks(PAGE, "python"):
        (tmp_path / block.split()[1]).write_text(block)
    chats = [[{"role": "user", "content": f"What of {i}?"}] for i in range(60)]
    trl = [{"prompt": chat, "accepted": ["a", "b"]} for chat in chats]
    openrlhf = [{"question": chat[0]["content"], "answer": "a"} for chat in chats]
    for name, rows in (("prompts", trl), ("my_questions", openrlhf)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    truth = {"style": "rule", "ground_truth": "a/b"}
    verl = [
        {"data_source": "verbs", "prompt": chat, "reward_model": truth, "extra_info": {"index": i}}
        for i, chat in enumerate(chats)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(verl), tmp_path / "verbs.parquet")
    return tmp_path


def script_of(diff: str, mark: str) -> str:
    """The script before (``-``) or after (``+``) the change."""
    return "".join(
        line[1:] + "\n" if line else "\n"
        for line in diff.splitlines()
        if line[:1] in ("", " ", mark)
    )


def run(folder, *argv: str) -> str:
    """What the command logs; it succeeds."""
    (outcome,) = run_all(folder, None, [Command(list(argv), cwd=str(folder), limit_s=200.0)])
    assert outcome.code == 0, outcome.stderr[-3000:]
    return outcome.stdout + outcome.stderr


def test_the_port_of_trls_script(workplace):
    script = script_of(DIFF, "+").replace("max_steps=20", "max_steps=1")
    assert "accepted_form is called as TRL calls it" in run(workplace, "-c", script)
    assert (workplace / "output/grpo/actor/model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), [(0, "OpenRLHF"), (1, "verl")])
def test_the_port_of_a_command(number, name, workplace):
    words = shlex.split(blocks(PAGE, "sh")[number].replace("\\\n", " "))
    script, *flags = words[1:]
    logged = run(workplace, str(ROOT / script), *flags, *SHORT.split())
    assert f"is called as {name} calls it" in logged
    assert (workplace / "output/actor/model.safetensors").is_file()


def test_the_lines_are_counted():
    after = script_of(DIFF, "+")
    before = script_of(DIFF, "-")
    compile(before, "trl_grpo.py", "exec")
    new = sum(line.startswith("+") for line in DIFF.splitlines())
    commands = [len(block.splitlines()) for block in blocks(PAGE, "sh")]
    rest = [row[3] for row in tables(PAGE, "script", "reward function", "data", "the rest")]
    assert rest == [
        f"{new} of {len(after.splitlines())} lines",
        *(f"the command: {count} lines" for count in commands),
    ]
    start, end = "def accepted_form", "config ="
    assert before[before.index(start) : before.index(end)] in after
