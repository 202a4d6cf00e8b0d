"""The flags of ``dschat generate``, ``dschat eval`` and ``dschat replay``.

Neither torch nor transformers here: ``--help`` and mistyped flags must answer at once.
"""

import os
from dataclasses import dataclass
from typing import Literal, Optional

from dschat.chat.load import AnswersConfig
from dschat.config.data import (
    DataConfig,
    ReadConfig,
    columns_by_role,
    require_encoding,
    require_reasoning_gym,
)
from dschat.config.errors import require
from dschat.config.fields import flag, place_flag, require_valid
from dschat.config.reward import RewardSourcesConfig
from dschat.reporting.run_files import named_paths

TASKS = ("win_rate", "score", "gold")
NEED_REWARD = ("win_rate", "score")
_SPLIT = "Rows to read: train, or eval, a source's held-out split (where it has none: all rows)."
NO_DATA = "--data_path is missing; name a file of prompts, or several"


@dataclass
class PromptsConfig(RewardSourcesConfig, ReadConfig, AnswersConfig):
    """Prompts."""

    reward_model_name_or_path: str = flag(
        "",
        "Reward model (step 2's folder). If its tokenizer is not the model's, answers are "
        "retokenized.",
        short=True,
        aliases=["--reward_model"],
    )
    data_path: Optional[list[str]] = flag(
        None,
        "Data sets, as in training: files (.json .jsonl .csv .tsv .parquet), folders, globs, "
        "builtin/chat, builtin/arithmetic, or hub names.",
        short=True,
    )
    split: Literal["train", "eval"] = flag("train", _SPLIT, short=True)
    columns: Optional[list[str]] = flag(
        None, "Column of the prompt, as prompt=COLUMN, or of a chat, as messages=COLUMN."
    )
    on_bad_row: Literal["auto", "error", "skip"] = flag(
        "auto",
        "At a line that is not JSON, CSV or UTF-8, and at a row without a usable prompt. error: "
        "stop and name it. skip: drop and count it. auto: error for lines, skip for rows.",
    )
    max_rows: Optional[int] = flag(None, "Read the first N usable rows only.", short=True, ge=1)
    max_num_seqs: int = flag(64, "Answers that are generated together.", ge=1)
    chunk_size: Optional[int] = flag(
        None,
        "Prompts answered and written at a time; default: enough for 8 times --max_num_seqs "
        "answers.",
        ge=1,
    )

    @property
    def has_rewards(self) -> bool:
        """Whether answers are scored."""
        return bool(self.reward_model_name_or_path) or self.has_reward_functions

    @property
    def data(self) -> DataConfig:
        """The data flags as `dschat.data` takes them."""
        return DataConfig(
            data_path=self.data_path or [],
            columns=self.columns,
            on_bad_row=self.on_bad_row,
            encoding=self.encoding,
            text_as=self.text_as,
            reasoning_gym=self.reasoning_gym,
        )

    def prompts_per_chunk(self, n: int) -> int:
        """Prompts that are answered together, each ``n`` times."""
        return self.chunk_size or max(1, 8 * self.max_num_seqs // n)

    def validate_prompts(self) -> None:
        self.validate_answers()
        columns_by_role(self.columns, ("prompt", "messages"))
        require_encoding(self.encoding)
        require_reasoning_gym(self.data_path or [], self.reasoning_gym)


@dataclass
class GenerateConfig(PromptsConfig):
    """Answer every prompt of a data set: one JSON line per prompt, in the order of the data."""

    path: str = flag(
        "", "Model: a folder such as output/demo/step3_rlhf/actor, or a hub name.", short=True
    )
    out: str = place_flag(
        "", "File to write (.jsonl). The same command resumes it where it was killed.", short=True
    )
    n: int = flag(1, "Answers per prompt.", short=True, ge=1)
    best_of: bool = flag(
        False,
        "Write the answer with the highest score as `answer`; needs a reward.",
        short=True,
    )
    pairs: bool = flag(
        False,
        "Write the answers with the highest and the lowest score as `chosen` and `rejected`, for "
        "step 2.",
        short=True,
    )
    column_prefix: str = flag("", "Start the names of new columns with this text.")
    overwrite: bool = place_flag(False, "Replace --out, whatever wrote it.")

    def validate(self) -> None:
        self.validate_prompts()
        require(bool(self.data_path), NO_DATA)
        require(bool(self.path), "--path is missing; name a model's folder")
        require(bool(self.out), "--out is missing; name a file for the answers, such as out.jsonl")
        for name in ("best_of", "pairs"):
            require(
                self.has_rewards or not getattr(self, name),
                f"--{name} ranks answers by a score; name --reward_model or --reward_fn",
            )
        require(
            self.n > 1 or not (self.best_of or self.pairs),
            f"--n {self.n}: --best_of and --pairs choose among several answers; raise it",
        )


@dataclass
class EvalConfig(PromptsConfig):
    """Evaluate one model, or compare several, on local data."""

    path: Optional[list[str]] = flag(
        None,
        "Models: folders or hub names, or NAME=FOLDER; the others are compared with the first.",
        short=True,
        action="extend",
    )
    answers: Optional[list[str]] = flag(
        None,
        "Files of `dschat generate` to evaluate beside the models, by their answers and scores.",
        short=True,
    )
    task: Optional[list[str]] = flag(
        None,
        f"What to measure of the answers to --data_path: {', '.join(TASKS)}.",
        short=True,
    )
    out: Optional[str] = flag(None, "JSON file for the results.", short=True)
    split: Literal["train", "eval"] = flag("eval", _SPLIT, short=True)
    temperature: float = flag(0.0, "Sampling temperature: 0 (greedy), or 0.01 to 100.", short=True)
    confidence: float = flag(0.95, "Level of the confidence intervals.", gt=0, lt=1)

    @property
    def models(self) -> list[tuple[str, str]]:
        """Name and path of each model, then of each file of ``answers``."""
        flag = "--path" if self.path else "--answers"
        return named_paths([*(self.path or ()), *(self.answers or ())], flag)

    def validate(self) -> None:
        self.validate_prompts()
        require(
            bool(self.path or self.answers),
            "--path is missing; name a model's folder, or several",
        )
        tasks = self.task or []
        require(bool(tasks), f"--task is missing; name one of {', '.join(TASKS)}")
        for task in tasks:
            require(
                task in TASKS,
                f"--task {task} is not one of {', '.join(TASKS)}; tasks of lm-evaluation-harness "
                "are run by lm_eval, which asks dschat serve (docs/evaluation.md)",
            )
            require(bool(self.data_path or not self.path), NO_DATA)
            require(
                self.has_rewards or not self.path or task not in NEED_REWARD,
                f"--task {task} needs a score; name --reward_model or --reward_fn",
            )
        require(
            len(self.models) > 1 or "win_rate" not in tasks,
            "--task win_rate compares with the first model or file; name two",
        )


@dataclass
class ReplayConfig:
    """Train the kept rollouts of a run of step 3 again, without generating (--keep_rollouts)."""

    run: str = flag("", "Output folder of train.py or step 3 (may come first).", short=True)
    iteration: int = flag(
        0, "The last iteration to train; its mini-batches are shown.", short=True, ge=0
    )
    out: Optional[str] = flag(None, "New file for one JSON line per iteration.", short=True)

    def validate(self) -> None:
        require_valid(self)
        require(bool(self.run), "name a folder: dschat replay OUT --iteration 120")
        require(self.iteration > 0, "--iteration is missing; name one, as in metrics.jsonl")
        out, parent = self.out or "", os.path.dirname(self.out or "") or "."
        is_new = os.path.isdir(parent) and not os.path.exists(out)
        require(is_new, f"--out {out} is no new file in a folder that exists; name another")
