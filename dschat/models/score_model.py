"""The one class behind reward model and critic: a score for every token of a sequence.

Wraps a transformers ``...ForSequenceClassification(num_labels=1)``, whose own forward pools to one
score per sequence. Right-padded ids come in, per-token scores go out; it must not know rewards or
PPO.
"""

from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel


class ScoreModel(nn.Module):
    """Per-token scores of right-padded sequences.

    A causal model needs no padding mask on real tokens, so none is built; what stands at padding is
    meaningless and must be masked or not gathered.
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
    """Parameters of a module, sharded or whole (ZeRO-3 keeps the true count in ``ds_numel``)."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())
