"""Reads and writes LoRA adapters in PEFT's format.

Training wraps the text model of a vision-language checkpoint. transformers loads the whole model
from it, in which the layers have longer names. Adapters are saved under those names; older ones,
which are not, are read too.
"""

from pathlib import Path

import transformers
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer, ParamWrapper
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from dschat.config import UserError
from dschat.models.checkpoint_files import CONFIG, CheckpointFiles
from dschat.models.checkpoint_tensors import FIELD
from dschat.models.lora import wrap

ADAPTER_WEIGHTS = "adapter_model.safetensors"


def load_adapter(model: nn.Module, folder: Path) -> PeftModel:
    """Wrap ``model`` with the adapter in PEFT's ``folder``, and load its score head. Both train.

    Raises:
        UserError: the adapter is of another model.
    """
    config = LoraConfig.from_pretrained(str(folder))
    places = _places(model, config.base_model_name_or_path)[::-1]
    for field in ("target_modules", "target_parameters"):
        if not isinstance(names := getattr(config, field) or "", str):
            setattr(config, field, {_moved(name, places) for name in names})
    config.inference_mode = False
    config.task_type = config.modules_to_save = None  # PEFT would wrap the score head
    config.base_model_name_or_path = None  # it becomes the name of ``model``
    wrapped = wrap(model, config)
    own = {
        name.replace(".default.", "."): parameter
        for name, parameter in wrapped.named_parameters()
        if ".lora_" in name or ".score." in f".{name}"
    }
    stored = {_moved(n, places): t for n, t in load_file(folder / ADAPTER_WEIGHTS).items()}
    if {n: p.shape for n, p in own.items()} != {n: t.shape for n, t in stored.items()}:
        raise UserError(f"{folder} is an adapter of another model than a {type(model).__name__}")
    for name, parameter in own.items():
        parameter.requires_grad_(True).data.copy_(stored[name])
    return wrapped


def saved_form(
    wrapped: PeftModel, state: dict[str, Tensor], settings: LoraConfig
) -> dict[str, Tensor]:
    """``state``, an adapter's tensors, under the names that PEFT expects of their base model, as
    transformers loads it; ``settings`` are changed to fit.
    """
    base = wrapped.get_base_model()
    places = _places(base, settings.base_model_name_or_path)
    if places[0] != places[1]:  # all names: layers that see or hear may have the same ends
        settings.target_modules = {
            _moved(name, places)
            for name, layer in base.named_modules()
            if isinstance(layer, LoraLayer) and not isinstance(layer, ParamWrapper)
        }
        parameters = settings.target_parameters or ()
        settings.target_parameters = [_moved(name, places) for name in parameters] or None
    return {_moved(name, places): tensor for name, tensor in state.items()}


def _places(model: nn.Module, source: str | None) -> tuple[str, str]:
    """Prefixes of the layers' names: in ``model``, and in what transformers makes of ``source``,
    its checkpoint.
    """
    try:
        raw = CheckpointFiles(source, "the base model").json(CONFIG) if source else None
    except UserError:  # it is gone
        raw = None
    if raw is None or FIELD not in raw or hasattr(model.config, FIELD) or "auto_map" in raw:
        return "", ""
    config = AutoConfig.from_pretrained(source)
    if hasattr(model, "score"):
        kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    else:  # without one, users load the class that it was saved as
        named = getattr(transformers, (config.architectures or [""])[0], None)
        kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), named)
    is_whole = kind is not None and kind.config_class is not type(model.config)
    return ("model.", "model.language_model.") if is_whole else ("", "")


def _moved(name: str, places: tuple[str, str]) -> str:
    """``name``, of a layer or of an adapter's tensor, if it begins with the first of ``places``
    with the second one in its place.
    """
    lead = "base_model.model." if name.startswith("base_model.model.") else ""
    own = name.removeprefix(lead)
    return lead + places[1] + own.removeprefix(places[0]) if own.startswith(places[0]) else name
