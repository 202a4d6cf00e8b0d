"""The architecture of a model for the decoder, from its transformers config.

It is found in transformers' own module, see `roles`. BLOOM's module computes its attention itself,
so that nothing can be found in it: its architecture stands here.
"""

import copy
import json
import logging
from functools import lru_cache

from transformers import PretrainedConfig

from dschat.config.errors import first_line
from dschat.inference.model.roles import found_spec
from dschat.inference.model.spec import ModelSpec, UnsupportedModel, WeightSource
from dschat.inference.model.trial import Trial
from dschat.models.config_files import muted

_BLOOM_LAYER = {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "qkv": "self_attention.query_key_value",
    "out": "self_attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}


def model_spec(config: PretrainedConfig) -> ModelSpec:
    """The architecture of the model of ``config``.

    Raises:
        UnsupportedModel: a part of it is not found, or the decoder does not compute it.
    """
    if row := ARCHITECTURES.get(config.model_type):
        return row(config)
    # NOTE: as transformers does when it builds the model: an original_max_position_embeddings
    # beside rope_parameters (Phi-3's way to write LongRoPE) overrides the one inside them.
    with muted(logging.WARNING):  # transformers warns of a config each time that it reads one
        if getattr(config, "rope_parameters", None):
            config.standardize_rope_params()
        spec = _found(_Key(config))
    if isinstance(spec, str):
        raise UnsupportedModel(spec)
    return spec


class _Key:
    """A config by its values."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = copy.deepcopy(config)
        values = json.dumps(config.to_dict(), sort_keys=True, default=str)
        self._values = type(config).__name__, values

    def __hash__(self) -> int:
        return hash(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._values == other._values


@lru_cache(maxsize=64)
def _found(key: _Key) -> ModelSpec | str:
    """Or why there is none."""
    try:
        return found_spec(Trial(key.config))
    except UnsupportedModel as reason:
        return str(reason)
    except Exception as error:  # transformers', which have no type in common
        return f"{key.config.model_type}: {first_line(error)}"


def _bloom(c: PretrainedConfig) -> ModelSpec:
    layer = "transformer.h.{i}"
    names = {f"{layer}.{name}": f"layers.{{i}}.{target}" for target, name in _BLOOM_LAYER.items()}
    names |= {
        "transformer.word_embeddings_layernorm": "embed_norm",
        "transformer.ln_f": "final_norm",
    }
    table = "transformer.word_embeddings.weight"
    head = table if c.tie_word_embeddings else "lm_head.weight"
    sources = [WeightSource(table, "embed.weight"), WeightSource(head, "head.weight")]
    for name, target in names.items():
        for kind in ("weight", "bias"):
            interleaved = target.endswith("qkv")  # queries, keys and values of each head
            sources.append(
                WeightSource(f"{name}.{kind}", f"{target}.{kind}", interleaved=interleaved)
            )
    return ModelSpec(
        num_layers=c.num_hidden_layers,
        hidden_size=c.hidden_size,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_attention_heads,
        head_size=c.hidden_size // c.num_attention_heads,
        intermediate_size=4 * c.hidden_size,
        vocab_size=c.vocab_size,
        tied=c.tie_word_embeddings,
        sources=tuple(sources),
        prefix="transformer.",
        activation="gelu_new",
        norm_eps=c.layer_norm_epsilon,
        residual_after_norm=c.apply_residual_connection_post_layernorm,
        alibi=True,
    )


ARCHITECTURES = {"bloom": _bloom}
