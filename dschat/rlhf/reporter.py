"""Reports a run of step 3: a console line per iteration, metrics.jsonl, samples, evaluations.

Also saves and resumes it at iteration boundaries, and reads the pretraining text of ptx.
"""

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

import dschat.distributed as dist
from dschat.checkpoint.fingerprint import model_fingerprint
from dschat.checkpoint.manager import RunState
from dschat.config import RLHFConfig
from dschat.data.batches import StepBatches, endless
from dschat.data.micro_batches import MicroBatchSize
from dschat.data.pretraining_text import text_dataset
from dschat.observability.console import format_line, progress
from dschat.observability.metrics_log import MetricsLog
from dschat.rlhf.evaluation import HeldOutPrompts, evaluate_policy, require_metric
from dschat.rlhf.experience import Experience
from dschat.rlhf.samples import answer_table, format_answers, sample_row
from dschat.rlhf.trainer import DeepSpeedPPOTrainer
from dschat.runtime.checkpointing import TrainingCheckpointer

logger = logging.getLogger("dschat")

_COLUMNS = (
    "objective/scores",
    "objective/kl",
    "objective/teacher_kl",
    "objective/entropy",
    "loss/policy_avg",
    "loss/value_avg",
    "rollout/answer_length",
    "time/generate_s",
    "time/iteration_s",
)


def unsupervised_steps(
    args: RLHFConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[list[dict[str, Any]]] | None:
    """Yield this rank's rows of pretraining text per optimizer step; None without ptx.

    A step has as many blocks of text as a mini-batch has sequences, each of the maximal length of
    prompt + answer.
    """
    if args.unsupervised_dataset_name is None:
        return None
    blocks = text_dataset(
        args.unsupervised_dataset_name,
        args.unsupervised_dataset_config_name,
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
    return endless(batches)


class Reporter:
    """Logs iterations and evaluations of one run."""

    def __init__(
        self,
        trainer: DeepSpeedPPOTrainer,
        held_out: HeldOutPrompts,
        num_iters: int,
        num_rows: int | None = None,
    ) -> None:
        """``num_rows``: number of training prompts; None for a stream."""
        self._trainer = trainer
        self._engine = trainer.engine
        self._args = trainer.args
        self._held_out = held_out
        self._num_iters, self._num_rows = num_iters, num_rows
        self._log = MetricsLog(
            self._args.output_dir, self._args, has_samples=self._args.sample_steps > 0
        )
        self._best = -math.inf
        self._best_print: str | None = None  # of the actor in `_best_folder`
        self._best_folder = Path(self._args.output_dir or "") / "actor_best"
        self._bar = progress(num_iters, "RLHF", self._args.disable_tqdm)

    def begin(self, checkpointer: TrainingCheckpointer) -> None:
        """Collective. Resume from a checkpoint; or else begin, with an evaluation."""
        self._checkpointer = checkpointer
        values = checkpointer.begin(self._state(), self._num_iters, self._trainer.load_run_state)
        if values is None:
            self._log.begin()
            self.evaluate()
            return
        # After it the folder may have got an actor of a branch that is given up.
        self._best_print = model_fingerprint(str(self._best_folder))
        is_kept = values.get("best_print") == self._best_print
        if is_kept and values["best_metric"] == self._args.best_metric:
            self._best = values["best"]
        self._log.resume_from(values["log"], self._trainer.iteration)
        self._bar.update(self._trainer.iteration)
        self._evaluate_if_due()  # the checkpoint was saved before the evaluation

    def _state(self) -> RunState:
        state = self._trainer.run_state()
        state.values |= {"best": self._best, "best_metric": self._args.best_metric}
        state.values["best_print"] = self._best_print
        state.values |= {"log": self._log.position(), "rows": self._num_rows}
        state.files = self._log.files
        return state

    def step(self, experience: Experience) -> None:
        """Collective. Report the iteration that just ended; save and evaluate where due.

        Raises ``TrainingStopped``, after saving, where the run was asked to stop.
        """
        done, args = self._trainer.iteration, self._args
        self._checkpointer.leave()
        self._bar.update()
        if done % args.logging_steps == 0:
            self._log.write(done, self._trainer.metrics)
            logger.info(format_line(done, self._num_iters, self._trainer.metrics, _COLUMNS))
        is_recorded = args.sample_steps > 0 and (done == 1 or done % args.sample_steps == 0)
        if is_recorded or (args.print_answers and done % args.print_answers_interval == 0):
            self._show_samples(experience, is_recorded)
        self._checkpointer.after(done, self._state, is_last=done == self._num_iters)
        self._evaluate_if_due()

    def _evaluate_if_due(self) -> None:
        done, every = self._trainer.iteration, self._args.eval_steps
        if every and done % every == 0 and done < self._num_iters:
            self.evaluate()

    def evaluate(self) -> None:
        """Collective. Evaluate the actor and, once it differs, its moving average."""
        if self._held_out.total == 0:
            return
        with self._engine.rollout_mode() as generator:
            metrics = evaluate_policy(
                self._engine, generator, self._held_out, self._trainer.collector
            )
        self._log_held_out(metrics, "held out")
        self._keep_best(metrics)
        if self._trainer.iteration > 0 and self._engine.ema is not None:
            with self._engine.ema_mode() as generator:
                average = evaluate_policy(
                    self._engine, generator, self._held_out, self._trainer.collector
                )
            self._log_held_out(average, "held out, moving average")
            metrics |= {name.replace("eval/", "eval_ema/"): v for name, v in average.items()}
        self._log.write(self._trainer.iteration, metrics)

    def _keep_best(self, metrics: dict[str, float]) -> None:
        """Collective. Save the actor if this evaluation is the best so far."""
        name = self._args.best_metric
        if not self._args.keep_best:
            return
        require_metric(name, metrics)
        if metrics[name] > self._best:
            self._best = metrics[name]
            self._engine.save_actor(self._best_folder)
            self._best_print = model_fingerprint(str(self._best_folder))
            logger.info(
                "best %s so far: %.4f at iteration %d, saved as %s",
                name,
                self._best,
                self._trainer.iteration,
                self._best_folder,
            )

    def _log_held_out(self, metrics: dict[str, float], label: str) -> None:
        line = format_line(self._trainer.iteration, self._num_iters, metrics, metrics)
        logger.info("%s  (%s)", line, label)

    def _show_samples(self, e: Experience, is_recorded: bool) -> None:
        """Log sample answers; ``is_recorded``: also to samples.jsonl and the other sinks."""
        if not dist.is_main_process() or not e.num_sequences:
            return
        row = sample_row(
            e,
            self._engine.tokenizer,
            self._args.num_samples_per_prompt,
            self._engine.has_reference,
        )
        table = answer_table(row)
        if is_recorded:
            self._log.write_samples(self._trainer.iteration, row, table)
        logger.info("sample answers\n%s", format_answers(table))

    def close(self) -> None:
        self._bar.close()
        self._log.close()
