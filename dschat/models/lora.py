"""LoRA with PEFT: adds adapters, disables them, and merges them into a stream of weights.

No ZeRO here: the caller of `merge` gathers the weights.
"""

import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dschat.config import UserError
from dschat.config.errors import did_you_mean
from dschat.models.long_rows import recompute_activations
from dschat.models.training_engine import full_shape

logger = logging.getLogger("dschat")

_HEADS = ("score", "lm_head", "embed_out")
# PEFT refuses adapters on their out_proj, whose weight Mamba's kernels read.
MAMBAS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
_LAYER = re.compile(r"^.*?\.\d+\.")
_WRAPPER = re.compile(r"\.base_layer(?=\.)")  # once per wrapper: PEFT nests them for experts


def add_lora(
    model: nn.Module,
    rank: int,
    alpha: float,
    modules: list[str],
    only_optimize_lora: bool,
    flag: str,
) -> PeftModel:
    """Wrap ``model`` with adapters of ``rank`` on ``modules``.

    ``modules`` are PEFT's names, all-linear (fused experts too), or a part of the path that ends
    with a dot, as in DeepSpeed-Chat's scripts (``decoder.layers.``: every linear layer below it).
    The score head of a reward model or critic always trains. Without ``only_optimize_lora`` the
    whole model trains, as in DeepSpeed-Chat. ``alpha`` 0 means 2 * ``rank``.
    """
    targets = target_modules(model, modules, flag)
    ends = ("",) if targets == "all-linear" else tuple(f".{name}" for name in modules)
    experts = [name for name in expert_parameters(model) if name.endswith(ends)]
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha or 2 * rank,
        target_modules=targets,
        target_parameters=experts or None,
        exclude_modules=[*_HEADS, *_other_linears(model)],
        lora_dropout=0.0,
        bias="none",
    )
    try:
        convert_peft_config_for_transformers(config, model, None)
        if targets == "all-linear" and isinstance(config.target_modules, set):
            # It has dropped dense layers that are named as experts were in transformers 4.
            layers = (n for n in linear_layers(model) if not check_target_module_exists(config, n))
            config.target_parameters |= {f"{name}.weight" for name in layers}
        wrapped = wrap(model, config)
    except ValueError as error:
        raise UserError(f"{flag} {' '.join(modules)}: {str(error).splitlines()[0]}") from error
    for name, parameter in wrapped.named_parameters():
        if not only_optimize_lora or ".score." in f".{name}":
            parameter.requires_grad_(True)
    if only_optimize_lora and "all-linear" in modules:
        _tell_coverage(wrapped)
    return wrapped


def wrap(model: nn.Module, config: LoraConfig) -> PeftModel:
    """``model`` with the adapters of ``config``, without PEFT's untrue warnings."""
    with warnings.catch_warnings():
        # PEFT looks for its own pattern among modules only, and calls transformers' old names.
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys")
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        return get_peft_model(model, config)


def _tell_coverage(wrapped: PeftModel) -> None:
    """Log which products of the layers have no adapter: PEFT reaches not all of every mixture."""
    adapted = adapters(wrapped)
    weights = {
        name: full_shape(p).numel()
        for key, p in wrapped.named_parameters()
        if (name := unwrapped_name(key)) and _LAYER.search(name)
        if len(full_shape(p)) > 1 and not name.endswith("bias")
    }
    bare = {name: size for name, size in weights.items() if name not in adapted}
    if bare:
        ends = sorted({_LAYER.sub("", name).removesuffix(".weight") for name in bare})
        logger.info(
            "adapters cover %.0f%% of the layers' weights; without one: %s",
            100 * (1 - sum(bare.values()) / sum(weights.values())),
            ", ".join(ends[:6]) + (" ..." if len(ends) > 6 else ""),
        )


def target_modules(model: nn.Module, modules: Sequence[str], flag: str) -> str | list[str]:
    """PEFT's ``target_modules``: names of linear layers, or suffixes of them.

    Raises:
        UserError: naming ``flag``: no such module, or one that LoRA does not support.
    """
    if "all-linear" in modules:
        weights = [layer.weight for layer in linear_layers(model).values()]
        if len({*map(id, weights)}) < len(weights):
            raise UserError(
                f"{flag}: layers of a {type(model).__name__} share weights, to which adapters of "
                "their own cannot be merged; train it without"
            )
        return "all-linear"
    names = [name for name in modules if name not in expert_names(model)]
    return [target for name in names for target in _targets(model, name, flag)]


def _targets(model: nn.Module, wanted: str, flag: str) -> list[str]:
    """``[wanted]``, or the linear layers below it if it ends with a dot."""
    layers = linear_layers(model)
    if wanted.endswith(".") and (below := [name for name in layers if wanted in name]):
        return below
    named = {n: m for n, m in model.named_modules() if n and f".{n}".endswith(f".{wanted}")}
    others = {name: module for name, module in named.items() if name not in layers}
    if named and not others:
        return [wanted]
    ends = sorted({name.rpartition(".")[2] for name in layers} | expert_names(model))
    fault = f"has no such module{did_you_mean(wanted, ends)}"
    if others:
        name, module = next(iter(others.items()))
        is_head = name.rpartition(".")[2] in _HEADS
        fault = f"puts no adapter on {'its head' if is_head else 'a ' + type(module).__name__}"
    raise UserError(
        f"{flag} {wanted}: {type(model).__name__} {fault}; adapters go on {', '.join(ends)}, and "
        "all-linear means all of them"
    )


