"""Trains and evaluates steps 1 and 2: any `Task`, such as next-token cross entropy and pairwise
reward modelling.
"""

import logging
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

import dschat.distributed as dist
from dschat.checkpoint.manager import RunState
from dschat.config import SupervisedConfig
from dschat.data.batches import Endless, StepBatches
from dschat.data.micro_batches import (
    MicroBatchSize,
    RankedBatch,
    WeightedBatch,
    collate_pairs,
    collate_sft,
    row_tokens,
)
from dschat.losses import pairwise_loss
from dschat.models.routing import METRIC, add_router_loss, router_metrics
from dschat.models.training_engine import ModelOrEngine, TrainingEngine, evaluating
from dschat.observability.console import eta, format_line, progress
from dschat.observability.health import RunHealth, Settings
from dschat.observability.metrics_log import MetricsLog
from dschat.runtime import optimizer_step
from dschat.runtime.best_model import BestModel
from dschat.runtime.checkpointing import training_checkpointer
from dschat.runtime.optimizer_step import DeviceSums, OptimizerStep, SkippedSteps

logger = logging.getLogger("dschat")

Rows = list[dict[str, Any]]


class Task(Protocol):
    """Batches rows and computes their loss and metrics, for `dschat.supervised.loop`."""

    columns: tuple[str, ...]  # metrics in the console line

    def collate(self, rows: Rows) -> Any: ...

    def longest_row(self, num_tokens: int) -> dict[str, Any]:
        """A synthetic row of sequences of ``num_tokens`` that takes the most memory."""
        ...

    def weight(self, batch: Any) -> float:
        """This batch's part of the step's denominator: its target tokens, or its pairs."""
        ...

    def prepare(self, model: ModelOrEngine, batches: list[Any]) -> list[Any]:
        """Collective. The micro-batches of an optimizer step or an evaluation, with values added
        that their losses need from all of them or from another model. Without gradient.
        """
        return batches

    def loss(self, model: ModelOrEngine, batch: Any) -> tuple[Tensor, DeviceSums]:
        """The sum of losses over the batch (0-d), and sums for the metrics; reads nothing from the
        device.
        """
        ...

    def summarize(self, sums: dict[str, float]) -> dict[str, float]:
        """Means from the sums over all ranks and micro-batches."""
        ...


class SFTTask(Task):
    """Next-token cross entropy on the tokens that the loss mask selects, by their weights."""

    columns = ("loss", "perplexity")

    collate = staticmethod(collate_sft)

    def longest_row(self, num_tokens: int) -> dict[str, Any]:
        return {"input_ids": [0] * num_tokens, "loss_mask": [True] * num_tokens}

    def weight(self, batch: WeightedBatch) -> float:
        return batch.weight

    def loss(self, model: ModelOrEngine, batch: WeightedBatch) -> tuple[Tensor, DeviceSums]:
        logprobs, _ = model(batch.rows)
        weights = torch.ones_like(logprobs) if batch.weights is None else batch.weights
        total = -(logprobs * weights).sum()
        sums = {"loss": total.detach(), "tokens": weights.sum()}
        return add_router_loss(model, total, sums, batch.rows, batch.weight)

    def summarize(self, sums: dict[str, float]) -> dict[str, float]:
        loss = sums["loss"] / max(sums["tokens"], 1.0)
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 100.0))}
        return metrics | _router_metrics(sums, sums["tokens"])


class RewardTask(Task):
    """-log sigmoid of the difference of two last-token scores, as the mean over a row's pairs of
    answers (InstructGPT, eq. 1): however many answers a row ranks, it weighs as much as a pair.

    Args:
        most_answers: of a row, for `longest_row`.
    """

    columns = ("loss", "accuracy", "margin")

    def __init__(self, most_answers: int = 2) -> None:
        self._most_answers = most_answers

    collate = staticmethod(collate_pairs)

    def longest_row(self, num_tokens: int) -> dict[str, Any]:
        chosen, rejected, *others = [[0] * num_tokens] * self._most_answers
        row: dict[str, Any] = {"chosen_ids": chosen, "rejected_ids": rejected}
        return row | {"other_ids": others, "ranks": list(range(self._most_answers))}

    def weight(self, batch: RankedBatch) -> int:
        return batch.num_real

    def loss(self, model: ModelOrEngine, batch: RankedBatch) -> tuple[Tensor, DeviceSums]:
        # NOTE: all answers in one forward. Two forwards before their backwards break ZeRO-3's
        # gradients.
        scores = model(batch.rows)
        total, metrics = pairwise_loss(scores[batch.better], scores[batch.worse], batch.weights)
        rows = total.new_full((), batch.num_real)
        metrics |= {"loss": total.detach(), "rows": rows}
        return add_router_loss(model, total, metrics, batch.rows, batch.num_real)

    def summarize(self, sums: dict[str, float]) -> dict[str, float]:
        pairs = max(sums["pairs"], 1.0)
        return {
            "loss": sums["loss"] / max(sums["rows"], 1.0),
            "accuracy": sums["correct"] / pairs,
            "margin": sums["margin"] / pairs,
            "chosen_score": sums["chosen"] / pairs,
            "rejected_score": sums["rejected"] / pairs,
        } | _router_metrics(sums, sums["rows"])


def _router_metrics(sums: dict[str, float], weight: float) -> dict[str, float]:
    return {METRIC: sums[METRIC] / max(weight, 1.0)} if METRIC in sums else {}


def _reduce(parts: list[DeviceSums]) -> dict[str, float]:
    """Collective. Sum over micro-batches and ranks; every rank must have the same names."""
    return dist.sum_named(dict(sorted(optimizer_step.sum_parts(parts).items())))


