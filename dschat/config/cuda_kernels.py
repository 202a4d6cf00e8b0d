"""Reads which parts run by Triton kernels on CUDA: the variable DSCHAT_CUDA_KERNELS."""

import os

from dschat.config.errors import UserError

VARIABLE = "DSCHAT_CUDA_KERNELS"
# Of captured decode steps. state: reads, embeds and advances the rows; it needs attention.
STEP_PARTS = ("attention", "norm", "product", "draw", "state")
# liger: norms and gated MLPs of training and scoring.
PARTS = (*STEP_PARTS, "liger")


def cuda_kernels() -> frozenset[str]:
    """The parts that are on: those listed, separated by commas; 0 or empty: none; 1 or unset: all,
    since they are faster than torch (docs/lab/measured-gpu.md).

    Raises:
        UserError: a part that there is not.
    """
    value = os.environ.get(VARIABLE, "1")
    if value in ("", "0"):
        return frozenset()
    if value == "1":
        return frozenset(PARTS)
    parts = frozenset(value.split(","))
    if unknown := sorted(parts - set(PARTS)):
        known = ", ".join(PARTS)
        raise UserError(f"{VARIABLE}: unknown part {unknown[0]!r}; list some of {known}, or 1")
    return parts
