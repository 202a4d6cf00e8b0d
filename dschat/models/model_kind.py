"""Tells from a configuration whether a model generates, scores, or neither."""

import re
from typing import Literal

from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

from dschat.config import UserError
from dschat.models.checkpoint_files import CheckpointFiles

# In transformers' table of causal LMs, but their logits depend on later tokens.
_NOT_CAUSAL = ("bert-generation", "cpmant", "prophetnet", "reformer", "xlm", "xlnet")
IS_MADE = "made_by_dschat"  # attribute of classes that `score_class` makes

RewardForm = Literal["score", "v_head", "base"]


def is_reward_config(config: PretrainedConfig) -> bool:
    """Whether config.json names a ``...ForSequenceClassification``."""
    return any(a.endswith("ForSequenceClassification") for a in config.architectures or [])


def not_causal_lm(config: PretrainedConfig) -> str | None:
    """The architecture of a model that is not a causal LM; None if it is one."""
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return None
    architectures = config.architectures or []
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    base = MODEL_MAPPING.get(type(config), None)
    if isinstance(base, type):
        known.add(base.__name__)  # saved without a head; loading checks the weights
    # BERT and its relatives attend in both directions, unless configured as decoders.
    masked = MODEL_FOR_MASKED_LM_MAPPING.get(type(config), None) is not None
    bidirectional = masked and not getattr(config, "is_decoder", True)
    is_other = (
        MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) is None
        or (architectures and not known.intersection(architectures))
        or config.is_encoder_decoder
        or bidirectional
        or config.model_type in _NOT_CAUSAL
    )
    return [*architectures, type(config).__name__][0] if is_other else None


def score_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The ``...ForSequenceClassification`` of this architecture; None if there can be none.

    Where transformers has a causal LM only, the class is made and registered with its auto classes,
    in the form that transformers gives to most families: the backbone and a linear ``score``.
    """
    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    causal_lm = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if known is not None or causal_lm is None or type(config) not in MODEL_MAPPING:
        return known
    family = next(base for base in causal_lm.__mro__[1:] if issubclass(base, PreTrainedModel))
    name = re.sub(r"(For\w+|LMHeadModel)$", "ForSequenceClassification", causal_lm.__name__)
    # NOTE: transformers takes a class of another module for custom code, with names of its own.
    fields = {"__module__": causal_lm.__module__, "config_class": type(config), IS_MADE: True}
    fields["base_model_prefix"] = family.base_model_prefix or "model"
    made = type(name, (GenericForSequenceClassification, family), fields)
    AutoModelForSequenceClassification.register(type(config), made, exist_ok=True)
    return made


def no_score_head(files: CheckpointFiles, class_name: str) -> UserError:
    """The error for an architecture (BERT, T5) without scores per token."""
    return files.error(
        f": {class_name} has no per-token score head; name a model of a causal architecture"
    )
