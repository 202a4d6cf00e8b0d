"""Clusters: machines from hostfile and flags, launch commands, and errors.

Commands for DeepSpeed's launcher are passed to its own parser, which returns what it would run.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from stub_steps import world_of

from dschat.config import UserError
from dschat.config.fields import require_valid
from dschat.launch import cluster
from dschat.launch.cluster import ClusterConfig

EXAMPLE = Path("training/launch/hostfile")
WORDS = ["step1_sft/main.py", "--data_path", "a b.jsonl", "--lora_modules", "q|v", "--x=-1"]


def write_program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A temporary working directory, every launcher installed, eight cores, no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for program in cluster.PROGRAMS.values():
        write_program(tmp_path / "bin" / program, "")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    Path("hosts").write_text("# ours\n\nalpha slots=4\n  beta   slots=4 # new\n")


def find(gpus_here: int = 0, default_nodes=None, default_gpus=None, dry_run=False, **flags):
    config = ClusterConfig(**flags)
    require_valid(config)
    config.validate_cluster()
    recipe = {"num_nodes": default_nodes, "num_gpus": default_gpus}
    return cluster.find(config, recipe, gpus_here, EXAMPLE, dry_run)


def test_numbers_come_from_flags_then_recipe_then_hostfile_then_here():
    assert find().hosts == {"node0": 1}
    assert find(gpus_here=4).hosts == {"node0": 4}
    assert find(gpus_here=4, default_gpus=2).hosts == {"node0": 2}
    assert find(hostfile="hosts").hosts == {"alpha": 4, "beta": 4}
    assert find(hostfile="hosts", default_gpus=2).hosts == {"alpha": 2, "beta": 2}
    assert find(hostfile="hosts", default_nodes=2, num_nodes=1, num_gpus=3).hosts == {"alpha": 3}
    big = find(default_nodes=8, default_gpus=8, dry_run=True)
    assert (len(big.hosts), big.num_processes, big.processes_here) == (8, 64, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alpha slots=4\nbeta slot=4\n", ":2: 'beta slot=4' is not of the form NAME slots=GPUS"),
        ("alpha\n", ":1: 'alpha' is not of the form"),
        ("alpha slots=-1\n", ":1: 'alpha slots=-1' is not of the form"),
        ("alpha slots=0\n", ":1: alpha has no slots"),
        ("alpha slots=4\n\nalpha slots=4\n", ":3: duplicate machine alpha"),
        ("# nobody\n", " names no machine"),
        ("\xff", ": not a UTF-8 text file"),
    ],
)
def test_hostfile_mistakes_name_the_line(text, message):
    Path("bad").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError) as error:
        find(hostfile="bad")
    assert str(error.value).startswith(f"--hostfile bad{message}")


def test_too_few_gpus_here():
    with pytest.raises(UserError, match="--num_gpus 8: this machine has 4"):
        find(gpus_here=4, num_gpus=8)
    with pytest.raises(UserError, match="--num_gpus 8: this machine has 4"):
        find(gpus_here=4, num_gpus=8, num_nodes=2, node_rank=1, master_addr="a")
    # A login node starts others, and need not have their GPUs.
    Path("hosts").write_text("alpha slots=8\nbeta slots=8\n")
    assert find(gpus_here=4, hostfile="hosts").num_processes == 16


def test_without_gpus_cores_limit_processes(monkeypatch):
    by_hand = {"num_nodes": 2, "node_rank": 1, "master_addr": "a"}
    for more in ({}, by_hand):
        assert find(num_gpus=8, **more).processes_here == 8
        with pytest.raises(UserError, match="--num_gpus 9: .* no GPU, only 8 cores; .* most 8$"):
            find(num_gpus=9, **more)
    assert find(num_gpus=9, dry_run=True).num_processes == 9
    assert find(num_gpus=9, num_nodes=2, launcher="slurm").num_processes == 18  # not all here
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert find(num_gpus=2).num_processes == 2  # to try it out


def test_a_missing_program_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="--launcher pdsh: pdsh is not installed here"):
        find(hostfile="hosts")
    with pytest.raises(UserError, match="--launcher slurm: srun is not installed here"):
        find(launcher="slurm")
    assert find(hostfile="hosts", dry_run=True).num_processes == 8


# The commands


def test_one_machine():
    assert find().command(2, WORDS) == [sys.executable, *WORDS]
    two = find(num_gpus=2, master_port=7000).command(2, WORDS)
    assert two[-len(WORDS) :] == WORDS
    assert {"--node_rank=0", "--master_addr=127.0.0.1", "--master_port=7000"} <= set(two)
    assert world_of(two) == {"node0": [0, 1]}


@pytest.mark.parametrize("names", [["2", "3", "6"], ["GPU-8f2a-11", "MIG-77c0-2", "GPU-8f2a-13"]])
def test_the_gpus_that_are_visible(names, monkeypatch):
    """DeepSpeed's launcher sets the variable to these again for its processes."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
    command = find(gpus_here=3, num_gpus=2, master_port=7000).command(1, WORDS)
    assert {"--node_rank=0", "--master_addr=127.0.0.1", "--master_port=7000"} <= set(command)
    assert world_of(command) == {"node0": names[:2]}


