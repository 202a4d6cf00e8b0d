"""Measures the FLOPs per second that a model's passes reach on this CPU, by running them.

They depend on its widths, the rows of a batch, the library of the products and the share of Python
in small models: no constant fits. The passes are the real ones on random weights: a micro-batch
through `PackedModel`, prompts and answers through the generator. Of a deep model only the first
layers run, of a large batch the first rows, and of long rows the first tokens.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from dschat.estimate.activations import Batch, Work, loss_of
from dschat.estimate.models import Models, Use
from dschat.estimate.seconds import TimedModel
from dschat.hybrid.weight_stream import weight_stream
from dschat.inference import EngineConfig, InferenceEngine, SamplingParams
from dschat.inference.hf_generator import HuggingFaceGenerator
from dschat.inference.protocol import Generator
from dschat.models.config_files import muted
from dschat.models.linear import use_fastest_products
from dschat.models.packing.model import PackedModel
from dschat.observability.flops import decode_flops, prefill_flops

# Parameters of the layers that run. More than of the largest model whose decode steps are one C
# call: a part of a larger one must not be such a model.
_PARAMETERS = 16e6
_LARGEST = 64e6  # parameters of the embedding and a layer; larger products reach a constant share
_FLOPS = 30e9  # of a pass: a second of a slow core
_STEPS = 8
_REPEATS, _LEAST_S = 3, 0.3


class GenerationRates(NamedTuple):
    """FLOPs per second, in prefill and in decode steps."""

    prefill: float
    decode: float


class CpuPasses:
    """Measures passes of ``models``, each once. A rate is None where the model is too large."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._pass_s = cache(self._measure_pass)
        self._generation_s = cache(self._measure_generation)

    def rate(
        self, model: TimedModel, use: Use, work: Work, batch: Batch, train: bool
    ) -> float | None:
        """Of passes over ``batch``, with the backward pass in training."""
        if (cut := self._cut(model, use)) is None:
            return None
        flops_of = cut.training_flops if train else cut.forward_flops
        while flops_of(batch.seq_len) > _FLOPS and batch.num_read > 1:
            batch = batch._replace(seq_len=batch.seq_len // 2, num_read=batch.num_read // 2)
        flops_each = flops_of(batch.seq_len)
        batch = batch._replace(num_rows=max(1, min(batch.num_rows, int(_FLOPS // flops_each))))
        if not train:
            use = use.reading
        seconds = self._pass_s(use, cut.shape.num_layers, work, batch, train)
        return batch.num_rows * flops_each / seconds

    def _measure_pass(
        self, use: Use, num_layers: int, work: Work, batch: Batch, train: bool
    ) -> float:
        module, rows = self._build(use, num_layers), batch.rows("cpu")

        def run() -> None:
            loss = loss_of(module, rows, work)
            if train:
                loss.backward()
                module.zero_grad()

        module.train(train)
        with torch.set_grad_enabled(train):
            return _seconds(run)

    def generation_rates(
        self, model: TimedModel, use: Use, in_engine: bool, num_seqs: int, lengths: tuple[int, int]
    ) -> GenerationRates | None:
        """Of ``num_seqs`` answers at a time; ``lengths``: tokens of a prompt and of an answer."""
        if (cut := self._cut(model, use)) is None:
            return None
        most = int(_FLOPS // num_seqs // prefill_flops(cut.shape, 1))  # tokens of each sequence
        steps = max(1, min(_STEPS, lengths[1] - 1, most))
        prompt = max(1, min(lengths[0], sum(lengths) - 1 - steps, most))
        short = min(prompt, 2 * steps)  # so that the decode steps are most of a call
        measured = use, cut.shape.num_layers, in_engine, num_seqs, prompt, short, steps
        seconds = self._generation_s(*measured)
        decoded = decode_flops(cut.shape, short, 1 + steps)
        return GenerationRates(
            num_seqs * prefill_flops(cut.shape, prompt) / seconds[0],
            num_seqs * decoded / seconds[1],
        )

    def _measure_generation(
        self,
        use: Use,
        num_layers: int,
        in_engine: bool,
        num_seqs: int,
        prompt: int,
        short: int,
        steps: int,
    ) -> tuple[float, float]:
        """Seconds of the prefill, and of the decode steps after a ``short`` one."""
        module = self._build(use, num_layers)
        generator = self._generator(module, in_engine, num_seqs, prompt + 1 + steps)
        vocab = module.base.config.get_text_config().vocab_size
        ids = np.random.default_rng(0).integers(vocab, size=(num_seqs, prompt))

        def seconds(prompt: int, answer: int) -> float:
            sampling = SamplingParams(max_new_tokens=answer, ignore_eos=True)
            prompts = ids[:, :prompt].tolist()
            return _seconds(lambda: generator.generate(prompts, sampling))

        without, whole = seconds(short, 1), seconds(short, 1 + steps)
        return seconds(prompt, 1), max(whole - without, 0.1 * whole)

    @staticmethod
    def _generator(module: PackedModel, in_engine: bool, num_seqs: int, seq_len: int) -> Generator:
        base = module.base.requires_grad_(False).eval()
        if not in_engine:
            return HuggingFaceGenerator(base, (), 0, num_seqs)
        sizes = EngineConfig(max_num_seqs=num_seqs, max_seq_len=seq_len)
        engine = InferenceEngine(base.config, base.dtype, base.device, sizes)
        engine.weights.load(weight_stream(base, base.device))
        return engine

    def _cut(self, model: TimedModel, use: Use) -> TimedModel | None:
        """The first layers of ``model``: all of a small one; None if one is too large."""
        sizes, depth = self._models.sizes(use.frozen), model.shape.num_layers
        embeddings = sizes.embedding * (1 if sizes.tied or use.kind == "score" else 2)
        layer = max(1, (sizes.total - embeddings) / depth)
        if embeddings + layer > _LARGEST:
            return None
        num_layers = min(depth, max(1, int((_PARAMETERS - embeddings) / layer)))
        return replace(model, shape=replace(model.shape, num_layers=num_layers))

    def _build(self, use: Use, num_layers: int) -> PackedModel:
        with muted(logging.WARNING):
            module = self._models.build(use, num_layers)
            use_fastest_products(module)
        return module


def _seconds(run: Callable[[], object]) -> float:
    """Median, after a first time that allocates memory and compiles kernels."""
    run()
    times: list[float] = []
    while len(times) < _REPEATS or sum(times) < _LEAST_S:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return median(times)
