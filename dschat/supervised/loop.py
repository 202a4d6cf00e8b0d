"""The loop of steps 1 and 2, and two tasks for it: SFT and reward modelling.

An engine, batches and a task come in; a trained engine and a log of metrics go out. It must not
know where the data came from, nor anything of RLHF.
"""

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

import dschat.distributed as dist
from dschat.checkpoint import RunState, export_adapter, export_hf
from dschat.config import SupervisedConfig
from dschat.data.batches import StepBatches, endless
from dschat.data.collate import PairBatch, SFTBatch, collate_pairs, collate_sft
from dschat.distributed import stop_signals
from dschat.hybrid.weight_stream import adapter_stream, weight_bytes, weight_stream
from dschat.losses import lm_loss, pairwise_loss
from dschat.models.fit import check_fit, check_positions
from dschat.models.lora import prepare_for_training
from dschat.models.score_model import gather_last
from dschat.models.tokenizer import load_tokenizer
from dschat.observability.console import format_line, progress
from dschat.observability.metrics_log import MetricsLog
from dschat.runtime.checkpointing import boundaries
from dschat.runtime.deepspeed_engine import ZeroSettings, initialize_training
from dschat.runtime.deepspeed_engine import zero_settings as deepspeed_zero_settings
from dschat.runtime.optimizer_step import SkippedSteps, Step, learning_rate, loss_scale
from dschat.runtime.output_dir import check_room, mark_complete

logger = logging.getLogger("dschat")

Rows = list[dict[str, Any]]
Sums = dict[str, float]


class Task(Protocol):
    """What a step trains on: rows to batch, the batch's weight, its loss, its metrics."""

    columns: tuple[str, ...]  # what the one line a step shows

    def collate(self, rows: Rows) -> Any: ...

    def weight(self, batch: Any) -> int:
        """This batch's share of the step's denominator: its target tokens, or pairs."""
        ...

    def prepare(self, model: nn.Module, batches: list[Any]) -> list[Any]:
        """Collective. The micro-batches of an optimizer step, or of an evaluation, with what their
        losses need to know of the others, or of another model. No gradient.
        """
        return batches

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Sums]:
        """The sum of losses over the batch (0-d), and sums of what is reported."""
        ...

    def summarise(self, sums: Sums) -> dict[str, float]:
        """Means out of sums over all ranks and micro-batches."""
        ...


class SFTTask(Task):
    """Next-token cross entropy on the masked-in tokens."""

    columns = ("loss", "perplexity")

    def __init__(self, pad_id: int) -> None:
        self._pad_id = pad_id

    def collate(self, rows: Rows) -> SFTBatch:
        return collate_sft(rows, self._pad_id)

    def weight(self, batch: SFTBatch) -> int:
        return int(batch.loss_mask[:, 1:].sum())  # the first token is predicted by nothing

    def loss(self, model: nn.Module, batch: SFTBatch) -> tuple[Tensor, Sums]:
        logits = model(input_ids=batch.input_ids, use_cache=False).logits
        total, num_tokens = lm_loss(logits, batch.input_ids, batch.loss_mask)
        sums = {"loss": float(total.detach()), "tokens": float(num_tokens)}
        return total, sums

    def summarise(self, sums: Sums) -> dict[str, float]:
        loss = sums["loss"] / max(sums["tokens"], 1.0)
        return {"loss": loss, "perplexity": math.exp(min(loss, 100.0))}


class RewardTask(Task):
    """-log sigmoid of the difference of two last-token scores (InstructGPT, eq. 1)."""

    columns = ("loss", "accuracy", "margin")

    def __init__(self, pad_id: int) -> None:
        self._pad_id = pad_id

    def collate(self, rows: Rows) -> PairBatch:
        return collate_pairs(rows, self._pad_id)

    def weight(self, batch: PairBatch) -> int:
        return batch.num_real

    def loss(self, model: nn.Module, batch: PairBatch) -> tuple[Tensor, Sums]:
        # NOTE: both answers in one forward; two forwards before their backwards break ZeRO-3's
        # gradients.
        scores = gather_last(model(batch.input_ids), batch.lengths)
        real = torch.arange(len(scores) // 2, device=scores.device) < batch.num_real
        chosen, rejected = scores.chunk(2)
        total, metrics = pairwise_loss(chosen[real], rejected[real])
        sums = {name: float(value) for name, value in metrics.items()}
        # The zero term keeps the graph whole on a rank that has no pair in this micro-batch.
        return total + 0.0 * scores.sum(), sums | {"loss": float(total.detach())}

    def summarise(self, sums: Sums) -> dict[str, float]:
        pairs = max(sums["pairs"], 1.0)
        return {
            "loss": sums["loss"] / pairs,
            "accuracy": sums["correct"] / pairs,
            "margin": sums["margin"] / pairs,
            "chosen_score": sums["chosen"] / pairs,
            "rejected_score": sums["rejected"] / pairs,
        }


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
    with stop_signals.requests(config.output_dir):
        export_hf(folder, weight_stream(module, dist.device()), *companions)
        if config.lora_dim and config.only_optimize_lora:
            export_adapter(folder / "adapter", adapter_stream(module, dist.device()), module)
        mark_complete(config.output_dir)


def _reduce(parts: list[Sums]) -> Sums:
    """Collective. Sums over micro-batches and ranks; every rank has the same names."""
    names = sorted(parts[0])
    totals = dist.sum_floats([sum(part[name] for part in parts) for name in names])
    return dict(zip(names, totals, strict=True))


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, batches: StepBatches) -> dict[str, float]:
    """Collective. ``eval/...`` metrics over every held-out row, each counted once."""
    training = model.training
    model.eval()
    micro_batches = [task.collate(rows) for step in batches.epoch(0) for rows in step]
    parts = []
    for batch in task.prepare(model, micro_batches):
        parts.append(task.loss(model, batch.to(dist.device()))[1])
    model.train(training)
    return {f"eval/{name}": value for name, value in task.summarise(_reduce(parts)).items()}


