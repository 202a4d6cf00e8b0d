"""Finds the machines of a run and builds the command that starts a step on them.

The command is plain Python for one process, else DeepSpeed's launcher (over pdsh, or node by node
without ssh) or SLURM's srun.
"""

import base64
import json
import os
import re
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Optional

from dschat.config import UserError
from dschat.config.errors import require
from dschat.config.fields import flag, read_named
from dschat.startup.performance import num_cores

FIRST_PORT = 29500
PROGRAMS = {"pdsh": "pdsh", "slurm": "srun"}  # required on this machine
# Three steps take three ports, up to 65535.
_PORT: dict[str, Any] = {"ge": 1, "le": 65533}


@dataclass
class ClusterConfig:
    """Machines, in flags named as in DeepSpeed's launcher."""

    num_gpus: Optional[int] = flag(
        None,
        "Processes per machine, one per GPU (on CPUs: at most one per core); default: the "
        "hostfile's slots, all visible GPUs, or one process on the CPU.",
        short=True,
        ge=1,
    )
    num_nodes: Optional[int] = flag(
        None,
        "Number of machines; default: all of --hostfile, or 1.",
        short=True,
        aliases=["--nnodes"],
        ge=1,
    )
    hostfile: Optional[str] = flag(
        None,
        "File of machines, one line each: NAME slots=GPUS (see training/launch/hostfile).",
        short=True,
    )
    launcher: Literal["pdsh", "slurm"] = flag(
        "pdsh", "Launcher for several machines; slurm: srun, without --hostfile."
    )
    launcher_args: str = flag(
        "", 'Extra arguments of pdsh or srun: --launcher_args="--mem 0 --qos long".'
    )
    node_rank: Optional[int] = flag(
        None,
        "Rank of this machine, from 0: start train.py on each machine, with the same flags "
        "otherwise; needs neither ssh nor --hostfile.",
        ge=0,
    )
    no_ssh: bool = flag(False, "Do not use ssh; implied by --node_rank.")
    master_addr: Optional[str] = flag(
        None, "Address of machine 0; default: queried from the first host over ssh."
    )
    master_port: Optional[int] = flag(
        None,
        "Port on machine 0; default: 29500, on a single machine the first free one from there. "
        "With several machines steps 2 and 3 use the next two.",
        **_PORT,
    )
    ssh_port: Optional[int] = flag(None, "Port of ssh on the other machines; default: 22.", **_PORT)

    def validate_cluster(self) -> None:
        by_hand = self.node_rank is not None
        require(by_hand or not self.no_ssh, "--no_ssh needs --node_rank: the rank of this machine")
        if self.node_rank is not None:
            require(
                bool(self.master_addr),
                "--node_rank needs --master_addr: the address of machine 0, the same on all",
            )
            for name, given in (
                ("launcher", self.launcher != "pdsh"),
                ("launcher_args", self.launcher_args),
                ("ssh_port", self.ssh_port),
            ):
                require(
                    not given,
                    f"--{name} starts processes on other machines, --node_rank on this one alone; "
                    "leave one out",
                )
        require(
            self.launcher == "pdsh" or not self.ssh_port,
            "--ssh_port is for pdsh; srun needs no ssh",
        )
        require(
            self.launcher != "slurm" or not self.hostfile,
            "--launcher slurm uses the machines of the SLURM job; leave --hostfile out",
        )


def read_hostfile(path: str) -> dict[str, tuple[int, int]]:
    """{name: (slots, line number)} of a hostfile, in order.

    DeepSpeed's format: ``NAME slots=GPUS`` lines; empty lines and lines that start with # are
    skipped.

    Raises:
        UserError: no such file, a malformed line (with its number), a duplicate machine, or none.
    """
    lines = read_named(path, f"--hostfile {path}", "one of lines NAME slots=GPUS").splitlines()
    hosts: dict[str, tuple[int, int]] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        match = re.match(r"(\S+)\s+slots=(\d+)", line)
        where = f"--hostfile {path}:{number}"
        if match is None:
            raise UserError(f"{where}: {line!r} is not of the form NAME slots=GPUS")
        name, slots = match[1], int(match[2])
        require(slots > 0, f"{where}: {name} has no slots; give it one per GPU or leave it out")
        require(name not in hosts, f"{where}: duplicate machine {name}; give it one line")
        hosts[name] = (slots, number)
    require(bool(hosts), f"--hostfile {path} names no machine; write lines NAME slots=GPUS")
    return hosts


