"""Machines: on which ones a step's processes run, and the command that starts them there.

Comes in: the flags about machines, what a recipe says of them, and the GPUs seen here. Goes out: a
``Cluster``, which turns a step's script and flags into a command: plain Python for one process,
else DeepSpeed's launcher (over pdsh or MPI, or node by node without ssh) or SLURM's srun.
This module must not know steps, recipes, or what the processes do.
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
from dschat.config.fields import flag
from dschat.config.text_file import read_text
from dschat.memory import available_memory

FIRST_PORT = 29500
PROCESS_BYTES = 350 * 2**20  # of one process with its libraries (measured: proportional set size)
MPI_LAUNCHERS = {"openmpi": "mpirun", "mpich": "mpirun", "impi": "mpirun"}
PROGRAMS = {"pdsh": "pdsh", "slurm": "srun", **MPI_LAUNCHERS}  # what must be on this machine


@dataclass
class ClusterConfig:
    """train.py's flags about machines; the names are those of DeepSpeed's launcher."""

    num_gpus: Optional[int] = flag(
        None,
        "Processes on each machine, one per GPU (without GPUs: at most one per core); default: the "
        "hostfile's slots, every visible GPU, or one process on the CPU.",
    )
    num_nodes: Optional[int] = flag(
        None, "Machines; default: all of --hostfile, or this one.", aliases=["--nnodes"]
    )
    hostfile: Optional[str] = flag(
        None, "The machines, a line each: NAME slots=GPUS (training/launch/hostfile)."
    )
    launcher: Literal["pdsh", "openmpi", "mpich", "impi", "slurm"] = flag(
        "pdsh", "What starts the processes of several machines; slurm: srun, without a --hostfile."
    )
    launcher_args: str = flag(
        "", 'More words for pdsh, mpirun or srun, as one: --launcher_args="--mca btl tcp,self".'
    )
    node_rank: Optional[int] = flag(
        None,
        "This machine's number, from 0: train.py is started on each machine by hand, with the same "
        "flags otherwise, and needs neither ssh nor a --hostfile.",
    )
    no_ssh: bool = flag(False, "Reach no other machine; --node_rank implies it.")
    master_addr: Optional[str] = flag(
        None, "Address of machine 0; default: asked of the first host over ssh."
    )
    master_port: Optional[int] = flag(
        None,
        "Port there; with several machines step 2 takes the next one and step 3 the one after.",
    )
    ssh_port: Optional[int] = flag(None, "Port of the other machines' ssh, where it is not 22.")

    def validate_nodes(self) -> None:
        """Raise ``UserError`` for a number that cannot be, or flags that exclude each other."""
        for name in ("num_gpus", "num_nodes"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"--{name} {value} must be at least 1")
        for name in ("master_port", "ssh_port"):
            value = getattr(self, name)
            require(
                value is None or 1 <= value <= 65533, f"--{name} {value} must be from 1 to 65533"
            )
        by_hand = self.node_rank is not None
        require(by_hand or not self.no_ssh, "--no_ssh needs --node_rank: this machine's number")
        if by_hand:
            require(self.node_rank >= 0, f"--node_rank {self.node_rank} must not be negative")
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
            f"--ssh_port is pdsh's; tell {self.launcher} with --launcher_args",
        )
        require(
            self.launcher != "slurm" or not self.hostfile,
            "--launcher slurm takes the machines of the SLURM job; leave --hostfile out",
        )


def read_hostfile(path: str) -> dict[str, tuple[int, int]]:
    """{name: (slots, line number)} of a hostfile, in its order; DeepSpeed's rules.

    A line is ``NAME slots=GPUS``; empty lines and those that begin with # are skipped.

    Raises:
        UserError: no such file, a line that is none of these (named), a machine twice, or none.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise UserError(
            f"--hostfile {path}: {reason}; name a file of lines NAME slots=GPUS"
        ) from None
    hosts: dict[str, tuple[int, int]] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        match = re.match(r"(\S+)\s+slots=(\d+)", line)
        where = f"--hostfile {path}:{number}"
        require(bool(match), f"{where}: {line!r} is not of the form NAME slots=GPUS")
        name, slots = match[1], int(match[2])
        require(slots > 0, f"{where}: {name} has no slots; give it one per GPU or leave it out")
        require(name not in hosts, f"{where}: {name} is there twice; give it one line")
        hosts[name] = (slots, number)
    require(bool(hosts), f"--hostfile {path} names no machine; write lines NAME slots=GPUS")
    return hosts


