"""Tiny configs of every causal-LM family of transformers, and checkpoints made from them.

`tiny_config` shrinks a family's default config by the names of its fields (``SIZES``), nested
configs too, and applies the family's row of ``ROWS``. Windows, attention chunks, top-k of indexers
and original lengths of rotary scalings shrink to 8 tokens or fewer: the rows of
`family_checks.py` cross all of them. A family with its own class for images and text is built as
that class, which is what people download.
"""

import copy
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from family_rows import REFUSED, ROWS
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dschat.builtin.tiny_model import tiny_tokenizer

PAD, END = 0, 1  # of the built-in tokenizer
NUM_MARKS = 32  # rows of the embedding behind the tokenizer's: ids of images and other marks

_WHOLE = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

# Beside the mapping's: published with images only, their text part is a causal LM.
FAMILIES = (*sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), "mistral3", "mistral_large4")

_LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"),
    *("num_encoder_layers", "num_decoder_layers", "num_blocks", "num_hidden_groups"),
)

# Value in a tiny config -> the fields that have it, where the family's default config sets them.
# Windows, chunks and blocks are of 8 tokens. With fewer index heads scores would tie at 0, and the
# order of ties depends on the length. 0: see `tiny_config`.
_FIELDS: dict[float, str] = {
    0: "vocab_size num_nextn_predict_layers vocab_size_per_layer_input",
    0.2: "initializer_range init_std",
    1: """
        index_topk_blocks topk_group first_k_dense_replace num_dense_layers
        moe_layer_start_index mamba_n_groups n_groups mamba_ngroups""",
    2: """
        num_key_value_heads num_kv_heads num_query_groups swa_num_key_value_heads o_groups
        num_experts_per_tok num_experts_per_token moe_topk moe_k n_group num_expert_group
        moe_layer_end_index linear_num_key_heads depth""",
    4: """
        num_attention_heads n_head n_heads num_heads decoder_attention_heads
        encoder_attention_heads attention_heads num_encoder_attention_heads
        num_decoder_attention_heads swa_num_attention_heads rotary_dim index_topk
        num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num
        mamba_n_heads mamba_num_heads time_step_rank mamba_dt_rank linear_num_value_heads
        linear_num_heads""",
    8: """
        head_dim global_head_dim dim_head d_head kv_channels attention_head_size
        swa_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim query_pre_attn_scalar
        sliding_window attention_chunk_size window_size attention_window_size
        local_attention keep_window_size sliding_window_size local_attention_window_len
        rel_extent floor_scale log_scaling_n_floor block_size index_block_size
        mamba_chunk_size chunk_size local_attn_chunk_length lsh_attn_chunk_length
        mamba_d_state state_size ssm_state_size linear_key_head_dim linear_value_head_dim
        linear_head_dim hidden_size_per_layer_input""",
    14: "patch_size",
    16: """
        block_multiple_of ffn_round_up_to_multiple_of qk_head_dim kv_lora_rank q_lora_rank
        o_lora_rank original_max_position_embeddings index_n_heads index_head_dim
        moe_intermediate_size shared_expert_intermediate_size
        moe_shared_expert_intermediate_size expert_ffn_hidden_size
        shared_experts_intermediate_size router_hidden_size mamba_d_head mamba_head_dim
        mamba_headdim num_position_embeddings""",
    28: "image_size",
    32: """
        hidden_size d_model n_embd emb_dim embedding_dim embedding_size input_embedding_size
        output_embedding_size word_embed_proj_dim lru_width out_hidden_size
        attention_hidden_size ext_pw_out_channel depthwise_separable_out_channel
        nemo_conv_channels output_channels vision_output_dim""",
    48: """
        intermediate_size ffn_dim dff dim_ff d_inner n_inner decoder_ffn_dim encoder_ffn_dim
        ffn_hidden_size feed_forward_size intermediate_size_mlp shared_intermediate_size
        dense_intermediate_size mlp_dim""",
    64: """
        max_position_embeddings n_positions n_ctx max_seq_len model_max_length
        context_length max_target_positions mamba_d_ssm""",
}
SIZES: dict[str, Any] = {name: size for size, names in _FIELDS.items() for name in names.split()}
SIZES["global_attn_indexes"] = [1]


@functools.cache
def tokenizer():
    """The built-in tokenizer, by which the table's vocabulary is sized."""
    return tiny_tokenizer()


def tiny_config(family: str) -> PretrainedConfig:
    """The family's config with every size shrunk."""
    row = ROWS.get(family, {})
    return _shrunk(_default(family, row), row, len(tokenizer()) + NUM_MARKS)


