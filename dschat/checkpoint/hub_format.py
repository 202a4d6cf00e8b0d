"""Turns a stream of weights into what the hub has of their family: names, tensors, other parts.

transformers renames, fuses and splits many families' weights while it loads them. Other programs
know the hub's form only, so a save reverts that. It also adds what training did not load of the
checkpoint that it started from: a vision tower, heads that predict several tokens.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from dschat.models.checkpoint_files import CheckpointFiles
from dschat.models.checkpoint_tensors import Rest, whole_name
from dschat.models.lora import unwrapped_name

_LAYER = re.compile(r"^.*?\.\d+\.")


def hub_tensors(
    model: PreTrainedModel, stream: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yields ``stream``, the weights of ``model``, in the form of its family's checkpoints.

    Holds a copy of one layer where tensors are fused or split, and of none else.
    """
    rest: Rest = getattr(model, "rest", None) or Rest()
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    fuses = any(isinstance(conversion, WeightConverter) for conversion in conversions)
    for tensors in _by_layer(model, stream) if fuses else ({n: t} for n, t in stream):
        if conversions:
            tensors = revert_weight_conversion(model, tensors)
        for name in list(tensors):
            yield whole_name(name, rest.prefixes), tensors.pop(name)
    if rest.keys:
        files = CheckpointFiles(rest.source, "the base model")
        yield from files.tensors(lambda key: key if key in rest.keys else None)


def _by_layer(
    model: PreTrainedModel, stream: Iterable[tuple[str, Tensor]]
) -> Iterator[dict[str, Tensor]]:
    """Copies of the tensors of each layer together: what is fused or split is within one."""
    saved = model.state_dict(keep_vars=True).keys()
    names = [name for name, _ in model.named_parameters()]
    names += [name for name, _ in model.named_buffers() if name in saved]
    expected: dict[str, set[str]] = defaultdict(set)
    for name in filter(None, map(unwrapped_name, names)):
        expected[_layer(name)].add(name)
    waiting: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in stream:
        layer = _layer(name)
        waiting[layer][name] = tensor.detach().to("cpu", copy=True)
        del tensor
        if waiting[layer].keys() == expected[layer]:
            yield waiting.pop(layer)
    assert not waiting, f"the stream lacks weights beside {next(iter(waiting))}"


def _layer(name: str) -> str:
    match = _LAYER.match(name)
    return match[0] if match else name
