"""Reports a run of step 3: a console line per iteration, metrics.jsonl, samples, evaluations.

Sample answers of an experience, which is on the CPU, read nothing from the device.
"""

import json
import logging
import math
import shutil
import sys
from collections.abc import Callable
from functools import partial
from io import StringIO
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import dschat.distributed as dist
from dschat.models.continued_text import StreamDecoder, continued_texts
from dschat.observability.console import eta, format_line, printable, progress
from dschat.observability.health import LEADING, RunHealth, Settings
from dschat.observability.metrics_log import MetricsLog
from dschat.rlhf.evaluation import HeldOutPrompts, evaluate_policy
from dschat.rlhf.experience import Experience
from dschat.rlhf.trainer import DeepSpeedPPOTrainer
from dschat.runtime.best_model import BestModel

logger = logging.getLogger("dschat")

NUM_ANSWERS = 3  # of different prompts
_MAX_TOKENS = 512  # of an answer, with their numbers
_MAX_SEQUENCES = 1024  # in the lists of scores and lengths
_PROMPT_CHARS, _ANSWER_CHARS = 160, 160  # in the log
_COLUMNS = (
    "objective/scores",
    "objective/kl",
    "objective/teacher_kl",
    "objective/entropy",
    "rollout/answer_length",
    "rollout/eos_share",
)


