"""Turn examples into token ids, one table for each kind of training.

Comes in: a config, a tokenizer. Goes out: ``datasets.Dataset``s of ids, made through
``datasets.map``, and a ``DataReport`` of each in the log. Must not know models, ranks or how rows
become batches.

How a text becomes tokens, and why training sees the ones that generation sees: ``segments.py``.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Optional, Union

import numpy as np
from datasets import Dataset, Features, List, Value

from dschat.config import CommonConfig, RewardConfig, RLHFConfig, SFTConfig, UserError
from dschat.data.adapters import Content, Example
from dschat.data.read import looks_like_file, quiet, read_file, read_hub
from dschat.data.segments import Encoded, encode_examples, prompt_text_ids, require_eos
from dschat.data.sources import load_examples

__all__ = [
    "DataReport",
    "preference_dataset",
    "prompt_dataset",
    "prompt_text_ids",
    "sft_dataset",
    "text_dataset",
]

logger = logging.getLogger("dschat")

Split = str  # "train", "eval" or "both"
Tables = Union[Dataset, tuple[Dataset, Dataset]]
_IDS, _MASK, _NOTE = List(Value("int32")), List(Value("bool")), Value("string")
CUT_PROMPT, CUT_ANSWER = "lost the beginning of the prompt", "lost the end of the answer"


@dataclass
class DataReport:
    """What became of a table: rows kept, rows dropped and cut (by reason), lengths in tokens."""

    name: str
    rows: int
    dropped: Counter = field(default_factory=Counter)
    cut: Counter = field(default_factory=Counter)
    mean_len: float = 0.0
    max_len: int = 0

    def __str__(self) -> str:
        parts = [
            f"{self.name}: {self.rows} rows of {self.mean_len:.0f} tokens (longest {self.max_len})"
        ]
        parts += [f"{count} dropped ({why})" for why, count in self.dropped.items()]
        parts += [f"{count} {what}" for what, count in self.cut.items()]
        return "; ".join(parts)


def sft_dataset(config: SFTConfig, tokenizer: Any, split: Split = "train") -> Tables:
    """Step 1's table: ``input_ids``, ``loss_mask`` (T,): prompt + answer + EOS, T <= max_seq_len.

    ``loss_mask[t]`` is True where token t is a target: the tokens of assistant turns, their EOS
    included, or with ``--train_on_prompt`` all; never position 0, which nothing predicts. What is
    too long loses the beginning of the prompt (a BOS stays); an answer that is too long by itself
    loses its end, EOS included.

    Returns:
        One Dataset for split "train" or "eval", the pair of them for "both".

    Raises:
        UserError: data that cannot be used, see ``load_examples``; no row left.
    """
    make = partial(
        _sft_rows,
        tokenizer=tokenizer,
        max_len=config.max_seq_len,
        train_on_prompt=config.train_on_prompt,
    )
    return _tables(config, "sft", split, make, {"input_ids": _IDS, "loss_mask": _MASK})


def preference_dataset(config: RewardConfig, tokenizer: Any, split: Split = "train") -> Tables:
    """Step 2's table: ``chosen_ids``, ``rejected_ids`` (T,): prompt + answer + EOS, as in step 1.

    The two share their prompt to the token: it is cut on the left by what the longer side needs.
    Pairs that are equal as tokens teach nothing and are dropped. ``--shuffle_labels`` swaps a
    seeded half of the training pairs.

    Returns and raises like ``sft_dataset``.
    """
    make = partial(_pair_rows, tokenizer=tokenizer, max_len=config.max_seq_len)
    columns = {"chosen_ids": _IDS, "rejected_ids": _IDS}
    tables = _tables(config, "reward", split, make, columns)
    if not config.shuffle_labels or split == "eval":
        return tables
    if split == "train":
        return _shuffled_labels(tables, config.seed)
    return _shuffled_labels(tables[0], config.seed), tables[1]


def prompt_dataset(config: RLHFConfig, tokenizer: Any, split: Split = "train") -> Tables:
    """Step 3's table: ``prompt_ids`` (P,), ``prompt_text``, ``index``; P <= max_prompt_seq_len.

    ``prompt_text`` is the prompt as the gold scorer and the log want it: a text prompt, or the last
    user turn. ``index`` numbers the examples before any is dropped. Prompts that are too long are
    dropped, not cut.

    Returns and raises like ``sft_dataset``.
    """
    make = partial(_prompt_rows, tokenizer=tokenizer, max_len=config.max_prompt_seq_len)
    columns = {"prompt_ids": _IDS, "prompt_text": Value("string"), "index": Value("int64")}
    return _tables(config, "rlhf", split, make, columns)


def text_dataset(
    name: str,
    config_name: Optional[str],
    column: str,
    tokenizer: Any,
    block_len: int,
    flag: str = "--unsupervised_dataset_name",
) -> Dataset:
    """Plain text for ptx: ``input_ids`` of exactly ``block_len`` tokens, documents joined by EOS.

    ``name`` is a hub data set, a .json/.jsonl file or a .txt file (a document is a paragraph).
    Documents are joined a thousand at a time; a last block that is not full is kept only where it
    is the only one of its thousand.

    Raises:
        UserError: unreadable data, no column ``column``, or no text in it.
    """
    if looks_like_file(name):
        table = read_file(name, flag, allow_text=True)
    else:
        table = read_hub(name, flag, config_name)["train"]
    if column not in table.column_names:
        raise UserError(
            f"--unsup_column {column!r} is not in {name}; it has: {', '.join(table.column_names)}"
        )
    with quiet():
        blocks = table.map(
            partial(_text_blocks, column=column, tokenizer=tokenizer, block_len=block_len),
            batched=True,
            remove_columns=table.column_names,
            features=Features({"input_ids": _IDS}),
        )
    if not len(blocks):
        raise UserError(f"{flag}: {name} has no text in its column {column!r}")
    logger.info("%s", _report(f"text of {name}", blocks, "input_ids"))
    return blocks


def _tables(
    config: CommonConfig, purpose: str, split: Split, make_rows: Callable, columns: dict[str, Any]
) -> Tables:
    """Load a step's examples, tokenise the splits asked for, report and drop what is unusable."""
    features = Features({**columns, "problem": _NOTE, "cut": _NOTE})
    made = []
    for name, examples in zip(("train", "eval"), load_examples(config, purpose), strict=True):
        if split in (name, "both"):
            # `map` over no rows would hand back a table without columns
            table = Dataset.from_dict({column: [] for column in features}, features=features)
            if len(examples):
                with quiet():
                    table = examples.map(
                        make_rows,
                        batched=True,
                        with_indices=True,
                        remove_columns=examples.column_names,
                        features=features,
                    )
            made.append(_finished(f"{purpose} {name} data", table, next(iter(columns))))
    return made[0] if len(made) == 1 else tuple(made)


