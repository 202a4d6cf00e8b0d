"""Rollouts whose decode steps run by interpreted Triton kernels, beside those of the plain loop."""

import torch
from captures import again, captured_by, steps_of
from families import build, empty_engine, engine, on_stacks, stream
from soft_graph import operators_only, soft_capture
from test_borrowed import lay_out
from test_module_decoder import answers, engine_on, random_module
from test_weights import factors, with_adapters

from dschat.config.rollout import STEP_PARTS
from dschat.inference.model.step_kernels import StepKernels


def module_rollouts(name, prompts, sampling):
    """Two rollouts of a random module, as those of `rollouts`."""
    module = random_module(name).requires_grad_(False)
    got = []
    for kernels in (StepKernels(torch.device("cpu")), None):
        made = engine_on(module, max_num_seqs=4, max_seq_len=32, page_size=4)
        captured_by(made, again, kernels)
        with operators_only():
            got.append(answers(made, sampling, prompts))
        assert len(steps_of(made)) > 0
    return got


def rollouts(name, order, freezes, requests, knobs, parts=STEP_PARTS, adapted=False):
    """For each of ``requests`` (prompts, sampling), two rollouts: by the kernels and without.

    ``order``: weights are borrowed, with q, k, v in this order in memory ("as is": wherever they
    are); "": they are copied. ``freezes``: a replay is the captured step's frozen operators.
    ``parts``: those that run by kernels. ``adapted``: adapters are applied beside the weights.
    """
    wrapped = with_adapters(name, seed=1) if adapted else None
    module = build(name)
    if len(order) == 3:
        lay_out(module, order)
    with operators_only():
        plain = engine(module, **knobs)
        made = on_stacks(empty_engine(module.config, **knobs))
        if order:
            made.borrow_weights(dict(module.named_parameters()))
        else:
            made.weights.load(stream(module))
        if wrapped is not None:
            for one in (plain, made):
                one.weights.load_adapters(factors(wrapped))
        kernels = StepKernels(torch.device("cpu"), frozenset(parts))
        captured_by(made, soft_capture if freezes else again, kernels)
        expected = [plain.generate(*request) for request in requests]
        got = [made.generate(*request) for request in requests]
    assert len(steps_of(made)) > 0
    return list(zip(got, expected, strict=True))
