"""Loads, samples, trains, saves and reloads a tiny checkpoint of every causal-LM family.

    python benchmarks/families.py
    python benchmarks/families.py llama gemma3 qwen3_5 --log families.log
    python benchmarks/families.py --columns rollout speed
    python benchmarks/families.py --csv docs/families.csv
    python benchmarks/families.py qwen3_5 --columns rollout speed --csv docs/families.csv

Random weights in fp32, rows longer than every window, chunk, top-k and original length. A cell is a
gap, a speed, ``ok``, or what went wrong; ``refused`` is one line that a user reads before weights
load. One JSON line per family; tracebacks go to ``--log``. Exits with 1 if a cell failed. ``--csv``
replaces the cells of these families and columns in a file; its other cells stay.

| column | what |
|---|---|
| loads | logits of what a step loads, against transformers' |
| rollout | log-probs of sampled answers, against plain forwards of each sequence alone |
| speed | of answers to 8 equal prompts of 16 + 16 tokens, in times of transformers' `generate` |
| packed | log-probs of packed rows in training mode, against plain forwards of each row alone |
| gradient | of a weighted sum of those, relative to its largest entry |
| SFT, reward, PPO, GRPO | two steps, one, one iteration, one iteration of the step's script |
| LoRA, ZeRO-3 | step 1 with adapters (merged when saved); step 1 sharded |
| names | tensors that step 1 saves, against those of the checkpoint: full, LoRA, ZeRO-3 |
| reloads | logits of the saved folder in transformers, against the trained module's |

Rollouts are by the engine with its own blocks (blocks) or transformers' module (module), or by
transformers' `generate` with our draws (fallback).
"""

import csv
import gc
import json
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed logs its choice to stdout
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DSCHAT_CPU_MATMUL", "mkl")  # no timing of products for every model
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import family_checks  # noqa: E402
import family_configs  # noqa: E402
import family_rows  # noqa: E402
import torch  # noqa: E402
from family_checks import Checked  # noqa: E402
from family_steps import Runs, write_data  # noqa: E402
from report import environment, flags, note  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

from dschat.config import UserError  # noqa: E402

TOLERANCE = 1e-4
CHEAP = ("loads", "rollout", "packed", "gradient")
SFT = ("SFT", "LoRA", "ZeRO-3")
COLUMNS = (*CHEAP[:2], "speed", *CHEAP[2:], *SFT, "reward", "PPO", "GRPO", "names", "reloads")
REFUSED = "refused: "


class Family:
    """The cells of one family."""

    def __init__(self, family: str, work: Path, log: TextIO) -> None:
        self.family, self._log = family, log
        self.cells: dict[str, str] = {}
        self._work, self._checkpoint = work / family, work / family / "checkpoint"
        self._work.mkdir(parents=True)

    def run(self, columns: tuple[str, ...]) -> None:
        """Fill ``cells``. A family whose checkpoint is refused or not read gets no other cells."""
        if not self._cell("loads", family_configs.save, self.family, self._checkpoint):
            return
        self.cells.clear()
        checked = Checked(self._checkpoint)
        if not self._cell("loads", family_checks.loads, checked, self.family):
            if not family_configs.is_refused(self.family):  # it should be loaded
                self.cells["loads"] = self.cells["loads"].replace(REFUSED, "UserError: ")
            return
        if "rollout" in columns:
            self._cell("rollout", family_checks.rollout_gap, checked, notes=checked.notes)
        if "speed" in columns:
            self._cell("speed", family_checks.speed, checked)
        if "packed" in columns:
            checked.notes.clear()
            self._cell("packed", self._packed, checked, notes=checked.notes)
        if not set(columns) - {*CHEAP, "speed"}:
            return
        write_data(self._work)
        runs = Runs(self.family, self._checkpoint, self._work)
        for name in SFT:
            if name in columns and self._cell(name, runs.run, name):
                self._cell("names", runs.name_differences, name, worst=True)
                self._cell("reloads", runs.reload_gap, name, notes=[name], worst=True)
        if "reward" in columns and self._cell("reward", runs.run, "reward") and "PPO" in columns:
            self._cell("PPO", runs.rlhf_gap, "PPO")
        if "GRPO" in columns:
            self._cell("GRPO", runs.rlhf_gap, "GRPO")

    def _packed(self, checked: Checked) -> float:
        gap, gradient = family_checks.packed_gaps(checked)
        self.cells["gradient"] = shown(gradient)
        return gap

    def _cell(
        self,
        name: str,
        check: Callable[..., Any],
        *args: Any,
        notes: Sequence[str] = (),
        worst: bool = False,
    ) -> bool:
        """Run ``check`` and write its cell; whether it did not fail. ``worst``: keep a failure, or
        a larger gap, that an earlier check wrote.
        """
        try:
            text, passed = shown(check(*args)), True
        except UserError as error:
            text = f"{REFUSED}{error}".replace(f" {self._checkpoint}", "")
            passed = False
        except Exception as error:
            first = next(iter(str(error).strip().splitlines()), "")
            text, passed = f"{type(error).__name__}: {first}", False
            print(f"== {self.family}, {name}", file=self._log)
            traceback.print_exc(file=self._log)
            self._log.flush()
        if notes and passed:
            text = f"{text} {' '.join(notes)}"
        before = self.cells.get(name)
        if not worst or before is None or _badness(text) > _badness(before):
            self.cells[name] = text
        return passed


