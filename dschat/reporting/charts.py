"""Lists the charts of each step: which metrics, under which title, axis and unit.

Metrics that no chart names get one each, in the section of other metrics.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from dschat.reporting.run_files import Step


@dataclass(frozen=True)
class Chart:
    """Metrics on one y axis, by their labels. ``caption``: what the curves mean."""

    title: str
    y_label: str  # quantity and unit
    metrics: dict[str, str]
    caption: str = ""
    is_smoothed: bool = True  # a running mean over noisy curves
    is_log: bool = False
    over: dict[str, str] = field(default_factory=dict)  # metric -> the one on its x axis
    x_label: str = ""  # of that one


def _held_out(metric: str) -> dict[str, str]:
    return {metric: "training", f"eval/{metric}": "held out"}


_GOLD = Chart(
    "Gold score",
    "gold score of held-out answers",
    {"eval/gold": "policy", "eval_ema/gold": "moving average"},
    "A rule-based score of the built-in tasks, never used as the reward.",
)
_LEARNING = (
    Chart(
        "Learning rate",
        "learning rate",
        {"learning_rate": "model", "policy/learning_rate": "actor", "val/learning_rate": "critic"},
        is_smoothed=False,
    ),
    Chart(
        "Gradient norm",
        "global 2-norm before clipping",
        {"grad_norm": "model", "policy/grad_norm": "actor", "val/grad_norm": "critic"},
        "Mean over the optimizer steps of an iteration; --max_grad_norm clips it.",
    ),
)
_STEP_SECONDS = Chart("Seconds per step", "seconds per optimizer step", {"time/step_s": "step"})
_SFT = (
    Chart("Loss", "cross-entropy, nats per token", _held_out("loss")),
    Chart("Perplexity", "exp(loss) per token", _held_out("perplexity"), is_log=True),
    _GOLD,
    *_LEARNING,
    _STEP_SECONDS,
)
_REWARD = (
    Chart("Loss", "-log sigmoid(margin), nats per pair", _held_out("loss")),
    Chart("Pairs ranked right", "share of pairs", _held_out("accuracy")),
    Chart("Margin", "score of chosen - rejected", _held_out("margin")),
    Chart(
        "Scores",
        "score",
        {"chosen_score": "chosen", "rejected_score": "rejected"},
        "Only their difference is trained; both may drift together.",
    ),
    *_LEARNING,
    _STEP_SECONDS,
)
_PREFERENCES = (
    Chart("Loss", "preference loss per pair", _held_out("loss")),
    Chart(
        "Pairs ranked right",
        "share of pairs",
        _held_out("rewards/accuracies"),
        "By the implicit reward, beta (log policy - log reference).",
    ),
    Chart("Margin", "implicit reward, chosen - rejected", _held_out("rewards/margins")),
    Chart(
        "Implicit rewards",
        "beta (log policy - log reference)",
        {"rewards/chosen": "chosen", "rewards/rejected": "rejected"},
    ),
    Chart(
        "Log-probs of answers",
        "nats per answer",
        {"logps/chosen": "chosen", "logps/rejected": "rejected"},
        "Both may fall while the margin grows.",
    ),
    _GOLD,
    *_LEARNING,
    _STEP_SECONDS,
)
_RLHF = (
    Chart(
        "Score",
        "score per answer",
        {
            "objective/scores": "rollouts",
            "eval/score": "held out",
            "eval_ema/score": "held out, moving average",
        },
        "Weighted sum of all reward sources, before clipping and KL penalty.",
    ),
    Chart(
        "Score against KL",
        "score per answer",
        {"objective/scores": "rollouts", "eval/score": "held out"},
        "Where the KL goes on and the score gains little, training should have stopped.",
        is_smoothed=False,
        over={"objective/scores": "objective/kl", "eval/score": "eval/kl"},
        x_label="KL to the reference model, nats per answer",
    ),
    Chart(
        "Reward with penalties",
        "reward per answer",
        {"objective/rlhf_reward": "rollouts"},
        "What the estimator maximizes: the clipped score minus KL and length penalties.",
    ),
    Chart(
        "KL to the reference model",
        "nats per answer",
        {"objective/kl": "rollouts", "eval/kl": "held out"},
        "Sum over the answer of log policy - log reference (Ouyang et al. 2022, eq. 2).",
    ),
    _GOLD,
    Chart(
        "pass@k",
        "share of held-out prompts",
        {f"eval/pass@{k}": f"k = {k}" for k in (1, 2, 4, 8, 16, 32, 64)},
        "Probability that one of k answers passes (Chen et al. 2021, arXiv 2107.03374, eq. 1).",
    ),
    Chart(
        "Answer length",
        "tokens per answer",
        {"rollout/answer_length": "rollouts", "eval/answer_length": "held out"},
    ),
    Chart(
        "Finished answers",
        "share of answers",
        {"rollout/eos_share": "rollouts", "eval/eos_share": "held out"},
        "Answers that end with a stop token; the others were cut at the maximal length.",
    ),
    Chart(
        "Entropy",
        "nats per token",
        {"objective/entropy": "policy"},
        "Of the policy's distribution at the sampled tokens; near 0 it no longer explores.",
    ),
    Chart(
        "Clip share",
        "share of tokens",
        {"policy/clipfrac_avg": "policy", "val/clipfrac_avg": "critic"},
        "Tokens of an update whose gradient the clip of the ratio (critic: of the value) removes.",
    ),
    Chart(
        "KL of an update",
        "nats per token",
        {"policy/approxkl_avg": "policy"},
        "Half the squared log-ratio of the policy in its update to the one before (Schulman's k2).",
    ),
    Chart("Policy loss", "loss per token", {"loss/policy_avg": "policy"}),
    Chart("Value loss", "squared error per token", {"loss/value_avg": "critic"}),
    *_LEARNING,
    Chart(
        "Rollout against training",
        "nats per token",
        {"rollout/logprob_gap": "mean |difference|", "rollout/mismatch_kl": "KL"},
        "Log-probs of the generator against those of the training form; rounding explains 1e-6 in "
        "fp32 and about 1e-2 in bf16.",
        is_log=True,
    ),
)
_UNITS = (
    ("tokens_per_s", "tokens per second"),
    ("_per_s", "per second"),
    ("_tflops", "TFLOP/s per device"),
    ("_gib", "GiB"),
    ("_s", "seconds"),
    ("_share", "share"),
    ("frac_avg", "share"),
    ("_length", "tokens"),
    ("_steps", "optimizer steps"),
    ("epoch", "epochs"),
)
_STEPS = {"step1_sft": _SFT, "step2_reward": _REWARD, "step3_rlhf": _RLHF}
PHASES = {"time/generate_s": "generate", "time/score_s": "score", "time/train_s": "train"}


def charts_of(name: str, steps: Iterable[Step]) -> dict[str, list[Chart]]:
    """The charts of the step ``name`` that have a metric in ``steps``, by section: "" for what is
    learned, and "other" with one chart per metric that is in none of those.
    """
    logged = {metric for step in steps for metric in step.metrics}
    table = _PREFERENCES if "rewards/accuracies" in logged else _STEPS[name]
    charts = [chart for chart in table if logged & chart.metrics.keys()]
    logged -= {metric for chart in charts for metric in chart.metrics}
    others = sorted(logged - {*PHASES, "time/iteration_s"})
    return {"": charts, "other": [Chart(m, unit_of(m), {m: m}) for m in others]}


def file_name(text: str) -> str:
    """``text`` in lower case, with dashes for all but letters and digits."""
    return "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def unit_of(metric: str) -> str:
    """The unit that a metric's name ends with."""
    name = metric.rpartition("/")[2]
    return next((unit for end, unit in _UNITS if name.endswith(end)), name.replace("_", " "))