def _sft_rows(
    batch: dict[str, list[str]],
    indices: list[int],
    tokenizer: Any,
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
    batch: dict[str, list[str]], indices: list[int], tokenizer: Any, max_len: int
) -> dict[str, list]:
    rows = []
    for encoded in encode_examples(tokenizer, _examples(batch), ("chosen", "rejected")):
        prompt, _, (chosen, rejected), cut = _fit(encoded, 2, max_len, tokenizer.bos_token_id)
        problem = encoded.problem or ("chosen and rejected alike" if chosen == rejected else "")
        rows.append(
            {
                "chosen_ids": prompt + chosen,
                "rejected_ids": prompt + rejected,
                "problem": problem,
                "cut": cut,
            }
        )
    return _columns(rows)


def _prompt_rows(
    batch: dict[str, list[str]], indices: list[int], tokenizer: Any, max_len: int
) -> dict[str, list]:
    rows = []
    examples = _examples(batch)
    encoded_examples = encode_examples(tokenizer, examples, ())
    for index, example, encoded in zip(indices, examples, encoded_examples, strict=True):
        too_long = len(encoded.prompt_ids) > max_len
        rows.append(
            {
                "prompt_ids": encoded.prompt_ids,
                "prompt_text": _asked(example.prompt),
                "index": index,
                "problem": encoded.problem
                or (f"longer than --max_prompt_seq_len {max_len}" if too_long else ""),
                "cut": "",
            }
        )
    return _columns(rows)