def linear_layers(model: nn.Module) -> dict[str, nn.Linear | Conv1D]:
    """Name -> layer of all layers that can have an adapter: linear ones, except heads."""
    others = {*_HEADS, *_other_linears(model)}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and name.rpartition(".")[2] not in others
    }


def _other_linears(model: nn.Module) -> set[str]:
    """Names of linear layers that compute something else, such as Llama 4's routers: no adapter."""
    others = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
        # the same product in other operations
        if type(module).__name__ not in ("FalconLinear", "Linear4bit", "Linear8bitLt")
    }
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return others | {"out_proj"} if model_type in MAMBAS else others


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter of all fused experts, (E, ., .) with E as the config says."""
    config = getattr(model, "config", None)
    counts = _expert_counts(config.to_dict() if config is not None else {})
    return {
        f"{name}.{leaf}": parameter
        for name, module in model.named_modules()
        if not type(module).__module__.startswith("torch.")  # nn.Conv1d
        for leaf, parameter in module.named_parameters(recurse=False)
        if len(full_shape(parameter)) == 3 and full_shape(parameter)[0] in counts
    }


def _expert_counts(fields: dict[str, Any]) -> set[int]:
    """Numbers of experts in a config, nested ones too."""
    counts = {v for k, v in fields.items() if "expert" in str(k) and type(v) is int and v > 1}
    return counts.union(*(_expert_counts(v) for v in fields.values() if isinstance(v, dict)))


def expert_names(model: nn.Module) -> set[str]:
    """Last names of the fused experts' parameters, such as gate_up_proj and down_proj."""
    return {name.rpartition(".")[2] for name in expert_parameters(model)}


def prepare_for_training(
    model: PreTrainedModel,
    gradient_checkpointing: bool,
    lora_dim: int,
    lora_alpha: float,
    lora_modules: list[str],
    only_optimize_lora: bool,
    flag: str,
    activations_on_host: bool = False,
) -> nn.Module:
    """Enable gradient checkpointing and add adapters, where ``model`` has none, before an engine
    wraps the model.
    """
    if gradient_checkpointing:
        recompute_activations(model, activations_on_host)
    if not lora_dim or isinstance(model, PeftModel):
        return model
    return add_lora(model, lora_dim, lora_alpha, lora_modules, only_optimize_lora, flag)


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Context in which ``module`` computes without its adapters; a no-op if it has none."""
    # NOTE: PEFT's disable_adapter() also flips requires_grad, which would break ZeRO's hooks.
    layers = [layer for layer in module.modules() if isinstance(layer, LoraLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@dataclass
class LoraAdapter:
    """One LoRA layer: the names of its matrices in the PEFT model, and how to merge them."""

    a_name: str
    b_name: str
    scaling: float
    transposed: bool  # GPT-2's Conv1D and gpt-oss's experts store (in, out)


def unwrapped_name(name: str) -> str | None:
    """The checkpoint's name of a parameter of a PEFT model; None for the adapter's matrices."""
    if ".lora_A." in name or ".lora_B." in name:
        return None
    return _WRAPPER.sub("", name.replace("base_model.model.", ""))


def adapters(module: nn.Module) -> dict[str, LoraAdapter]:
    """Every LoRA layer below ``module``: checkpoint name of its weight -> its adapter."""
    layers: dict[str, LoraAdapter] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, LoraLayer):
            (key,) = layer.active_adapters
            weight_name = unwrapped_name(f"{name}.{getattr(layer, 'parameter_name', 'weight')}")
            assert weight_name is not None
            is_transposed = isinstance(layer, ParamWrapper) and layer.num_experts > 1
            is_transposed &= getattr(layer.get_base_layer(), "is_transposed", False)
            layers[weight_name] = LoraAdapter(
                a_name=f"{name}.lora_A.{key}.weight",
                b_name=f"{name}.lora_B.{key}.weight",
                scaling=layer.scaling[key],
                transposed=bool(getattr(layer, "fan_in_fan_out", False)) or is_transposed,
            )
    return layers


def merge(weight: Tensor, a: Tensor, b: Tensor, adapter: LoraAdapter) -> Tensor:
    """``weight + scaling * B A`` as a new tensor (Hu et al. 2021, eq. 3), summed in fp32.

    Of fused experts, ``weight`` is (E, out, in), ``a`` (E * r, in) and ``b`` (out, r * E), as PEFT
    stores them. Returns the dtype of ``weight``.
    """
    if weight.ndim == 3:
        experts = weight.shape[0]
        a = a.reshape(experts, -1, a.shape[-1])  # (E, r, in)
        b = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)  # (E, out, r)
    delta = b.float() @ a.float() * adapter.scaling
    return (weight.float() + (delta.mT if adapter.transposed else delta)).to(weight.dtype)
