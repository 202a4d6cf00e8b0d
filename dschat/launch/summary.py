"""Summarizes a run in a few numbers from its metrics.jsonl files: ``summary.json`` and a table.

The keys are flat; null where a number is unknown (an unfinished step, data without a gold
score). ``warnings``: what went wrong in the steps, a line each.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple, Optional

from dschat.checkpoint.manifest import COMPLETE
from dschat.launch.recipe import STEPS
from dschat.observability.metrics_log import METRICS, is_finite, whole_rows
from dschat.reporting.run_files import Step, read_warnings
from dschat.startup.files import no_link, replace_file

Number = Optional[float]
Summary = dict[str, Number]


def _last(step: Step, name: str) -> Number:
    return next((value for _, value in reversed(step.series(name))), None)


def _at_start(step: Step, name: str) -> Number:
    """The metric before the first step of training."""
    return next((value for number, value in step.series(name) if number == 0), None)


def _median(step: Step, name: str) -> Number:
    values = [value for _, value in step.series(name)]
    return median(values) if values else None


class _Line(NamedTuple):
    """A number of the summary: its key, its title in the table, and where it comes from."""

    key: str
    title: str
    step: int  # whose folder has the rows
    take: Optional[Callable[[Step, str], Number]] = None  # None: wall seconds of the step
    metric: str = ""


_PPO = (
    _Line("rm_accuracy", "reward model: held-out pairs ranked right", 2, _last, "eval/accuracy"),
    _Line("gold_base", "gold score of the base model", 1, _at_start, "eval/gold"),
    _Line("gold_sft", "  after step 1 (SFT)", 3, _at_start, "eval/gold"),
    _Line("gold_ppo", "  after step 3 (PPO)", 3, _last, "eval/gold"),
    _Line("gold_ema", "  its moving average", 3, _last, "eval_ema/gold"),
    _Line("kl_per_sequence", "KL to the SFT model, nats per answer", 3, _last, "eval/kl"),
    _Line("step1_s", "step 1, seconds", 1),
    _Line("step2_s", "step 2, seconds", 2),
    _Line("step3_s", "step 3, seconds", 3),
    _Line(
        "generate_tokens_per_s",
        "generation, tokens per second (median)",
        *(3, _median, "throughput/generate_tokens_per_s"),
    ),
)
# DPO and its relatives: step 2 trains the policy, into step 3's folder.
_PAIR_ACCURACY = "eval/rewards/accuracies"
_PAIRS = (
    _Line("policy_accuracy", "policy: held-out pairs ranked right", 3, _last, _PAIR_ACCURACY),
    _Line("gold_base", "gold score of the base model", 1, _at_start, "eval/gold"),
    _Line("gold_sft", "  after step 1 (SFT)", 3, _at_start, "eval/gold"),
    _Line("gold_policy", "  after step 2 (preferences)", 3, _last, "eval/gold"),
    _Line("step1_s", "step 1, seconds", 1),
    _Line("step2_s", "step 2, seconds", 2),
)


def write_summary(
    output_dir: str | Path, step_seconds: Mapping[int, float], resumed: bool = False
) -> Summary:
    """Write ``OUTPUT_DIR/summary.json`` and return its content.

    Args:
        output_dir: the folder with ``step1_sft``, ``step2_reward`` and ``step3_rlhf``.
        step_seconds: wall seconds of the steps that just ran, by number; the other steps keep
            their seconds of an earlier summary.
        resumed: whether to add ``step_seconds`` to the seconds of an earlier summary.
    """
    folder = Path(output_dir)
    steps = {n: _read_step(folder / step.name) for n, step in STEPS.items()}
    previous = _read_previous(folder / "summary.json")
    summary: Summary = {}
    for line in _PAIRS if steps[3].series(_PAIR_ACCURACY) else _PPO:
        if line.take is not None:
            summary[line.key] = line.take(steps[line.step], line.metric)
            continue
        before, ran = previous.get(line.key), step_seconds.get(line.step)
        summary[line.key] = before if ran is None else ran + (before or 0.0 if resumed else 0.0)
    warnings = [text for step in steps.values() for text in read_warnings(step.folder)]
    content = json.dumps(summary | {"warnings": warnings}, indent=2)
    replace_file(folder / "summary.json", content + "\n")
    return summary


def format_summary(summary: Mapping[str, Number]) -> str:
    """The summary as a table, one line per number; ``-`` where it is unknown."""
    lines = _PAIRS if "gold_policy" in summary else _PPO
    width = max(len(line.title) for line in lines)
    return "\n".join(
        f"{line.title:<{width}}  {_shown(line.key, summary.get(line.key)):>8}" for line in lines
    )


def _shown(key: str, value: Number) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if key.endswith("_s") else f"{value:.3f}"


def _read_step(folder: Path) -> Step:
    """The rows of a finished step's metrics file, in order. An unfinished step has none: its last
    evaluation is of another model than its result.
    """
    return Step(folder, whole_rows(folder / METRICS) if (folder / COMPLETE).is_file() else [])


def _read_previous(path: Path) -> dict[str, Number]:
    """The summary of an earlier run; empty if there is none or it cannot be read."""
    try:
        with open(path, encoding="utf-8", opener=no_link) as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    items = content.items() if isinstance(content, dict) else ()
    return {key: value for key, value in items if is_finite(value)}
