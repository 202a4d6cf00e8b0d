"""Two machines, simulated by two train.py on one that communicate over loopback.

Both write to one OUT, as on a shared disk. One process a machine; rank 0 is on the first.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--step1.max_seq_len", "48", "--per_device_train_batch_size", "4", "--logging_steps", "1"]


def train(out: Path, *flags: str, log: str) -> subprocess.Popen:
    """``python train.py`` on one machine, its output in ``out.parent/log``."""
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with open(out.parent / log, "w") as file:
        return subprocess.Popen(
            [sys.executable, "train.py", "--output_dir", str(out), *flags],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


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


def wait(runs: list[subprocess.Popen], out: Path, timeout_s: float = 300) -> list[int]:
    """The exit codes; the logs where it takes too long."""
    try:
        return [run.wait(timeout=timeout_s) for run in runs]
    except subprocess.TimeoutExpired:
        logs = "\n".join(path.read_text()[-2000:] for path in sorted(out.parent.glob("node*.log")))
        pytest.fail(f"still running after {timeout_s} s:\n{logs}")
    finally:
        for run in runs:
            run.terminate()


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


@pytest.mark.slow
@pytest.mark.dist
def test_two_machines_train_as_two_processes_of_one(tmp_path, data):
    (tmp_path / "two").mkdir()
    (tmp_path / "one").mkdir()
    flags = ("--step", "1", "--actor_model", "builtin/tiny", "--max_steps", "2", *SMALL, *data)
    runs = two_nodes(tmp_path / "two" / "out", *flags)
    runs.append(train(tmp_path / "one" / "out", *flags, "--num_gpus", "2", log="node.log"))
    codes = wait(runs, tmp_path / "two" / "out")
    logs = [(tmp_path / "two" / f"node{n}.log").read_text() for n in (0, 1)]
    assert codes == [0, 0, 0], logs
    two, one = losses(tmp_path / "two" / "out"), losses(tmp_path / "one" / "out")
    assert len(two) == 2
    assert two == pytest.approx(one, rel=1e-4)
    assert len(list((tmp_path / "two").rglob("*.safetensors"))) == 1
    assert "step 2/2" in logs[0]
    assert "step 2/2" not in logs[1]  # only one of them logs


@pytest.mark.dist
@pytest.mark.slow
def test_all_three_steps_on_two_machines(tmp_path, data):
    """Each step starts on both from what the first machine wrote of the last one."""
    out = tmp_path / "out"
    flags = ["--actor_model", "builtin/tiny", "--reward_model", "builtin/tiny", "--max_steps", "2"]
    flags += ["--per_device_generation_batch_size", "4", "--per_device_training_batch_size", "4"]
    flags += ["--max_prompt_seq_len", "32", "--max_answer_seq_len", "8", "--actor_zero_stage", "3"]
    codes = wait(two_nodes(out, *flags, *SMALL, *data), out, timeout_s=400)
    logs = [(tmp_path / f"node{n}.log").read_text() for n in (0, 1)]
    assert codes == [0, 0], logs
    models = {str(path.parent.relative_to(out)) for path in out.rglob("model.safetensors")}
    assert models == {"step1_sft", "step2_reward", "step3_rlhf/actor", "step3_rlhf/critic"}
    assert "chat with it" in logs[0]
    assert "chat with it" not in logs[1]


def training(out: Path, *data: str) -> list[subprocess.Popen]:
    """Both machines, in the middle of step 1."""
    flags = ("--step", "1", "--actor_model", "builtin/tiny", "--max_steps", "100000", *SMALL)
    runs = two_nodes(out, *flags, *data, "--num_train_epochs", "100000")
    metrics = out / "step1_sft" / "metrics.jsonl"
    deadline = time.monotonic() + 250
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        assert all(run.poll() is None for run in runs), (out.parent / "node0.log").read_text()
        time.sleep(0.2)
    return runs


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_to_one_machine_stops_both(tmp_path, data, asked):
    out = tmp_path / "out"
    runs = training(out, *data)
    runs[asked].send_signal(signal.SIGUSR1)
    codes = wait(runs, out, timeout_s=60)
    logs = [(tmp_path / f"node{n}.log").read_text() for n in (0, 1)]
    assert codes == [75, 75], logs
    newest = max((out / "step1_sft" / "checkpoints").iterdir())
    line = f"stopped in step 1, saved in {newest}; the same command resumes from there"
    assert [log.splitlines()[-1] for log in logs] == [line, line]
    assert not (out / "step1_sft" / ".ranks").exists()


@pytest.mark.dist
@pytest.mark.slow
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
    codes = wait(runs, out, timeout_s=60)
    assert all(codes), codes
    assert time.monotonic() - start < 45


@pytest.mark.dist
@pytest.mark.slow
def test_machines_with_different_flags_say_so(tmp_path, data):
    out = tmp_path / "out"
    flags = ("--step", "1", "--actor_model", "builtin/tiny", "--max_steps", "2", *SMALL, *data)
    codes = wait(two_nodes(out, *flags, other=("--learning_rate", "1")), out)
    assert codes == [2, 2]
    assert (
        "process 1 was started with another --learning_rate than process 0"
        in (tmp_path / "node0.log").read_text()
    )
    # A machine that saw the other's folder leaves it, empty.
    assert not [path for path in out.rglob("*") if path.is_file()]
