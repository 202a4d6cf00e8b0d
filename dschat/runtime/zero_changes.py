"""Changes what DeepSpeed's ZeRO does: it works on gradients in the flat tensors that hold them,
gathers the weights of some modules at once, and computes linear layers without its autograd
function where nothing is recorded.

Only `dschat.runtime.deepspeed_engine` imports this, after it has set up DeepSpeed's import.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.zero import partition_parameters as zero_parameters
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer, GradPartitionBufferGroup
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn

import dschat.distributed as dist
from dschat.models.packing.model import PackedModel

# -- gradients -------------------------------------------------------------------------------------
#
# DeepSpeed 0.19 runs some twenty operators for each parameter in every step, and a device waits for
# their launches: of OPT-1.3B's 388 parameters longer than it computes.

_ROW = 1024  # elements whose norm is taken in fp32; rows of 65,536 are off by 2e-7


def work_on_partitions(zero: DeepSpeedZeroOptimizer) -> None:
    """Norm, check and update of ``zero`` with as many operators for a thousand parameters as for
    one, where gradients are summed in fp32 into one tensor, as of bf16 weights. Otherwise this
    leaves out what the step does twice.
    """
    norm_of_tensors, norm_of_groups = zero.get_grad_norm_direct, zero.scaled_global_norm
    set_weights = zero._update_model_bit16_weights

    def norm_of_group(gradients: Any, params: list[nn.Parameter], norm_type: float = 2) -> Tensor:
        if norm_type == 2 and isinstance(gradients, GradPartitionBufferGroup):
            gradients, params = [_row_norms(gradients.flat_partition)], params[:1]
        return norm_of_tensors(gradients, params, norm_type)

    def set_moved_weights(group: int) -> None:
        flat, offsets = zero.bit16_groups_flat[group], zero.round_robin_bit16_offsets[group]
        placed = zip(zero.round_robin_bit16_groups[group], offsets, strict=True)
        start, size = flat.data_ptr(), flat.element_size()
        if any(param.data_ptr() != start + size * offset for param, offset in placed):
            set_weights(group)

    zero.get_grad_norm_direct = norm_of_group
    zero._update_model_bit16_weights = set_moved_weights
    if zero.compute_grad_norm and not zero.cpu_offload:
        # The norm is not finite where a gradient is not, and `step` looks at it too.
        zero.has_overflow = lambda partition_gradients=True: False
        # NOTE: read before the update is queued; whoever reads it later would wait for that.
        zero.scaled_global_norm = lambda norm_type=2: norm_of_groups(norm_type).cpu()


def sum_in_place(zero: DeepSpeedZeroOptimizer) -> None:
    """Have one process under ZeRO-2 add each gradient to the partition when it is complete.

    Nothing is reduced, so DeepSpeed's bucket, a copy of gradients on their way, is never allocated.
    """
    assert not any((zero.cpu_offload, zero.round_robin_gradients, zero.parameter_alignment))

    def add_gradient(param: Any, group: int) -> None:
        if param.grad is not None:
            sums = zero._get_compact_grad_partition_buffer(group)
            sums[param.param_idx_in_group].add_(param.grad)
            param.grad = None

    def empty_sums(group: int) -> GradPartitionBufferGroup:
        weights = zero.bit16_groups_flat[group]
        flat = torch.zeros_like(weights, dtype=zero.gradient_accumulation_dtype)
        return GradPartitionBufferGroup(zero.unflatten(flat, zero.bit16_groups[group]), flat)

    zero._use_compact_grad_partition_buffer = lambda group: True
    zero._build_compact_grad_partition_buffer = empty_sums
    zero.process_gradients = add_gradient
    zero.reduce_ipg_grads = lambda comm_dtype=None: None


def _row_norms(flat: Tensor) -> Tensor:
    """Norms whose norm in fp64 is the norm of ``flat``, which need not be copied to fp64 for it."""
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float32)
    return torch.cat([rows, rest.view(1)])


# -- weights ---------------------------------------------------------------------------------------

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


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    of_zero = LinearFunctionForZeroStage3
    return (of_zero.apply if torch.is_grad_enabled() else of_zero.forward)(input, weight, bias)


def compute_without_autograd() -> None:
    """Have linear layers leave out DeepSpeed's autograd function where nothing is recorded: its
    ``apply`` binds arguments by their signature, 30 us a layer in every decode step. Call it before
    the first ZeRO-3 model is built: then DeepSpeed replaces what a process' linear layers call.
    """
    zero_parameters.zero3_linear_wrap = _linear
