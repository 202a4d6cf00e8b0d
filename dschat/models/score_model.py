"""Scores every token of a sequence: the module behind reward model and critic.

Wraps a transformers ``...ForSequenceClassification(num_labels=1)``, whose own forward pools to one
score per sequence.
"""

from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel


class ScoreModel(nn.Module):
    """Per-token scores of right-padded sequences.

    In a causal model right padding does not affect real tokens, so there is no padding mask. Scores
    at padding are meaningless: mask them or do not gather them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """``input_ids`` (B, T) int64 -> scores (B, T) fp32."""
        # NOTE: PEFT's wrapper has a `model` attribute of its own, which would shadow the backbone.
        model = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        backbone = getattr(model, model.base_model_prefix)
        hidden = backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        return model.score(hidden).squeeze(-1).float()


def gather_last(scores: Tensor, lengths: Tensor) -> Tensor:
    """Scores at the last real tokens: ``scores`` (B, T), ``lengths`` (B,) >= 1 -> (B,)."""
    return scores.gather(1, (lengths - 1).unsqueeze(1)).squeeze(1)


def count_parameters(module: nn.Module) -> int:
    """Number of parameters, unsharded (ZeRO-3 keeps the full count in ``ds_numel``)."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())
