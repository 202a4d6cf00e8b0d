"""Holds the decoder against a `Trial`: from the same input, each of its layers returns the same."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dschat.distributed import RankGroup
from dschat.inference.model.attention import own_heads
from dschat.inference.model.borrowed import BorrowedLinear, HeadLayout
from dschat.inference.model.decoder import Decoder
from dschat.inference.model.findings import Findings, need
from dschat.inference.model.spec import ModelSpec
from dschat.inference.model.states import Carried, StepCache
from dschat.inference.model.trial import LINEAR
from dschat.inference.model.weights import Weights
from dschat.models.packing.kernels import Scores

_TOLERANCE = 1e-4  # of the largest value: roundings of a layer


class _Product(NamedTuple):
    """A linear layer of a trial, in place of a `BorrowedPart`."""

    product: Callable[[Tensor], Tensor]


@torch.inference_mode(False)
@torch.no_grad()
def check_decoder(spec: ModelSpec, found: Findings) -> None:
    """Raise `NotFound` unless a decoder of ``spec`` computes what the trial's model does."""
    trial = found.trial
    longest = int(trial.positions[-1]) + 1
    decoder = Decoder(spec, trial.model.config, _weights(spec, found), longest)

    def attend(layer: int, heads: Tensor, layout: HeadLayout, how: Scores) -> Tensor:
        expected = found.attended[layer].how
        is_same = how._replace(scale=0.0, sinks=None) == expected._replace(scale=0.0, sinks=None)
        need(is_same, f"the attention of layer {layer} is another one")
        heads[:, layout.q] *= how.scale / expected.scale
        return own_heads(layer, heads, layout, how)

    layers = [found.called(f"{trial.layers}.{n}") for n in range(spec.num_layers)]
    cache = StepCache(config=trial.model.config)
    step = decoder.begin(trial.positions, attend, None)._replace(carried=Carried(cache, 1, 0))
    h = decoder.embed(trial.ids, trial.positions, None)
    need(_agree(h, found.read(layers[0])), "the decoder's embeddings are others")
    for n, call in enumerate(layers):
        h, added = decoder.layer(n, found.read(call).clone(), None, step)
        result = h if added is None else h + added
        need(_agree(result, found.result(call)), f"the decoder computes layer {n} in another way")
    hidden = decoder.finish(found.result(layers[-1]).clone(), None, step)
    need(_agree(decoder.logits(hidden), trial.logits), "the decoder's logits are others")


def _agree(actual: Tensor, expected: Tensor) -> bool:
    """Whether most rows are equal up to rounding, which may choose another expert for some."""
    gaps = (actual - expected).abs().amax(1) / expected.abs().max().clamp(min=1e-6)
    return bool(gaps.median() <= _TOLERANCE)


def _weights(spec: ModelSpec, found: Findings) -> Weights:
    """The trial's weights, and its linear layers."""
    trial = found.trial
    weights = Weights(spec, torch.float32, torch.device("cpu"), RankGroup())
    sources = [source for source in spec.layer_sources() if not source.instead]
    weights.borrow({source.name: found.tensors[source.name] for source in sources})
    products: dict[str, list[Any]] = defaultdict(list)
    of_tokens = trial.model.get_input_embeddings(), trial.model.get_output_embeddings()
    for source in sources:
        base, _, suffix = source.target.rpartition(".")
        module = trial.model.get_submodule(source.name.rpartition(".")[0])
        is_product = base in weights.linears and type(module) in LINEAR
        if suffix == "weight" and is_product and module not in of_tokens:
            products[base].append(_Product(module.forward))
    for base, parts in products.items():
        linear = weights.linears[base]
        assert isinstance(linear, BorrowedLinear)
        linear.products = parts
    return weights
