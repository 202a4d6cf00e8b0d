"""Streams a step's examples: reads, splits and shuffles them during training (``--streaming``).

For sources larger than memory or disk. The stream is endless and identical in every process;
held-out examples form a small table.

A row's key alone decides where it goes: its salted hash, as a number in [0, 1), says whether it is
held out and which step gets it. So a prompt never leaks from one step to another, and the shares
are right on average. Tables use the same hash but slightly different borders (``splits.cut``):
stream for all three steps, or for none.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, Optional

import numpy as np
from datasets import Dataset

from dschat.config.data import DataConfig
from dschat.data.sources import splits
from dschat.data.sources.adapters import PURPOSES, Purpose
from dschat.data.sources.resolve import RawRows
from dschat.data.sources.splits import DataSource
from dschat.data.sources.tables import made_table

logger = logging.getLogger("dschat")

ExampleRow = dict[str, str]  # `Example.to_row`
_HELD_OUT = -1  # a part like the steps 0 to 2


@dataclass
class Tally:
    """Counts dropped rows and logs them: the first ten individually, then at 100, 1,000, ..."""

    name: str
    quiet: bool = False
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, why: str, where: str = "") -> None:
        self.counts[why] += 1
        total = self.counts.total()
        if self.quiet:
            return
        if where and total <= splits.NUM_LISTED:
            logger.warning("%s: dropped %s: %s", self.name, where, why)
        elif total >= splits.NUM_LISTED and str(total).strip("0") == "1":
            logger.warning("%s: dropped %d rows so far (%s)", self.name, total, self.summary())

    def summary(self) -> str:
        return ", ".join(f"{count} with {why}" for why, count in self.counts.items())


class ExampleStream:
    """The endless training examples of one step; each iteration starts over in the same order.

    A source that ends is read again in another order. Sources alternate at random, in proportion to
    their rows times their weights, as in tables. Memory holds ``--shuffle_buffer_size`` rows.
    """

    def __init__(self, config: DataConfig, purpose: Purpose) -> None:
        self._config, self._purpose, self._seed = config, purpose, config.seed
        self._sources = [splits.load_source(spec, config, purpose) for spec in config.data_path]
        self._splits = np.cumsum(config.split_weights) / np.sum(config.split_weights)
        have_eval = all(source.splits.eval for source in self._sources)
        self._hold_out = config.eval_data_path is None and not have_eval
        step = PURPOSES.index(purpose)
        if not config.split_weights[step]:
            raise splits.no_rows(config.data_split, step, "the")
        filled = [s for s in self._sources if next(self._part(s, s.splits.train, step), None)]
        for source in self._sources:
            if source not in filled:
                logger.warning("%s has no rows for step %d", source.name, step + 1)
        if not filled:
            raise splits.no_rows(config.data_split, step, "the")
        self._sources, self._shares = filled, _shares(filled) if len(filled) > 1 else None
        columns = [c for s in filled for c in s.splits.train.columns if c != s.adapter.prompt]
        self.other_columns = sorted({*columns})

    def __iter__(self) -> Iterator[ExampleRow]:
        return self.rows()

    def rows(self, quiet: bool = False) -> Iterator[ExampleRow]:
        """The stream from its start; ``quiet``: do not log dropped rows."""
        rng = np.random.default_rng([self._seed, 0])
        streams = [self._endless(i, quiet) for i in range(len(self._sources))]
        while True:
            for i in rng.choice(len(streams), size=1024, p=self._shares):
                yield next(streams[i])

    def held_out(self) -> Dataset:
        """At most ``--max_eval_samples`` held-out rows, sampled from the first of every source."""
        limit = self._config.max_eval_samples
        if self._config.eval_data_path is not None:
            named = splits.named_held_out(self._config, self._purpose)
            parts = [self._part(*each) for each in named]
        else:
            parts = [
                self._part(s, s.splits.eval)
                if s.splits.eval
                else self._part(s, s.splits.train, _HELD_OUT)
                for s in self._sources
                if s.splits.eval or self._config.eval_fraction
            ]
        rows = [row for part in parts for row in islice(part, limit)]
        sample = np.random.default_rng(self._seed).permutation(len(rows))[:limit]
        return made_table(splits.EXAMPLES, [rows[i] for i in sorted(sample.tolist())])

    def _endless(self, number: int, quiet: bool) -> Iterator[ExampleRow]:
        source = self._sources[number]
        size = max(1, self._config.shuffle_buffer_size // len(self._sources))
        step = PURPOSES.index(self._purpose)
        for epoch in count():
            # later epochs would log the same rows again
            tally = Tally(source.name) if epoch == 0 and not quiet else None
            rows = self._part(source, source.splits.train, step, tally)
            num_rows = 0
            for row in shuffled(rows, size, [self._seed, 1 + number, epoch]):
                num_rows += 1
                yield row
            if not num_rows:
                raise splits.no_rows(self._config.data_split, step, "the")

    def _part(
        self,
        source: DataSource,
        rows: RawRows,
        part: Optional[int] = None,
        tally: Optional[Tally] = None,
    ) -> Iterator[ExampleRow]:
        """The usable rows of one pass that belong to ``part``; without it, all of them.

        Raises:
            UserError: a bad row that ``--on_bad_row`` does not allow.
        """
        for row in splits.normalized_rows(rows, source.adapter, self._purpose):
            if row["problem"]:
                splits.check_allowed(row, self._config.on_bad_row, source.flag)
                if tally:
                    tally.add(row["fault"].removesuffix("; fix it") or row["problem"], row["where"])
            elif part is None or self._place(row["key"], source) == part:
                yield {"example": row["example"]}

    def _place(self, key: str, source: DataSource) -> int:
        is_held = self._hold_out and _unit(key, f"eval:{self._seed}") < self._config.eval_fraction
        if is_held:
            return _HELD_OUT
        if not source.is_split(self._config):
            return PURPOSES.index(self._purpose)
        return int(np.searchsorted(self._splits, _unit(key, f"split:{self._seed}"), "right"))


def _shares(sources: list[DataSource]) -> np.ndarray:
    """(sources,) float64, logged: by rows x weights, or by weights where a number is unknown."""
    parts = [source.splits.train for source in sources]
    sizes = [sum(1 for _ in r) if r.stamp and r.num_rows is None else r.num_rows for r in parts]
    known = [n or 1 for n in sizes] if None not in sizes else [1] * len(sizes)
    weights = np.array([s.weight * n for s, n in zip(sources, known, strict=True)])
    shares = weights / weights.sum()
    logger.info(
        "the stream takes %s (by %s)",
        ", ".join(f"{share:.1%} from {s.name}" for share, s in zip(shares, sources, strict=True)),
        "weights alone: a source's rows are not known" if None in sizes else "rows and weights",
    )
    return shares


def shuffled(rows: Iterator[Any], size: int, seed: Any) -> Iterator[Any]:
    """``rows`` in random order through a buffer of ``size``; a permutation if all of them fit."""
    rng = np.random.default_rng(seed)
    buffer = list(islice(rows, size))
    for row in rows:
        i = int(rng.integers(size))
        yield buffer[i]
        buffer[i] = row
    for i in rng.permutation(len(buffer)):
        yield buffer[i]


def _unit(key: str, salt: str) -> float:
    return splits.key_hash(key, salt) / 2**64
