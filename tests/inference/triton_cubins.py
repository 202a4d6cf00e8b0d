"""Compiles planned Triton launches for devices that this machine lacks, and reads the code.

NOTE: Triton must not be in interpreter mode here.
"""

import re
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_worker import launches_of, module

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


def compiled(launch):
    return triton.compile(source(launch), target=HOPPER, options=launch.options)