def shown(value: Any) -> str:
    """A gap with one digit; ``ok`` for what returns nothing to show."""
    if isinstance(value, float):
        return f"{value:.0e}" if value else "0"
    return value if isinstance(value, str) else "ok"


def _badness(cell: str) -> float:
    gap = _gap(cell)
    return (0.0 if cell.startswith("ok") else float("inf")) if gap is None else gap


def _gap(cell: str) -> float | None:
    try:
        return float(cell.partition(" ")[0])
    except ValueError:
        return None


def _is_ratio(cell: str) -> bool:
    return cell.endswith("x") and _gap(cell.removesuffix("x")) is not None


def failed(cell: str) -> bool:
    """Whether the cell is neither ``ok``, nor a gap within the tolerance, nor a speed, nor a
    refusal.
    """
    gap = _gap(cell)
    if gap is not None:
        return not gap <= TOLERANCE
    return not (
        cell.startswith("ok") or _is_ratio(cell) or (cell.startswith(REFUSED) and "\n" not in cell)
    )


def check(
    family: str, work: Path, log: TextIO, columns: tuple[str, ...] = COLUMNS
) -> dict[str, str]:
    """The cells of ``family``, by column; its folders lie in ``work``."""
    if family in family_rows.NOT_BUILT:
        return {"loads": f"{REFUSED}{family_rows.NOT_BUILT[family]}"}
    torch.manual_seed(0)
    row = Family(family, work, log)
    row.run(columns)
    gc.collect()
    return row.cells


def silence() -> None:
    """No warnings of the libraries: tables and JSON lines only."""
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("dschat").setLevel(logging.ERROR)
    gc.collect()
    gc.freeze()  # DeepSpeed collects garbage for every engine


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="default: all")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=COLUMNS)
    parser.add_argument("--log", default="/dev/null", help="file for tracebacks")
    parser.add_argument("--csv", type=Path, help="file for the table")
    args = parser.parse_args()
    if unknown := set(args.families) - set(family_configs.FAMILIES):
        parser.error(f"unknown: {' '.join(sorted(unknown))}")
    silence()
    family_checks.start()
    about = environment(torch.device("cpu"))
    rows: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder, open(args.log, "w") as log:
        for family in args.families or family_configs.FAMILIES:
            began = time.perf_counter()
            rows[family] = check(family, Path(folder), log, tuple(args.columns))
            seconds = round(time.perf_counter() - began, 1)
            line = {"benchmark": "families", "case": family, **about, "seconds": seconds}
            print(json.dumps(line | {"cells": rows[family]}), flush=True)
    faults = [(f, name, c) for f, row in rows.items() for name, c in row.items() if failed(c)]
    for family, name, cell in faults:
        note(f"{family}, {name}: {cell[:150]}")
    note(f"{len(rows)} families, {len(faults)} failed cells in {len({f for f, *_ in faults})}")
    if args.csv:
        write_table(args.csv, rows, args.columns)
    sys.exit(bool(faults))


def write_table(path: Path, rows: dict[str, dict[str, str]], columns: Sequence[str]) -> None:
    """Put ``columns`` of ``rows`` into the table at ``path``, which may hold other cells."""
    table: dict[str, dict[str, str]] = {}
    if path.exists():
        with path.open(newline="") as file:
            table = {row.pop("family"): row for row in csv.DictReader(file)}
    for family, cells in rows.items():
        fresh = {column: cells.get(column, "") for column in {"loads", *columns}}
        table[family] = table.get(family, {}) | fresh
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ("family", *COLUMNS), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({"family": family, **table[family]} for family in sorted(table))


if __name__ == "__main__":
    main()
