"""The knobs of the data: where rows come from, which column is what, how they are parted and read.

They are part of `dschat.config.CommonConfig`, and of `ShowConfig`, the flags of
`python -m dschat.data`. It must not know models, steps or training.
"""

from dataclasses import dataclass
from typing import Literal, Optional

from dschat.config.errors import require
from dschat.config.fields import flag, require_types


@dataclass
class DataConfig:
    """Sources, columns, splits; what all three steps read in the same way."""

    data_path: list[str] = flag(
        ["builtin/chat"],
        "Data sets: files (.json .jsonl .csv .tsv .parquet), folders, globs, builtin/chat, "
        "builtin/arithmetic, or hub names (`NAME:CONFIG` for one configuration); `PATH:WEIGHT` "
        "blends several.",
    )
    eval_data_path: Optional[list[str]] = flag(
        None, "Held-out data; by default the source's own eval split, or --eval_fraction of it."
    )
    eval_fraction: float = flag(
        0.05, "Share of a source without an eval split that is held out for evaluation."
    )
    max_eval_samples: int = flag(
        500, "Evaluate on at most this many held-out examples; 0: no evaluation."
    )
    data_split: str = flag(
        "2,4,4",
        "Proportions of the training data that go to steps 1, 2 and 3; the parts are disjoint.",
    )
    prompt_column: Optional[str] = flag(
        None, "Column that holds the prompt, or a path into one, such as question.text."
    )
    chosen_column: Optional[str] = flag(None, "Column that holds the preferred answer.")
    rejected_column: Optional[str] = flag(None, "Column that holds the other answer.")
    messages_column: Optional[str] = flag(None, "Column that holds a chat `messages` list.")
    seed: int = flag(1234, "Seed of the data order, new weights, dropout and sampling.")
    on_bad_row: Literal["auto", "error", "skip"] = flag(
        "auto",
        "Lines that are not JSON, CSV or UTF-8, and rows without a usable prompt or answer: error "
        "stops at the first and names it, skip counts them and goes on; auto stops at the former "
        "and skips the latter.",
    )
    streaming: bool = flag(
        False,
        "Read rows as training goes, for data larger than memory or disk; needs --max_steps.",
    )
    shuffle_buffer_size: int = flag(
        10_000, "Rows that --streaming holds to draw the next one from at random."
    )

    @property
    def split_weights(self) -> tuple[float, float, float]:
        parts = tuple(float(p) for p in self.data_split.split(","))
        return parts  # type: ignore[return-value]

    def validate_data(self) -> None:
        """Raise ``UserError`` (flag and remedy in one line) for the first knob that cannot work."""
        require(
            bool(self.data_path),
            "--data_path is empty; name a file, a folder, a hub data set or builtin/chat",
        )
        try:
            parts = self.split_weights
        except ValueError:
            parts = ()
        require(
            len(parts) == 3 and min(parts) >= 0 and 0 < sum(parts) < float("inf"),
            f"--data_split {self.data_split!r} is not three numbers, one a step, such as 2,4,4",
        )
        require(
            0 <= self.eval_fraction < 1, f"--eval_fraction {self.eval_fraction} must be in [0, 1)"
        )
        require(
            self.max_eval_samples >= 0,
            f"--max_eval_samples {self.max_eval_samples} must not be negative",
        )
        require(0 <= self.seed < 2**32, f"--seed {self.seed} must be between 0 and {2**32 - 1}")
        require(
            self.shuffle_buffer_size >= 1,
            f"--shuffle_buffer_size {self.shuffle_buffer_size} must be at least 1; "
            "1 keeps the rows in their order",
        )


@dataclass
class ShowConfig(DataConfig):
    """Show what data sets turn into: columns, splits, lengths, examples, and what is left out."""

    step: Optional[Literal["1", "2", "3"]] = flag(None, "One step alone; default: each that can.")
    model: str = flag("builtin/tiny", "Whose tokenizer to use: a folder, a hub name, builtin/tiny.")
    max_seq_len: int = flag(512, "Longest sequence of steps 1 and 2, in tokens.")
    max_prompt_seq_len: int = flag(256, "Longest prompt of step 3, in tokens.")
    trust_remote_code: bool = flag(False, "Let a checkpoint bring and run its own Python code.")

    def validate(self) -> None:
        """Raise ``UserError`` (flag and remedy in one line) for the first knob that cannot work."""
        require_types(self)
        self.validate_data()
        for name in ("max_seq_len", "max_prompt_seq_len"):
            value = getattr(self, name)
            require(value >= 1, f"--{name} {value} must be at least 1")
