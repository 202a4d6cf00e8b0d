"""Damaged files in a run's folder, of every kind: a run resumes, or says in one line why not.

The run of a script is killed, each file that it left is damaged in each way, and the command that
resumes it is run again. Finished models are loaded. A log that is damaged never ends a run.
"""

import os
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import forked
import pytest
import torch
from cases import STEP1
from damages import DAMAGES
from runs import Case, ran

from dschat.config import UserError
from dschat.models.checkpoint import Checkpoint

slow = pytest.mark.slow
STEP3 = Case(3, "--enable_ema --kl_coef 0.1 --sample_steps 1 --max_eval_samples 2")
LOGS = ("metrics.jsonl", "starts.jsonl", "samples.jsonl", "training_config.yaml")
CHECKPOINT = ("manifest.json", "values.json", "rank_00000.safetensors")
STATES = ("actor/mp_rank_00_model_states.pt", "critic/mp_rank_00_model_states.pt")
OF_BYTES = ("half", "bit", "folder", "broken link", "pipe")  # of a file that is no text


@pytest.fixture(scope="module")
def killed(models, tmp_path_factory):
    """Case -> the folder of a run that was killed after its second checkpoint, of step 4."""
    made = {}

    def run(case: Case) -> Path:
        if case not in made:
            made[case] = out = tmp_path_factory.mktemp("killed") / "run"
            outcome = forked.run(
                *case.command(models, out)[1:],
                # An iteration has eight steps: of two models, epochs and mini-batches.
                variables={"FAULT": f"hang_in_step {35 if case.step == 3 else 5} 0"},
                signum=signal.SIGKILL,
                after_file=str(out / "checkpoints/step_000004/manifest.json"),
            )
            assert outcome.code == -signal.SIGKILL, outcome.stderr[-3000:]
        return made[case]

    return run


def cases(case: Case, files: list[str]) -> list:
    """A damage of a file, each."""
    return [
        (case, file, damage)
        for file in files
        for damage in (DAMAGES if file.endswith(("json", "jsonl", "yaml")) else OF_BYTES)
    ]


IN_STEP1 = [*LOGS, *(f"checkpoints/step_000004/{name}" for name in CHECKPOINT)]
IN_STEP3 = [*IN_STEP1, *(f"checkpoints/step_000004/{name}" for name in STATES)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "file", "damage"), [*cases(STEP1, IN_STEP1), *cases(STEP3, IN_STEP3)]
)
def test_a_run_resumes_or_says_why_not(case, file, damage, killed, models, tmp_path):
    if not (killed(case) / file).exists():
        pytest.skip("this step does not write it")
    out = tmp_path / "run"
    shutil.copytree(killed(case), out)
    DAMAGES[damage](out / file)
    (out / os.fsdecode(b"a\xff.jsonl")).write_text("")
    is_refused = damage in ("folder", "broken link", "pipe") and file in LOGS
    is_refused &= file != "starts.jsonl"
    said = ran(case, models, out, "--max_steps", "5", code=2 if is_refused else 0)
    assert "Traceback" not in said
    if is_refused:
        assert said.splitlines()[-1].startswith(f"error: --output_dir {out}: its {file} is not a f")
    else:
        assert (out / "COMPLETE").exists()
        resumed = "step_000004" if file in LOGS else "step_000002"
        assert f"from {out}/checkpoints/{resumed}" in said


@contextmanager
def at_most(seconds: int):
    """A time limit: who opens a pipe waits for ever."""

    def stop(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_finished_model_loads_or_is_refused(damage, whole, tmp_path):
    out, done = tmp_path / "model", whole(STEP1)
    for file in sorted(path for path in done.iterdir() if path.is_file()):
        shutil.copytree(done, out, ignore=shutil.ignore_patterns("checkpoints"))
        DAMAGES[damage](out / file.name)
        try:
            with at_most(60):
                model = Checkpoint(out, "--model")
                model.check_checksums()
                assert model.tokenizer().eos_token
                model.language_model(torch.float32)
                _ = model.generation_config
        except UserError as error:
            refused = str(error)
        else:
            refused = ""
        assert "\n" not in refused, (file.name, refused)
        shutil.rmtree(out)
