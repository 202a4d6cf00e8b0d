"""Runs the tiny operations of `benchmarks/gpu_kernels.py`, on a CPU."""

import sys

import pytest
import torch
from gpu_cases import CASES
from gpu_floor import Rates
from gpu_kernels import Failed, measure
from gpu_operations import operations


def lines(models, kernels, sides, fault=None):
    """The lines of ``kernels`` of these tiny models, and what `Failed` says, or "".

    ``fault``: the module of a kernel, and a replacement in its source.
    """
    cases = [case for case in CASES["kernels"].tiny().kernels if case.model in models]
    found, failure = [], ""
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            from triton_worker import PACKAGE, module

            name, *replacement = fault
            patch.setitem(sys.modules, f"{PACKAGE}.{name}", module(name, replacement))
        try:
            chosen = operations(cases, kernels)
            for line in measure(chosen, torch.device("cpu"), 1, Rates(1e9), sides):
                found.append(line)
        except Failed as failed:
            failure = str(failed)
    return found, failure
