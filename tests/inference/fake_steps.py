"""Counts what the captured decode steps of an engine do on a fake CUDA device."""

import dataclasses
from collections import Counter

import torch
from fake_cuda import DEVICE, WAITS, fake_cuda
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoModelForCausalLM

from dschat.inference import InferenceEngine, SamplingParams

PROMPTS = [[5], [7, 8, 9, 10, 11, 12, 13], list(range(2, 32)), [20, 21, 22]]
SAMPLED = SamplingParams(max_new_tokens=4, seed=1, ignore_eos=True)


def fake_engine(watch, config, dtype=torch.bfloat16, borrowed="", **knobs):
    """An engine on the fake device whose decode steps are captured by ``watch``.

    ``borrowed``: the weights are read in place, each an allocation ("parts") or all "adjacent",
    matrices before vectors.
    """
    with _disable_current_modes(), torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    parameters = dict(sorted(module.named_parameters(), key=lambda item: item[1].dim() == 1))
    sizes = [p.numel() for p in parameters.values()]
    if borrowed == "adjacent":
        stored = torch.empty(sum(sizes), dtype=dtype, device=DEVICE).split(sizes)
    else:
        stored = [torch.empty(size, dtype=dtype, device=DEVICE) for size in sizes]
    tensors = {
        name: part.view(p.shape) for (name, p), part in zip(parameters.items(), stored, strict=True)
    }
    knobs = {"max_num_seqs": 8, "max_seq_len": 64, "kv_cache_gib": 1e3} | knobs
    made = InferenceEngine(config, dtype, DEVICE, **knobs)
    if made._capture is not None:
        made._capture = watch.capture
    if borrowed:
        made.weights.borrow(tensors)
    else:
        made.weights.load(tensors.items())
    return made


def decode_step(config, prompts=PROMPTS, sampling=SAMPLED, **knobs):
    """What one token more costs: the `Counter` of its captured step, and of all around it."""
    counts = []
    with fake_cuda() as watch:
        made = fake_engine(watch, config, **knobs)
        for num_tokens in (5, 5, 6):  # the first one makes decoder and graphs
            watch.counts.clear()
            fewest = num_tokens if sampling.min_new_tokens else 0  # stops are forbidden to the end
            lengths = {"max_new_tokens": num_tokens, "min_new_tokens": fewest}
            made.generate(prompts, dataclasses.replace(sampling, **lengths))
            counts.append(Counter(watch.counts))
    counts[-1].subtract(counts[-2])
    return [
        Counter({name: n for (inside, name), n in counts[-1].items() if inside == captured and n})
        for captured in (True, False)
    ]


def operators(counts):
    return sum(counts.values()) - waits(counts)


def waits(counts):
    return sum(counts[name] for name in WAITS)