@dataclass(frozen=True)
class Cluster:
    """The machines of a run. ``hosts``: name -> number of processes, in rank order."""

    config: ClusterConfig
    hosts: Mapping[str, int]
    gpus_here: int = 0
    hostfile: Optional[str] = None
    port: int = FIRST_PORT

    @property
    def num_processes(self) -> int:
        """On all machines together."""
        return sum(self.hosts.values())

    @property
    def processes_here(self) -> int:
        """On this machine if its rank is known, else on the first."""
        return list(self.hosts.values())[self.number_here]

    @property
    def number_here(self) -> int:
        """Rank of this machine; 0 if it is not known."""
        return self.config.node_rank or 0

    @property
    def relay(self) -> Optional[int]:
        """The signal that the launch command forwards to its processes on all machines, if any."""
        return signal.SIGUSR1 if self.config.launcher == "slurm" else None

    @property
    def is_first(self) -> bool:
        """Whether this machine starts rank 0, which writes all files."""
        return not self.config.node_rank

    def command(self, number: int, words: Sequence[str]) -> list[str]:
        """The command that runs ``words`` (a Python script and its flags) as step ``number``.

        Several machines use another port for every step: one machine may start the next step while
        another still finishes the last, and would connect to it.
        """
        several = len(self.hosts) > 1
        port = self.port + number - 1 if several else self.port
        if self.config.launcher == "slurm":
            return [*self._srun(port), sys.executable, *words]
        if self.num_processes == 1:
            return [sys.executable, *words]
        if not several or self.config.node_rank is not None:
            return [*self._launched_here(port), *words]
        quoted = [shlex.quote(words[0]), *map(_quoted_for_pdsh, words[1:])]
        return [*self._over_hostfile(port), *quoted]

    def _launched_here(self, port: int) -> list[str]:
        """The processes of this machine, by the part of DeepSpeed's launcher that runs on each.

        NOTE: the part in front of it takes the first GPUs, reads no names of GPUs (UUIDs), and
        needs a hostfile for several machines.
        """
        world: dict[str, list[Any]] = {host: list(range(n)) for host, n in self.hosts.items()}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = [name.strip() for name in visible if self.gpus_here and name.strip()]
        if names:
            world[list(world)[self.number_here]] = names[: self.processes_here]
        info = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
        return [
            *(sys.executable, "-m", "deepspeed.launcher.launch", "--log_level=critical"),
            *(f"--world_info={info}", f"--node_rank={self.number_here}"),
            *(f"--master_addr={self.config.master_addr or '127.0.0.1'}", f"--master_port={port}"),
        ]

    def _over_hostfile(self, port: int) -> list[str]:
        config = self.config
        runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "critical"]
        flags = ["--hostfile", str(self.hostfile), "--master_port", str(port)]
        flags += ["--num_nodes", str(len(self.hosts))]
        if len(set(self.hosts.values())) == 1:
            flags += ["--num_gpus", str(self.processes_here)]
        flags += ["--ssh_port", str(config.ssh_port)] if config.ssh_port else []
        flags += ["--master_addr", config.master_addr] if config.master_addr else []
        # One word: argparse would read a value that starts with a dash as a flag.
        flags += [f"--launcher_args={config.launcher_args}"] if config.launcher_args else []
        return [*runner, *flags]

    def _srun(self, port: int) -> list[str]:
        """One task per process; `dschat.distributed` reads rank and master address from SLURM."""
        exports = []
        if self.config.master_addr:
            exports.append(f"MASTER_ADDR={self.config.master_addr}")
        if self.config.master_port:
            exports.append(f"MASTER_PORT={port}")
        return [
            *("srun", "--kill-on-bad-exit=1", "--nodes", str(len(self.hosts))),
            *("--ntasks", str(self.num_processes), "--ntasks-per-node", str(self.processes_here)),
            *([f"--export={','.join(['ALL', *exports])}"] if exports else []),
            *shlex.split(self.config.launcher_args),
        ]


