"""Tokenizes examples into one table per training step, or a stream of the same rows.

Tables are made by ``datasets.map``, which caches them, and a ``DataReport`` of each goes to the
log. ``segments.py`` turns texts into ids.
"""

import json
import logging
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any, Literal, Optional, Union, overload

import numpy as np
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from dschat.config import CommonConfig, RewardConfig, RLHFConfig, SFTConfig, UserError
from dschat.data.batches import RowStream
from dschat.data.pretraining_text import text_dataset
from dschat.data.report import DataReport, read_report
from dschat.data.segments import Encoded, encode_examples, prompt_text_ids
from dschat.data.sources.adapters import Content, Example, Purpose
from dschat.data.sources.columns import is_packed
from dschat.data.sources.splits import key_hash, load_examples
from dschat.data.sources.stream import ExampleRow, ExampleStream, Tally
from dschat.data.sources.table_cache import mapped

__all__ = [
    "DataReport",
    "preference_dataset",
    "prompt_dataset",
    "prompt_text_ids",
    "sft_dataset",
    "text_dataset",
]

logger = logging.getLogger("dschat")

OneSplit = Literal["train", "eval"]
Split = Union[OneSplit, Literal["both"]]
Table = Union[Dataset, RowStream]
Tables = Union[Table, tuple[Table, Dataset]]
_IDS, _MASK, _NOTE = List(Value("int32")), List(Value("bool")), Value("string")
_NUM_PROBED = 1000  # examples of a stream of which at least one must be usable
_PROMPT_SHARE = 1 / 4  # of max_seq_len that a prompt keeps, however long its answer
CUT_PROMPT, CUT_ANSWER = "lost the beginning of the prompt", "lost the end of the answer"


@overload
def sft_dataset(
    config: SFTConfig, tokenizer: PreTrainedTokenizerBase, split: Literal["both"]
) -> tuple[Table, Dataset]: ...


@overload
def sft_dataset(
    config: SFTConfig, tokenizer: PreTrainedTokenizerBase, split: OneSplit = "train"
) -> Table: ...


def sft_dataset(
    config: SFTConfig, tokenizer: PreTrainedTokenizerBase, split: Split = "train"
) -> Tables:
    """Step 1's table: ``input_ids``, ``loss_mask`` (T,): prompt + answer + EOS, T <= max_seq_len.

    ``loss_mask[t]`` is True where token t is a target: the tokens of assistant turns with their
    EOS, or all tokens with ``--train_on_prompt``; never position 0, which nothing predicts. Rows
    beyond max_seq_len lose the beginning of the prompt (a BOS stays). An answer that does not fit
    beside the rest of the prompt loses its end, including EOS.

    Returns:
        One Dataset for split "train" or "eval", the pair of them for "both"; with ``--streaming``
        the training rows are a ``RowStream``.

    Raises:
        UserError: unusable data, see ``load_examples``; no rows left.
    """
    make = partial(
        _sft_rows,
        tokenizer=tokenizer,
        max_len=config.max_seq_len,
        train_on_prompt=config.train_on_prompt,
    )
    return _tables(config, "sft", split, make, {"input_ids": _IDS, "loss_mask": _MASK})


@overload
def preference_dataset(
    config: RewardConfig, tokenizer: PreTrainedTokenizerBase, split: Literal["both"]
) -> tuple[Table, Dataset]: ...


@overload
def preference_dataset(
    config: RewardConfig, tokenizer: PreTrainedTokenizerBase, split: OneSplit = "train"
) -> Table: ...


def preference_dataset(
    config: RewardConfig, tokenizer: PreTrainedTokenizerBase, split: Split = "train"
) -> Tables:
    """Step 2's table: ``chosen_ids``, ``rejected_ids`` (T,): prompt + answer + EOS, as in step 1;
    and ``prompt_length``, the tokens before either answer.

    Both sides have identical prompt tokens: the prompt is cut on the left, as in step 1, to fit the
    longer side. Pairs with identical tokens are dropped, and pairs with an answer that would lose
    its end: annotators compared whole answers, and a missing EOS would give a side away.
    ``--shuffle_labels`` swaps a seeded half of the training pairs.

    Returns and raises like ``sft_dataset``.
    """
    make = partial(_pair_rows, tokenizer=tokenizer, max_len=config.max_seq_len)
    columns = {"chosen_ids": _IDS, "rejected_ids": _IDS, "prompt_length": Value("int32")}
    tables = _tables(config, "reward", split, make, columns)
    if not config.shuffle_labels or split == "eval":
        return tables
    if isinstance(tables, tuple):
        return _shuffled_labels(tables[0], config.seed), tables[1]
    return _shuffled_labels(tables, config.seed)


@overload
def prompt_dataset(
    config: RLHFConfig, tokenizer: PreTrainedTokenizerBase, split: Literal["both"]
) -> tuple[Table, Dataset]: ...


@overload
def prompt_dataset(
    config: RLHFConfig, tokenizer: PreTrainedTokenizerBase, split: OneSplit = "train"
) -> Table: ...


