"""Summarizes the runs of a side for `learning.py`: curve, steps to the target, seconds, ratios."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from report import rounded, spread

PARTS = ("step", "generate", "score", "train")

Point = tuple[float, float, float]  # samples, seconds, accuracy


@dataclass
class Run:
    """One side's run with one seed."""

    points: list[Point]  # the SFT model first
    rows: list[dict[str, float]]  # per rollout: seconds by ``PARTS``
    about: dict[str, Any]  # versions and threads of its process

    def figures(self, target: float) -> dict[str, float | None]:
        """Medians of seconds over the rollouts, by part, and what it takes to reach ``target``."""
        samples, seconds = first_reach(self.points, target)
        parts = {f"{p}_s": statistics.median(row[p] for row in self.rows) for p in PARTS}
        return parts | {"samples_to_target": samples, "seconds_to_target": seconds}


def first_reach(points: list[Point], target: float) -> tuple[float | None, float | None]:
    """Samples and seconds at which the accuracy first reaches ``target``, interpolated linearly;
    None if it never does.
    """
    if points[0][2] >= target:
        return points[0][:2]
    for (n0, s0, a0), (n1, s1, a1) in zip(points, points[1:], strict=False):
        if a1 >= target:
            part = (target - a0) / (a1 - a0)
            return n0 + part * (n1 - n0), s0 + part * (s1 - s0)
    return None, None


def summary(runs: list[Run], target: float) -> dict[str, Any]:
    """Of one side's runs, one per seed: the curve, ``[samples, seconds, accuracy]``, each a median,
    and spreads of the figures; None if a seed does not reach the target.
    """
    places = zip(*(run.points for run in runs), strict=True)
    curve = [[rounded(statistics.median(v)) for v in zip(*at, strict=True)] for at in places]
    final = spread([run.points[-1][2] for run in runs])
    found = [run.figures(target) for run in runs]
    return {"curve": curve, "final_accuracy": final} | _spreads(found, lambda one: one)


def ratio(runs: list[Run], baseline: list[Run], target: float) -> dict[str, Any]:
    """Figures of ``runs`` / ``baseline`` with the same seed (above 1: the baseline is better)."""
    pairs = [(a.figures(target), b.figures(target)) for a, b in zip(runs, baseline, strict=True)]
    both = [{key: (a[key], b[key]) for key in a} for a, b in pairs]
    return _spreads(both, lambda pair: pair[0] / pair[1] if all(pair) else None)


def _spreads(found: list[dict[str, Any]], value: Callable[[Any], float | None]) -> dict[str, Any]:
    columns = {key: [value(one[key]) for one in found] for key in found[0]}
    return {key: None if None in column else spread(column) for key, column in columns.items()}
