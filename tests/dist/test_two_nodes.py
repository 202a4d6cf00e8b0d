"""Two machines, simulated by two train.py on one that communicate over loopback.

Both write to one OUT, as on a shared disk. One process a machine; rank 0 is on the first.
"""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from python_process import ROOT, environment

pytestmark = [pytest.mark.slow, pytest.mark.dist]
SMALL = ["--step1.max_seq_len", "48", "--per_device_train_batch_size", "4", "--logging_steps", "1"]
STEP1 = ["--step", "1", "--actor_model", "builtin/tiny", *SMALL]


def train(out: Path, *flags: str, log: str) -> subprocess.Popen:
    """``python train.py`` on one machine, its output in ``out.parent/log``."""
    out.parent.mkdir(exist_ok=True)
    command = [sys.executable, "train.py", "--output_dir", str(out), *flags]
    env = environment(OMP_NUM_THREADS="1")
    with open(out.parent / log, "w") as file:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT)


def two_nodes(out: Path, *flags: str, other: tuple[str, ...] = ()) -> list[subprocess.Popen]:
    """Start both machines; the second also gets the flags ``other``."""
    with socket.socket() as probe:  # its own range: three ports, one a step
        probe.bind(("127.0.0.1", 0))
        port = 20_000 + probe.getsockname()[1] % 9_000
    meet = ["--num_nodes", "2", "--num_gpus", "1", "--master_addr", "127.0.0.1"]
    meet += ["--master_port", str(port)]
    return [
        train(out, *flags, *meet, "--node_rank", str(n), *(other if n else ()), log=f"node{n}.log")
        for n in (0, 1)
    ]


def ended(
    runs: list[subprocess.Popen], out: Path, timeout_s: float = 300
) -> tuple[list[int], list[str]]:
    """The exit codes, and the logs of both machines."""
    try:
        codes = [run.wait(timeout=timeout_s) for run in runs]
    except subprocess.TimeoutExpired:
        pytest.fail(f"still running after {timeout_s} s:\n{logs_of(out)}")
    finally:
        for run in runs:
            run.terminate()
    return codes, logs_of(out)


def logs_of(out: Path) -> list[str]:
    return [(out.parent / f"node{n}.log").read_text() for n in (0, 1)]


def losses(out: Path) -> list[float]:
    lines = (out / "step1_sft" / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


@pytest.fixture
def data(tmp_path):
    """A few questions: the built-in data set's evaluation takes longer than all the rest."""
    path = tmp_path / "sums.jsonl"
    rows = [
        {"prompt": f"What is {a} plus {b}?", "chosen": str(a + b), "rejected": "no"}
        for a in range(8)
        for b in range(6)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ("--data_path", str(path), "--data_split", "1,1,1", "--eval_fraction", "0.1")


def test_two_machines_train_as_two_processes_of_one(tmp_path, data):
    one, two = tmp_path / "one" / "out", tmp_path / "two" / "out"
    flags = (*STEP1, "--max_steps", "2", *data)
    runs = [*two_nodes(two, *flags), train(one, *flags, "--num_gpus", "2", log="node.log")]
    codes, logs = ended(runs, two)
    assert codes == [0, 0, 0], logs
    assert len(losses(two)) == 2
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    assert len(list(two.rglob("*.safetensors"))) == 1
    assert "step 2/2" in logs[0]
    assert "step 2/2" not in logs[1]  # only one of them logs


def test_all_three_steps_on_two_machines(tmp_path, data):
    """Each step starts on both from what the first machine wrote of the last one."""
    out = tmp_path / "out"
    flags = ["--actor_model", "builtin/tiny", "--reward_model", "builtin/tiny", "--max_steps", "2"]
    flags += ["--per_device_generation_batch_size", "4", "--per_device_training_batch_size", "4"]
    flags += ["--max_prompt_seq_len", "32", "--max_answer_seq_len", "8", "--actor_zero_stage", "3"]
    codes, logs = ended(two_nodes(out, *flags, *SMALL, *data), out, timeout_s=400)
    assert codes == [0, 0], logs
    models = {str(path.parent.relative_to(out)) for path in out.rglob("model.safetensors")}
    assert models == {"step1_sft", "step2_reward", "step3_rlhf/actor", "step3_rlhf/critic"}
    assert "chat with it" in logs[0]
    assert "chat with it" not in logs[1]


def training(out: Path, *data: str) -> list[subprocess.Popen]:
    """Both machines, in the middle of step 1."""
    runs = two_nodes(out, *STEP1, *data, "--max_steps", "100000", "--num_train_epochs", "100000")
    metrics = out / "step1_sft" / "metrics.jsonl"
    deadline = time.monotonic() + 250
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        assert all(run.poll() is None for run in runs), (out.parent / "node0.log").read_text()
        time.sleep(0.2)
    return runs


@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_to_one_machine_stops_both(tmp_path, data, asked):
    out = tmp_path / "out"
    runs = training(out, *data)
    runs[asked].send_signal(signal.SIGUSR1)
    codes, logs = ended(runs, out, timeout_s=60)
    assert codes == [75, 75], logs
    newest = max((out / "step1_sft" / "checkpoints").iterdir())
    line = f"stopped in step 1, saved in {newest}; the same command resumes from there"
    assert [log.splitlines()[-1] for log in logs] == [line, line]
    assert not (out / "step1_sft" / ".ranks").exists()


def test_a_machine_that_fails_ends_the_other(tmp_path, data):
    """Killed in the middle of training: both train.py exit within seconds, with an error."""
    out = tmp_path / "out"
    runs = training(out, *data)
    (rank,) = [
        child
        for child in psutil.Process(runs[1].pid).children(recursive=True)
        if not {"launch", "watchdog"} & {*re.findall(r"\w+", " ".join(child.cmdline()[:4]))}
    ]
    rank.kill()
    start = time.monotonic()
    codes, _ = ended(runs, out, timeout_s=60)
    assert all(codes), codes
    assert time.monotonic() - start < 45


def test_machines_with_different_flags_say_so(tmp_path, data):
    out = tmp_path / "out"
    runs = two_nodes(out, *STEP1, "--max_steps", "2", *data, other=("--learning_rate", "1"))
    codes, logs = ended(runs, out)
    assert codes == [2, 2]
    assert "process 1 was started with another --learning_rate than process 0" in logs[0]
    # A machine that saw the other's folder leaves it, empty.
    assert not [path for path in out.rglob("*") if path.is_file()]
