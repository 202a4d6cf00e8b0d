"""Compiles planned Triton launches for devices that this machine lacks, and reads the machine code.

NOTE: Triton must not be in interpreter mode here. Its release decides which of its two assemblers
it uses, and a parser of the wrong one's output reports no spills: only the cubin itself is read,
with the tools of Triton's wheel, whose exit codes are checked.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

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


def report(launch, capability):
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
    return Report(
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