@dataclass(frozen=True)
class Cluster:
    """The machines of a run: ``hosts`` are names and numbers of processes, in rank order."""

    config: ClusterConfig
    hosts: Mapping[str, int]
    gpus_here: int = 0
    hostfile: Optional[str] = None
    port: int = FIRST_PORT

    @property
    def num_processes(self) -> int:
        """Of all machines together."""
        return sum(self.hosts.values())

    @property
    def processes_here(self) -> int:
        """Of one machine: this one where its number is known, else the first."""
        return list(self.hosts.values())[self.number_here]

    @property
    def number_here(self) -> int:
        """This machine's number; 0, the first one's, where it is not known."""
        return self.config.node_rank or 0

    @property
    def relay(self) -> Optional[int]:
        """The signal that the command passes on to its processes on all machines, if there is
        such.
        """
        return signal.SIGUSR1 if self.config.launcher == "slurm" else None

    @property
    def is_first(self) -> bool:
        """Whether rank 0, which writes all files, is started from here."""
        return not self.config.node_rank

    def command(self, number: int, words: Sequence[str]) -> list[str]:
        """The command that runs ``words`` (a Python script and its flags) as step ``number``.

        Several machines take another port for every step: one may begin the next step while
        another still ends the last, and would meet it there.
        """
        several = len(self.hosts) > 1
        port = self.port + number - 1 if several else self.port
        if self.config.launcher == "slurm":
            return [*self._srun(port), sys.executable, *words]
        if not several:
            return [*self._here(port), *words]
        if self.config.node_rank is not None:
            return [*self._by_hand(port), *words]
        if self.config.launcher == "pdsh":
            words = [shlex.quote(words[0]), *map(_quoted_for_pdsh, words[1:])]
        return [*self._over_hostfile(port), *words]

    def _here(self, port: int) -> list[str]:
        """One machine: plain Python for one process, else DeepSpeed's launcher."""
        count = self.num_processes
        if count == 1:
            return [sys.executable]
        devices = ["--num_gpus", str(count)]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if self.gpus_here and visible != [""]:
            # NOTE beside --num_gpus the launcher drops CUDA_VISIBLE_DEVICES and takes the first.
            devices = ["--include", f"localhost:{','.join(visible[:count])}"]
        return [*_runner(), *devices, "--master_port", str(port)]

    def _by_hand(self, port: int) -> list[str]:
        """This machine's part. DeepSpeed's runner would ask for a hostfile only to build this."""
        world: dict[str, list[Any]] = {host: list(range(n)) for host, n in self.hosts.items()}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if self.gpus_here and visible != [""]:
            world[list(world)[self.config.node_rank]] = visible[: self.processes_here]
        info = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
        return [
            *(sys.executable, "-m", "deepspeed.launcher.launch", "--log_level=critical"),
            *(f"--world_info={info}", f"--node_rank={self.config.node_rank}"),
            *(f"--master_addr={self.config.master_addr}", f"--master_port={port}"),
        ]

    def _over_hostfile(self, port: int) -> list[str]:
        config, more = self.config, self.config.launcher_args
        flags = ["--hostfile", str(self.hostfile), "--master_port", str(port)]
        address = config.master_addr
        if config.launcher == "pdsh":
            flags += ["--num_nodes", str(len(self.hosts))]
            if len(set(self.hosts.values())) == 1:
                flags += ["--num_gpus", str(self.processes_here)]
            flags += ["--ssh_port", str(config.ssh_port)] if config.ssh_port else []
        else:  # these start every slot of the file and refuse --num_nodes
            address = address or next(iter(self.hosts))
            flags += ["--launcher", config.launcher, "--no_ssh_check"]
        if config.launcher == "openmpi":  # DeepSpeed tells the other two itself
            more = f"-x MASTER_ADDR={address} -x MASTER_PORT={port} {more}".rstrip()
        flags += ["--master_addr", address] if address else []
        # One word: argparse would take a value that begins with a dash for a flag.
        flags += [f"--launcher_args={more}"] if more else []
        return [*_runner(), *flags]

    def _srun(self, port: int) -> list[str]:
        """One task a process; `dschat.distributed` learns rank and meeting point from SLURM."""
        given = []
        if self.config.master_addr:
            given.append(f"MASTER_ADDR={self.config.master_addr}")
        if self.config.master_port:
            given.append(f"MASTER_PORT={port}")
        return [
            *("srun", "--kill-on-bad-exit=1", "--nodes", str(len(self.hosts))),
            *("--ntasks", str(self.num_processes), "--ntasks-per-node", str(self.processes_here)),
            *([f"--export={','.join(['ALL', *given])}"] if given else []),
            *shlex.split(self.config.launcher_args),
        ]


