"""Says in a few sentences how a run of step 3 ended: whether held-out answers got better, until
when, and what speaks for a hacked score.

A difference counts as chance up to one standard error, which is an upper bound here: evaluations
answer the same prompts with the same seeds.
"""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from dschat.observability.health import LEADING

Row = dict[str, Any]
_SCORE, _TRAINED = LEADING[-1], "objective/scores"


def verdict(rows: Sequence[Row], num_held_out: int, where: str) -> tuple[str, bool] | None:
    """The verdict on a run that has ended, from its metrics.jsonl, and whether it is bad: another
    actor than the last may be better, or its score hacked. None without two evaluations.
    ``where``: a sentence on where its best actor is.
    """
    known = {name: [row for row in rows if row.get(name) is not None] for name in LEADING}
    name = next((name for name in LEADING if len(known[name]) > 1), None)
    if name is None:
        return None
    first, best, last = known[name][0], max(known[name], key=lambda row: row[name]), known[name][-1]
    gain, loss, fall = (a[name] - b[name] for a, b in ((best, first), (best, last), (first, last)))
    trained = [row for row in rows if row.get(_TRAINED) is not None]
    spread = median([row.get(f"{_TRAINED}_std") or 0.0 for row in trained] or [0.0])
    error = math.sqrt(2 / max(num_held_out, 1))
    # In [0, 1], the largest spread that a mean allows.
    widest = max(math.sqrt(abs(row[name] * (1 - row[name]))) for row in (best, last))
    chance = error * (spread if name == _SCORE else widest)

    said, when = "got better to the end", f"iteration {best['step']}"
    is_solved = name != _SCORE and min(first[name], last[name]) > 0.95
    if gain <= chance:
        said = "got worse" if fall > chance else "did not get better"
    elif loss > 0:
        said = f"got better until {when} of {last['step']}, and "
        said += "worse after it" if loss > chance else "no better after it"
    numbers = f"{name} {first[name]:.3g} at first, "
    numbers += f"{best[name]:.3g} at {when}, " if best not in (first, last) else ""
    text = f"Held-out answers {said}: {numbers}{last[name]:.3g} at the end (chance: {chance:.1g})."
    rise = _rise(best, last, trained, spread * error) if loss > chance / 2 else ""
    if rise:
        text += f" {rise}: it may be hacked, read the answers."
    elif name == _SCORE:
        text += " Only the reward judged them: a hacked score would look the same."
    if loss > 0:
        before = f"The actor it started from is {'better' if loss > chance else 'no worse'}."
        text += f" {where if best is not first else before}"
    if last.get("eval/kl") is not None:
        text += f" KL to the reference: {last['eval/kl']:.3g} nats an answer."
    text += f" Answers cut: {1 - last.get('eval/eos_share', 1.0):.0%}."
    return text, (gain <= chance and not is_solved or loss > chance or bool(rise))


def _rise(best: Row, last: Row, trained: list[Row], chance: float) -> str:
    """How the score rose since the best evaluation; "" where it did by no more than chance."""
    until_best = [row for row in trained if row["step"] <= best["step"]][-3:] or trained[:3]
    ends = [[row[_TRAINED] for row in part] or [0.0] for part in (until_best, trained[-3:])]
    held_out = [row.get(_SCORE) or 0.0 for row in (best, last)]
    scores = {"held-out": held_out, "training": list(map(median, ends))}
    for label, (before, after) in scores.items():
        if after - before > chance:
            return f"The {label} score rose meanwhile, {before:.3g} to {after:.3g}"
    return ""