def _text_blocks(
    batch: dict[str, list], column: str, tokenizer: Any, block_len: int
) -> dict[str, list]:
    eos = require_eos(tokenizer)
    texts = [text for text in batch[column] if isinstance(text, str) and text.strip()]
    if not texts:
        return {"input_ids": []}
    documents = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    stream = [token for ids in documents for token in (*ids, eos)]
    whole = len(stream) // block_len * block_len or len(stream)
    return {"input_ids": [stream[i : i + block_len] for i in range(0, whole, block_len)]}


def _fit(
    encoded: Encoded, num_answers: int, max_len: int, bos: Optional[int]
) -> tuple[list[int], list[bool], list[list[int]], str]:
    """Cut an example to ``max_len``: (prompt ids, their targets, answers, what was lost).

    At least one token of the prompt stays, since a first answer token needs something to follow.
    """
    prompt, targets = encoded.prompt_ids, encoded.prompt_targets
    if encoded.problem:
        return [], [], [[]] * num_answers, ""
    keep = min(len(prompt), max(max_len - max(map(len, encoded.answers)), 1))
    lost = []
    if keep < len(prompt):
        lost.append(CUT_PROMPT)
        # a model that always read a BOS first must find it here too
        head = 1 if prompt[0] == bos and keep > 1 else 0
        tail = len(prompt) - (keep - head)
        prompt, targets = prompt[:head] + prompt[tail:], targets[:head] + targets[tail:]
    if any(keep + len(answer) > max_len for answer in encoded.answers):
        lost.append(CUT_ANSWER)
    answers = [answer[: max_len - keep] for answer in encoded.answers]
    return prompt, targets, answers, "; ".join(lost)


def _finished(name: str, table: Dataset, ids_column: str) -> Dataset:
    """Drop the rows with a problem, log the report, and hand back the rest without the notes."""
    problems = table["problem"][:]
    dropped = Counter(problem for problem in problems if problem)
    kept = table.select([i for i, problem in enumerate(problems) if not problem])
    cut = Counter(what for note in kept["cut"][:] if note for what in note.split("; "))
    kept = kept.remove_columns(["problem", "cut"])
    report = _report(name, kept, ids_column, dropped, cut)
    if not len(kept) and len(table):
        raise UserError(f"no row is left of the {report}; check the data or allow longer sequences")
    logger.info("%s", report)
    return kept


def _report(name: str, table: Dataset, ids_column: str, *counts: Counter) -> DataReport:
    lengths = [len(ids) for ids in table[ids_column]] or [0]
    return DataReport(
        name, len(table), *counts, mean_len=sum(lengths) / len(lengths), max_len=max(lengths)
    )


def _shuffled_labels(pairs: Dataset, seed: int) -> Dataset:
    """``pairs`` with chosen and rejected swapped in a seeded half of them."""
    swap = np.random.default_rng(seed).random(len(pairs)) < 0.5
    with quiet():
        return pairs.map(_swap_where, with_indices=True, fn_kwargs={"swap": swap.tolist()})


def _swap_where(row: dict[str, Any], index: int, swap: list[bool]) -> dict[str, Any]:
    if not swap[index]:
        return row
    return {"chosen_ids": row["rejected_ids"], "rejected_ids": row["chosen_ids"]}


def _asked(prompt: Content) -> str:
    """A text prompt, or what the user said last."""
    if isinstance(prompt, str):
        return prompt
    said = [turn["content"] for turn in prompt if turn["role"] == "user"]
    return said[-1] if said else prompt[-1]["content"]


def _examples(batch: dict[str, list[str]]) -> list[Example]:
    return [
        Example.from_row(dict(zip(batch, values, strict=True)))
        for values in zip(*batch.values(), strict=True)
    ]


def _columns(rows: Iterable[dict[str, Any]]) -> dict[str, list]:
    rows = list(rows)
    return {name: [row[name] for row in rows] for name in rows[0]}
