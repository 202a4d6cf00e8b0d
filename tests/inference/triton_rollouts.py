"""Rollouts whose decode steps run by interpreted Triton kernels, beside those of the plain loop."""

import pytest
import torch
from captures import again
from families import build, engine
from soft_graph import operators_only, soft_capture
from test_borrowed import borrowing, lay_out

from dschat.config.cuda_kernels import STEP_PARTS
from dschat.inference.captured_core import CapturedCore
from dschat.inference.kernels.cuda.dispatch import StepKernels
from dschat.inference.model.borrowed import HeadLayout


def wrong_slices(patch):
    """Keys are read where values are, and values where keys are."""
    origins = HeadLayout.origins.func

    def swapped(layout):
        q, k, v, step = origins(layout)
        return q, v, k, step

    patch.setattr(HeadLayout, "origins", property(swapped))


def gate_always_first(patch):
    product = StepKernels.product
    patch.setattr(StepKernels, "product", lambda *args: product(*args[:5]))


def host_seed(patch):
    """A draw takes the seed that the host has while the step is captured."""
    enter, draw, seeds = CapturedCore._enter, StepKernels.draw, []

    def entered(self, sequences):
        seeds[:] = [sequences[0].request.sampling.seed]
        return enter(self, sequences)

    def drawn(self, logits, params, has_greedy, numbers, integers, *rest):
        frozen = torch.cat([torch.full_like(integers[:1], seeds[0]), integers[1:]])
        return draw(self, logits, params, has_greedy, numbers, frozen, *rest)

    patch.setattr(CapturedCore, "_enter", entered)
    patch.setattr(StepKernels, "draw", drawn)


FAULTS = {f.__name__: f for f in (wrong_slices, gate_always_first, host_seed)}


def rollouts(name, order, freezes, requests, knobs, fault=None, parts=STEP_PARTS):
    """For each of ``requests`` (prompts, sampling), two rollouts: by the kernels and without.

    ``order``: weights are borrowed, with q, k, v in this order in memory ("as is": wherever they
    are); "": they are copied. ``freezes``: a replay is the captured step's frozen operators.
    ``parts``: those that run by kernels.
    """
    module = build(name)
    if len(order) == 3:
        lay_out(module, order)
    with operators_only(), pytest.MonkeyPatch.context() as patch:
        plain = engine(module, **knobs)
        made = borrowing(module, **knobs) if order else engine(module, **knobs)
        made._capture = soft_capture if freezes else again
        made._kernels = StepKernels(torch.device("cpu"), frozenset(parts))
        expected = [plain.generate(*request) for request in requests]
        if fault:
            FAULTS[fault](patch)
        got = [made.generate(*request) for request in requests]
    assert made._runner._graphs.num_captured > 0
    assert made.speculation is None or made.stats.accepted_tokens > 0
    return list(zip(got, expected, strict=True))
