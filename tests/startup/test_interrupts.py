"""Ctrl-C and SIGTERM at any moment: one line, 130 or 143, no process and no partial model left.

In a loop that saves checkpoints they stop training: one line that says how to resume, 75, and a
complete checkpoint.

The commands are real, each in a fork (``forked.py``), or in a process of its own while it imports.
train.py starts processes itself and has such tests of its own, in ``faults/``.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from quick import some

from dschat.startup import exit_on_interrupt

ENDS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}
STEP1 = "step1_sft/main.py --output_dir out --max_seq_len 64 --model_name_or_path {f}/llama"
STEP3 = (
    "step3_rlhf/main.py --output_dir out --sample_steps 0 --max_prompt_seq_len 8 "
    "--max_answer_seq_len 8 --per_device_generation_batch_size 2 "
    "--per_device_training_batch_size 2 "
    "--actor_model_name_or_path {f}/llama --critic_model_name_or_path {f}/llama_reward"
)
MOMENTS = {  # a command, and when the signal comes
    "loading": (f"{STEP1} --data_path {{f}}/many.jsonl", {"after_s": 0.4}),
    "training": (
        f"{STEP1} --data_path {{f}}/few.jsonl --max_steps 1000000 --save_steps 0",
        {"after_file": "out/metrics.jsonl"},
    ),
    "training, step 3": (
        f"{STEP3} --data_path {{f}}/few.jsonl --max_steps 1000000 --save_steps 0",
        {"after_file": "out/metrics.jsonl"},
    ),
    "chat": ("chat.py --path {f}/llama", {"after_text": "float32 on"}),
}
SAVING = {  # nothing but what a signal asks for
    "step 1": f"{STEP1} --data_path {{f}}/few.jsonl --max_steps 1000000 --save_steps 1000000",
    "step 3": f"{STEP3} --data_path {{f}}/few.jsonl --max_steps 1000000 --save_steps 1000000",
}
CASES = [*zip(MOMENTS, [*ENDS] * 2, strict=True)]  # each of both signals at two moments
CASES += [("step 1", signal.SIGINT), ("step 3", signal.SIGUSR1)]


def write_inputs(folder: Path) -> None:
    import tiny_models

    for name in ("llama", "llama_reward"):
        tiny_models.ensure(folder, name)
    for name, count in (("few", 60), ("many", 100_000)):
        rows = (
            json.dumps({"prompt": f"w{i % 60} w{i}", "chosen": "w3", "rejected": "w4"})
            for i in range(count)
        )
        (folder / f"{name}.jsonl").write_text("\n".join(rows))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """The outcomes of the commands that are parameters of tests."""
    items = [item for item in request.session.items if item.module is request.module]
    asked = [item.callspec.params for item in items if "outcomes" in item.fixturenames]
    wanted = [(params["moment"], params["signum"]) for params in asked]
    folder = tmp_path_factory.mktemp("interrupts")
    commands = []
    in_loop = {"after_file": "out/metrics.jsonl"}
    for moment, signum in wanted:
        command, when = MOMENTS.get(moment) or (SAVING[moment], in_loop)
        commands.append(forked.Command(command.format(f=folder).split(), signum, **when))
    return dict(zip(wanted, forked.run_all(folder, Path(__file__), commands), strict=True))


def cases(moments):
    chosen = [case for case in CASES if case[0] in moments]
    ids = [f"{moment}, {signum.name}" for moment, signum in chosen]
    marks = [pytest.mark.slow if case[0] in ("training, step 3", "chat") else () for case in chosen]
    params = zip(chosen, marks, ids, strict=True)
    params = [pytest.param(*case, marks=mark, id=name) for case, mark, name in params]
    return pytest.mark.parametrize(("moment", "signum"), params)


@cases(SAVING)
def test_a_loop_that_saves_stops(outcomes, moment, signum):
    outcome = outcomes[moment, signum]
    assert outcome.code == 75, outcome.stderr[-2000:]
    *before, last = outcome.stderr.splitlines()
    found = re.fullmatch(
        r"stopped at step \d+, saved in /.*/(out/checkpoints/step_\d{6}); "
        "the same command with --resume latest resumes from there",
        last,
    )
    assert found, last
    notice = "stopping after this step; a second signal ends it at once"
    assert before.count(notice) == 1
    assert all(line[2:3] == ":" or line == notice for line in before), before
    assert [name for name in outcome.left if name.endswith("manifest.json")] == [
        f"{found[1]}/manifest.json"
    ]
    assert not outcome.orphans
    assert "out/COMPLETE" not in outcome.left


@cases(MOMENTS)
def test_one_line_and_nothing_half(outcomes, moment, signum):
    outcome = outcomes[moment, signum]
    code, word = ENDS[signum]
    assert outcome.code == code, outcome.stderr[-2000:]
    *before, last = outcome.stderr.splitlines()
    assert last == word
    assert all(line[2:3] == ":" for line in before), before  # the log's, each with its time
    assert not outcome.orphans
    models = [name for name in outcome.left if "safetensors" in name or ".saving" in name]
    assert not models
    assert "out/COMPLETE" not in outcome.left
    if moment == "loading":
        assert (before, outcome.left) == ([], [])


# Sends a signal to its own process when the import of a module begins.
SITECUSTOMIZE = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["SIGNAL_AT"]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), int(os.environ["SIGNUM"]))

sys.meta_path.insert(0, Finder())
"""
LOSSY = """
from dschat.distributed import entrypoint

def main():
    try:
        import json.tool
    except BaseException:
        print("swallowed")

entrypoint.run(main)
"""
SCRIPTS = ("chat.py", "train.py", "step1_sft/main.py", "step2_reward/main.py", "step3_rlhf/main.py")
IMPORTS = [
    *((script, "dschat.config", signal.SIGINT) for script in SCRIPTS),
    ("-m dschat.data rows.jsonl", "dschat.config", signal.SIGINT),
    ("-m dschat chat", "dschat.distributed", signal.SIGINT),
    ("-m dschat chat", "dschat.chat", signal.SIGINT),
    ("{f}/lossy.py", "json.tool", signal.SIGINT),
    ("{f}/lossy.py", "json.tool", signal.SIGTERM),
]


@pytest.mark.parametrize(
    ("command", "module", "signum"), some(IMPORTS, [IMPORTS[1], *IMPORTS[-3:]])
)
def test_one_line_while_modules_load(tmp_path, command, module, signum):
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    (tmp_path / "lossy.py").write_text(LOSSY)
    variables = forked.environment(tmp_path)
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), variables["PYTHONPATH"]])
    variables |= {"SIGNAL_AT": module, "SIGNUM": str(int(signum))}
    done = subprocess.run(
        [sys.executable, *command.format(f=tmp_path).split()],
        cwd=forked.ROOT,
        env=variables,
        capture_output=True,
        text=True,
    )
    code, word = ENDS[signum]
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"{word}\n")


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_only_the_default_handler_is_replaced(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        exit_on_interrupt()
        replaced = signal.getsignal(signal.SIGINT) is not handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert replaced == (handler is signal.default_int_handler)
