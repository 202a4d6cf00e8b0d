"""Makes score models on the frozen weights of a language model, without a copy of them.

Each model is a module of its own with its own adapters and score head, and can be trained, put into
evaluation mode, checkpointed and exported apart from the others; only the parameters of the base
are the same objects. The passes of several models may therefore interleave in any order.

No ZeRO-3: it would shard those parameters for one engine and gather them for another.
"""

import copy
import os
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from dschat.config import UserError
from dschat.models.checkpoint import Checkpoint
from dschat.models.checkpoint_files import ADAPTER_CONFIG
from dschat.models.load import score_class
from dschat.models.lora import load_adapter
from dschat.models.packing.model import backbone
from dschat.models.vocabulary import embedding_rows, grow_embeddings

FLAG = "--share_base"
FOLDER = "adapter"  # of a folder that a LoRA run exports


class SharedBase:
    """The weights of a causal LM without its head, before adapters are added to it.

    Args:
        model: its dropout is that of every score model too.
        source: the checkpoint that it was loaded from.
    """

    def __init__(self, model: PreTrainedModel, source: Checkpoint) -> None:
        body = backbone(model)
        if body is None:
            raise _unknown(source)
        self._body, self._source = sharing_copy(body), source
        self._longest_row = getattr(model, "longest_row", 0)

    def score_model(
        self, adapter: Checkpoint | None, pad_token_id: int, num_tokens: int = 0
    ) -> nn.Module:
        """An ``AutoModelForSequenceClassification(num_labels=1)`` on these weights, with the
        adapter and the score head of the reward model ``adapter``; None: with a new score head.

        ``num_tokens``: if the embedding has fewer rows, the model gets a larger one of its own.
        """
        body = sharing_copy(self._body)
        config = body.config
        assert isinstance(config, PretrainedConfig)
        config.num_labels = 1
        dtype = next(p.dtype for p in body.parameters() if p.is_floating_point())
        score_class(config)  # registers one where transformers has none
        trust = self._source.trust_remote_code
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(
                config, dtype=dtype, trust_remote_code=trust
            )
        own = backbone(model)
        if type(own) is not type(body) or not hasattr(model, "score"):
            raise _unknown(self._source)
        setattr(model, next(name for name, part in model.named_children() if part is own), body)
        model.config = config
        model.score.to_empty(device="cpu")
        model._init_weights(model.score)
        model.longest_row = self._longest_row
        model._weight_conversions = None  # as `load.from_pretrained` does
        if num_tokens > embedding_rows(config):
            embedding = model.get_input_embeddings()  # NOTE: resizing writes into its weight
            embedding.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
            grow_embeddings(model, num_tokens)
        config.pad_token_id = pad_token_id
        return model if adapter is None else load_adapter(model, *_adapter_files(adapter))


def sharing_copy(module: nn.Module) -> nn.Module:
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
    for model in models:
        if model is base:
            continue
        settings = model.json(f"{FOLDER}/{ADAPTER_CONFIG}")
        if settings is None:
            raise model.error(
                f" has no folder {FOLDER}, which {FLAG} loads in place of its weights; train it "
                f"with step 2 from {base.name} with --lora_dim, or leave {FLAG} out"
            )
        if settings.get("peft_type") != "LORA" or settings.get("use_dora"):
            raise model.error(f": its {FOLDER} is not plain LoRA; leave {FLAG} out")
        name = str(settings.get("base_model_name_or_path"))
        if os.path.realpath(name) != os.path.realpath(base.name):
            raise model.error(
                f" is an adapter of {name}, and the actor is {base.name}: {FLAG} needs one base; "
                f"train it with step 2 from {base.name}, name {name} as {base.flag}, or leave "
                f"{FLAG} out"
            )
        _adapter_files(model)
    if not getattr(base.config, "auto_map", None):  # else loading checks it
        kinds = [type(backbone(base.shapes(kind))) for kind in ("lm", "score")]
        if kinds[0] is not kinds[1]:
            raise _unknown(base)


def _adapter_files(checkpoint: Checkpoint) -> tuple[Path, Path]:
    """The configuration and the weights of the adapter in this folder."""
    names = ADAPTER_CONFIG, "adapter_model.safetensors"
    config, weights = (checkpoint.locate(f"{FOLDER}/{name}") for name in names)
    if config is None or weights is None:
        raise checkpoint.error(f": its folder {FOLDER} is incomplete; copy it again")
    return config, weights


def _unknown(source: Checkpoint) -> UserError:
    return source.error(
        f": language and score models of this family have different backbones; leave {FLAG} out"
    )
