"""The run in a few numbers: what its steps logged, as ``summary.json`` and as a table.

Comes in: the output folder of a run, and how long its steps took. Goes out: flat keys, null where a
number is unknown (a step that has not run, data without a gold score). It must not know how any of
them was measured: it reads metrics.jsonl and nothing else.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, Optional

from dschat.config import UserError

Number = Optional[float]

_STEP_FOLDERS = {1: "step1_sft", 2: "step2_reward", 3: "step3_rlhf"}

# key of summary.json -> what the table calls it; after three steps, and after two
_PPO_TITLES = {
    "rm_accuracy": "reward model: held-out pairs ranked right",
    "gold_base": "gold score of the base model",
    "gold_sft": "  after step 1 (SFT)",
    "gold_ppo": "  after step 3 (PPO)",
    "gold_ema": "  its moving average",
    "kl_per_sequence": "KL to the SFT model, nats per answer",
    "step1_s": "step 1, seconds",
    "step2_s": "step 2, seconds",
    "step3_s": "step 3, seconds",
    "generate_tokens_per_s": "generation, tokens per second (median)",
}
_PAIRS_TITLES = {
    "policy_accuracy": "policy: held-out pairs ranked right",
    "gold_base": "gold score of the base model",
    "gold_sft": "  after step 1 (SFT)",
    "gold_policy": "  after step 2 (preferences)",
    "step1_s": "step 1, seconds",
    "step2_s": "step 2, seconds",
}


def write_summary(
    output_dir: str | Path, step_seconds: Mapping[int, float], went_on: bool = False
) -> dict[str, Number]:
    """Write ``OUTPUT_DIR/summary.json`` and return what is in it.

    Args:
        output_dir: the folder with ``step1_sft``, ``step2_reward`` and ``step3_rlhf``; where step 2
            trained the policy, that lies in the last, and there is nothing of a third step to tell.
        step_seconds: wall seconds of the steps that ran just now, by number; the others keep what
            an earlier summary said.
        went_on: these steps were cut short before: their seconds are added to what it said.

    Raises:
        UserError: a metrics file with a line that is no JSON object.
    """
    folder = Path(output_dir)
    rows = {n: _read_rows(folder / name / "metrics.jsonl") for n, name in _STEP_FOLDERS.items()}
    former = _former(folder / "summary.json")
    seconds = {f"step{n}_s": former.get(f"step{n}_s") for n in _STEP_FOLDERS}
    for n, ran in step_seconds.items():
        seconds[f"step{n}_s"] = ran + (seconds[f"step{n}_s"] or 0.0 if went_on else 0.0)
    of_pairs = bool(_column(rows[3], "eval/rewards/accuracies"))
    summary = (_of_pairs if of_pairs else _of_ppo)(rows) | seconds
    titles = _PAIRS_TITLES if of_pairs else _PPO_TITLES
    summary = {name: summary[name] for name in titles}
    _write(folder / "summary.json", summary)
    return summary


def _of_pairs(rows: Mapping[int, list[dict[str, Any]]]) -> dict[str, Number]:
    return {
        "policy_accuracy": _last(rows[3], "eval/rewards/accuracies"),
        "gold_base": _at_start(rows[1], "eval/gold"),
        "gold_sft": _at_start(rows[3], "eval/gold"),
        "gold_policy": _last(rows[3], "eval/gold"),
    }


def _of_ppo(rows: Mapping[int, list[dict[str, Any]]]) -> dict[str, Number]:
    speeds = _column(rows[3], "throughput/generate_tokens_per_s")
    return {
        "rm_accuracy": _last(rows[2], "eval/accuracy"),
        "gold_base": _at_start(rows[1], "eval/gold"),
        "gold_sft": _at_start(rows[3], "eval/gold"),
        "gold_ppo": _last(rows[3], "eval/gold"),
        "gold_ema": _last(rows[3], "eval_ema/gold"),
        "kl_per_sequence": _last(rows[3], "eval/kl"),
        "generate_tokens_per_s": median(speeds) if speeds else None,
    }


def format_summary(summary: Mapping[str, Number]) -> str:
    """The same as a table, a line a number; ``-`` where it is unknown."""
    titles = _PAIRS_TITLES if "gold_policy" in summary else _PPO_TITLES
    width = max(map(len, titles.values()))
    return "\n".join(
        f"{title:<{width}}  {_shown(key, summary.get(key)):>8}" for key, title in titles.items()
    )


def _shown(key: str, value: Number) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if key.endswith("_s") else f"{value:.3f}"


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, in the order they were logged; none where there is no file."""
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if not isinstance(row, dict):
            raise UserError(f"{path}: line {number} is no JSON object; run that step again")
        rows.append(row)
    return rows


def _column(rows: list[dict[str, Any]], name: str) -> list[float]:
    """The finite values of a metric, in order. NaN, the mean of nothing, is as good as absent."""
    return [row[name] for row in rows if name in row and math.isfinite(row[name])]


def _last(rows: list[dict[str, Any]], name: str) -> Number:
    values = _column(rows, name)
    return values[-1] if values else None


def _at_start(rows: list[dict[str, Any]], name: str) -> Number:
    """The metric before the first step of training."""
    values = _column([row for row in rows if row.get("step") == 0], name)
    return values[0] if values else None


def _former(path: Path) -> dict[str, Number]:
    """What an earlier run wrote; nothing where it wrote none or none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(path: Path, summary: dict[str, Number]) -> None:
    """In one move, so that no half file is ever seen."""
    scratch = path.with_suffix(".json.part")
    scratch.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    os.replace(scratch, path)
