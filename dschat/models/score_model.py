"""Scores tokens of packed rows: the module behind reward model and critic.

Wraps a transformers ``...ForSequenceClassification(num_labels=1)``, whose own forward pools to one
score per sequence.
"""

from torch import Tensor, nn

from dschat.models.packing.model import PackedModel
from dschat.models.packing.rows import PackedRows


class ScoreModel(PackedModel):
    """Scores at the columns that rows read."""

    def forward(self, rows: PackedRows) -> Tensor:
        """Scores (M,) fp32."""
        return self.base.score(self.hidden_states(rows)).squeeze(-1).float()


def count_parameters(module: nn.Module) -> int:
    """Number of parameters, unsharded (ZeRO-3 keeps the full count in ``ds_numel``)."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())
