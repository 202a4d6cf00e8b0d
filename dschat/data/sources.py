"""From data sets to the examples of a step: read, hold some out, blend, cut in three parts.

Comes in: ``--data_path`` and its relatives. Goes out: for one step, its training rows and held-out
rows, every row an ``Example``, whatever the source was called and however its columns were. Must
not know tokenizers, ranks or models: the result depends on the data and the seed alone, so every
process of any number computes the same.
"""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from hashlib import blake2b
from typing import Literal, Optional

import numpy as np
from datasets import Dataset, Features, Value, concatenate_datasets

from dschat.config import CommonConfig, UserError
from dschat.data.adapters import (
    CONTENT_FIELDS,
    PURPOSES,
    Example,
    Purpose,
    choose_adapter,
    normalise,
    require_answers,
)
from dschat.data.builtin import builtin_rows
from dschat.data.read import eval_split, line_of, looks_like_file, quiet, read_file, read_hub

__all__ = ["Example", "Source", "cut", "load_examples", "load_source", "parse_spec"]

logger = logging.getLogger("dschat")

_SCHEMA = Features({f: Value("string") for f in (*CONTENT_FIELDS, "key", "problem")})


@dataclass(frozen=True)
class Source:
    """One source, read and normalised for one purpose: ``rows`` has ``_SCHEMA``'s columns."""

    name: str
    weight: float
    rows: Dataset


def load_examples(
    config: CommonConfig, purpose: Purpose, seed: Optional[int] = None
) -> tuple[Dataset, Dataset]:
    """The training and held-out examples of one step, as tables of ``Example.to_row`` rows.

    Rows are held out first, then blended (weight w: every row of that source stands w times, a
    fraction being a seeded choice), then cut in three by ``--data_split``. Rows with the same
    prompt (for a dialogue: the same opening) stay together in all of it, so step 3's prompts are
    new to steps 1 and 2. A row is placed by a hash of (seed, prompt): the parts are the same
    whatever the purpose, the order of calls or the number of processes.

    Raises:
        UserError: unreadable or empty data, a missing column, or a part without rows.
    """
    seed = config.seed if seed is None else seed
    sources = [load_source(spec, config, "train", purpose) for spec in config.data_path]
    held_out, held_keys = _hold_out(config, sources, purpose, seed)
    blend = concatenate_datasets([_weighted(source, held_keys, seed) for source in sources])
    parts = cut(blend["key"][:], config.split_weights, f"split:{seed}")
    step = PURPOSES.index(purpose)
    train = _usable(blend.select([i for i, part in enumerate(parts) if part == step]))
    if not len(train):
        raise UserError(
            f"--data_split {config.data_split} leaves step {step + 1} none of the {len(blend)} "
            "training rows; give it a larger share or more data"
        )
    held_out = _usable(held_out)
    chosen = np.random.default_rng(seed).permutation(len(held_out))[: config.max_eval_samples]
    logger.info(
        "data for step %d: %d of %d training rows, %d of %d held-out rows",
        *(step + 1, len(train), len(blend), len(chosen), len(held_out)),
    )
    return train, held_out.select(sorted(chosen.tolist()))


def load_source(
    spec: str,
    config: CommonConfig,
    split: Literal["train", "eval"],
    purpose: Purpose,
    flag: str = "--data_path",
) -> Optional[Source]:
    """Read and normalise one ``NAME[:WEIGHT]``; None where it has no held-out split of its own.

    Rows without a usable prompt are dropped here, for every purpose alike; rows that only
    ``purpose`` cannot use keep their place (``problem`` says why), so that the three parts do not
    depend on the purpose.
    """
    name, weight = parse_spec(spec, flag)
    table = _read(name, split, flag)
    if table is None:
        return None
    adapter = choose_adapter(name, table.column_names, config, flag)
    require_answers(name, adapter, purpose, table.column_names, flag)
    with quiet():
        rows = table.map(
            partial(normalise, adapter=adapter, purpose=purpose),
            remove_columns=table.column_names,
            features=_SCHEMA,
        )
    problems = rows["problem"][:]
    bad = [i for i, problem in enumerate(problems) if problem]
    if bad:
        counts = Counter(problems[i] for i in bad)
        why = ", ".join(f"{count} with {problem}" for problem, count in counts.items())
        where = line_of(name, bad[0])
        if len(bad) == len(rows):
            columns = ", ".join(table.column_names)
            hint = "" if adapter.prompt or adapter.messages else "; name it with --prompt_column"
            raise UserError(
                f"{flag}: {name} has no usable row: {why}{hint} (it has: {columns}); "
                f"look at {where}"
            )
        logger.warning(
            "%s: dropped %d of %d rows (%s); the first is %s",
            *(name, len(bad), len(rows), why, where),
        )
    keep = [i for i, key in enumerate(rows["key"][:]) if key]
    return Source(name, weight, rows if len(keep) == len(rows) else rows.select(keep))


