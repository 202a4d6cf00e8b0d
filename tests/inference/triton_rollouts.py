"""Rollouts whose decode steps run by interpreted Triton kernels, beside those of the plain loop."""

import torch
from captures import again, captured_by, graphs_of
from families import build, engine
from soft_graph import operators_only, soft_capture
from test_borrowed import borrowing, lay_out

from dschat.config.cuda_kernels import STEP_PARTS
from dschat.inference.kernels.cuda.dispatch import StepKernels


def rollouts(name, order, freezes, requests, knobs, parts=STEP_PARTS):
    """For each of ``requests`` (prompts, sampling), two rollouts: by the kernels and without.

    ``order``: weights are borrowed, with q, k, v in this order in memory ("as is": wherever they
    are); "": they are copied. ``freezes``: a replay is the captured step's frozen operators.
    ``parts``: those that run by kernels.
    """
    module = build(name)
    if len(order) == 3:
        lay_out(module, order)
    with operators_only():
        plain = engine(module, **knobs)
        made = borrowing(module, **knobs) if order else engine(module, **knobs)
        kernels = StepKernels(torch.device("cpu"), frozenset(parts))
        captured_by(made, soft_capture if freezes else again, kernels)
        expected = [plain.generate(*request) for request in requests]
        got = [made.generate(*request) for request in requests]
    assert graphs_of(made).num_captured > 0
    assert made.speculation is None or made.stats.accepted_tokens > 0
    return list(zip(got, expected, strict=True))
