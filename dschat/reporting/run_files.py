"""Reads the output folders of train.py and of its steps: metrics, samples, settings, starts.

Settings and versions are shown, never loaded, so folders of older versions work too.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dschat.config import UserError
from dschat.config.errors import require
from dschat.observability.metrics_log import (
    METRICS,
    SAMPLES,
    SETTINGS,
    STARTS,
    WARNINGS,
    Row,
    is_finite,
    whole_rows,
)
from dschat.startup.files import no_link

PAGE = "report.html"  # in the folder of a run
STEPS = {"step1_sft": "SFT", "step2_reward": "Reward model", "step3_rlhf": "RLHF"}
_VARIANTS = ("actor_ema", "actor_best", "reward_best")  # of the model of a run
Series = list[tuple[float, float]]  # (step, value)


@dataclass
class Step:
    """One step's output folder."""

    folder: Path
    rows: list[Row]
    samples: list[Row] = field(default_factory=list)  # answers of rollouts
    held_out: list[Row] = field(default_factory=list)  # answers of evaluations, likewise
    starts: list[Row] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    verdict: str = ""  # of a run of step 3 that has ended

    def series(self, metric: str) -> Series:
        """The finite values of a metric, in order."""
        return [(row["step"], row[metric]) for row in self.rows if is_finite(row.get(metric))]

    @property
    def metrics(self) -> set[str]:
        """The names of all numbers that were logged."""
        return {name for row in self.rows for name in row} - {"step"}


@dataclass
class Run:
    """A run under the name that figures show; ``steps`` by the name of their folder."""

    name: str
    folder: Path
    steps: dict[str, Step]


def read_runs(folders: Sequence[str]) -> list[Run]:
    """The runs in ``folders``, with distinct names.

    Raises:
        UserError: no metrics in a folder, or settings that cannot be read.
    """
    named = named_paths([str(folder) for folder in dict.fromkeys(map(Path, folders))], "runs")
    return [Run(name, Path(path), _read_steps(Path(path))) for name, path in named]


def named_paths(paths: Sequence[str], flag: str) -> list[tuple[str, str]]:
    """Name and path of each of ``paths``: of NAME=PATH both, of others the name is from the path.

    Raises:
        UserError: two have the same name.
    """
    names = iter(short_names([os.path.abspath(path) for path in paths if not _named(path)]))
    found = [_named(path) or (next(names), path) for path in paths]
    taken = [name for name, _ in found]
    twice = next((name for i, name in enumerate(taken) if name in taken[:i]), None)
    require(twice is None, f"{flag}: two are named {twice}; name each once, or write NAME=FOLDER")
    return found


def _named(text: str) -> tuple[str, str] | None:
    """The parts of NAME=PATH. A path may have a = too: it exists, or one is in its folders."""
    name, _, path = text.partition("=")
    is_path = os.sep in name or os.path.exists(os.path.expanduser(text))
    return (name, path) if name and path and not is_path else None


def short_names(paths: Sequence[str | Path]) -> list[str]:
    """The ends of ``paths``, as short as they are distinct: the names of models and runs. Every run
    has an `actor`: the folder above it names it.
    """
    parts = [os.path.normpath(path).split(os.sep) for path in paths]
    parts = [p[:-1] if any(p[:-1]) and p[-1] == "actor" else p for p in parts]
    names: list[str] = []
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(p[-length - (p[-1] in _VARIANTS) :]) for p in parts]
        if len(set(names)) == len(names):
            break
    return names


def _read_steps(folder: Path) -> dict[str, Step]:
    steps = {name: folder / name for name in STEPS if (folder / name / METRICS).is_file()}
    if not steps and (folder / METRICS).is_file():
        steps = {_kind_of(folder): folder}
    read = {name: read_step(path) for name, path in steps.items()}
    read = {name: step for name, step in read.items() if step.rows}
    require(
        bool(read),
        f"{folder}: no metrics there; name the output folder of train.py, or a step's folder that "
        f"has {METRICS}",
    )
    return read


def _kind_of(folder: Path) -> str:
    """The step that wrote the folder: by its name, else by what it logged."""
    name = Path(os.path.abspath(folder)).name
    if name in STEPS:
        return name
    metrics = read_step(folder).metrics
    if metrics & {"objective/scores", "eval/score", "rewards/accuracies"}:
        return "step3_rlhf"
    return "step2_reward" if metrics & {"accuracy", "eval/accuracy"} else "step1_sft"


def read_step(folder: Path) -> Step:
    """The files of a step's output folder."""
    samples = whole_rows(folder / SAMPLES, _has_samples)
    found = [row for row in whole_rows(folder / WARNINGS) if "verdict" in row]
    return Step(
        folder,
        whole_rows(folder / METRICS),
        [row for row in samples if not row.get("held_out")],
        [row for row in samples if row.get("held_out")],
        whole_rows(folder / STARTS),
        _read_mapping(folder / SETTINGS),
        read_warnings(folder),
        str(found[-1]["verdict"]) if found else "",
    )


def read_warnings(folder: Path) -> list[str]:
    """What a step found to be wrong, a line each; a bad verdict too."""
    return [str(row["warning"]) for row in whole_rows(folder / WARNINGS) if "warning" in row]


def _has_samples(row: Row) -> bool:
    """Whether ``row`` has the fields of `dschat.rlhf.samples`."""
    lists = [row.get(name) for name in ("samples", "scores", "answer_lengths")]
    return all(isinstance(value, list) for value in lists) and all(map(_is_sample, row["samples"]))


def _is_sample(sample: Any) -> bool:
    if not isinstance(sample, dict) or not isinstance(tokens := sample.get("tokens"), list):
        return False
    texts = (sample.get("prompt"), sample.get("answer"), *tokens)
    by_token = [v for v in map(sample.get, ("token_kl", "advantages")) if v is not None]
    return all(isinstance(text, str) for text in texts) and all(
        isinstance(values, list) and len(values) == len(tokens) for values in by_token
    )


def _read_mapping(path: Path) -> dict[str, Any]:
    """A YAML mapping, its values as text; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        with open(path, encoding="utf-8", opener=no_link) as file:
            text = file.read()
        # PyYAML takes minutes for nested brackets; with aliases a small file makes a huge page.
        brackets = text.count("[") + text.count("{")
        if brackets > 10_000 or any(isinstance(t, yaml.AliasToken) for t in yaml.scan(text)):
            raise yaml.YAMLError
        content = yaml.load(text, yaml.BaseLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        raise UserError(f"{path} cannot be read; remove it, or run that step again") from None
    return content if isinstance(content, dict) else {}
