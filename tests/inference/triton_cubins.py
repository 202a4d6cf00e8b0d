"""Compiles planned Triton launches, also of whole steps, for devices that this machine lacks, and
reads the machine code.

NOTE: Triton must not be in interpreter mode here.
"""

import os
import re
import subprocess
import tempfile
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

DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
}


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


def following(name, args, options):
    """`ordering` of the launches that a module plans on Hopper."""
    with patch.object(module("launch"), "has_dependent_launch", lambda device: True):
        launches = launches_of(name, *args, **options)
    return [ordering(launch) for launch in launches]


def ordering(launch):
    """How often a launch waits for the kernel before it, whether before its first store and before
    it lets the next one start, whether it fetches the next weight, and its own before it waits.
    """
    code = compiled(launch).asm["ptx"]
    waits = [found.start() for found in re.finditer(r"griddepcontrol\.wait", code)]
    later = r"\b(?:st|atom|red)\.global|griddepcontrol\.launch_dependents"
    stores = [found.start() for found in re.finditer(later, code)]
    assert launch.options["launch_pdl"]
    last = max(waits, default=0)
    own = 0 <= code.find("prefetch.global.L2 ") < last
    return len(waits), last < min(stores), "cp.async.bulk.prefetch" in code, own


def step_kernels(name, dtype, sampling, rows):
    """Compiles every launch of a step of ``rows`` sequences; returns the kernels' names."""
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
    for launch in different.values():
        compiled(launch)
    return {name for name, *_ in different}


def compiled(launch):
    return triton.compile(source(launch), target=HOPPER, options=launch.options)


def synchronizes(name, args):
    """Whether all threads of a launch store, then one fences, counts, and drops stale lines."""
    (launch,) = launches_of(name, *args)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled(launch).asm["cubin"])
        file.flush()
        command = [DISASSEMBLER, "-c", file.name]
        code = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=60
        ).stdout
    assert "EXIT" in code, "nvdisasm printed no code"
    order = r"(?s)\bSTG\b.*\bBAR\.SYNC\b.*\bMEMBAR\b.*\bATOMG\b.*\bCCTL\.IVALL\b"
    return re.search(order, code) is not None