def prompt_dataset(
    config: RLHFConfig, tokenizer: PreTrainedTokenizerBase, split: Split = "train"
) -> Tables:
    """Step 3's table: ``prompt_ids`` (P,), ``prompt``, ``prompt_text``, ``index``; P <=
    max_prompt_seq_len.

    ``prompt`` is the source of the ids, text or chat messages, as JSON. ``prompt_text``, for the
    gold scorer and the log, is a text prompt or the last user turn. ``index`` numbers the examples
    before any is dropped. Prompts that are too long are dropped, not cut. The table keeps a row's
    other columns for reward functions: `prompt_columns` names them, `prompts_of` unpacks them.

    Returns and raises like ``sft_dataset``.
    """
    make = partial(_prompt_rows, tokenizer=tokenizer, max_len=config.max_prompt_seq_len)
    text = Value("string")
    columns = {"prompt_ids": _IDS, "prompt": text, "prompt_text": text, "index": Value("int64")}
    return _tables(config, "rlhf", split, make, columns)


def _tables(
    config: CommonConfig, purpose: Purpose, split: Split, make_rows: Callable, columns: dict
) -> Tables:
    """Load a step's examples, tokenize the requested splits, report and drop unusable rows."""
    if config.streaming:
        stream = ExampleStream(config, purpose, config.seed)
        train, held_out = stream, stream.held_out()
    else:
        train, held_out = load_examples(config, purpose)
    tables = []
    for name, examples in (("train", train), ("eval", held_out)):
        if split in (name, "both"):
            title = f"{purpose} {name} data"
            if isinstance(examples, ExampleStream):
                tables.append(_stream(title, examples, make_rows, columns))
            else:
                tables.append(tokenized(title, examples, make_rows, columns)[0])
    return tables[0] if len(tables) == 1 else tuple(tables)


def tokenized(
    name: str, examples: Dataset, make_rows: Callable, columns: dict[str, Any]
) -> tuple[Dataset, DataReport]:
    """A table of ``columns``, made by ``make_rows`` from examples; and its report, also logged.

    The columns that examples carry for reward functions are kept.

    Raises:
        UserError: no rows are left.
    """
    carried = dict.fromkeys(filter(is_packed, examples.column_names), Value("string"))
    features = Features({**columns, **carried, "problem": _NOTE, "cut": _NOTE})
    # `map` over an empty table would return one without columns
    table = Dataset.from_dict({column: [] for column in features}, features=features)
    if len(examples):
        table = mapped(
            examples,
            make_rows,
            batched=True,
            with_indices=True,
            remove_columns=examples.column_names,
            features=features,
        )
    report, kept = read_report(name, table, next(iter(columns)))
    if not len(kept) and len(table):
        raise UserError(
            f"no rows are left of the {report}; check the data or allow longer sequences"
        )
    logger.info("%s", report)
    rows = table.remove_columns(["problem", "cut"])
    return (rows if len(kept) == len(table) else rows.select(kept)), report


