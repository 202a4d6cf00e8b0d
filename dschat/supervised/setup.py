"""Builds the base model, engine and batches of steps 1 and 2, and saves the result."""

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import dschat.distributed as dist
from dschat.builtin.tiny_model import resolve_model
from dschat.checkpoint.hf_export import export_adapter, export_hf
from dschat.checkpoint.saved_check import probe_values
from dschat.config import SupervisedConfig
from dschat.config.fields import AUTO, fixed_or_zero
from dschat.data.batches import RowTable, StepBatches, check_same_rows
from dschat.data.micro_batches import MicroBatchSize, row_tokens
from dschat.distributed import stop_signals
from dschat.hybrid.weight_stream import adapter_stream, weight_bytes, weight_stream
from dschat.models.checkpoint import Checkpoint
from dschat.models.checkpoint_tensors import announce_rest
from dschat.models.heads import LanguageModel
from dschat.models.packing.model import PackedModel, packed_model
from dschat.models.tokenizer import match_vocabulary, num_ids, stop_ids
from dschat.models.training_engine import TrainingEngine
from dschat.runtime.deepspeed_engine import ZeroSettings, sharded_loading, trained_engine, unwrap
from dschat.runtime.hub import write_card
from dschat.runtime.output_dir import check_room
from dschat.runtime.start import warn_of_few_steps
from dschat.runtime.token_budget import measure_budget
from dschat.supervised.loop import Task

logger = logging.getLogger("dschat")

BASE = "--model_name_or_path"


class Base(NamedTuple):
    """The model that a step starts from, before its weights load."""

    checkpoint: Checkpoint
    tokenizer: PreTrainedTokenizerBase


class HubFiles(NamedTuple):
    """What a Hugging Face folder has beside the weights, as `export_hf` takes it."""

    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...] = ()


def read_base(config: SupervisedConfig, kind: Literal["lm", "score"]) -> Base:
    """Collective. The base model's configuration and tokenizer, checked against the flags.

    Raises:
        UserError: a model of another kind; attention, LoRA modules or lengths that the model does
            not have; no tokenizer.
    """
    with dist.main_process_first():
        name = resolve_model(config.model_name_or_path)
    trust = config.trust_remote_code
    checkpoint = Checkpoint(name, BASE, trust)
    lora = config.lora_dim, config.lora_modules, "--lora_dim"
    bits = config.weight_bits()
    checkpoint.check(kind, config.attn_implementation, *lora, *config.row_form, bits)
    checkpoint.check_positions(config.max_seq_len, "--max_seq_len", "lower it")
    source = checkpoint
    if config.tokenizer_name_or_path:
        source = Checkpoint(config.tokenizer_name_or_path, "--tokenizer_name_or_path", trust)
    return Base(checkpoint, source.tokenizer(**config.tokenizer_flags))


def load_policy(
    config: SupervisedConfig, base: Base, zero: ZeroSettings, dropout: float | None
) -> PreTrainedModel:
    """Collective. ``base`` as a causal LM in ``zero``'s layout; dropout None: the model's own."""
    options = dropout, config.attn_implementation, num_ids(base.tokenizer), config.max_seq_len
    with sharded_loading(zero):
        model = base.checkpoint.language_model(zero.dtype, *options, zero.weight_bits)
    announce_rest(model)
    return model


def policy_files(config: SupervisedConfig, base: Base, model: PreTrainedModel) -> HubFiles:
    """What is saved beside ``model``, which `load_policy` made of ``base``: the configuration of
    its checkpoint, with the rows and the pad id of ``model``.
    """
    saved = copy.deepcopy(base.checkpoint.config)
    match_vocabulary(saved, model.config, config.lora_dim > 0 and config.only_optimize_lora)
    stops = stop_ids(base.tokenizer, model.generation_config)
    return HubFiles(saved, base.tokenizer, stops)


def build_engine(
    model: nn.Module,
    config: SupervisedConfig,
    zero: ZeroSettings,
    num_steps: int,
    wrap: type[PackedModel] = LanguageModel,
) -> Any:
    """Collective. Add adapters and gradient checkpointing to ``model``, then ``wrap`` it and put a
    DeepSpeed engine around it.

    Raises ``UserError`` where the disk has no space for the saved model.
    """
    if config.output_dir is not None:
        check_room(config.output_dir, [weight_bytes(model)] * (1 + bool(config.keep_best)))
    logger.info("%s, %s", zero.describe(), str(zero.dtype).removeprefix("torch."))
    warn_of_few_steps(config, num_steps, "per_device_train_batch_size")
    return trained_engine(model, config, "", zero, wrap, num_steps)


def step_batches(
    config: SupervisedConfig, train: RowTable, held_out: RowTable
) -> tuple[StepBatches, StepBatches]:
    """Collective. This rank's share of the shuffled training rows, and of the held-out rows in
    order. ``UserError`` where ranks have other rows.
    """
    check_same_rows(train, held_out)
    world, rows = dist.world_size(), config.per_device_eval_batch_size
    tokens, ranks = fixed_or_zero(config.max_tokens_per_micro_batch), config.sequence_parallel_size
    size = MicroBatchSize(config.per_device_train_batch_size, tokens, ranks=ranks)
    share = dist.rank(), world, config.seed
    return (
        StepBatches(train, config.global_batch_size(world), size, *share),
        StepBatches(held_out, rows * world, replace(size, rows=rows), *share, shuffle=False),
    )


def settle_micro_batches(
    config: SupervisedConfig, engine: TrainingEngine, task: Task, *batches: StepBatches
) -> None:
    """Collective. Set the size of micro-batches by what they depend on the model for: padding, and
    the token budget where that is auto.
    """
    model = packed_model(engine)
    size = replace(batches[0].size, padded=model.pads, by_row=model.by_row)
    if config.max_tokens_per_micro_batch == AUTO:
        size = replace(size, tokens=_measured_budget(config, engine, task))
    for each in batches:
        each.size = replace(size, rows=each.size.rows)


def _measured_budget(config: SupervisedConfig, engine: TrainingEngine, task: Task) -> int:
    """Collective. The token budget by a trial of the longest rows."""
    row = task.longest_row(-(-config.max_seq_len // config.sequence_parallel_size))
    longest = row_tokens(row).total

    def forward(num_rows: int) -> Tensor:
        (batch,) = task.prepare(engine, [task.collate([row] * num_rows)])
        return task.loss(engine, batch.to(dist.device()))[0]

    return measure_budget([(engine, forward)], longest, config.global_batch_size(1))


def save(
    engine: TrainingEngine, config: SupervisedConfig, files: HubFiles, subfolder: str = ""
) -> None:
    """Collective. Export ``engine``'s model as a Hugging Face folder.

    An adapter is exported too where the base was frozen: it fits no other weights. A stop signal
    waits until all is saved; a second one does not.

    Args:
        subfolder: of the output folder.
    """
    assert config.output_dir is not None
    folder = Path(config.output_dir) / subfolder
    module = unwrap(engine)
    with stop_signals.handle_stop_signals(config.output_dir):
        values = probe_values(engine, files.config)
        stream = weight_stream(module, dist.device())
        export_hf(folder, stream, module, *files, values)
        if config.lora_dim and config.only_optimize_lora:
            export_adapter(folder / "adapter", adapter_stream(module, dist.device()), module)
    write_card(folder, config)
    logger.info("saved %s", folder)