def num_total_steps(config: SupervisedConfig, batches: StepBatches) -> int:
    """Optimizer steps of the whole run: ``max_steps``, or as many as the epochs have."""
    return config.max_steps or config.num_train_epochs * len(batches)


def train_step(engine: Any, task: Task, micro_batches: list[Rows]) -> tuple[dict[str, float], Step]:
    """Collective. One optimizer step on this rank's part of a global batch.

    Returns the metrics of the global batch, and the finished step.
    """
    batches = [task.collate(rows) for rows in micro_batches]
    (denominator,) = dist.sum_floats([float(sum(map(task.weight, batches)))])
    step = Step(engine, len(batches), denominator)
    parts = []
    for batch in task.prepare(engine, batches):
        loss, sums = task.loss(engine, batch.to(dist.device()))
        step.backward(loss)
        parts.append(sums)
    step.finish()
    return task.summarise(_reduce(parts)), step


def train(
    engine: Any,
    task: Task,
    config: SupervisedConfig,
    train_batches: StepBatches,
    eval_batches: StepBatches,
    metrics_log: MetricsLog,
) -> dict[str, float]:
    """Collective. Evaluate, train, evaluate; returns the last evaluation's metrics.

    With ``--resume`` it goes on where a checkpoint was made, as if nothing had happened.

    Raises ``FloatingPointError`` after ``max_bad_steps`` steps in a row without a finite gradient,
    or at the end where no step had one; ``Stopped`` where it was asked to stop, saved.
    """
    total = num_total_steps(config, train_batches)
    steps, skipped = endless(train_batches), SkippedSteps(config.max_bad_steps)

    def state() -> RunState:
        values = {"step": steps.taken, "bad": skipped.in_a_row, "rows": train_batches.num_rows}
        values["log"] = metrics_log.position()
        return RunState({"model": engine}, values=values, files=metrics_log.files)

    with boundaries(config) as bounds:
        values = bounds.begin(state())
        if values is None:
            metrics_log.begin()
            _evaluate_and_log(engine, task, eval_batches, metrics_log, 0, total)
        else:
            steps.taken, skipped.in_a_row = values["step"], values["bad"]
            metrics_log.go_on_from(values["log"], values["step"])
        engine.train()
        bar = progress(total, "training", config.disable_tqdm, steps.taken)
        while steps.taken < total:
            epoch = train_batches.epoch_of(steps.taken)
            rate, started = learning_rate(engine), time.perf_counter()
            metrics, step = train_step(engine, task, next(steps))
            done = steps.taken
            bar.update()
            skipped.take(step, f"step {done}")
            metrics |= {
                "grad_norm": step.grad_norm,
                "learning_rate": rate,
                "epoch": epoch,
                "bad_steps": float(skipped.in_a_row),
                "time/step_s": time.perf_counter() - started,
            }
            if engine.fp16_enabled():
                metrics["loss_scale"] = loss_scale(engine)
            if done % config.logging_steps == 0:
                metrics_log.write(done, metrics)
                columns = (*task.columns, "grad_norm", "learning_rate", "time/step_s")
                logger.info(format_line(done, total, metrics, columns))
            if config.eval_steps and done % config.eval_steps == 0 and done < total:
                _evaluate_and_log(engine, task, eval_batches, metrics_log, done, total)
            bounds.after(done, state, is_last=done == total)
        bar.close()
        skipped.require_some(any_applied=skipped.in_a_row < total)
        return _evaluate_and_log(engine, task, eval_batches, metrics_log, total, total)


def _evaluate_and_log(
    engine: Any, task: Task, batches: StepBatches, metrics_log: MetricsLog, done: int, total: int
) -> dict[str, float]:
    if len(batches) == 0:
        return {}
    metrics = evaluate(engine, task, batches)
    metrics_log.write(done, metrics)
    logger.info("%s  (held out)", format_line(done, total, metrics, metrics))
    return metrics
