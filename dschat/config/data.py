"""Flags of the data (sources, columns, splits, streaming), of micro-batches, checkpoints and logs.

Part of `dschat.config.CommonConfig`; `ShowConfig` has the flags of ``python -m dschat.data``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Optional

from dschat.config.errors import require
from dschat.config.fields import (
    AUTO,
    IntOrAuto,
    flag,
    log_flag,
    place_flag,
    require_bounds,
    require_types,
    speed_flag,
)

ROLES = ("prompt", "chosen", "rejected", "messages", "answers", "ranks", "scores")


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


@dataclass
class DataConfig:
    """Data."""

    data_path: list[str] = flag(
        ["builtin/chat"],
        "Data sets: files (.json .jsonl .csv .tsv .parquet), folders, globs, builtin/chat (or "
        "/arithmetic, /calculator, /guess), or hub names (`NAME:CONFIG` for one configuration); "
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
        "2,4,4",
        "Proportions of the training data for steps 1, 2 and 3; the parts are disjoint.",
    )
    columns: Optional[list[str]] = flag(
        None,
        "Columns by role, as ROLE=COLUMN; a column may be a path, e.g. question.text. prompt; "
        "chosen and rejected: answers; messages: a chat; answers: a list of ranked answers, e.g. "
        "completions.*.response; ranks or scores: a number for each, the lowest rank or the "
        "highest score is best.",
    )
    seed: int = flag(
        1234, "Seed of the data order, new weights, dropout and sampling.", ge=0, le=2**32 - 1
    )
    on_bad_row: Literal["auto", "error", "skip"] = flag(
        "auto",
        "What to do at a line that is not JSON, CSV or UTF-8, and at a row without a usable prompt "
        "or answer. error: stop and name it. skip: drop and count it. auto: error for lines, skip "
        "for rows.",
    )
    streaming: bool = flag(
        False,
        "Read rows during training, for data larger than memory or disk; needs --max_steps.",
    )
    shuffle_buffer_size: int = flag(
        10_000,
        "Rows in the shuffle buffer of --streaming; 1: keep the order.",
        ge=1,
        remedy="; 1 keeps the order of the rows",
        needs="streaming",
    )

    @property
    def split_weights(self) -> tuple[float, float, float]:
        parts = tuple(float(p) for p in self.data_split.split(","))
        return parts  # type: ignore[return-value]

    def validate_data(self) -> None:
        require(
            bool(self.data_path),
            "--data_path is empty; name a file, a folder, a hub data set or builtin/chat",
        )
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

    packing: Literal["auto", "on", "off"] = speed_flag(
        "auto",
        "Train and score on token streams without padding, in which answers to one prompt share "
        "it; auto: pad where the model's family cannot, on: stop there.",
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

    def validate_micro_batches(self, longest_row: int, flags: str) -> None:
        """``UserError`` where a micro-batch cannot hold the longest row, of ``flags`` tokens."""
        budget = self.max_tokens_per_micro_batch
        if budget == AUTO:
            return
        require(
            not 0 < int(budget) < longest_row,
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
        require_types(self)
        require_bounds(self)
        self.validate_data()


@dataclass
class SavingConfig:
    """Checkpoints, failures, hooks and logging."""

    # checkpoints
    save_steps: int = log_flag(
        50,
        "Save a checkpoint every N optimizer steps; 0: never, and a signal then stops the step "
        "without saving.",
        ge=0,
    )
    save_total_limit: int = log_flag(2, "Number of checkpoints to keep; 0: all.", ge=0)
    resume: Optional[str] = place_flag(
        None,
        "Resume from a checkpoint folder, or from the latest complete checkpoint in OUTPUT_DIR "
        "(latest, or no value; start fresh if there is none). Changed settings are logged and "
        "apply. train.py sets this itself.",
        nargs="?",
        const="latest",
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
    )
    hub_strategy: Literal["end", "every_save"] = place_flag(
        "end", "Push at the end, or also after every checkpoint.", needs="push_to_hub"
    )
    hub_private_repo: Optional[bool] = place_flag(
        None,
        "Make --push_to_hub's repository private, or public; default: as its owner has it set.",
        needs="push_to_hub",
    )
    report_to: list[Literal["tensorboard", "wandb", "none"]] = log_flag(
        ["tensorboard"],
        "Log to TensorBoard events in OUTPUT_DIR/tensorboard, to Weights & Biases (needs the "
        "[wandb] extra), or to neither, beside metrics.jsonl.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = log_flag("info", "Log level.")
    disable_tqdm: bool = log_flag(False, "Disable progress bars.")
