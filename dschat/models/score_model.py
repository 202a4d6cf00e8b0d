"""Scores tokens of packed rows: the module behind reward model and critic.

Wraps a transformers ``...ForSequenceClassification(num_labels=1)``, whose own forward pools to one
score per sequence.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

import dschat.distributed as dist
from dschat.models.checkpoint import Checkpoint
from dschat.models.packing.model import PackedModel
from dschat.models.packing.rows import PackedRows, pack
from dschat.models.training_engine import full_shape

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
