"""The ``dschat env`` command: what a bug report needs to know of this machine, one fact a line."""

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec

import dschat.distributed as dist
from dschat.config import parser
from dschat.config.rollout import cuda_kernels
from dschat.distributed.machine import processor
from dschat.distributed.memory import available_memory
from dschat.inference.kernels import cpu
from dschat.observability.metrics_log import versions
from dschat.startup.performance import num_cores

# Optional packages, and what they are for.
_OPTIONAL = {
    "triton": "kernels of decode steps on CUDA",
    "flash_attn": "attention on CUDA, else torch's",
    "liger_kernel": "norms and MLPs of training on CUDA",
    "fla": "layers with states on CUDA",
    "bitsandbytes": "--load_in_4bit, --load_in_8bit",
    "vllm": "--rollout_backend vllm",
}


@dataclass
class EnvConfig:
    """Print versions, devices, and what is off and why, as a report of a fault needs them."""

    def validate(self) -> None: ...


def main() -> None:
    parser.parse(EnvConfig, takes_file=False)
    sys.stdout.write("".join(f"{name + ':':15}{value}\n" for name, value in facts().items()))


def facts() -> dict[str, str]:
    """By name: versions, processor, devices, and what is on or off, and why."""
    import torch

    found = versions() | {"system": platform.platform()}
    lines = processor().splitlines()  # one outside Linux
    model = lines[1].partition(": ")[2] if len(lines) > 1 else lines[0]
    model = model or platform.machine()
    found["processor"] = f"{model}, {num_cores()} cores, {torch.get_num_threads()} threads"
    found["memory"] = f"{available_memory() / 2**30:.1f} GiB available"
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        found[f"GPU {number}"] = f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB"
    if not dist.has_gpu():
        found["GPU"] = "none" if torch.version.cuda else "none: this torch is built without CUDA"
    compiler = next(filter(None, map(shutil.which, cpu.COMPILERS)), None)
    found["C compiler"] = compiler or "none"
    why = "; DSCHAT_CPU_KERNELS=0" if os.environ.get("DSCHAT_CPU_KERNELS") == "0" else ""
    found["C kernels"] = (
        "on" if cpu.load() else f"off{why or ('' if compiler else ': no compiler')}"
    )
    if dist.has_gpu():
        found["CUDA kernels"] = ", ".join(sorted(cuda_kernels())) or "off"
    for name, use in _OPTIONAL.items():
        found[name] = f"{'installed' if find_spec(name) else 'not installed'} ({use})"
    ours = [n for n in os.environ if n.startswith(("DSCHAT_", "OMP_")) and "KEY" not in n]
    found["environment"] = " ".join(f"{n}={os.environ[n]}" for n in ours) or "nothing set"
    return found