def _micro_batches(task: Task, rows: Rows, size: MicroBatchSize) -> list[Any]:
    """Collective. This rank's ``rows`` in micro-batches; equally many on every rank."""
    parts = size.split([row_tokens(row) for row in rows])
    return [task.collate([rows[i] for i in part]) for part in parts]


@torch.no_grad()
def evaluate(model: ModelOrEngine, task: Task, batches: StepBatches) -> dict[str, float]:
    """Collective. ``eval/...`` metrics over every held-out row, each counted once."""
    rows = [row for step in batches.epoch(0) for row in step]
    micro_batches = _micro_batches(task, rows, batches.size)
    with evaluating(model):
        parts = [
            task.loss(model, batch.to(dist.device()))[1]
            for batch in task.prepare(model, micro_batches)
        ]
    return {f"eval/{name}": value for name, value in task.summarize(_reduce(parts)).items()}


def num_total_steps(config: SupervisedConfig, batches: StepBatches) -> int:
    """Optimizer steps of the whole run: ``max_steps``, or the steps of all epochs."""
    return config.max_steps or config.num_train_epochs * len(batches)


def train_step(
    engine: TrainingEngine, task: Task, rows: Rows, size: MicroBatchSize
) -> tuple[dict[str, float], OptimizerStep]:
    """Collective. One optimizer step on ``rows``, this rank's part of a global batch.

    Returns the metrics of the global batch, and the finished step.
    """
    batches = _micro_batches(task, rows, size)
    (denominator,) = dist.sum_floats([float(sum(map(task.weight, batches)))])
    step = OptimizerStep(engine, len(batches), denominator)
    # All on the device before the first forward: a copy from host memory waits for the device.
    batches = [batch.to(dist.device()) for batch in batches]
    parts = []
    for batch in task.prepare(engine, batches):
        loss, sums = task.loss(engine, batch)
        step.backward(loss)
        parts.append(sums)
    step.finish()
    return task.summarize(_reduce(parts)) | router_metrics(engine), step


def train(
    engine: TrainingEngine,
    task: Task,
    config: SupervisedConfig,
    train_batches: StepBatches,
    eval_batches: StepBatches,
    metrics_log: MetricsLog,
    save: Callable[[], None] = lambda: None,
    call: Callable[..., None] = lambda *_: None,
    best: BestModel | None = None,
) -> dict[str, float]:
    """Collective. Evaluate, train, ``save``, evaluate; returns the last evaluation's metrics.
    ``call``: `Callbacks`. ``best``: the model for ``--keep_best``.

    With ``--resume`` it continues from a checkpoint with the same results as without a break.

    Raises:
        FloatingPointError: after ``max_bad_steps`` steps in a row without a finite gradient, or at
            the end where no step had one.
        TrainingStopped: after saving, where the run was asked to stop.
    """
    total = num_total_steps(config, train_batches)
    steps, skipped = Endless(train_batches), SkippedSteps(config.max_bad_steps)
    health = RunHealth(Settings("step"))
    best = best or BestModel(config, "", lambda folder: None)
    leading = "eval/accuracy" if "accuracy" in task.columns else "eval/loss"

    def state() -> RunState:
        values = {
            "step": steps.position,
            "bad": skipped.in_a_row,
            "rows": len(train_batches.dataset),
            "log": metrics_log.position(),
            "health": health.state(),
        } | best.state()
        return RunState({"model": engine}, values=values, files=metrics_log.files)

    def evaluated(done: int) -> dict[str, float]:
        """Log an evaluation after ``done`` steps; its metrics."""
        if len(eval_batches) == 0:
            return {}
        metrics = evaluate(engine, task, eval_batches)
        call("on_evaluate", engine, metrics)
        metrics_log.write(done, metrics)
        metrics_log.write_warnings(done, health.read(done, metrics))
        logger.info(format_line("held out", done, total, metrics, metrics))
        best.take(metrics, leading, f"step {done}")
        return metrics

    def restore(values: dict[str, Any]) -> None:
        steps.position, skipped.in_a_row = values["step"], values["bad"]
        vars(health).update(values["health"])
        best.restore(values)

    with training_checkpointer(config, save) as checkpointer:
        values = checkpointer.begin(state(), total, restore)
        if values is None:
            metrics_log.begin()
            evaluated(0)
        else:
            metrics_log.resume_from(values["log"], values["step"])
        engine.train()
        bar = progress(total, "training", config.disable_tqdm, steps.position)
        while steps.position < total:
            epoch = train_batches.epoch_of(steps.position)
            rate, started = optimizer_step.learning_rate(engine), time.perf_counter()
            metrics, step = train_step(engine, task, next(steps), train_batches.size)
            done = steps.position
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
                metrics["loss_scale"] = optimizer_step.loss_scale(engine)
            call("on_step", engine, metrics)
            if done % config.logging_steps == 0:
                metrics_log.write(done, metrics)
                columns = (*task.columns, "grad_norm", "learning_rate")
                logger.info(format_line("step", done, total, metrics, columns) + eta(bar))
            if config.eval_steps and done % config.eval_steps == 0 and done < total:
                evaluated(done)
            checkpointer.after(done, state, is_last=done == total)
        bar.close()
        skipped.require_some(any_applied=skipped.in_a_row < total)
        save()  # before an evaluation that may fail, or run out of memory
        call("on_save", engine, config.output_dir)
        metrics = evaluated(total)
        metrics_log.log_change(leading)
        return metrics
