"""Flags of the data (sources, columns, splits), of micro-batches, checkpoints and logs.

Part of `dschat.config.CommonConfig`; `ShowConfig` has the flags of ``python -m dschat.data``.
"""

import importlib.util
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Optional

from dschat.config.errors import UserError, require
from dschat.config.fields import (
    AUTO,
    IntOrAuto,
    flag,
    log_flag,
    place_flag,
    require_valid,
    speed_flag,
)

# Of the columns of a data set.
ROLES = ("prompt", "chosen", "rejected", "messages", "answers", "ranks", "scores")
# What chat templates get from a program, and so are no variables of a user's.
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


def require_encoding(name: str) -> None:
    """``UserError`` for an encoding that Python does not know."""
    with suppress(LookupError, ValueError):
        "".encode(name)
        return
    raise UserError(f"--encoding {name}: Python knows no such encoding of text; check its name")


def require_reasoning_gym(names: list[str], settings: Optional[dict[str, Any]]) -> None:
    """``UserError`` where a task of reasoning-gym is named without it, or has settings unnamed."""
    found = re.findall(r"^reasoning_gym/(\w+)", "\n".join(names), re.MULTILINE)
    require(
        not found or importlib.util.find_spec("reasoning_gym") is not None,
        "--data_path reasoning_gym/... needs reasoning-gym; install it with `pip install "
        "dschat[reasoning-gym]`",
    )
    for task, values in (settings or {}).items():
        require(task in found, f"--reasoning_gym: --data_path has no reasoning_gym/{task}; add it")
        require(isinstance(values, dict), f"--reasoning_gym: {task} needs an object of settings")


