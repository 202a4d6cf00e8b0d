"""Names that weights have in published checkpoints where transformers' module names them otherwise.

transformers renames tensors and stacks experts as it loads them; here its rules are
followed backwards, so that a checkpoint is read one tensor at a time.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightTransform,
)

from dschat.inference.model.spec import WeightSource

_STACKS = [[MergeModulelist], [MergeModulelist, Concatenate]]
_PARTS = ("gate", "up")


def published_sources(
    model: PreTrainedModel, sources: Iterable[WeightSource]
) -> list[WeightSource] | None:
    """Sources of tensors that published checkpoints have in place of those of ``sources``; None: a
    source cannot describe them.
    """
    rules = get_model_conversion_mapping(model, add_legacy=False)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [r.reverse_transform() for r in rules if not isinstance(r, WeightConverter)][::-1]
    found: list[WeightSource] = []
    for source in sources:
        matches = [rule for rule in converters if _ends_with(source.name, rule)]
        if len(matches) > 1 or (
            matches and (_kinds(matches[0]) not in _STACKS or source.index is None)
        ):
            return None
        ones = list(_of_expert(source, matches[0])) if matches else [source]
        for one in ones:
            name = _original(one.name, renamings)
            if name != source.name:
                found.append(replace(one, name=name, instead=source.name))
    return found


def _kinds(rule: WeightConverter) -> list[type]:
    return [type(operation) for operation in rule.operations]


def _ends_with(name: str, rule: WeightTransform) -> bool:
    return len(rule.target_patterns) != 1 or bool(re.search(rule.target_patterns[0] + "$", name))


def _of_expert(source: WeightSource, rule: WeightConverter) -> Iterator[WeightSource]:
    """The tensors of one expert that a stack is made of."""
    stem = re.sub(rule.target_patterns[0] + "$", "", source.name)
    parts = _PARTS if len(rule.source_patterns) == 2 else ("",)
    for pattern, part in zip(rule.source_patterns, parts, strict=True):
        name = stem + pattern.replace("*", str(source.index))
        yield replace(source, name=name, part=part, index=None, transposed=False, interleaved=False)


def _original(name: str, renamings: Iterable[WeightTransform]) -> str:
    for rule in renamings:
        name, _ = rule.rename_source_key(name)
    return name
