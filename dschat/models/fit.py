"""Checks a checkpoint against the flags before any weights load.

NOTE: call it outside ZeRO-3's loading context, in which modules cannot be built on the meta device.
"""

from collections.abc import Sequence

from transformers import PretrainedConfig, PreTrainedModel

from dschat.config import UserError
from dschat.models.config_files import build_from, read_generation_config
from dschat.models.load import Kind, load_shapes
from dschat.models.lora import check_rank
from dschat.models.model_kind import checkpoint_headers, integer_weights, require_causal_lm
from dschat.models.packing.model import Packing, cannot_pack, packing_problem


def check_fit(
    config: PretrainedConfig,
    name_or_path: str,
    flag: str,
    kind: Kind,
    attn_implementation: str | None = None,
    lora_dim: int = 0,
    lora_modules: Sequence[str] = (),
    lora_flag: str = "--lora_dim",
    packing: Packing = "auto",
) -> None:
    """Raise ``UserError`` unless this checkpoint loads as a model of ``kind``.

    Args:
        lora_dim: rank of the adapters on ``lora_modules``; 0: no adapters.

    Raises:
        UserError: another kind; missing, unexpected, reshaped or integer weights; an attention
            implementation, packing or LoRA modules that the architecture lacks; adapters that
            exceed the memory.
    """
    if kind == "lm":
        require_causal_lm(config, name_or_path, flag)
    headers = checkpoint_headers(name_or_path, flag)
    if not headers:
        raise UserError(
            f"{flag} {name_or_path} holds no weights; name another folder, or save the model with "
            "save_pretrained"
        )
    if integers := integer_weights(headers):
        raise UserError(
            f"{flag} {name_or_path} stores {len(integers)} weights as integers, such as "
            f"{integers[0]}; name the floating-point checkpoint that it was made from"
        )
    if kind == "lm":
        read_generation_config(name_or_path, flag)  # has the EOS ids
    if getattr(config, "auto_map", None):
        return  # only its own code can build it, which loading runs
    model = _model_on_meta(config, name_or_path, flag, kind, attn_implementation)
    if packing == "on" and (problem := packing_problem(model)):
        raise cannot_pack(model, problem)
    if lora_dim:
        check_rank(model, lora_dim, lora_modules, lora_flag)


def check_positions(
    config: PretrainedConfig, length: int, name_or_path: str, flags: str, remedy: str
) -> None:
    """Raise ``UserError`` if ``length`` tokens exceed the model's positions, or Doge's window."""
    text, limits = config.get_text_config(), ("max_position_embeddings", "keep_window_size")
    positions = min(filter(None, (getattr(text, limit, None) for limit in limits)), default=None)
    if positions is not None and length > positions:
        raise UserError(f"{flags} {length}: {name_or_path} has {positions} positions; {remedy}")


def _model_on_meta(
    config: PretrainedConfig,
    name_or_path: str,
    flag: str,
    kind: Kind,
    attn_implementation: str | None,
) -> PreTrainedModel:
    def load(config: PretrainedConfig, attn_implementation: str | None = None) -> PreTrainedModel:
        return load_shapes(config, name_or_path, flag, kind, attn_implementation)

    model = build_from(config, load, name_or_path, flag)
    try:
        return load(config, attn_implementation) if attn_implementation else model
    except (ValueError, ImportError) as error:
        if isinstance(error, UserError):
            raise
        reason = str(error).splitlines()[0].partition(". ")[0].rstrip(".")
        raise UserError(
            f"--attn_implementation {attn_implementation}: {name_or_path} cannot use it here "
            f"({reason}); sdpa and eager always work"
        ) from error
