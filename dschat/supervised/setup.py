"""Builds what steps 1 and 2 train with, and saves what they trained."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

import dschat.distributed as dist
from dschat.checkpoint import export_adapter, export_hf
from dschat.config import SupervisedConfig
from dschat.data.batches import StepBatches
from dschat.distributed import stop_signals
from dschat.hybrid.weight_stream import adapter_stream, weight_bytes, weight_stream
from dschat.models.fit import check_fit, check_positions
from dschat.models.lora import prepare_for_training
from dschat.models.tokenizer import load_tokenizer
from dschat.runtime.deepspeed_engine import ZeroSettings, initialize_training
from dschat.runtime.deepspeed_engine import zero_settings as deepspeed_zero_settings
from dschat.runtime.output_dir import check_room, mark_complete

logger = logging.getLogger("dschat")


def load_tokenizer_of_base(
    config: SupervisedConfig, name: str, model_config: PretrainedConfig, kind: str
) -> PreTrainedTokenizerBase:
    """The tokenizer of the base model ``name``, once ``model_config`` is known to do what the flags
    ask. ``kind``: "lm" or "score", as `check_fit` takes it.

    Raises:
        UserError: attention, LoRA modules or lengths that the model does not have; no tokenizer.
    """
    flag = "--model_name_or_path"
    lora = config.lora_dim, config.lora_modules
    check_fit(model_config, name, flag, kind, config.attn_implementation, *lora)
    check_positions(model_config, config.max_seq_len, name, "--max_seq_len", "lower it")
    return load_tokenizer(
        config.tokenizer_name_or_path or name,
        "--tokenizer_name_or_path" if config.tokenizer_name_or_path else flag,
        config.trust_remote_code,
        config.end_of_turn,
        config.chat_template,
    )


def zero_settings(config: SupervisedConfig) -> ZeroSettings:
    """How this configuration lays out and computes its one model; see `deepspeed_setup`."""
    return deepspeed_zero_settings(config)


def build_engine(
    model: nn.Module,
    config: SupervisedConfig,
    zero: ZeroSettings,
    num_steps: int,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Any:
    """Collective. Adapters and checkpointing onto ``model``, ``wrap`` and an engine around it.

    Raises ``UserError`` where the disk has no space for what will be saved.
    """
    if config.output_dir is not None:
        check_room(config.output_dir, [weight_bytes(model)])
    logger.info("%s, %s", zero.describe(), str(zero.dtype).removeprefix("torch."))
    model = prepare_for_training(
        model,
        config.gradient_checkpointing,
        config.lora_dim,
        config.lora_alpha,
        config.lora_modules,
        config.only_optimize_lora,
        "--lora_modules",
    )
    return initialize_training(
        wrap(model),
        zero,
        config.learning_rate,
        config.weight_decay,
        config.adam_betas,
        config.lr_scheduler_type,
        config.num_warmup_steps,
        num_steps,
    )


def step_batches(
    config: SupervisedConfig, train: Any, held_out: Any
) -> tuple[StepBatches, StepBatches]:
    """This rank's share of the training rows, shuffled, and of the held-out rows, in order."""
    rank, world = dist.rank(), dist.world_size()
    return (
        StepBatches(
            train,
            config.global_batch_size(world),
            config.per_device_train_batch_size,
            rank,
            world,
            config.seed,
        ),
        StepBatches(
            held_out,
            config.per_device_eval_batch_size * world,
            config.per_device_eval_batch_size,
            rank,
            world,
            config.seed,
            shuffle=False,
        ),
    )


def save(
    module: nn.Module, config: SupervisedConfig, *companions: Any, subfolder: str = ""
) -> None:
    """Collective. Export ``module`` as a Hugging Face folder, its adapter besides, and mark the
    output folder, of which that may be a ``subfolder``.

    An adapter is of use only on the weights it was trained on: it is kept where those were frozen.
    A signal meanwhile waits until all is saved; a second one does not.

    ``companions``: model configuration, tokenizer, architecture name and stop ids, as `export_hf`
    takes them.
    """
    assert config.output_dir is not None
    folder = Path(config.output_dir) / subfolder
    with stop_signals.handle_stop_signals(config.output_dir):
        export_hf(folder, weight_stream(module, dist.device()), *companions)
        if config.lora_dim and config.only_optimize_lora:
            export_adapter(folder / "adapter", adapter_stream(module, dist.device()), module)
        mark_complete(config.output_dir)
