"""Summarizes the runs of a side for `learning.py`: curve, steps to the target, seconds, ratios."""

import statistics
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

    def seconds(self, part: str) -> float:
        """Median over the rollouts."""
        return statistics.median(row[part] for row in self.rows)


def first_reach(points: list[Point], target: float) -> tuple[float, float] | None:
    """Samples and seconds at which the accuracy first reaches ``target``, interpolated linearly;
    None if it never does.
    """
    if points[0][2] >= target:
        return points[0][:2]
    for (n0, s0, a0), (n1, s1, a1) in zip(points, points[1:], strict=False):
        if a1 >= target:
            part = (target - a0) / (a1 - a0)
            return n0 + part * (n1 - n0), s0 + part * (s1 - s0)
    return None


def summary(runs: list[Run], target: float) -> dict[str, Any]:
    """The summary of one side's runs, one per seed."""
    return {
        "curve": median_curve([run.points for run in runs]),
        "final_accuracy": spread([run.points[-1][2] for run in runs]),
        "target": {"accuracy": target} | to_target(runs, target),
        "step_s": {part: spread([run.seconds(part) for run in runs]) for part in PARTS},
    }


def median_curve(curves: list[list[Point]]) -> list[list[float]]:
    """``[samples, seconds, accuracy]``, each the median over the seeds."""
    places = zip(*curves, strict=True)
    return [[rounded(statistics.median(v)) for v in zip(*at, strict=True)] for at in places]


def to_target(runs: list[Run], target: float) -> dict[str, dict[str, float] | None]:
    """Spreads of samples and seconds to ``target``; None if a seed does not reach it."""
    reached = [first_reach(run.points, target) for run in runs]
    if None in reached:
        return {"samples": None, "seconds": None}
    samples, seconds = zip(*reached, strict=True)
    return {"samples": spread(list(samples)), "seconds": spread(list(seconds))}


def ratio(
    runs: list[Run], baseline: list[Run], target: float
) -> dict[str, dict[str, float] | None]:
    """``runs`` / ``baseline`` with the same seed (above 1: the baseline is better): seconds of a
    rollout and its parts, samples and seconds to the target.
    """
    pairs = list(zip(runs, baseline, strict=True))
    ratios: dict[str, dict[str, float] | None] = {
        part: spread([a.seconds(part) / b.seconds(part) for a, b in pairs]) for part in PARTS
    }
    reached = [[first_reach(run.points, target) for run in pair] for pair in pairs]
    for place, name in enumerate(("samples_to_target", "seconds_to_target")):
        all_reach = all(a and b and b[place] for a, b in reached)
        ratios[name] = spread([a[place] / b[place] for a, b in reached]) if all_reach else None
    return ratios
