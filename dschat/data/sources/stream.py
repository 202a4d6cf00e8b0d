"""Examples of a step without a table: read, parted and shuffled as training goes.

Comes in: ``--data_path`` and its relatives, of sources larger than memory or disk. Goes out: for
one step, an endless stream of training examples, the same for every process, and a small table of
held-out ones. Must not know tokenizers, ranks or batches.

A row's place follows from its own key alone: a salted hash of it, as a number in [0, 1), says
whether it is held out and which step gets it. So prompts never leak from one into another, though
nobody has seen them all; shares are right on average. The hash is that of ``sources.cut``, the
borders are not quite: stream for all three steps, or for none.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Optional

import numpy as np
from datasets import Dataset, Features, Value

from dschat.config.data import DataConfig
from dschat.data.sources.adapters import CONTENT_FIELDS, PURPOSES, Purpose
from dschat.data.sources.normalize import NOTES, NUM_LISTED, normalised_rows, own_columns, refuse
from dschat.data.sources.resolve import RawRows
from dschat.data.sources.splits import DataSource, key_hash, load_source, named_held_out, no_rows

logger = logging.getLogger("dschat")

ExampleRow = dict[str, Optional[str]]
_HELD_OUT = -1  # beside the steps, 0 to 2


@dataclass
class Tally:
    """Counts what is left out and says so: the first ten one by one, then at 100, 1,000, ..."""

    name: str
    quiet: bool = False
    counts: Counter = field(default_factory=Counter)

    def add(self, why: str, where: str = "") -> None:
        self.counts[why] += 1
        total = self.counts.total()
        if self.quiet:
            return
        if where and total <= NUM_LISTED:
            logger.warning("%s: left out %s: %s", self.name, where, why)
        elif total >= NUM_LISTED and str(total).strip("0") == "1":
            logger.warning("%s: left out %d rows so far (%s)", self.name, total, self.summary())

    def summary(self) -> str:
        return ", ".join(f"{count} with {why}" for why, count in self.counts.items())


class ExampleStream:
    """The training examples of one step; iterating it starts it anew, with the same order.

    A source that has ended begins again, in another order; sources with weights take turns at
    random, in proportion to them. Memory holds ``--shuffle_buffer_size`` rows.
    """

    def __init__(self, config: DataConfig, purpose: Purpose, seed: int) -> None:
        self._config, self._purpose, self._seed = config, purpose, seed
        self._sources = [load_source(spec, config, purpose) for spec in config.data_path]
        self._splits = np.cumsum(config.split_weights) / np.sum(config.split_weights)
        own_eval = all(source.splits.eval for source in self._sources)
        self._hold_out = config.eval_data_path is None and not own_eval
        step = PURPOSES.index(purpose)
        if not config.split_weights[step]:
            raise no_rows(config.data_split, step, "the")
        filled = [s for s in self._sources if next(self._part(s, s.splits.train, step), None)]
        for source in self._sources:
            if source not in filled:
                logger.warning("%s has no row for step %d", source.name, step + 1)
        if not filled:
            raise no_rows(config.data_split, step, "the")
        self._sources = filled
        own = (name for s in filled for name in own_columns(s.splits.train, s.adapter, purpose))
        self.columns = [*CONTENT_FIELDS, *dict.fromkeys(own)]  # of every row

    def __iter__(self) -> Iterator[ExampleRow]:
        return self.rows()

    def rows(self, quiet: bool = False) -> Iterator[ExampleRow]:
        """The stream, from its start; ``quiet``: nothing is said of the rows that are left out."""
        rng = np.random.default_rng([self._seed, 0])
        weights = np.array([source.weight for source in self._sources])
        streams = [self._endless(i, quiet) for i in range(len(self._sources))]
        while True:
            for i in rng.choice(len(streams), size=1024, p=weights / weights.sum()):
                yield dict.fromkeys(self.columns) | next(streams[i])

    def held_out(self) -> Dataset:
        """At most ``--max_eval_samples`` held-out rows: the first ones of every source, evenly."""
        limit = self._config.max_eval_samples
        if self._config.eval_data_path is not None:
            parts = [self._part(*named) for named in named_held_out(self._config, self._purpose)]
        else:
            parts = [
                self._part(s, s.splits.eval)
                if s.splits.eval
                else self._part(s, s.splits.train, _HELD_OUT)
                for s in self._sources
                if s.splits.eval or self._config.eval_fraction
            ]
        tables = [list(islice(part, limit)) for part in parts] if limit else []
        rows = [row for table in tables for row in table]
        chosen = np.random.default_rng(self._seed).permutation(len(rows))[:limit]
        rows = [rows[i] for i in sorted(chosen.tolist())]
        names = dict.fromkeys([*self.columns, *(name for row in rows for name in row)])
        columns = {name: [row.get(name) for row in rows] for name in names}
        return Dataset.from_dict(columns, Features(dict.fromkeys(columns, Value("string"))))

    def _endless(self, number: int, quiet: bool) -> Iterator[ExampleRow]:
        source = self._sources[number]
        size = max(1, self._config.shuffle_buffer_size // len(self._sources))
        step, turn = PURPOSES.index(self._purpose), 0
        while True:
            # a later pass would say the same of the same rows
            tally = Tally(source.name) if turn == 0 and not quiet else None
            rows = self._part(source, source.splits.train, step, tally)
            num_rows = 0
            for row in shuffled(rows, size, [self._seed, 1 + number, turn]):
                num_rows += 1
                yield row
            if not num_rows:
                raise no_rows(self._config.data_split, step, "the")
            turn += 1

    def _part(
        self,
        source: DataSource,
        rows: RawRows,
        part: Optional[int] = None,
        tally: Optional[Tally] = None,
    ) -> Iterator[ExampleRow]:
        """The usable rows of one pass that belong to a part; without ``part``, to any.

        Raises:
            UserError: a bad row that ``--on_bad_row`` does not let pass.
        """
        for row in normalised_rows(rows, source.adapter, self._purpose):
            if row["problem"]:
                refuse(row, self._config.on_bad_row, source.flag)
                if tally:
                    why = row["fault"].removesuffix("; fix it") or row["problem"]
                    tally.add(why, row["where"])
            elif part is None or self._place(row["key"]) == part:
                yield {name: value for name, value in row.items() if name not in NOTES}

    def _place(self, key: str) -> int:
        held = self._hold_out and _unit(key, f"eval:{self._seed}") < self._config.eval_fraction
        if held:
            return _HELD_OUT
        return int(np.searchsorted(self._splits, _unit(key, f"split:{self._seed}"), "right"))


def shuffled(rows: Iterator[Any], size: int, seed: Any) -> Iterator[Any]:
    """``rows`` in a random order, holding ``size`` of them; one that all fit is a permutation."""
    rng = np.random.default_rng(seed)
    buffer = list(islice(rows, size))
    for row in rows:
        i = int(rng.integers(size))
        yield buffer[i]
        buffer[i] = row
    for i in rng.permutation(len(buffer)):
        yield buffer[i]


def _unit(key: str, salt: str) -> float:
    return key_hash(key, salt) / 2**64