def find(
    config: ClusterConfig,
    recipe: Mapping[str, Any],
    gpus_here: int,
    example: Path,
    dry_run: bool,
) -> Cluster:
    """The machines that ``config`` names, or else ``recipe``'s ``num_nodes`` and ``num_gpus``.

    A ``dry_run`` may plan for machines that do not exist, with ``example`` as the hostfile.

    Raises:
        UserError: more machines or GPUs than exist, or no launcher that reaches them.
    """
    num_gpus = config.num_gpus or recipe.get("num_gpus")
    listed = read_hostfile(config.hostfile) if config.hostfile else {}
    num_nodes = config.num_nodes or recipe.get("num_nodes") or len(listed) or 1
    if listed:
        hosts = _of_hostfile(config, listed, num_nodes, num_gpus)
    else:
        hosts = {f"node{i}": num_gpus or max(gpus_here, 1) for i in range(num_nodes)}
    several = num_nodes > 1
    _check_reach(config, num_nodes, dry_run)

    starts_elsewhere = config.launcher == "slurm" or (several and config.node_rank is None)
    here = hosts[list(hosts)[config.node_rank or 0]]
    if not starts_elsewhere and not dry_run:
        _check_room(here, gpus_here)
    default_port = FIRST_PORT if starts_elsewhere or several else None
    port = config.master_port or default_port or (_free_port() if here > 1 else FIRST_PORT)
    hostfile = config.hostfile or os.path.relpath(example)
    return Cluster(config, hosts, gpus_here, hostfile, port)


def _quoted_for_pdsh(word: str) -> str:
    """``word``, escaped for DeepSpeed, pdsh and a remote shell: DeepSpeed puts words with a space
    in double quotes and escapes only those words, pdsh replaces %h, %u and %n, reads %% as %.
    """
    quoted = re.sub(r"[\\$`]", r"\\\g<0>", word) if " " in word else shlex.quote(word)
    return quoted.replace("%", "%%")


def _check_room(count: int, gpus_here: int) -> None:
    """Require a GPU for each of ``count`` processes on this machine; without GPUs a core, or two
    processes.
    """
    require(
        count <= gpus_here or not gpus_here,
        f"--num_gpus {count}: this machine has {gpus_here}; for several machines give the GPUs of "
        "one, and --num_nodes",
    )
    most = gpus_here or max(2, num_cores())
    require(
        count <= most,
        f"--num_gpus {count}: this machine has no GPU, only {num_cores()} cores; "
        f"give at most {most}",
    )


def _of_hostfile(
    config: ClusterConfig,
    listed: Mapping[str, tuple[int, int]],
    num_nodes: int,
    num_gpus: Optional[int],
) -> dict[str, int]:
    """The first ``num_nodes`` machines of the file, with ``num_gpus`` processes or all slots."""
    file = f"--hostfile {config.hostfile}"
    require(
        num_nodes <= len(listed), f"--num_nodes {num_nodes}: {file} names {len(listed)} machines"
    )
    hosts = {}
    for name, (slots, line) in islice(listed.items(), num_nodes):
        require(
            num_gpus is None or num_gpus <= slots,
            f"--num_gpus {num_gpus}: {file}:{line} gives {name} {slots} slots",
        )
        hosts[name] = num_gpus or slots
    return hosts


def _check_reach(config: ClusterConfig, num_nodes: int, dry_run: bool) -> None:
    """Require flags and programs to start ``num_nodes`` machines from this one."""
    if num_nodes == 1 and config.launcher != "slurm":
        for name in ("node_rank", "master_addr", "ssh_port"):
            require(
                getattr(config, name) is None,
                f"--{name} is for several machines; add --num_nodes, or leave it out",
            )
        return
    if config.node_rank is not None:
        require(
            config.node_rank < num_nodes,
            f"--node_rank {config.node_rank}: {num_nodes} machines have ranks 0 to {num_nodes - 1}",
        )
        return
    if dry_run:
        return
    is_pdsh = config.launcher == "pdsh"
    require(
        bool(config.hostfile) or not is_pdsh,
        f"--num_nodes {num_nodes} needs --hostfile; or start train.py on every machine with its "
        "--node_rank and the same --master_addr, or use --launcher slurm in a SLURM job",
    )
    program = PROGRAMS[config.launcher]
    require(
        shutil.which(program) is not None,
        f"--launcher {config.launcher}: {program} is not installed here; start train.py where it "
        "is, or on every machine with its --node_rank",
    )
    for path in (os.getcwd(), sys.executable) if is_pdsh else ():
        require(
            shlex.quote(path) == path and "%" not in path,
            f"--launcher pdsh: {path} has characters that a remote shell would interpret; choose "
            "another folder, or start train.py on every machine with its --node_rank",
        )


def _free_port() -> int:
    """The first free port from ``FIRST_PORT``: always the same unless another run is active."""
    for port in range(FIRST_PORT, FIRST_PORT + 200):
        with socket.socket() as s, suppress(OSError):
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("", port))
            return port
    raise UserError(f"no free port from {FIRST_PORT} to {port}; stop other runs on this machine")