def is_refused(family: str) -> bool:
    """Whether dschat refuses the family by design: encoders with and without a decoder, and parts
    of models that read audio or images.
    """
    config = tiny_config(family)
    masked = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING.get(type(config), None)
    return config.is_encoder_decoder or masked is not None or family in REFUSED


def _default(family: str, row: dict[str, Any]) -> PretrainedConfig:
    plain = {key: value for key, value in row.items() if "." not in key}
    try:
        return CONFIG_MAPPING[family]()
    except Exception:  # the defaults contradict each other, or a nested config is required
        return CONFIG_MAPPING[family](**plain)


def _shrunk(config: PretrainedConfig, row: dict[str, Any], vocab_size: int) -> PretrainedConfig:
    """A config of ``config``'s class; ``row`` as in ``ROWS``."""
    given = {key: value for key, value in config.to_dict().items() if value is not None}
    values = {name: size for name, size in SIZES.items() if name in given}
    values |= {name: vocab_size for name, size in values.items() if size == 0 and "vocab" in name}
    layers = {name: given[name] for name in _LAYERS if isinstance(given.get(name), int)}
    lists = _per_layer(given, set(layers.values()))
    num_layers = 3 if lists or "num_experts_per_tok" in given else 2
    values |= dict.fromkeys(layers, num_layers)
    lists = {name: kinds for name, kinds in lists.items() if name not in values}
    values |= {name: _cycle(kinds, num_layers) for name, kinds in lists.items()}
    marks = sorted(k for k in given if k.endswith(("_token_id", "_token_index")))
    marks = [k for k in marks if k not in ("bos_token_id", "eos_token_id", "pad_token_id")]
    if "vocab_size" in given or "text_config" in given:
        values |= {name: vocab_size - 1 - i for i, name in enumerate(marks)}
        values |= {"bos_token_id": END, "eos_token_id": END, "pad_token_id": PAD}
    if "kv_lora_rank" in given:  # multi-head latent attention
        values["num_key_value_heads"] = values["num_attention_heads"]
    for name in type(config).sub_configs:
        if isinstance(part := getattr(config, name, None), PretrainedConfig):
            inner = {k.partition(".")[2]: v for k, v in row.items() if k.startswith(f"{name}.")}
            values[name] = _shrunk(part, inner, vocab_size).to_dict()
    values |= {key: value for key, value in row.items() if "." not in key}
    return type(config)(**copy.deepcopy(values))


def _per_layer(given: dict[str, Any], counts: set[int]) -> dict[str, list]:
    """The lists with one entry per layer."""
    names = [k for k, v in given.items() if isinstance(v, list) and len(v) in counts and len(v) > 3]
    return {name: given[name] for name in names}


def _cycle(kinds: Iterable[Any], count: int) -> list:
    """``count`` entries in which every kind of ``kinds`` occurs, in the order of their first."""
    distinct = list(dict.fromkeys(kinds))
    if distinct[0] == "dense":  # dense first, then mixtures
        return [*distinct, *distinct[-1:] * count][:count]
    return (distinct * count)[: max(count, len(distinct))][:count]


def model_class(family: str, config: PretrainedConfig) -> Any:
    """The class whose checkpoints people download."""
    name = _WHOLE.get(family, "")
    if name.endswith("ForConditionalGeneration"):
        return getattr(transformers, name)
    return AutoModelForCausalLM


def build(family: str, seed: int = 0) -> PreTrainedModel:
    """A tiny model with random weights, fp32; vectors and router biases drawn too, so that a lost
    one shows. Doge's ``A`` too, without which its attention is a plain one.
    """
    config = tiny_config(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        loader = model_class(family, config)
        if loader is AutoModelForCausalLM:
            model = loader.from_config(config, dtype=torch.float32)
        else:
            model = loader(config)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dim() == 1 and name.endswith(("bias", "norm.weight", "attn.A")):
                centre = 0.0 if name.endswith("bias") else tensor.data.float().mean().item()
                tensor.data.normal_(centre, 0.1)
            elif name.endswith("gate.weight") and not tensor.any():
                tensor.data.normal_(0.0, 0.2)  # else all experts tie, in an order of the device
    return model.eval()


def save(family: str, folder: Path) -> PreTrainedModel:
    """The model that was written to ``folder``, as the library's own `save_pretrained` writes it,
    beside the built-in tokenizer.
    """
    model = build(family)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model


def read_config(folder: Path) -> PretrainedConfig:
    """The config of a saved checkpoint."""
    return AutoConfig.from_pretrained(folder)
