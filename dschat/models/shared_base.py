"""Makes score models on the frozen weights of a language model, without a copy of them.

Each model is a module of its own with its own adapter and score head, which trains, recomputes its
activations and is exported as others do; only the parameters of the base are the same objects. So
passes of several models may interleave in any order. No ZeRO-3: it would shard those parameters for
one engine and gather them for another.
"""

import copy
import os
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from dschat.models.checkpoint import Checkpoint
from dschat.models.checkpoint_files import ADAPTER_CONFIG
from dschat.models.load import score_class
from dschat.models.lora import ADAPTER_WEIGHTS, load_adapter
from dschat.models.packing.model import backbone
from dschat.models.vocabulary import embedding_rows, grow_embeddings

FOLDER = "adapter"  # of a folder that a LoRA run exports


class SharedBase:
    """The weights of ``model``, a causal LM without adapters yet. Its dropout is that of the score
    models too.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        body = backbone(model)
        assert isinstance(body, PreTrainedModel)
        self._body, self._longest_row = sharing_copy(body), getattr(model, "longest_row", 0)

    def score_model(
        self, adapter: Checkpoint | None, pad_token_id: int, num_tokens: int = 0
    ) -> nn.Module:
        """An ``AutoModelForSequenceClassification(num_labels=1)`` on these weights, with the
        adapter and the score head of the reward model ``adapter``; None: with a new score head.

        ``num_tokens``: if the embedding has fewer rows, the model gets a larger one of its own.
        """
        body = sharing_copy(self._body)
        body.config.num_labels = 1
        dtype = next(p.dtype for p in body.parameters() if p.is_floating_point())
        score_class(body.config)  # registers one where transformers has none
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(body.config, dtype=dtype)
        names = {part: name for name, part in model.named_children()}
        setattr(model, names[backbone(model)], body)
        model.config = body.config
        model.score.to_empty(device="cpu")
        model._init_weights(model.score)
        model.longest_row = self._longest_row  # as `load.from_pretrained` does, and:
        model._weight_conversions = None
        if num_tokens > embedding_rows(body.config):
            embedding = model.get_input_embeddings()  # NOTE: resizing writes into its weight
            embedding.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
            grow_embeddings(model, num_tokens)
        body.config.pad_token_id = pad_token_id
        return model if adapter is None else load_adapter(model, _adapter_folder(adapter))


def sharing_copy(module: PreTrainedModel) -> PreTrainedModel:
    """A copy of ``module`` that has the same parameters and buffers."""
    kept: list[object] = [*module.parameters(), *module.buffers()]
    # What decodes a weight of bitsandbytes, in layers of 4 and of 8 bits.
    states = (getattr(m, name, None) for m in module.modules() for name in ("quant_state", "state"))
    kept += [state for state in states if type(state).__module__.startswith("bitsandbytes")]
    return copy.deepcopy(module, {id(one): one for one in kept})


def check_shared(base: Checkpoint, models: list[Checkpoint]) -> None:
    """Raise ``UserError`` unless ``models`` other than ``base`` are reward models that step 2
    trained as adapters on it; and unless score models can be made on it. Loads no weights.
    """
    for model in (model for model in models if model is not base):
        settings = model.json(f"{FOLDER}/{ADAPTER_CONFIG}")
        if settings is None:
            raise model.error(
                f" has no folder {FOLDER}, which --share_base loads in place of its weights; train "
                f"it with step 2 from {base.name} with --lora_dim, or leave --share_base out"
            )
        if settings.get("peft_type") != "LORA" or settings.get("use_dora"):
            raise model.error(f": its {FOLDER} is not plain LoRA; leave --share_base out")
        name = str(settings.get("base_model_name_or_path"))
        if os.path.realpath(name) != os.path.realpath(base.name):
            raise model.error(
                f" is an adapter of {name}, and the actor is {base.name}: --share_base needs one "
                f"base; train it with step 2 from {base.name}, or name {name} as {base.flag}"
            )
        _adapter_folder(model)
    has_own_code = getattr(base.config, "auto_map", None)
    if has_own_code or len({type(backbone(base.shapes(kind))) for kind in ("lm", "score")}) > 1:
        raise base.error(
            ": language and score models of this family have different backbones, or code of their "
            "own; leave --share_base out"
        )


def _adapter_folder(checkpoint: Checkpoint) -> Path:
    files = [checkpoint.locate(f"{FOLDER}/{name}") for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    if files[1] is None:
        raise checkpoint.error(f": its {FOLDER} has no {ADAPTER_WEIGHTS}; copy it again")
    return files[1].parent
