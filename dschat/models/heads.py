"""The modules behind all models: `LanguageModel` predicts targets of packed rows (actor, reference,
SFT, DPO), `ScoreModel` scores their tokens (reward model, critic).

A language model returns log-probs and entropies, never logits: its head runs in chunks inside the
forward pass, where ZeRO-3 gathers its weight. A score model wraps a transformers
``...ForSequenceClassification(num_labels=1)``, whose own forward pools to one score per sequence.
"""

import re
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

import dschat.distributed as dist
from dschat.losses import (
    entropy_from_logits,
    linear_logprobs,
    linear_top_ids,
    token_entropy,
    token_logprobs,
)
from dschat.models.checkpoint import Checkpoint
from dschat.models.linear import OneDnnLinear, product_of
from dschat.models.packing.model import PackedModel, Packing, backbone, probe
from dschat.models.packing.rows import PackedRows, pack
from dschat.models.training_engine import full_shape

if TYPE_CHECKING:
    from peft import PeftModel

# Config fields of families that change logits after the head: Gemma's softcap, Cohere's and
# Granite's scales, Falcon-H1's multiplier.
_CHANGES_LOGITS = re.compile(r"logit.*(soft_?cap|scal)|(lm_head|output)_mult|mup_width")


class LanguageModel(PackedModel):
    """Log-probs of the ids that follow the columns which rows read."""

    def __init__(
        self, model: "PreTrainedModel | PeftModel", packing: Packing = "auto", parallel: int = 1
    ) -> None:
        super().__init__(model, packing, parallel)
        head = self.base.get_output_embeddings()
        self._head_is_linear = (
            type(head) in (nn.Linear, OneDnnLinear)
            and backbone(self.base) is not None
            and not _changes_logits(self.base.config)
        )
        if self._head_is_linear:
            head.forward = partial(_head_forward, head)

    def compute(
        self,
        rows: PackedRows,
        temperature: float = 1.0,
        with_entropy: bool = False,
        top_k: int = 0,
        num_ids: int = 0,
    ) -> tuple[Tensor | None, ...]:
        """Log-probs (M,) fp32 of ``rows.targets``, and entropies (M,) fp32 or None.

        ``log_softmax(logits / temperature)`` in fp32; temperature 0 (greedy) counts as 1. With
        ``rows.candidates`` the log-probs are (M, 1 + K): of the target, then of the candidates.
        ``top_k`` appends the likeliest of the first ``num_ids`` ids to the candidates; a third
        result are then the ids of the log-probs, (M, 1 + K) int64.
        """
        ids = rows.targets
        if top_k or rows.candidates is not None:
            others = [] if rows.candidates is None else [rows.candidates]
            ids = torch.cat([ids.unsqueeze(1), *others], dim=1)
        if self._head_is_linear:
            head = self.base.get_output_embeddings()
            hidden = self.hidden_states(rows)
            return head(hidden, ids, temperature, with_entropy, top_k, num_ids)
        logits = self.run(rows, "logits")[None]  # the family changes them after the head
        if top_k:
            top = logits[0, :, :num_ids].topk(min(top_k, num_ids)).indices
            ids = torch.cat([ids, top], dim=1)
        logprobs, entropy = token_logprobs(logits, ids[None], temperature)[0], None
        if with_entropy:
            compute = token_entropy if logits.requires_grad else entropy_from_logits
            entropy = compute(logits, temperature)[0]
        return (logprobs, entropy, ids) if top_k else (logprobs, entropy)

    def _check(self, device: torch.device) -> None:
        super()._check(device)
        if self._head_is_linear:
            rows = probe(self.base).to(device)
            head = self.base.get_output_embeddings()
            logits = self.run(rows, "logits")
            self._head_is_linear = self.gap(head(self.hidden_states(rows)), logits) is None


def _changes_logits(config: PretrainedConfig) -> bool:
    fields = config.get_text_config().to_dict().items()
    return any(_CHANGES_LOGITS.search(k) and v not in (None, 0, 1, False) for k, v in fields)


def _head_forward(
    head: nn.Linear,
    hidden: Tensor,
    target_ids: Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    top_k: int = 0,
    num_ids: int = 0,
) -> Any:
    """Forward of a head that can skip the logits: without targets it is ``nn.Linear``'s.

    NOTE: it runs as the head's own forward, because ZeRO-3 gathers a weight for the forward and the
    backward pass of the module that owns it.
    """
    if target_ids is None:
        return type(head).forward(head, hidden)
    weights, product = (head.weight, head.bias), product_of(head)
    if top_k:
        top = linear_top_ids(hidden, *weights, top_k, num_ids, product)
        target_ids = torch.cat([target_ids, top], dim=1)
    results = linear_logprobs(hidden, *weights, target_ids, temperature, with_entropy, product)
    return (*results, target_ids) if top_k else results


_ROWS = 64  # of one forward of a `RewardModel`


class ScoreModel(PackedModel):
    """Scores at the columns that rows read."""

    def compute(self, rows: PackedRows) -> Tensor:
        """Scores (M,) fp32."""
        return self.base.score(self.hidden_states(rows)).squeeze(-1).float()


class RewardModel:
    """A reward model outside training, on this process's device.

    Args:
        pad_id: where its config.json has none.
        num_tokens: see `Checkpoint.score_model`.

    Raises:
        UserError: not a reward model, or its weights do not fit.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, pad_id: int, num_tokens: int = 0
    ) -> None:
        own_pad_id = checkpoint.config.pad_token_id
        pad_id = pad_id if own_pad_id is None else own_pad_id
        model = checkpoint.score_model(dtype, pad_id, num_tokens=num_tokens)
        self._model = ScoreModel(model.to(dist.device()).eval())
        self._model.check(dist.device())

    @torch.no_grad()
    def score(self, rows: list[list[int]], num_shared: Iterable[int] = ()) -> Tensor:
        """The score of each row of ids at its last token: (S,) fp32 on the CPU.

        ``num_shared``: ids at the start of each row that are computed once for adjacent rows that
        have the same ones.
        """
        shared, scores = list(num_shared), [torch.zeros(0)]
        for start in range(0, len(rows), _ROWS):
            part = slice(start, start + _ROWS)
            packed = pack(rows[part], [[len(row) - 1] for row in rows[part]], shared[part] or None)
            scores.append(self._model(packed.to(dist.device())).float().cpu())
        return torch.cat(scores)


def count_parameters(module: nn.Module) -> int:
    """Number of parameters, unsharded (ZeRO-3 keeps the full count in ``ds_numel``)."""
    return sum(full_shape(p).numel() for p in module.parameters())
