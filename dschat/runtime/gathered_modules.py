"""How ZeRO-3 gathers weights: all at once in some modules; on a CPU through shared memory.

Only `dschat.runtime.deepspeed_engine` imports this, after it has set up DeepSpeed's import.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.zero import partition_parameters as zero_parameters
from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict
from deepspeed.utils import set_z3_leaf_module
from torch import nn

import dschat.distributed as dist
from dschat.models.packing.model import PackedModel

# Parts of sparse attention (DeepSeek-V4, Qwen4) that run a norm once for every full block of keys.
_RUNS_ON_LONG_ROWS = ("compressor", "indexer")


def mark_leaves(module: nn.Module) -> None:
    """Let ZeRO-3 gather all weights of a module at once, and reduce all of their gradients, where
    the rows decide which of its children run, or the mode (Gemma 3n's AltUp). Otherwise ranks would
    gather halves of different weights into one, or wait for each other.

    Call before ``deepspeed.initialize``.
    """
    for parent in module.modules():
        for name, child in parent.named_children():
            if name in _RUNS_ON_LONG_ROWS:
                set_z3_leaf_module(child, True)
            elif name == "altup" or (isinstance(child, nn.ModuleList) and "expert" in name):
                set_z3_leaf_module(parent, True)


def check_packing(module: nn.Module) -> None:
    """Collective under ZeRO-3. `PackedModel.check`, where ``module`` is one."""
    if isinstance(module, PackedModel):
        with as_in_forward(module):
            module.check(dist.device())


@contextmanager
def as_in_forward(module: nn.Module) -> Iterator[None]:
    """A scope in which parts of a sharded ``module`` run as in its engine's forward: a parameter
    that a module reads without running the child that owns it (Mamba's ``conv1d.weight``) is
    gathered, and becomes an external parameter of the reader, for recomputation and backward too.
    """
    tables = [child._parameters for child in module.modules()]
    sharded = [table for table in tables if isinstance(table, ZeROOrderedDict)]
    for table in sharded:
        table._in_forward = True
    try:
        yield
    finally:
        for table in sharded:
            table._in_forward = False


_gather_by_gloo = getattr(zero_parameters, "_dist_allgather_fn", None)  # private to DeepSpeed
_LARGE_BYTES = 2**18  # of a gathered parameter; smaller ones wait for each other either way


class _Done:
    """The handle of a collective that is over."""

    def wait(self) -> None:
        pass


def _gather_on_cpu(shard: torch.Tensor, output: torch.Tensor, group: Any = None) -> Any:
    """Collective. DeepSpeed's all-gather of a parameter, through shared memory where the ranks have
    some: gloo's takes three times as long, because it sends everything through sockets.
    """
    is_large = output.numel() * output.element_size() >= _LARGE_BYTES
    if is_large and dist.gather_on_host(output, shard.view(-1), group):
        return _Done()
    assert _gather_by_gloo is not None
    return _gather_by_gloo(shard, output, group)


def gather_through_shared_memory() -> None:
    """Let ZeRO-3 gather parameters on a CPU by `_gather_on_cpu`."""
    if _gather_by_gloo is not None:
        zero_parameters._dist_allgather_fn = _gather_on_cpu