def parse_spec(spec: str, flag: str = "--data_path") -> tuple[str, float]:
    """Split ``NAME[:WEIGHT]``; a number after the last colon, unless a file is called so."""
    name, colon, tail = spec.rpartition(":")
    try:
        weight = float(tail)
    except ValueError:
        return spec, 1.0
    if not colon or not name or os.path.isfile(os.path.expanduser(spec)):
        return spec, 1.0
    if not 0 < weight < float("inf"):
        raise UserError(f"{flag} {spec}: the weight after the colon must be a number above 0")
    return name, weight


def cut(keys: Sequence[str], shares: Sequence[float], salt: str) -> list[int]:
    """Give every row a part, 0 to len(shares) - 1, in about these shares; equal keys share one.

    Keys are laid in the order of their salted hashes (a seeded permutation that depends on nothing
    else), and each goes to the part in which the middle of its rows falls.
    """
    sizes = Counter(keys)
    order = sorted(sizes, key=lambda key: blake2b(f"{salt}:{key}".encode()).digest())
    ends = np.cumsum(shares) / np.sum(shares) * len(keys)
    part_of, start = {}, 0
    for key in order:
        middle = start + sizes[key] / 2
        part_of[key] = int(np.searchsorted(ends, middle))
        start += sizes[key]
    return [part_of[key] for key in keys]


@cache
def _builtin_tables() -> dict[str, Dataset]:
    return {split: Dataset.from_list(rows) for split, rows in builtin_rows().items()}


def _read(name: str, split: str, flag: str) -> Optional[Dataset]:
    if name == "builtin/chat":
        return _builtin_tables()[split]
    if name.startswith("builtin/"):
        raise UserError(f"{flag}: there is no {name}; the built-in data set is builtin/chat")
    if looks_like_file(name):
        return read_file(name, flag) if split == "train" else None
    splits = read_hub(name, flag)
    return splits["train"] if split == "train" else eval_split(splits)


def _hold_out(
    config: CommonConfig, sources: list[Source], purpose: Purpose, seed: int
) -> tuple[Dataset, set[str]]:
    """The held-out rows of all sources, and the keys that training must leave to them."""
    if config.eval_data_path is not None:
        flag = "--eval_data_path"
        named = [
            load_source(spec, config, "eval", purpose, flag)
            or load_source(spec, config, "train", purpose, flag)
            for spec in config.eval_data_path
        ]
        return concatenate_datasets([source.rows for source in named]), set()
    tables, held_keys = [], set()
    for spec, source in zip(config.data_path, sources, strict=True):
        own = load_source(spec, config, "eval", purpose)
        if own is None:
            keys = source.rows["key"][:]
            parts = cut(keys, (config.eval_fraction, 1 - config.eval_fraction), f"eval:{seed}")
            held = [i for i, part in enumerate(parts) if part == 0]
            held_keys.update(keys[i] for i in held)
        tables.append(own.rows if own else source.rows.select(held))
    return concatenate_datasets(tables), held_keys


def _weighted(source: Source, held_keys: set[str], seed: int) -> Dataset:
    """A source's training rows, each as often as its weight says."""
    rows = [i for i, key in enumerate(source.rows["key"][:]) if key not in held_keys]
    copies, rest = divmod(round(source.weight * len(rows)), len(rows)) if rows else (0, 0)
    drawn = np.random.default_rng(seed).permutation(len(rows))[:rest]
    return source.rows.select(rows * copies + [rows[i] for i in sorted(drawn)])


def _usable(rows: Dataset) -> Dataset:
    keep = [i for i, problem in enumerate(rows["problem"][:]) if not problem]
    return rows.select(keep).select_columns(list(CONTENT_FIELDS))