def test_by_hand_every_machine_knows_all():
    Path("hosts").write_text("alpha slots=2\nbeta slots=3\n")
    for flags in ({"hostfile": "hosts"}, {"num_nodes": 2, "num_gpus": 2}):
        second = find(**flags, node_rank=1, no_ssh=True, master_addr="10.0.0.1", master_port=7000)
        command = second.command(3, WORDS)
        assert command[:3] == [sys.executable, "-m", "deepspeed.launcher.launch"]
        assert {"--node_rank=1", "--master_addr=10.0.0.1", "--master_port=7002"} <= set(command)
        assert command[-len(WORDS) :] == WORDS  # no shell reads them
        assert not second.is_first
    assert world_of(command) == {"node0": [0, 1], "node1": [0, 1]}


def test_by_hand_takes_the_visible_gpus_here(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    command = find(2, num_nodes=2, num_gpus=2, node_rank=1, master_addr="a").command(1, WORDS)
    assert world_of(command) == {"node0": [0, 1], "node1": ["4", "5"]}


def test_srun_starts_one_task_a_process():
    flags = {"launcher": "slurm", "num_nodes": 2, "num_gpus": 4}
    srun = ["srun", "--kill-on-bad-exit=1", "--nodes", "2", "--ntasks", "8"]
    srun += ["--ntasks-per-node", "4"]
    assert find(**flags).command(1, WORDS) == [*srun, sys.executable, *WORDS]
    more = find(**flags, master_port=7000, launcher_args="--mem 0 --comment='a b'")
    assert more.command(2, WORDS) == [
        *(*srun, "--export=ALL,MASTER_PORT=7001", "--mem", "0", "--comment=a b"),
        *(sys.executable, *WORDS),
    ]


def deepspeed_command(command: list[str]) -> list[str]:
    """The pdsh command that DeepSpeed's launcher makes of ours."""
    from deepspeed.launcher import runner

    assert command[:3] == [sys.executable, "-m", "deepspeed.launcher.runner"]
    args = runner.parse_args(command[3:])
    pool = runner.fetch_hostfile(args.hostfile)
    active = runner.parse_inclusion_exclusion(pool, args.include, args.exclude)
    active = runner.apply_num_nodes_and_gpus(active, args.num_nodes, args.num_gpus)
    backend = runner.LAUNCHER_CLASSES[args.launcher](args, runner.encode_world_info(active))
    return backend.get_cmd(dict(os.environ), active)[0]


# Words that a remote shell would expand or split, or pdsh replaces (%h, %n, %%).
HARD = [*WORDS, r"x.pattern=it costs \$(\d+)", "$HOME", "a $HOME", "`id`", "a `id` $(id)", "100%n"]
HARD += [
    "%h %u %n %% %",
    "%%h",
    'say "hi" \\"',
    "it's a",
    "a\nb c\td",
    "\t",
    "* ; | & #",
    "a !b \\",
    "",
]


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_pdsh_gives_the_flags_to_a_remote_shell_unharmed(shell):
    write_program(show := Path("show").resolve(), "printf '%s\\0' \"$@\"")
    flags = {"hostfile": "hosts", "ssh_port": 2222, "master_port": 7000, "launcher_args": "-t 9"}
    command = find(**flags, num_gpus=2).command(2, HARD)
    assert command[command.index("--ssh_port") + 1] == "2222"
    made = deepspeed_command(command)
    assert made[made.index("-w") + 1] == "alpha,beta"
    assert made[made.index("-t") + 1] == "9"
    line = " ".join(made[made.index("-t") + 2 :])
    line = line.replace(sys.executable, str(show))  # on the other machine
    line = re.sub("%([hun%])", lambda m: {"h": "beta", "u": "me", "n": "1", "%": "%"}[m[1]], line)
    remote = subprocess.check_output([shell, "-c", line], text=True).split("\0")[:-1]
    assert remote[-len(HARD) :] == HARD
    assert "--node_rank=1" in remote
    assert "--master_port=7001" in remote
    assert world_of(remote) == {"alpha": [0, 1], "beta": [0, 1]}


@pytest.mark.parametrize("name", ["a b", "$HOME", "50%"])
def test_pdsh_reaches_no_folder_that_needs_quotes(name, monkeypatch):
    """DeepSpeed's runner writes ``cd FOLDER`` and Python's path unquoted."""
    folder = Path(name).resolve()
    folder.mkdir()
    Path("hosts").rename(folder / "hosts")
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=rf"--launcher pdsh: .*{re.escape(name)}.* --node_rank"):
        find(hostfile="hosts")
