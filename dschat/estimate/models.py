"""Sizes of models and memory of their passes, from their configurations.

Models are built on the meta device, where weights have shapes but no memory. Nothing is loaded or
written.
"""

import copy
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PretrainedConfig,
)

from dschat.builtin.tiny_model import MAX_VOCAB_SIZE, TINY_CONFIG, TINY_NAME
from dschat.estimate.activations import Batch, Work, run_pass
from dschat.inference import UnsupportedModel
from dschat.inference.model.module_decoder import module_spec
from dschat.inference.model.spec import ModelSpec
from dschat.models.checkpoint import Checkpoint
from dschat.models.checkpoint_files import CheckpointFiles
from dschat.models.config_files import blamed_on, muted
from dschat.models.heads import LanguageModel, ScoreModel
from dschat.models.load import set_dropout
from dschat.models.lora import linear_layers, prepare_for_training
from dschat.models.packing.model import PackedModel, Packing
from dschat.models.packing.states import by_torch
from dschat.models.tokenizer import drop_pad
from dschat.observability.flops import ModelShape, shape_of

# Errors of a forward pass that needs the values of tensors, or of a family without a known size.
MODEL_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)


@dataclass(frozen=True)
class Use:
    """A checkpoint and the settings of a step that affect its memory."""

    name: str
    flag: str = field(compare=False)  # for messages
    kind: Literal["lm", "score"]
    dtype: torch.dtype
    dropout: float | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    gradient_checkpointing: bool = False
    lora_dim: int = 0
    lora_modules: tuple[str, ...] = ()
    only_optimize_lora: bool = True
    packing: Packing = "auto"
    activations_on_host: bool = False

    @property
    def only_adapters(self) -> bool:
        """Whether only LoRA adapters train, on frozen weights."""
        return bool(self.lora_dim) and self.only_optimize_lora

    @property
    def reading(self) -> "Use":
        """The same model in passes without gradients."""
        return replace(self, dropout=0.0, gradient_checkpointing=False, activations_on_host=False)

    @property
    def frozen(self) -> "Use":
        """The same checkpoint without training."""
        return replace(self.reading, lora_dim=0)


@dataclass(frozen=True)
class Sizes:
    """Numbers of elements."""

    total: int
    trained: int
    largest: int  # of one tensor
    shape: ModelShape | None  # None: not known
    linear: tuple[int, int] = (0, 0)  # of all linear layers' weights but the head's, of the largest