def find(
    config: ClusterConfig,
    default_nodes: Optional[int],
    default_gpus: Optional[int],
    gpus_here: int,
    example: Path,
    dry_run: bool,
) -> Cluster:
    """The machines that ``config`` names; the defaults (a recipe's) hold where it says nothing.

    A ``dry_run`` may plan for machines that are not there; ``example`` then stands for a hostfile.

    Raises:
        UserError: more machines or GPUs than there are, or no way to reach them.
    """
    num_gpus = config.num_gpus or default_gpus
    listed = read_hostfile(config.hostfile) if config.hostfile else {}
    num_nodes = config.num_nodes or default_nodes or len(listed) or 1
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
    """What DeepSpeed, pdsh and a remote shell make ``word`` of: the first puts words with a blank
    in double quotes and escapes these alone, the second replaces %h, %u and %n, and reads %% as %.
    """
    quoted = re.sub(r"[\\$`]", r"\\\g<0>", word) if " " in word else shlex.quote(word)
    return quoted.replace("%", "%%")


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_room(count: int, gpus_here: int) -> None:
    """Whether ``count`` processes can be started on this machine: one a GPU; without GPUs as many
    as it has cores (two in any case), and memory for what each loads before any model.
    """
    if gpus_here:
        require(
            count <= gpus_here,
            f"--num_gpus {count}: this machine shows {gpus_here}; for several machines give the "
            "number of each one's, and --num_nodes",
        )
        return
    for most, what in (
        (max(2, num_cores()), f"{num_cores()} cores"),
        (available_memory() // PROCESS_BYTES, f"{available_memory() / 2**30:.1f} GiB of memory"),
    ):
        require(
            count <= max(1, most),
            f"--num_gpus {count}: this machine shows no GPU, and has {what} for as many processes; "
            f"give at most {max(1, most)}",
        )


def _of_hostfile(
    config: ClusterConfig,
    listed: Mapping[str, tuple[int, int]],
    num_nodes: int,
    num_gpus: Optional[int],
) -> dict[str, int]:
    """The first ``num_nodes`` machines of the file, with as many processes as asked for."""
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
    if config.launcher in MPI_LAUNCHERS and num_nodes > 1:
        require(
            hosts == {name: slots for name, (slots, _) in listed.items()},
            f"--launcher {config.launcher} starts every slot of {file}, which is not the "
            f"{num_nodes} machines x {num_gpus or 'slots'} asked for; change the file to it",
        )
    return hosts


def _check_reach(config: ClusterConfig, num_nodes: int, dry_run: bool) -> None:
    """Whether ``num_nodes`` machines can be started with these flags, from this one."""
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
            f"--node_rank {config.node_rank}: {num_nodes} machines have the numbers 0 to "
            f"{num_nodes - 1}",
        )
        return
    if dry_run:
        return
    require(
        bool(config.hostfile) or config.launcher == "slurm",
        f"--num_nodes {num_nodes} needs --hostfile; or start train.py on every machine with its "
        "--node_rank and one --master_addr, or take --launcher slurm in a SLURM job",
    )
    program = PROGRAMS[config.launcher]
    require(
        shutil.which(program) is not None,
        f"--launcher {config.launcher}: there is no {program} here; start train.py where there is, "
        "or on every machine with its --node_rank",
    )
    for path in (os.getcwd(), sys.executable) if config.launcher == "pdsh" else ():
        require(
            shlex.quote(path) == path and "%" not in path,
            f"--launcher pdsh: {path} has characters that a remote shell reads otherwise; choose "
            "another folder, or start train.py on every machine with its --node_rank",
        )


def _runner() -> list[str]:
    return [sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "critical"]


def _free_port() -> int:
    """The first free port from ``FIRST_PORT``: the same each time, unless another run is on."""
    for port in range(FIRST_PORT, FIRST_PORT + 200):
        with socket.socket() as s, suppress(OSError):
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("", port))
            return port
    raise UserError(
        f"no free port from {FIRST_PORT} to {port}; end some of the runs on this machine"
    )
