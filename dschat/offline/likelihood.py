"""Computes log-probs of given answers and texts, on the packed rows that training uses."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

import dschat.distributed as dist
from dschat.models.language_model import LanguageModel
from dschat.models.load import load_causal_lm
from dschat.models.packing import pack
from dschat.models.vocabulary import num_ids
from dschat.offline.model import FLAG, Model

_TOKENS = 8192  # of one forward


@dataclass
class Continuation:
    """Tokens, of which those from ``start`` on are scored; ``start`` is at least 1."""

    ids: list[int]
    start: int


class Likelihood:
    """A causal LM that scores continuations.

    Raises:
        UserError: weights that are missing, damaged or not finite.
    """

    def __init__(self, model: Model, trust_remote_code: bool = False) -> None:
        module = load_causal_lm(
            model.name,
            FLAG,
            model.dtype,
            dropout=0.0,
            trust_remote_code=trust_remote_code,
            num_tokens=num_ids(model.tokenizer),
        )
        self._module = LanguageModel(module.to(dist.device()).eval())
        self._module.check(dist.device())

    @torch.no_grad()
    def score(self, items: Sequence[Continuation]) -> list[float]:
        """The sum of the log-probs of every continuation, in nats: (len(items),).

        Adjacent items with the same tokens before ``start`` share them.
        """
        sums: list[float] = []
        for part in _parts(items):
            packed = pack(
                [item.ids for item in part],
                [range(item.start - 1, len(item.ids) - 1) for item in part],
                [item.start for item in part],
            ).to(dist.device())
            logprobs, _ = self._module(packed)
            totals = torch.zeros(len(part), dtype=torch.float64, device=logprobs.device)
            totals.index_add_(0, packed.row_of, logprobs.double())
            sums += totals.tolist()
        return sums


def _parts(items: Sequence[Continuation]) -> Iterator[Sequence[Continuation]]:
    """``items`` in parts of at most `_TOKENS` tokens, or of one item."""
    start = tokens = 0
    for i, item in enumerate(items):
        if i > start and tokens + len(item.ids) > _TOKENS:
            yield items[start:i]
            start, tokens = i, 0
        tokens += len(item.ids)
    if items:
        yield items[start:]
