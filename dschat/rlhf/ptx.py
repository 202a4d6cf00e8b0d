"""Adds a pretraining loss on text (InstructGPT's ptx) to the actor's optimizer steps."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

import dschat.distributed as dist
from dschat.config import RLHFConfig
from dschat.data.batches import Endless, StepBatches
from dschat.data.micro_batches import MicroBatchSize, row_tokens
from dschat.data.pretraining_text import text_dataset
from dschat.models.packing import PackedRows, pack
from dschat.rlhf.batching import micro_batch_size
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.runtime.optimizer_step import DeviceSums, OptimizerStep

TextSteps = Iterator[list[dict[str, Any]]]  # this rank's rows (with ``input_ids``) of each step


def unsupervised_steps(args: RLHFConfig, tokenizer: PreTrainedTokenizerBase) -> TextSteps | None:
    """Yield this rank's rows of pretraining text per optimizer step; None without ptx.

    A step has as many blocks of text as a mini-batch has sequences, each of the maximal length of
    prompt + answer.
    """
    if args.unsupervised_dataset_name is None:
        return None
    blocks = text_dataset(
        args.unsupervised_dataset_name,
        args.unsup_column,
        tokenizer,
        args.longest_row,
        config=args,
    )
    world = dist.world_size()
    batches = StepBatches(
        blocks,
        args.mini_batch_size(world),
        MicroBatchSize(args.per_device_training_batch_size),
        dist.rank(),
        world,
        args.seed,
    )
    return Endless(batches)


def text_micro_batches(
    engine: DeepSpeedRLHFEngine, steps: TextSteps | None, rows: int
) -> list[PackedRows]:
    """Collective. The next step's text on the device, ``rows`` at a time unless there is a token
    budget; empty without that loss.
    """
    if steps is None:
        return []
    ids = [row["input_ids"] for row in next(steps)]
    parts = micro_batch_size(engine, rows).split([row_tokens({"input_ids": row}) for row in ids])
    texts = [[ids[i] for i in part] for part in parts]
    packed = (pack(rows, [range(len(row) - 1) for row in rows]) for rows in texts)
    return [rows.to(dist.device()) for rows in packed]


def add_text_loss(
    engine: DeepSpeedRLHFEngine,
    step: OptimizerStep,
    batches: list[PackedRows],
    coef: float,
    denominator: float,
) -> list[DeviceSums]:
    """Collective. Add ``coef`` x the token mean of the pretraining loss to the actor's step, which
    divides by ``denominator``; sums of metrics.
    """
    if not batches:
        return []
    (num_tokens,) = dist.sum_floats([float(sum(len(batch.targets) for batch in batches))])
    # `step` divides by the action tokens; this factor replaces that by the text's tokens.
    weight = coef * max(denominator, 1.0) / max(num_tokens, 1.0)
    parts = []
    for batch in batches:
        logprobs, _ = engine.actor(batch)
        loss, num_targets = -logprobs.sum(), torch.ones_like(logprobs).sum()
        step.backward(weight * loss)
        parts.append({"ptx_loss": loss.detach(), "ptx_tokens": num_targets})
    return parts
