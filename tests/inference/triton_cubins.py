"""Compiles planned Triton launches, also of whole steps, for devices that this machine lacks, and
reads the machine code.

NOTE: Triton must not be in interpreter mode here. Its release decides which of its two assemblers
it uses, and a parser of the wrong one's output reports no spills: only the cubin itself is read,
with the tools of Triton's wheel, whose exit codes are checked.
"""

import os
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import triton
from captures import again, captured_by, graphs_of
from families import build, engine
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_worker import launches_of, module

from dschat.inference.kernels.cuda.launch import Launch
from dschat.inference.model.step_kernels import StepKernels
from dschat.inference.requests.sampler import Sampler, SamplingKind
from dschat.inference.requests.sequence import Request

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
}


@dataclass
class Report:
    """What a cubin says about one thread, and ``shared`` bytes of a program."""

    registers: int
    stack: int  # bytes
    local: int  # loads and stores of local memory: spills
    shared: int
    wide_loads: int  # of 128 bits, from global memory, or asynchronous copies of 16 bytes
    tensor_cores: int  # instructions
    copies: int  # groups of asynchronous copies under way while tensor cores work; 0: none is
    threads: int
    synchronizes: bool  # all threads store, then one fences, counts, and drops stale cache lines


def source(launch):
    """What the JIT would compile: integers of 1 are constants, multiples of 16 are known to be."""
    signature, constants, attrs = {}, dict(launch.constants), {}
    names = [n for n in launch.kernel.arg_names if n not in launch.constants]
    assert len(names) == len(launch.args), (names, launch.args)
    for name, value in zip(names, launch.args, strict=True):
        if value is None or (isinstance(value, int) and value == 1):
            constants[name] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if not isinstance(value, int) or value % 16 == 0:
            attrs[(launch.kernel.arg_names.index(name),)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    ordered = {name: signature[name] for name in launch.kernel.arg_names}
    return ASTSource(launch.kernel, ordered, constants, attrs)


def run_tool(name, *words):
    return subprocess.run(
        [TOOLS / name, *words], check=True, capture_output=True, text=True, timeout=60
    ).stdout


def following(name, args, options):
    """`ordering` of the launches that a module plans on Hopper."""
    with patch.object(module("launch"), "has_dependent_launch", lambda device: True):
        launches = launches_of(name, *args, **options)
    return [ordering(launch) for launch in launches]


def ordering(launch):
    """How often a launch waits for the kernel before it, whether before its first store and before
    it lets the next one start, whether it fetches the next weight, and its own before it waits.
    """
    target = GPUTarget("cuda", 90, 32)
    code = triton.compile(source(launch), target=target, options=launch.options).asm["ptx"]
    waits = [found.start() for found in re.finditer(r"griddepcontrol\.wait", code)]
    later = r"\b(?:st|atom|red)\.global|griddepcontrol\.launch_dependents"
    stores = [found.start() for found in re.finditer(later, code)]
    assert launch.options["launch_pdl"]
    last = max(waits, default=0)
    own = 0 <= code.find("prefetch.global.L2 ") < last
    return len(waits), last < min(stores), "cp.async.bulk.prefetch" in code, own


def cubin(name, args, capability):
    """What the machine code of a module's launches says: a list of reports."""
    return [report(launch, capability) for launch in launches_of(name, *args)]


def step_reports(name, dtype, sampling, rows, capability):
    """The kernel's name and the report of each launch of a step of ``rows`` sequences, once."""
    knobs = {"stop_ids": (), "max_num_seqs": rows, "page_size": 16}
    with patch.dict(os.environ, {"DSCHAT_CPU_MATMUL": "plain"}):  # as on CUDA
        made = engine(build(name), dtype=dtype, **knobs)
    kernels = StepKernels(torch.device("cpu"))
    graphs = graphs_of(captured_by(made, again, kernels))
    request = Request([1], sampling)
    Sampler(made.num_tokens, made.device, made.group).prepare(request, made.stop_ids)
    kind = SamplingKind.of(request.sequences)
    launches = []
    with patch.object(Launch, "run", lambda launch: launches.append(launch)):
        graphs.step(rows, graphs.pages_for(1), kind)()
    different = {}
    for launch in launches:
        kinds = [(x.dtype, x.ndim) if isinstance(x, torch.Tensor) else x for x in launch.args]
        different[launch.kernel.__name__, str(launch.constants), str(kinds)] = launch
    return [(key[0], report(launch, capability)) for key, launch in different.items()]


def report(launch, capability):
    """A `Report` as a dict."""
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source(launch), target=target, options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = run_tool("cuobjdump", "-res-usage", file.name)
        code = run_tool("nvdisasm", "-c", file.name)
    assert "EXIT" in code, "nvdisasm printed no code"
    products = r"\b(?:HMMA|HGMMA|IMMA)\b"
    # A wait names the number of groups that may stay under way.
    waits = re.split(r"\bDEPBAR\.LE SB0, 0x", code)[1:]
    ahead = [int(wait.split()[0], 16) for wait in waits if re.search(products, wait)]
    numbers = dict(re.findall(r"(REG|STACK|SHARED):(\d+)", usage))
    count = lambda pattern: len(re.findall(pattern, code))  # noqa: E731
    found = Report(
        registers=int(numbers["REG"]),
        stack=int(numbers["STACK"]),
        local=count(r"\b(?:LDL|STL)\b"),
        shared=max(int(numbers["SHARED"]), compiled.metadata.shared),
        wide_loads=count(r"\bLDG\.E\.(?:\w+\.)*128\b|\bLDGSTS\.E\.(?:\w+\.)*128\b"),
        tensor_cores=count(products),
        copies=min(ahead, default=0),
        threads=32 * launch.num_warps,
        synchronizes=count(r"(?s)\bSTG\b.*\bBAR\.SYNC\b.*\bMEMBAR\b.*\bATOMG\b.*\bCCTL\.IVALL\b")
        > 0,
    )
    return asdict(found)