def _stream(
    name: str, examples: ExampleStream, make_rows: Callable, columns: Iterable[str]
) -> RowStream:
    """A stream of tokenized rows.

    Raises:
        UserError: none of the first examples is usable, so no step would train anything.
    """
    tally = Tally(name)
    stream = RowStream(
        lambda: enumerate(examples),
        partial(_encode, make_rows=make_rows, tally=tally),
        [*columns, *filter(is_packed, examples.columns)],
    )
    first, probe = enumerate(examples.rows(quiet=True)), Tally(name, quiet=True)
    for _ in range(_NUM_PROBED // 50):
        rows = _encode(list(islice(first, 50)), make_rows, probe)
        if rows:
            logger.info("%s: streamed during training (--streaming)", name)
            return stream
    raise UserError(
        f"no rows are left of the first {_NUM_PROBED} of the {name} ({probe.summary()}); check the "
        "data or allow longer sequences"
    )


def _encode(
    examples: list[tuple[int, ExampleRow]], make_rows: Callable, tally: Tally
) -> list[dict[str, Any]]:
    """Numbered examples as rows; unusable ones are counted and left out."""
    if not examples:
        return []
    batch = {name: [row[name] for _, row in examples] for name in examples[0][1]}
    columns = make_rows(batch, [index for index, _ in examples])
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for row in rows:
        if row["problem"]:
            tally.add(row["problem"])
    notes = ("problem", "cut")
    return [{k: v for k, v in row.items() if k not in notes} for row in rows if not row["problem"]]


def _sft_rows(
    batch: dict[str, list[str]],
    indices: list[int],
    tokenizer: PreTrainedTokenizerBase,
    max_len: int,
    train_on_prompt: bool,
) -> dict[str, list]:
    rows = []
    for encoded in encode_examples(tokenizer, _examples(batch), ("chosen",)):
        prompt, targets, (answer,), cut = _fit(encoded, 1, max_len, tokenizer.bos_token_id)
        ids = prompt + answer
        mask = [True] * len(ids) if train_on_prompt else targets + [True] * len(answer)
        mask[:1] = [False] * len(mask[:1])  # nothing predicts the first token
        problem = encoded.problem or ("" if any(mask) else "no room for an answer in --max_seq_len")
        rows.append({"input_ids": ids, "loss_mask": mask, "problem": problem, "cut": cut})
    return _columns(rows)


def _pair_rows(
    batch: dict[str, list[str]],
    indices: list[int],
    tokenizer: PreTrainedTokenizerBase,
    max_len: int,
) -> dict[str, list]:
    rows = []
    for encoded in encode_examples(tokenizer, _examples(batch), ("chosen", "rejected")):
        prompt, _, (chosen, rejected), cut = _fit(encoded, 2, max_len, tokenizer.bos_token_id)
        problem = encoded.problem
        if CUT_ANSWER in cut:
            problem = f"an answer too long for --max_seq_len {max_len}"
        elif not problem and chosen == rejected:
            problem = "chosen and rejected alike"
        rows.append(
            {
                "chosen_ids": prompt + chosen,
                "rejected_ids": prompt + rejected,
                "prompt_length": len(prompt),
                "problem": problem,
                "cut": cut,
            }
        )
    return _columns(rows)


def _prompt_rows(
    batch: dict[str, list[str]],
    indices: list[int],
    tokenizer: PreTrainedTokenizerBase,
    max_len: int,
) -> dict[str, list]:
    rows = []
    examples = _examples(batch)
    encoded_examples = encode_examples(tokenizer, examples, ())
    for index, example, encoded in zip(indices, examples, encoded_examples, strict=True):
        too_long = len(encoded.prompt_ids) > max_len
        rows.append(
            {
                "prompt_ids": encoded.prompt_ids,
                "prompt": json.dumps(example.prompt),
                "prompt_text": _question(example.prompt),
                "index": index,
                "problem": encoded.problem
                or (f"longer than --max_prompt_seq_len {max_len}" if too_long else ""),
                "cut": "",
            }
        )
    return {**_columns(rows), **{name: batch[name] for name in batch if is_packed(name)}}


def _fit(
    encoded: Encoded, num_answers: int, max_len: int, bos: Optional[int]
) -> tuple[list[int], list[bool], list[list[int]], str]:
    """Cut an example to ``max_len``: (prompt ids, their targets, answers, parts that were lost).

    The prompt keeps its last ``_PROMPT_SHARE`` of ``max_len``, or all of it if it is shorter:
    answers without their question teach nothing. At least one token stays, since the answer's first
    token needs one before it.
    """
    prompt, targets = encoded.prompt_ids, encoded.prompt_targets
    if encoded.problem:
        return [], [], [[]] * num_answers, ""
    share = max(int(max_len * _PROMPT_SHARE), 1)
    keep = min(len(prompt), max(max_len - max(map(len, encoded.answers)), share))
    lost = []
    if keep < len(prompt):
        lost.append(CUT_PROMPT)
        # keep the BOS: the model has always seen one first
        head = 1 if prompt[0] == bos and keep > 1 else 0
        tail = len(prompt) - (keep - head)
        prompt, targets = prompt[:head] + prompt[tail:], targets[:head] + targets[tail:]
    if any(keep + len(answer) > max_len for answer in encoded.answers):
        lost.append(CUT_ANSWER)
    answers = [answer[: max_len - keep] for answer in encoded.answers]
    return prompt, targets, answers, "; ".join(lost)


def _shuffled_labels(pairs: Table, seed: int) -> Table:
    """``pairs``, a seeded half of them with chosen and rejected swapped."""
    if isinstance(pairs, RowStream):
        return RowStream(pairs.examples, partial(_encode_shuffled, pairs.encode, seed))
    swap = np.random.default_rng(seed).random(len(pairs)) < 0.5
    return mapped(pairs, partial(_swap_where, swap=swap.tolist()), with_indices=True)


def _encode_shuffled(encode: Callable, seed: int, examples: list) -> list[dict[str, Any]]:
    """``_shuffled_labels`` for a stream: a hash of its tokens decides whether a pair is swapped."""
    rows = encode(examples)
    swap = [key_hash(str(row["chosen_ids"]), f"swap:{seed}") % 2 == 1 for row in rows]
    return [{**row, **_swap_where(row, i, swap)} for i, row in enumerate(rows)]


def _swap_where(row: dict[str, Any], index: int, swap: list[bool]) -> dict[str, Any]:
    if not swap[index]:
        return row
    return {"chosen_ids": row["rejected_ids"], "rejected_ids": row["chosen_ids"]}


def _question(prompt: Content) -> str:
    """A text prompt, or the last user turn."""
    if isinstance(prompt, str):
        return prompt
    questions = [turn["content"] for turn in prompt if turn["role"] == "user"]
    return questions[-1] if questions else prompt[-1]["content"]


def _examples(batch: dict[str, list[str]]) -> list[Example]:
    return [
        Example.from_row(dict(zip(batch, values, strict=True)))
        for values in zip(*batch.values(), strict=True)
    ]


def _columns(rows: Iterable[dict[str, Any]]) -> dict[str, list]:
    rows = list(rows)
    return {name: [row[name] for row in rows] for name in rows[0]}
