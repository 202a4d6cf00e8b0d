"""Ranks from the variables of different launchers; processes that do not meet or do not match."""

import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from python_process import LAUNCHER, environment

import dschat.distributed as dist
from dschat.config import UserError
from dschat.distributed import env, process_group

TASK = {  # one of srun's, on the second machine
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_JOB_NODELIST": "gpu[003,007-008]",
}


def numbers() -> tuple[int, int, int]:
    return dist.rank(), dist.world_size(), dist.local_rank()


def test_without_a_launcher_there_is_one_process(variables):
    variables()
    assert numbers() == (0, 1, 0)
    # A batch script, and a shell that srun started in a job: neither is one of several.
    variables(SLURM_JOB_ID="1", SLURM_NTASKS="8", SLURM_PROCID="0", SLURM_LOCALID="0")
    assert numbers() == (0, 1, 0)
    variables(**(TASK | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}))
    assert numbers() == (0, 1, 0)


def test_launchers_say_who_we_are(variables):
    here = {"MASTER_ADDR": "10.0.0.1"}
    variables(**here, RANK="3", WORLD_SIZE="4", LOCAL_RANK="1")
    assert numbers() == (3, 4, 1)
    variables(**TASK)
    assert numbers() == (5, 8, 1)
    variables(**TASK, **here, RANK="3", WORLD_SIZE="4", LOCAL_RANK="1")  # a launcher per machine
    assert numbers() == (3, 4, 1)
    mpi = {"OMPI_COMM_WORLD_RANK": "6", "OMPI_COMM_WORLD_SIZE": "7"}
    variables(**TASK, **here, **mpi, OMPI_COMM_WORLD_LOCAL_RANK="2")
    assert numbers() == (6, 7, 2)


def test_slurm_tasks_meet_on_the_first_machine(variables):
    variables(**TASK)
    env.complete_environment()
    assert {name: os.environ[name] for name in LAUNCHER[:5]} == {
        "MASTER_ADDR": "gpu007",
        "MASTER_PORT": "13236",  # 12000 + (1234 + 2) % 20000
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
    }
    variables(**TASK, MASTER_ADDR="10.0.0.1", MASTER_PORT="7000")
    env.complete_environment()
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("10.0.0.1", "7000")


@pytest.mark.parametrize(
    ("machines", "first"),
    [
        ("host", "host"),
        ("n1,n2", "n1"),
        ("tux[1-3]", "tux1"),
        ("gpu[007-012,020],login1", "gpu007"),
        ("rack[0-3]-node[05,08-12],z", "rack0-node05"),
        ("a[2].cluster.org,b", "a2.cluster.org"),
    ],
)
def test_first_host(machines, first):
    assert env.first_host(machines) == first


JOIN = """
import sys
import dschat.distributed as dist
from dschat.distributed import entrypoint, process_group

class Teardown:
    def __del__(self):
        print("torn down while joined", file=sys.stderr)

if "--seed" in sys.argv:  # the processes that refuse each other
    teardown = Teardown()

def main():
    process_group.JOIN_MINUTES = float(sys.argv[1])
    dist.init()
    print(dist.rank(), dist.sum_floats([float(dist.rank() + 1)]), flush=True)
    dist.shutdown()

entrypoint.run(main)
"""


def join(folder: Path, *tasks: tuple[str, ...], job: int, **variables: str) -> list[Any]:
    """Exit code and output of processes that meet as srun's tasks would: rank and flags of each, of
    two.
    """
    script = folder / "join.py"
    script.write_text(JOIN)
    clean = {k: v for k, v in environment().items() if not k.startswith(("SLURM", "OMPI"))}
    slurm = {"SLURM_STEP_NODELIST": "localhost,other", "SLURM_STEP_NUM_TASKS": "2"}
    clean |= TASK | slurm | {"SLURM_JOB_ID": str(os.getpid() + job)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), *flags],
            env=clean | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, *flags in tasks
    ]
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    return [(p.returncode, text) for p, text in zip(processes, outputs, strict=True)]


@pytest.mark.slow  # those that refuse each other meet and gather too
@pytest.mark.dist
def test_slurm_tasks_compute_together(tmp_path):
    done = join(tmp_path, ("0", "1"), ("1", "1"), job=0)
    assert done == [(0, "0 [3.0]\n"), (0, "1 [3.0]\n")]


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="needs Linux")
def test_a_rendezvous_on_this_machine_listens_to_it_alone(variables):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    variables(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    store = process_group.meet()
    store.set("key", "value")
    tables = Path("/proc/net").glob("tcp*")
    rows = [line.split() for table in tables for line in table.read_text().splitlines()]
    listening = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]
    assert listening == [f"0100007F:{port:04X}"]


def test_a_port_that_is_taken_is_named(variables):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        variables(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="2")
        with pytest.raises(UserError, match=r"--master_port: 127.0.0.1:\d+ is in use; choose"):
            process_group.meet()


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_process_that_stays_alone_says_so(rank, tmp_path):
    """So does the first of another machine: rank 0, which speaks for all, never came."""
    ((code, text),) = join(tmp_path, (rank, "0.02"), job=2 + int(rank), SLURM_LOCALID="0")
    assert code == 2
    start = f"error: process {rank} of 2 did not meet the others at localhost:"
    assert text.splitlines()[-1].startswith(start)


@pytest.mark.parametrize(("number", "said"), [(1, False), (2, True), (3, False)])
def test_more_processes_than_gpus_are_named_once(number, said, variables, capsys):
    """Rank 0 sees a GPU and waits: of those without one, the first says so."""
    variables(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1")
    is_refused = pytest.raises(UserError, match=f"process {number} of this machine sees 2 GPUs")
    with is_refused if number >= 2 else nullcontext():
        process_group.check_device(2)
    printed = capsys.readouterr().err
    assert printed.startswith("error: process 2 of this machine sees 2 GPUs; start one") == said
    assert bool(printed) == said
