"""Writes the report of ``python -m dschat.data``: what each step would train on.

Its lines, at most 100 columns wide, show each source's columns, and for each step its share of the
rows, their lengths, a few rows as the model will see them, and what was left out and why.
"""

import logging
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, islice
from logging.handlers import BufferingHandler
from operator import itemgetter
from os.path import commonprefix
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from dschat.config import RewardConfig, RLHFConfig, SFTConfig, UserError
from dschat.config.data import DataConfig, ShowConfig
from dschat.data.batches import prompt_columns, prompts_of
from dschat.data.sources.adapters import PURPOSES, Purpose
from dschat.data.sources.known_datasets import listed
from dschat.data.sources.splits import DataSource, open_source
from dschat.data.sources.tables import DataReport
from dschat.data.tokenize import preference_dataset, prompt_dataset, sft_dataset

logger = logging.getLogger("dschat")

WIDTH = 100
NUM_EXAMPLES = 3
_MAX_LINES = 12  # of one example
_DATA_FLAGS = tuple(DataConfig.__dataclass_fields__)


class _Step(NamedTuple):
    title: str
    ids: str  # column of its table
    config: Callable[..., Any]
    tables: Callable[..., Any]
    limit: str  # flag of its longest rows


_STEPS: dict[Purpose, _Step] = {
    "sft": _Step("supervised fine-tuning", "input_ids", SFTConfig, sft_dataset, "max_seq_len"),
    "reward": _Step("reward model", "chosen_ids", RewardConfig, preference_dataset, "max_seq_len"),
    "rlhf": _Step(
        "prompts for PPO", "prompt_ids", RLHFConfig, prompt_dataset, "max_prompt_seq_len"
    ),
}


@contextmanager
def _captured_log() -> Iterator[list[logging.LogRecord]]:
    """Collects the records that a training step would log."""
    captured = BufferingHandler(sys.maxsize)
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:], logger.propagate = [captured], False
    logger.setLevel(logging.INFO)
    try:
        yield captured.buffer
    finally:
        logger.handlers[:], level, logger.propagate = before
        logger.setLevel(level)


def show(config: ShowConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """The report, line by line.

    Raises:
        UserError: no step can use the data, or the one named by ``--step`` cannot.
    """
    for spec in config.data_path:
        yield from _source_lines(open_source(spec, config), config)
    yield ""
    yield "> marks tokens with loss (step 2: tokens after the shared prefix), | tokens without loss"
    steps = [int(config.step)] if config.step else [1, 2, 3]
    num_refused = 0
    for step in steps:
        yield ""
        try:
            yield from _step_lines(step, PURPOSES[step - 1], config, tokenizer)
        except UserError as error:
            num_refused += 1
            if num_refused == len(steps):
                raise
            yield from _wrapped(f"cannot use this data: {error}", indent=2)


def _source_lines(source: DataSource, config: ShowConfig) -> Iterator[str]:
    yield source.name + (f", weight {source.weight:g}" if source.weight != 1 else "")
    roles = ", ".join(f"{role} <- {column}" for role, column in source.adapter.roles.items())
    chat = " (as a chat)" if source.adapter.as_chat else ""
    yield from _wrapped(f"uses {roles}{chat}", indent=2)
    yield from _wrapped(f"has the columns {listed(source.splits.train.columns)}", indent=2)
    held_out = "its own split" if source.splits.eval else "no split of its own: a share is held out"
    yield f"  evaluation rows: {'those of --eval_data_path' if config.eval_data_path else held_out}"


def _step_lines(
    step: int, purpose: Purpose, config: ShowConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    title, ids_column, config_class, tables, limit = _STEPS[purpose]
    yield f"step {step} ({title})"
    flags = {name: getattr(config, name) for name in (*_DATA_FLAGS, limit)}
    with _captured_log() as records:
        train, _ = tables(config_class(**flags), tokenizer, "both")
    for record in records:
        first = record.args[0] if isinstance(record.args, tuple) and record.args else None
        if isinstance(first, DataReport):
            yield from _lengths(first)
        else:
            yield from _wrapped(record.getMessage(), indent=2)
    if purpose == "rlhf":
        columns = listed(sorted(prompt_columns(train))) or "none: prompts have no other columns"
        yield from _wrapped(f"for reward functions: {columns}", indent=2)
    for number, row in enumerate(islice(train, NUM_EXAMPLES), start=1):
        yield from _example(number, purpose, row, tokenizer)


def _lengths(report: DataReport) -> Iterator[str]:
    """Row counts, lengths and shares of one table."""
    total = report.rows + report.dropped.total()
    lengths = (
        f"mean {report.mean_len:.0f}, p50 {report.p50_len}, p95 {report.p95_len}, "
        f"longest {report.max_len} tokens"
    )
    yield from _wrapped(f"{report.name}: {report.rows:,} rows; {lengths}", indent=2)
    for reason, count in report.dropped.items():
        yield from _wrapped(f"dropped {count:,} ({count / total:.1%}): {reason}", indent=4)
    for part, count in report.cut.items():
        yield from _wrapped(f"{count:,} ({count / total:.1%}) {part}", indent=4)


def _example(
    number: int, purpose: Purpose, row: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """One row, as pieces of text with and without loss."""
    if purpose == "sft":
        ids, mask = row["input_ids"], row["loss_mask"]
        yield f"  example {number}: {len(ids)} tokens, {sum(mask)} with loss"
        yield from _pieces(ids, mask, tokenizer)
    elif purpose == "reward":
        yield from _answers(number, row, tokenizer)
    else:
        ids = row["prompt_ids"]
        yield f"  example {number}: {len(ids)} tokens, to be answered"
        yield from _pieces(ids, [False] * len(ids), tokenizer)
        for column, (value,) in prompts_of([row]).columns.items():
            shown = f"    {column} = {value!r}"
            yield shown if len(shown) <= WIDTH else f"{shown[: WIDTH - 4]} ..."


def _answers(number: int, row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """A pair or a ranking, best first: the tokens that all answers share, and each one's own."""
    ids = [row["chosen_ids"], *row["other_ids"], row["rejected_ids"]]
    sides = ["chosen", *(f"rank {rank + 1}" for rank in row["ranks"][2:]), "rejected"]
    shared = len(commonprefix(ids))
    lengths = " and ".join(str(len(each)) for each in ids)
    yield f"  example {number}: {lengths} tokens, {shared} shared"
    yield from _pieces(ids[0][:shared], [False] * shared, tokenizer)
    for side, each in zip(sides, ids, strict=True):
        yield f"    {side}:"
        yield from _pieces(each[shared:], [True] * (len(each) - shared), tokenizer)


def _pieces(
    ids: Sequence[int], mask: Sequence[bool], tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """Runs of tokens with and without loss, decoded with their special tokens."""
    for target, run in groupby(zip(ids, mask, strict=True), key=itemgetter(1)):
        text = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        shown = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")
        mark = "    > " if target else "    | "
        lines = [shown[i : i + WIDTH - 6] for i in range(0, len(shown), WIDTH - 6)]
        if len(lines) > _MAX_LINES:
            half = _MAX_LINES // 2
            left_out = f"... {len(lines) - 2 * half} lines ..."
            lines = [*lines[:half], left_out, *lines[-half:]]
        yield from (mark + line for line in lines)


def _wrapped(text: str, indent: int) -> Iterator[str]:
    margin = " " * indent
    yield from textwrap.wrap(
        text, WIDTH, initial_indent=margin, subsequent_indent=margin + "  ", break_on_hyphens=False
    )