class Reporter:
    """Logs iterations and evaluations of one run."""

    def __init__(
        self,
        trainer: DeepSpeedPPOTrainer,
        held_out: HeldOutPrompts,
        num_iters: int,
        call: Callable[..., None] = lambda *_: None,
    ) -> None:
        """``call``: `Callbacks`."""
        self._call = call
        self._trainer = trainer
        self._engine = trainer.engine
        self._args = trainer.args
        self._held_out = held_out
        self._num_iters = num_iters
        self.log = MetricsLog(
            self._args.output_dir, self._args, has_samples=self._args.sample_steps > 0
        )
        args = self._args
        most_clipped = args.loss_of_policy.most_clipped
        known = (args.temperature, most_clipped, args.num_samples_per_prompt, held_out.total)
        self._health = RunHealth(Settings("iteration", *known))
        self._passes: bool | None = None  # whether evaluations have pass@k: the first decides
        self._position: dict[str, Any] | None = None  # in the log, of the checkpoint
        self._best = BestModel(args, "actor_best", self._engine.save_actor)
        self._bar = progress(num_iters, "RLHF", self._args.disable_tqdm)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; the same on all ranks, but for the position in files that rank 0 writes."""
        own = {"passes": self._passes, "health": self._health.state(), "log": self.log.position()}
        return self._best.state() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`, before `begin`."""
        self._best.restore(state)
        self._passes, self._position = state["passes"], state["log"]
        self._health = RunHealth(self._health.settings, **state["health"])

    def begin(self) -> None:
        """Collective. Begin with an evaluation; or, if resumed, where the log was."""
        if self._position is None:
            self.log.begin()
            if not self._engine.has_reference:
                logger.info("a policy far from its start, or a hacked score, shows with --log_kl")
            self.evaluate()
        else:
            self.log.resume_from(self._position, self._trainer.iteration)
            self._evaluate_if_due()  # the checkpoint was saved before the evaluation
        self._bar.n = self._bar.initial = self._trainer.iteration
        self._bar.unpause()  # its pace is the iterations' from now on

    def step(
        self, experience: Experience, save: Callable[..., None] = lambda *_, **__: None
    ) -> None:
        """Collective. Report the iteration that just ended, ``save`` it, and evaluate where due.

        ``save``: takes the iteration and ``is_last``. Raises ``FloatingPointError`` with
        ``stop_on`` where the policy has collapsed.
        """
        done, args = self._trainer.iteration, self._args
        self._bar.update()
        self._call("on_step", self._trainer, self._trainer.metrics)
        if done % args.logging_steps == 0:
            self.log.write(done, self._trainer.metrics)
            line = "step", done, self._num_iters, self._trainer.metrics, _COLUMNS
            logger.info(format_line(*line) + eta(self._bar))
        if args.sample_steps and (done == 1 or done % args.sample_steps == 0):
            self._show_samples(experience)
        collapse = self._warn(self._trainer.metrics)
        save(done, is_last=done == self._num_iters)
        if collapse and args.stop_on == "collapse":
            raise FloatingPointError(f"stopped by --stop_on collapse: {collapse}")
        self._evaluate_if_due()

    def _warn(self, metrics: dict[str, float]) -> str:
        """Log new warnings; returns the line of a collapse, "" without one."""
        found = self._health.read(self._trainer.iteration, metrics)
        self.log.write_warnings(self._trainer.iteration, found)
        return next((str(finding) for finding in found if finding.kind == "collapse"), "")

    def _evaluate_if_due(self) -> None:
        done, every = self._trainer.iteration, self._args.eval_steps
        if every and done % every == 0 and done < self._num_iters:
            self.evaluate()

    def evaluate(self) -> None:
        """Collective. Evaluate the actor and, once it differs, its moving average."""
        if self._held_out.total == 0:
            return
        collector, show = self._trainer.collector, partial(self._show_samples, held_out=True)
        with self._engine.rollout_mode() as generator:
            metrics = evaluate_policy(
                self._engine, generator, self._held_out, collector, show, self._passes
            )
        self._passes = LEADING[1] in metrics
        self._call("on_evaluate", self._trainer, metrics)
        at = self._trainer.iteration, self._num_iters
        logger.info(format_line("held out", *at, metrics, metrics))
        self._warn(metrics)
        leading = next((name for name in LEADING if name in metrics), "eval/teacher_kl")
        when = f"iteration {self._trainer.iteration}"
        self._best.take(metrics, leading, when, self._health.is_doubtful)
        if self._trainer.iteration > 0 and self._engine.ema is not None:
            with self._engine.ema_mode() as generator:
                average = evaluate_policy(
                    self._engine, generator, self._held_out, collector, passes=self._passes
                )
            logger.info(format_line("average", *at, average, average))
            metrics |= {name.replace("eval/", "eval_ema/"): v for name, v in average.items()}
        self.log.write(self._trainer.iteration, metrics)

    def _show_samples(self, e: Experience, held_out: bool = False) -> None:
        """Log sample answers: to the held-out prompts, always the same ones, where the run
        evaluates, else of rollouts. Both go to samples.jsonl.
        """
        args, done = self._args, self._trainer.iteration
        if not args.sample_steps or not dist.is_main_process() or not e.num_sequences:
            return
        n = args.eval_num_samples if held_out else args.num_samples_per_prompt
        row = sample_row(e, self._engine.tokenizer, n, self._engine.has_reference and not held_out)
        if held_out:
            unknown = {"advantages": None}
            row |= {"held_out": True, "samples": [s | unknown for s in row["samples"]]}
        elif extra := self._trainer.reward_functions.logs.extra:
            row["extra"] = json.loads(json.dumps(extra, default=str))
        self.log.write_samples(done, row)
        if held_out == bool(args.eval_steps and self._held_out.total):
            table = answer_table(row)
            self.log.write_answers(done, table)
            shown = format_answers(table, boxed=sys.stderr.isatty())
            logger.info("sample answers\n%s", shown, extra={"is_styled": True})

    def close(self) -> None:
        """Log the verdict, and close bar and files."""
        where = "--keep_best saves the best actor."
        if (best := self._best).value > -math.inf:
            where = f"{best.folder} has the actor with {best.metric} {best.value:.3g}."
        self.log.write_verdict(self._held_out.total, where)
        self._bar.close()
        self.log.close()


# -- sample answers --------------------------------------------------------------------------------


