"""``dschat eval``: evaluates models and answer files on local data.

Its tasks compare files of ``dschat generate``: ``score`` and ``win_rate`` by their scores, ``gold``
by the built-in gold scorer. For a model of ``--path`` such a file is written first.

Metrics, and differences between models, have confidence intervals. A mean has the standard error of
its sample, as in lm-evaluation-harness, and a share Wilson's score interval (Wilson 1927, JASA 22,
209-212). A difference is of paired rows.
"""

import json
import logging
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from io import StringIO
from pathlib import Path
from statistics import NormalDist
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dschat.builtin.gold_scorer import gold_score
from dschat.chat.model import Model
from dschat.config import UserError
from dschat.config.errors import require
from dschat.data.sources.readers import read_lines
from dschat.data.tokenize import question_text
from dschat.observability import console
from dschat.offline.flags import NEED_REWARD, EvalConfig, GenerateConfig, PromptsConfig
from dschat.offline.generate import generate
from dschat.offline.rows import Metrics
from dschat.startup.files import replace_file

logger = logging.getLogger("dschat")

_WIDTH = 160  # characters of the table where standard output is not a terminal
OUT = "--out"


@np.errstate(invalid="ignore")
def interval(values: np.ndarray, confidence: float, is_difference: bool = False) -> dict[str, Any]:
    """The mean of ``values`` (R,) that are not NaN, with the bounds of its confidence interval.

    Of a difference also ``p``: two-sided, of none. Numbers that are not known are None.
    """
    values = values[~np.isnan(values)]
    count, z = len(values), NormalDist().inv_cdf((1 + confidence) / 2)
    mean = float(values.mean()) if count else math.nan
    error = float(values.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    low, high = mean - z * error, mean + z * error
    numbers = {"value": mean, "low": low, "high": high}
    if is_difference:
        numbers["p"] = math.erfc(abs(mean) / error / math.sqrt(2)) if error else float(mean == 0)
    elif count and set(values) <= {0, 1}:
        numbers["low"], numbers["high"] = wilson(mean, count, z)
    return {k: v if math.isfinite(v) else None for k, v in numbers.items()} | {"rows": count}


def wilson(share: float, total: int, z: float) -> tuple[float, float]:
    """Bounds of a share of ``total``, ``z`` standard deviations around it."""
    middle = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    # Without rounding: none right begins at 0, all right ends at 1.
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


@dataclass
class Results:
    """Every metric with its confidence interval, and its differences from the first model.

    ``metrics`` and ``differences`` hold JSON values, in the order of the models; None: not known.
    """

    settings: dict[str, Any]
    metrics: list[dict[str, Any]]
    differences: list[dict[str, Any]]

    @classmethod
    @np.errstate(invalid="ignore")
    def of(cls, config: EvalConfig, by_label: dict[str, Metrics]) -> "Results":
        """``by_label``: label of a model or file -> its metrics."""
        results, (baseline, *_) = cls(asdict(config), [], []), by_label
        for name in dict.fromkeys(name for metrics in by_label.values() for name in metrics):
            first = by_label[baseline].get(name)
            for label, metrics in by_label.items():
                if (found := metrics.get(name)) is None:
                    continue
                row = {"metric": name, "model": label}
                results.metrics.append(row | interval(found, config.confidence))
                if label != baseline and first is not None:
                    difference = interval(found - first, config.confidence, is_difference=True)
                    results.differences.append(row | {"baseline": baseline} | difference)
        return results

    def text(self) -> str:
        """The metrics and differences as a table, fit for the terminal if there is one."""
        from rich import box
        from rich.console import Console
        from rich.table import Table

        level = f"{100 * self.settings['confidence']:g}% interval"
        differences = {(row["metric"], row["model"]): row for row in self.differences}
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("metric", "model"):
            table.add_column(name, overflow="fold")
        for name in ("rows", "value", level, "difference", level, "p"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.metrics:
            cells = [row["metric"], row["model"], f"{row['rows']:,}"]
            cells += [_number(row["value"]), _bounds(row)]
            if other := differences.get((row["metric"], row["model"])):
                p = "" if other["p"] is None else f"{other['p']:.2g}"
                cells += [_number(other["value"], "+"), _bounds(other, "+"), p]
            table.add_row(*cells)
        width = None if sys.stdout.isatty() else _WIDTH
        text = StringIO()
        console = Console(file=text, width=width, highlight=False, markup=False)
        console.print(table)
        if self.differences:
            console.print(f"differences from {self.differences[0]['baseline']}, paired")
        return text.getvalue()

    def write(self, path: str) -> None:
        """Write all of it as JSON to ``path``, which is complete or unchanged."""
        out = Path(os.path.expanduser(path))
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            replace_file(out, json.dumps(asdict(self), indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise UserError(f"{OUT} {path}: {error.strerror}; name another file") from None


def check_out(path: str | None) -> None:
    """Raise ``UserError`` where ``--out`` exists and is not the output of ``dschat eval``."""
    file = Path(os.path.expanduser(path or ""))
    try:
        if path is None or not file.exists():
            return
    except OSError as error:  # no permission, or a name that is too long
        raise UserError(f"{OUT} {path}: {error.strerror}; name another file") from None
    require(file.is_file(), f"{OUT} {path} is a folder; name a file")
    try:
        content = json.loads(file.read_bytes())
    except ValueError:
        content = None
    require(
        isinstance(content, dict) and {"settings", "metrics", "differences"} <= set(content),
        f"{OUT} {path} exists, and dschat eval did not write it; name another file",
    )


def _number(value: float | None, sign: str = "") -> str:
    if value is None:
        return ""
    return format(value, f"{sign}.4g" if abs(value) >= 100 else f"{sign}.3f")


def _bounds(row: dict[str, Any], sign: str = "") -> str:
    if row["low"] is None:
        return ""
    return f"{_number(row['low'], sign)} to {_number(row['high'], sign)}"


FLAG = "--answers"
_PREFIX = "dschat_eval_"  # of the columns of a model's answers, beside the data's
Answers = list[dict[str, Any]]  # lines with prompt, answer and score


def evaluate(config: EvalConfig) -> Results:
    """The metrics of every model and answer file of ``config``.

    Raises:
        UserError: a wrong flag, model, reward source, task or data, before weights load.
    """
    check_out(config.out)
    tasks, num_models = config.task or [], len(config.path or ())
    labels, sources = zip(*config.models, strict=True)
    paths, files = sources[:num_models], sources[num_models:]
    for path in paths:  # all of them, before the first one loads
        Model.find(path, config.dtype, config.trust_remote_code, **config.template_flags)
    given = [read_answers(path, tasks) for path in files]
    require_equal_prompts(given, files)
    answers = [*(_answers_of(path, config) for path in paths), *given]
    require_equal_prompts(answers, sources)
    console.release()
    return Results.of(config, dict(zip(labels, answer_metrics(tasks, answers), strict=True)))


def answer_metrics(tasks: list[str], answers: list[Answers]) -> list[Metrics]:
    """The values per row of each of ``answers``; wins over the first of them."""
    metrics: list[Metrics] = []
    scores = [np.array([row.get("score") for row in rows], dtype=np.float64) for rows in answers]
    for rows, own in zip(answers, scores, strict=True):
        found: Metrics = {}
        if "gold" in tasks:
            gold = [gold_score(question_text(row["prompt"]), row["answer"]) for row in rows]
            found["gold"] = np.array(gold)
        if "score" in tasks:
            found["score"] = own
        if "win_rate" in tasks and metrics:
            won, lost = own > scores[0], own < scores[0]
            found["win_rate"] = 0.5 + 0.5 * won - 0.5 * lost  # a half where one has no score
        metrics.append(found)
    return metrics


def read_answers(path: str, tasks: list[str], prefix: str = "") -> Answers:
    """A file of ``dschat generate``, whose columns start with ``prefix``.

    Raises:
        UserError: it lacks what the tasks need.
    """
    rows: Answers = []
    try:
        for line in read_lines(path):
            require(line.row is not None, f"{FLAG}: {line.where}: {line.fault}")
            rows.append({k.removeprefix(prefix): v for k, v in (line.row or {}).items()})
            require(
                isinstance(rows[-1].get("answer"), str) and "prompt" in rows[-1],
                f"{FLAG} {path}: line {len(rows)} has no answer; write the file with dschat "
                "generate, with --n 1 or --best_of",
            )
    except OSError as error:
        raise UserError(f"{FLAG} {path}: {error.strerror or error}; check the path") from None
    scored = any(isinstance(row.get("score"), (int, float)) for row in rows)
    needing = [task for task in tasks if task in NEED_REWARD]
    require(
        scored or not needing,
        f"{FLAG} {path} has no scores for --task {' '.join(needing)}; write the file with dschat "
        "generate and a reward",
    )
    return rows


def require_equal_prompts(answers: list[Answers], names: Sequence[str]) -> None:
    """Raise ``UserError`` unless all of ``answers`` have the same prompts."""
    for rows, name in zip(answers, names, strict=True):
        first = answers[0]
        require(
            len(rows) == len(first),
            f"{name} answers {len(rows)} prompts, and {names[0]} {len(first)}; generate both from "
            "the same rows",
        )
        for number, (row, other) in enumerate(zip(rows, first, strict=True), start=1):
            require(
                row["prompt"] == other["prompt"],
                f"{name}: line {number} answers another prompt than {names[0]} there; generate "
                f"both from the same rows: {json.dumps(row['prompt'])[:60]}",
            )


def _answers_of(path: str, config: EvalConfig) -> Answers:
    """One answer of the model at ``path`` to every prompt of the data."""
    shared = {field.name: getattr(config, field.name) for field in fields(PromptsConfig)}
    with TemporaryDirectory() as folder:
        out = os.path.join(folder, "answers.jsonl")
        generate(GenerateConfig(**shared, path=path, out=out, column_prefix=_PREFIX))
        return read_answers(out, config.task or [], _PREFIX)