class Models:
    """Sizes and passes by `Use`, cached.

    Args:
        made_from: output folder -> model it is trained from, for checkpoints that do not exist yet.
        shallow: layers to run; the memory of a deeper model is linear in its layers.
    """

    def __init__(self, made_from: Mapping[str, str] | None = None, shallow: int = 4) -> None:
        self._made_from = dict(made_from or {})
        self._shallow = shallow
        self._sized = cache(self._sizes)
        self._ran = cache(self._run)
        self._config = cache(self._load_config)
        self.attention = cache(self._attention)

    def config(self, use: Use) -> PretrainedConfig:
        """The configuration of the checkpoint, or of the model it is trained from.

        Raises:
            UserError: naming the flag: no readable configuration.
        """
        name = use.name
        while name in self._made_from:
            name = self._made_from[name]
        return self._config(name, use.flag, use.trust_remote_code)

    def sizes(self, use: Use) -> Sizes:
        """Numbers of elements, which do not depend on the settings of passes."""
        plain = replace(use.reading, dropout=None, attn_implementation=None, packing="off")
        return self._sized(plain)

    def _attention(self, use: Use) -> ModelSpec | None:
        """The sizes of the attention of transformers' module, and of the steps of an engine on it;
        None if the engine cannot follow it.
        """
        # NOTE: 16 bits, the only products of experts that the meta device knows.
        half, hidden = torch.bfloat16, self.config(use).get_text_config().hidden_size
        try:
            with by_torch():
                spec = module_spec(self._module(replace(use.frozen, dtype=half)).base)
        except UnsupportedModel:
            return None
        spec = replace(spec, hidden_size=hidden, intermediate_size=4 * hidden)
        return spec.in_dtype(use.dtype)

    def _load_config(self, name: str, flag: str, trust_remote_code: bool) -> PretrainedConfig:
        if name == TINY_NAME:
            return LlamaConfig(vocab_size=MAX_VOCAB_SIZE, **TINY_CONFIG)
        return Checkpoint(os.path.expanduser(name), flag, trust_remote_code).config

    def _sizes(self, use: Use) -> Sizes:
        depth, most = self.config(use).get_text_config().num_hidden_layers, self._shallow
        if not use.only_adapters or depth <= most:
            return _count(self._module(use))
        # PEFT is slow on deep models: count the adapters of few layers and extrapolate.
        few, fewer = (_count(self._module(use, n)).trained for n in (most, most - 1))
        base, trained = self.sizes(use.frozen), few + (depth - most) * (few - fewer)
        # The score head trains without an adapter, and `base` includes it.
        head = 0
        if use.kind == "score":
            head = self._module(use.frozen, 1).base.score.weight.numel()
        return replace(base, total=base.total + trained - head, trained=trained)

    def run(self, use: Use, work: Work, batch: Batch, train: bool) -> int:
        """The memory of ``work`` on ``batch``; see `activations.run_pass`."""
        return self._ran(use if train else use.reading, work, batch, train)

    def _run(self, use: Use, work: Work, batch: Batch, train: bool) -> int:
        depth, most = self.config(use).get_text_config().num_hidden_layers, self._shallow

        def run(num_layers: int | None) -> int:
            module = self._module(use, num_layers)
            with by_torch():
                return run_pass(module, work, batch, train)

        if depth <= most:
            return run(None)
        few = run(most)
        return few + (depth - most) * (few - run(most - 1))

    def _module(self, use: Use, num_layers: int | None = None) -> PackedModel:
        """``use``; ``num_layers``: with its first layers only."""
        config = copy.deepcopy(self.config(use))
        if num_layers is not None:
            _cut(config.get_text_config(), num_layers)
        if use.dropout is not None:
            set_dropout(config, use.dropout)
        options: dict[str, Any] = {"trust_remote_code": use.trust_remote_code, "dtype": use.dtype}
        if use.attn_implementation in ("eager", "sdpa"):  # others save what sdpa saves
            options["attn_implementation"] = use.attn_implementation
        auto = AutoModelForCausalLM
        if use.kind == "score":
            config.num_labels, auto = 1, AutoModelForSequenceClassification
        drop_pad(config)
        with muted(logging.WARNING):  # warnings of transformers and PEFT concern loaded weights
            files = CheckpointFiles(use.name, use.flag)
            with blamed_on(files), init_empty_weights(include_buffers=True):
                module = auto.from_config(config, **options)
            module = prepare_for_training(
                module,
                use.gradient_checkpointing,
                use.lora_dim,
                0.0,
                list(use.lora_modules),
                use.only_optimize_lora,
                use.flag,
                use.activations_on_host,
            )
            wrap = ScoreModel if use.kind == "score" else LanguageModel
            packed = wrap(module, use.packing)
        return packed.to(use.dtype)  # PEFT makes fp32 adapters, which DeepSpeed casts to 16 bit


def _count(module: PackedModel) -> Sizes:
    counts = [(p.numel(), p.requires_grad) for p in module.parameters()]
    layers = linear_layers(module.base).items()
    linear = [m.weight.numel() for name, m in layers if ".lora_" not in name]
    return Sizes(
        total=sum(n for n, _ in counts),
        trained=sum(n for n, trained in counts if trained),
        largest=max(n for n, _ in counts),
        shape=shape_of(module.base),
        linear=(sum(linear), max(linear, default=0)),
    )


def _cut(config: PretrainedConfig, num_layers: int) -> None:
    """Reduce ``config`` to ``num_layers`` layers, including lists with one entry per layer."""
    depth = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, (list, tuple)) and len(value) == depth:
            setattr(config, name, value[:num_layers])
    config.num_hidden_layers = num_layers