def sample_row(
    e: Experience, tokenizer: PreTrainedTokenizerBase, num_samples_per_prompt: int, has_kl: bool
) -> dict[str, Any]:
    """A row of samples.jsonl about this rank's part of a rollout; None stands for "unknown".

    ``samples``: the first answer to each of `NUM_ANSWERS` prompts, with its tokens, their
    advantages and, with ``has_kl``, log policy - log reference in nats. ``scores`` and
    ``answer_lengths``: of all answers.
    """
    first: dict[int, int] = {}  # prompt -> its first row
    for i, prompt in enumerate((e.numbers // num_samples_per_prompt).tolist()):
        first.setdefault(prompt, i)
    rows = list(first.values())[:NUM_ANSWERS]
    scores = torch.where(e.scored, e.scores, math.nan)
    return {
        "samples": [_sample(e, i, tokenizer, has_kl) for i in rows],
        "scores": _numbers(scores[:_MAX_SEQUENCES]),
        "answer_lengths": (e.lengths - e.prompt_lengths)[:_MAX_SEQUENCES].tolist(),
    }


def _sample(
    e: Experience, i: int, tokenizer: PreTrainedTokenizerBase, has_kl: bool
) -> dict[str, Any]:
    ids, start = e.input_ids[i, : int(e.lengths[i])].tolist(), int(e.prompt_lengths[i])
    num_tokens = min(len(ids) - start, _MAX_TOKENS)
    kl = (e.logprobs[i] - e.ref_logprobs[i])[:num_tokens]
    # Of one turn its text alone: templates add a system prompt and names of roles. Of more turns
    # the rendered text, where marks stand between them.
    source = (e.sources[i] if e.sources else None) or ""
    turns = [] if isinstance(source, str) else source
    question = turns[0]["content"] if len(turns) == 1 else None
    drawn = bool(e.answer_mask[i, : len(ids) - start].all())
    total = float((e.logprobs[i] - e.ref_logprobs[i])[e.answer_mask[i]].double().sum())
    return {
        "prompt": question or tokenizer.decode(ids[:start], skip_special_tokens=not turns),
        "answer": continued_texts(tokenizer, [ids[start:]], with_special=not drawn)[0],
        "score": _number(float(e.scores[i])) if e.scored[i] else None,
        "answer_length": len(ids) - start,
        "finished": bool(e.finished[i]),
        "kl": _number(total) if has_kl else None,
        "tokens": token_texts(tokenizer, ids[start : start + num_tokens]),
        "token_kl": _numbers(kl) if has_kl else None,
        "advantages": _numbers(e.advantages[i, :num_tokens]),
    }


def _number(value: float) -> float | None:
    """Four significant digits; JSON has no NaN and no infinity."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _numbers(values: Tensor) -> list[float | None]:
    return [_number(value) for value in values.tolist()]


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """The text that each token adds, special tokens included.

    A token that ends within a character has none; the token that completes it has the character.
    """
    decoder = StreamDecoder(tokenizer, with_special=True)
    texts = [decoder.push(token) for token in ids]
    return [*texts[:-1], texts[-1] + decoder.finish()] if texts else []


def answer_table(row: dict[str, Any]) -> list[dict[str, Any]]:
    """One mapping of column to text or number per sample of ``row``."""
    columns = ("prompt", "answer", "score", "answer_length", "kl")
    return [{name: sample[name] for name in columns} for sample in row["samples"]]


def format_answers(table: list[dict[str, Any]], boxed: bool) -> str:
    """``table`` for the log: ``boxed`` for a terminal, or one plain line per answer."""
    if not boxed:
        return "\n".join(
            f"  {_score(row)}  {row['prompt'][-_PROMPT_CHARS:]!r:.38} -> "
            f"{row['answer'][:_ANSWER_CHARS]!r:.66}"
            for row in table
        )
    shown = Table("score", "prompt", "answer", "tokens", "KL", expand=True)
    for row in table:
        kl = "-" if row["kl"] is None else f"{row['kl']:.2f}"
        prompt, answer = row["prompt"][-_PROMPT_CHARS:], row["answer"][:_ANSWER_CHARS]
        cells = (_score(row).strip(), prompt, answer, str(row["answer_length"]), kl)
        shown.add_row(*(Text(printable(cell)) for cell in cells))
    file = StringIO()
    width = shutil.get_terminal_size().columns
    Console(file=file, force_terminal=True, width=width).print(shown)
    return file.getvalue().rstrip()


def _score(row: dict[str, Any]) -> str:
    return " none" if row["score"] is None else f"{row['score']:+.2f}"