def template_variables(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` if all their names can be variables of a chat template; else ``UserError``."""
    for name in values:
        require(
            name.isidentifier() and name not in (*_RESERVED, "chat_template", "tokenize"),
            f"chat_template_kwargs: {name:.40} is no variable of a chat template; leave it out",
        )
    return values


def columns_by_role(columns: Optional[list[str]], roles: Sequence[str] = ROLES) -> dict[str, Any]:
    """The items ROLE=COLUMN of ``--columns``; ``UserError`` for one of another form."""
    found: dict[str, Any] = {}
    for item in columns or ():
        role, _, column = item.partition("=")
        require(bool(column), f"--columns {item}: write ROLE=COLUMN, such as prompt=question")
        require(role in roles, f"--columns {item}: no such role; choose from {', '.join(roles)}")
        require(role not in found, f"--columns names two columns for {role}; leave one out")
        found[role] = column
    return found


def look_up(row: dict[str, Any], path: Optional[str]) -> Any:
    """The value at a column, or at a path into it such as ``answers.0.text``; None if absent.

    ``answers.*.text`` is the list of all texts.
    """
    if path is None:
        return None
    if path in row:
        return row[path]
    value: Any = row
    steps = path.split(".")
    for number, step in enumerate(steps):
        if step == "*" and isinstance(value, list):
            rest = ".".join(steps[number + 1 :])
            return [look_up(item, rest) if isinstance(item, dict) else None for item in value]
        if isinstance(value, dict) and step == "*":
            continue  # an object of lists, such as a Sequence of `datasets`
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value


@dataclass
class TemplateConfig:
    """Chat template."""

    chat_template: Optional[str] = flag(
        None, "File with a Jinja chat template; default: the tokenizer's.", reads="files"
    )
    chat_template_kwargs: Optional[dict[str, Any]] = flag(
        None,
        "Variables for the chat template as JSON, e.g. '{\"enable_thinking\": false}'; a trained "
        "model's template has them as defaults.",
    )
    system_message: Literal["merge", "refuse"] = flag(
        "merge",
        "System messages where the chat template has no place for them. merge: put their text in "
        "front of the first user turn. refuse: such a chat is an error.",
    )

    @property
    def template_flags(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(TemplateConfig)}


@dataclass
class ReadConfig(TemplateConfig):
    """Reading data."""

    encoding: str = flag("utf-8", "Encoding of JSON, CSV and TSV files, such as cp1252.")
    text_as: Optional[Literal["chat", "raw"]] = flag(
        None,
        "Prompts that are text. chat: a user's turn, or the turns of Human: ... Assistant: ..., "
        "rendered by the chat template. raw: as they are. default: chat for columns of questions "
        "and instructions, else raw with a warning.",
    )
    reasoning_gym: Optional[dict[str, dict[str, Any]]] = flag(
        None,
        "Settings of tasks reasoning_gym/NAME in --data_path as JSON: size (1000), seed (0), and "
        'the task\'s own, e.g. \'{"chain_sum": {"min_terms": 3}}\'.',
    )


@dataclass
class DataConfig(ReadConfig):
    """Data."""

    data_path: list[str] = flag(
        ["builtin/chat"],
        "Data sets: files (.json .jsonl .csv .tsv .parquet), folders, globs, builtin/chat (or "
        "/arithmetic, /addition), reasoning_gym/TASK, verifiers:NAME, hub names (`NAME:CONFIG`); "
        "`PATH:WEIGHT` blends several.",
        short=True,
        reads="files",
    )
    eval_data_path: Optional[list[str]] = flag(
        None,
        "Held-out data, as in --data_path; default: the source's eval split, or --eval_fraction.",
        reads="files",
    )
    eval_fraction: float = flag(
        0.05, "Share of rows to hold out from a source without an eval split.", ge=0, lt=1
    )
    max_eval_samples: int = flag(
        500, "Maximum number of held-out examples; 0: no evaluation.", ge=0
    )
    data_split: str = flag(
        AUTO,
        "Proportions of the training data for steps 1, 2 and 3, such as 2,4,4; the parts are "
        "disjoint. auto: 2,4,4 for data with rejected answers, all rows for every step for others.",
    )
    columns: Optional[list[str]] = flag(
        None,
        "Columns by role, as ROLE=COLUMN; a column may be a path, e.g. question.text. prompt; "
        "chosen and rejected: answers; messages: a chat; answers: a list of ranked answers, e.g. "
        "completions.*.response; ranks or scores: a number for each, the lowest rank or the "
        "highest score is best.",
    )
    reasoning: Literal["auto", "keep", "inline", "drop"] = flag(
        "auto",
        "Thoughts of assistant turns (reasoning_content, reasoning, thinking). keep: as fields, "
        "which the chat template must render. inline: <think>...</think> in front of the answer. "
        "drop: leave them out. auto: inline where the template reads only that, else keep.",
    )
    seed: int = flag(
        1234,
        "Seed of the data order, new weights, dropout and sampling.",
        short=True,
        ge=0,
        le=2**32 - 1,
    )
    on_bad_row: Literal["auto", "error", "skip"] = flag(
        "auto",
        "What to do at a line that is not JSON, CSV or UTF-8, and at a row without a usable prompt "
        "or answer. error: stop and name it. skip: drop and count it. auto: error for lines, skip "
        "for rows.",
    )

    @property
    def split_weights(self) -> tuple[float, float, float]:
        split = "2,4,4" if self.data_split == AUTO else self.data_split
        parts = tuple(float(p) for p in split.split(","))
        return parts  # type: ignore[return-value]

    def validate_data(self) -> None:
        require(
            bool(self.data_path),
            "--data_path is empty; name a file, a folder, a hub data set or builtin/chat",
        )
        require_encoding(self.encoding)
        names = [*self.data_path, *(self.eval_data_path or ())]
        require_reasoning_gym(names, self.reasoning_gym)
        roles = columns_by_role(self.columns).keys()
        require(
            ("answers" in roles) == (("ranks" in roles) != ("scores" in roles)),
            "--columns answers=COLUMN needs either ranks=COLUMN or scores=COLUMN, and they need it",
        )
        require(
            "answers" not in roles or roles.isdisjoint(("chosen", "messages")),
            "--columns answers=COLUMN names all answers; leave out chosen and messages",
        )
        try:
            parts: tuple[float, ...] = self.split_weights
        except ValueError:
            parts = ()
        require(
            len(parts) == 3 and min(parts) >= 0 and 0 < sum(parts) < float("inf"),
            f"--data_split {self.data_split!r} is not three numbers, one per step, such as 2,4,4",
        )


@dataclass
class MicroBatchConfig:
    """Micro-batches.

    How forwards take a process's rows of an optimizer step; the update does not depend on it.
    """

    attn_implementation: Optional[str] = speed_flag(
        None,
        "Attention of the training model: sdpa, eager or flash_attention_2; default: transformers' "
        "choice.",
    )
    packing: Literal["auto", "on", "off"] = speed_flag(
        "auto",
        "Train and score on token streams without padding, in which answers to one prompt share "
        "it; auto: pad where the model's family cannot, on: stop there.",
    )
    sequence_parallel_size: int = speed_flag(
        1,
        "Ranks that compute each micro-batch together, a part of its tokens each, for rows that "
        "are too long for one.",
        ge=1,
    )
    gradient_accumulation_steps: int = flag(
        1,
        "Micro-batches per optimizer step and process.",
        aliases=["--gradient_accumulation"],
        ge=1,
    )
    max_tokens_per_micro_batch: IntOrAuto = speed_flag(
        0,
        "Balance the rows of an optimizer step over the processes by tokens, and cut them into "
        "micro-batches of at most N tokens; auto: as many as fit in memory. 0: into micro-"
        "batches of the batch size per device.",
        ge=0,
    )

    @property
    def row_form(self) -> tuple[Literal["auto", "on", "off"], int]:
        """How models take rows: ``packing``, ``sequence_parallel_size``."""
        return self.packing, self.sequence_parallel_size

    def validate_micro_batches(self, longest_row: int, flags: str) -> None:
        """``UserError`` where a micro-batch cannot hold the longest row, of ``flags`` tokens."""
        budget, parallel = self.max_tokens_per_micro_batch, self.sequence_parallel_size
        require(
            parallel == 1 or self.packing != "off",
            f"--sequence_parallel_size {parallel} needs packed rows; leave --packing off out",
        )
        if budget == AUTO:
            return
        require(
            not 0 < int(budget) * parallel < longest_row,
            f"--max_tokens_per_micro_batch {budget} is less than one row can have: "
            f"{flags} = {longest_row}; raise it, or use auto",
        )


@dataclass
class ShowConfig(DataConfig):
    """Show how data sets are read: columns, splits, lengths, examples, dropped rows."""

    step: Optional[Literal["1", "2", "3"]] = flag(
        None, "Show this step only; default: every step that can use the data.", short=True
    )
    model: str = flag(
        "builtin/tiny",
        "Model whose tokenizer to use: a folder, a hub name or builtin/tiny.",
        short=True,
    )
    max_seq_len: int = flag(512, "Longest sequence of steps 1 and 2, in tokens.", short=True, ge=1)
    max_prompt_seq_len: int = flag(256, "Longest prompt of step 3, in tokens.", short=True, ge=1)
    trust_remote_code: bool = flag(False, "Run Python code that a checkpoint brings.")

    def validate(self) -> None:
        require_valid(self)
        self.validate_data()


@dataclass
class SavingConfig:
    """Checkpoints, failures, hooks and logging."""

    default_output_dir: ClassVar[str] = ""

    # checkpoints
    save_steps: int = log_flag(
        50,
        "Save a checkpoint every N optimizer steps; 0: never, and a signal then stops the step "
        "without saving.",
        short=True,
        ge=0,
    )
    save_total_limit: int = log_flag(2, "Number of checkpoints to keep; 0: all.", ge=0)
    resume: Optional[str] = place_flag(
        None,
        "Resume from a checkpoint folder, or from the latest complete checkpoint in OUTPUT_DIR "
        "(latest, or no value; start fresh if there is none). Changed settings are logged and "
        "apply. train.py sets this itself.",
        short=True,
        nargs="?",
        const="latest",
    )
    keep_best: Optional[str] = flag(
        None,
        "Save the model of the best evaluation as OUTPUT_DIR/actor_best (reward model: reward_best)"
        ", by this metric; without a value: loss, reward model accuracy, step 3 gold score, pass@1 "
        "or score, until it looks collapsed or hacked.",
        short=True,
        nargs="?",
        const=AUTO,
    )
    # failures
    max_bad_steps: int = log_flag(
        20, "Stop with an error after N consecutive steps with a non-finite loss or gradient.", ge=1
    )
    # hooks
    callback: Optional[list[str]] = flag(
        None,
        "Your hooks, file.py:CLASS or pkg.mod:CLASS with methods on_rollout (step 3), on_step, "
        "on_evaluate, on_save, on_end.",
        reads="files",
    )
    on_callback_error: Literal["error", "log"] = flag(
        "error", "A hook that raises ends the run, or is logged.", needs="callback"
    )
    # logging
    logging_steps: int = log_flag(1, "Log metrics every N steps.", ge=1)
    push_to_hub: Optional[str] = place_flag(
        None,
        "Push the saved models to this repository of the Hugging Face hub, NAME or OWNER/NAME.",
        form="; give the repository's name, OWNER/NAME",
    )
    hub_strategy: Literal["end", "every_save"] = place_flag(
        "end", "Push at the end, or also after every checkpoint.", needs="push_to_hub"
    )
    hub_private_repo: Optional[bool] = place_flag(
        None,
        "Make --push_to_hub's repository private, or public; default: as its owner has it set.",
        needs="push_to_hub",
    )
    report_to: list[Literal["tensorboard", "wandb", "trackio", "mlflow", "none"]] = log_flag(
        ["tensorboard"],
        "Log to TensorBoard events in OUTPUT_DIR/tensorboard, to Weights & Biases, trackio or "
        "MLflow (each needs the extra of its name), or to none, beside metrics.jsonl.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = log_flag("info", "Log level.")
    disable_tqdm: bool = log_flag(False, "Disable progress bars.")
