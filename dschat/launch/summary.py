"""Summarizes a run in a few numbers from its metrics.jsonl files: ``summary.json`` and a table.

The keys are flat; null where a number is unknown (a step that has not finished, data without a gold
score).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, Optional

from dschat.checkpoint.manifest import COMPLETE
from dschat.observability.metrics_log import METRICS
from dschat.reporting.run_files import is_finite, read_rows
from dschat.startup.files import replace_file

Number = Optional[float]

_STEP_FOLDERS = {1: "step1_sft", 2: "step2_reward", 3: "step3_rlhf"}

# key of summary.json -> title in the table; after RLHF, and after DPO and its relatives
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
    output_dir: str | Path, step_seconds: Mapping[int, float], resumed: bool = False
) -> dict[str, Number]:
    """Write ``OUTPUT_DIR/summary.json`` and return its content.

    Args:
        output_dir: the folder with ``step1_sft``, ``step2_reward`` and ``step3_rlhf``. A policy
            that step 2 trained is in ``step3_rlhf``, and there is no step 3.
        step_seconds: wall seconds of the steps that just ran, by number; the others keep those of
            an earlier summary.
        resumed: whether to add ``step_seconds`` to those of an earlier summary.

    Raises:
        UserError: a line of a metrics file is not a JSON object.
    """
    folder = Path(output_dir)
    rows = {n: _read_rows(folder / name) for n, name in _STEP_FOLDERS.items()}
    previous = _read_previous(folder / "summary.json")
    seconds = {f"step{n}_s": previous.get(f"step{n}_s") for n in _STEP_FOLDERS}
    for n, ran in step_seconds.items():
        seconds[f"step{n}_s"] = ran + (seconds[f"step{n}_s"] or 0.0 if resumed else 0.0)
    from_pairs = bool(_column(rows[3], "eval/rewards/accuracies"))
    summary = (_from_pairs if from_pairs else _from_ppo)(rows) | seconds
    titles = _PAIRS_TITLES if from_pairs else _PPO_TITLES
    summary = {name: summary[name] for name in titles}
    replace_file(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def _from_pairs(rows: Mapping[int, list[dict[str, Any]]]) -> dict[str, Number]:
    return {
        "policy_accuracy": _last(rows[3], "eval/rewards/accuracies"),
        "gold_base": _at_start(rows[1], "eval/gold"),
        "gold_sft": _at_start(rows[3], "eval/gold"),
        "gold_policy": _last(rows[3], "eval/gold"),
    }


def _from_ppo(rows: Mapping[int, list[dict[str, Any]]]) -> dict[str, Number]:
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
    """The summary as a table, one line per number; ``-`` where it is unknown."""
    titles = _PAIRS_TITLES if "gold_policy" in summary else _PPO_TITLES
    width = max(map(len, titles.values()))
    return "\n".join(
        f"{title:<{width}}  {_shown(key, summary.get(key)):>8}" for key, title in titles.items()
    )


def _shown(key: str, value: Number) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if key.endswith("_s") else f"{value:.3f}"


def _read_rows(step: Path) -> list[dict[str, Any]]:
    """The rows of a finished step's metrics file, in order; none of another: its last evaluation is
    not that of its result.
    """
    return read_rows(step / METRICS) if (step / COMPLETE).is_file() else []


def _column(rows: list[dict[str, Any]], name: str) -> list[float]:
    """The finite values of a metric, in order; null is the mean of no values."""
    return [row[name] for row in rows if is_finite(row.get(name))]


def _last(rows: list[dict[str, Any]], name: str) -> Number:
    values = _column(rows, name)
    return values[-1] if values else None


def _at_start(rows: list[dict[str, Any]], name: str) -> Number:
    """The metric before the first step of training."""
    values = _column([row for row in rows if row.get("step") == 0], name)
    return values[0] if values else None


def _read_previous(path: Path) -> dict[str, Number]:
    """The summary of an earlier run; empty if there is none or it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
