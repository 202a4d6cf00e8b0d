"""Compiles the kernels of whole decode steps: what the interpreter accepts, a compiler may not."""

import os
from unittest.mock import patch

import torch
from captures import again, captured_by, graphs_of
from families import build
from triton_cubins import report

from dschat.inference import EngineConfig, InferenceEngine
from dschat.inference.kernels.cuda.dispatch import StepKernels
from dschat.inference.kernels.cuda.launch import Launch
from dschat.inference.sampler import Sampler, SamplingKind
from dschat.inference.sequence import Request


def step_reports(name, dtype, sampling, rows, capability):
    """The kernel's name and the report of each launch of a step of ``rows`` sequences, once."""
    config = build(name).config
    sizes = EngineConfig(max_num_seqs=rows, max_seq_len=64, page_size=16)
    with patch.dict(os.environ, {"DSCHAT_CPU_MATMUL": "plain"}):  # as on CUDA
        made = InferenceEngine(config, dtype, torch.device("cpu"), sizes)
        made.weights.load((n, p.detach()) for n, p in build(name).named_parameters())
    kernels = StepKernels(torch.device("cpu"))
    graphs = graphs_of(captured_by(made, again, kernels))
    request = Request([1], sampling)
    Sampler(made.num_tokens, made.device, made.group).prepare(request, made.stop_ids)
    kind = SamplingKind.of(request.sequences)
    graphs.state.prepare(kind)
    launches = []
    with patch.object(Launch, "run", lambda launch: launches.append(launch)):
        graphs.step(rows, graphs.pages_for(1), kind)()
    different = {}
    for launch in launches:
        kinds = [(x.dtype, x.ndim) if isinstance(x, torch.Tensor) else x for x in launch.args]
        different[launch.kernel.__name__, str(launch.constants), str(kinds)] = launch
    return [(key[0], report(launch, capability)) for key, launch in different.items()]
