"""Reads each iteration's metrics and says what is going wrong, since when, and what to change.

Every rule is about numbers that metrics.jsonl has. A line comes when a rule begins to hold and
again when it returns, not in every iteration. The bounds are far from what healthy runs show, and a
rule that may hold by chance must hold for some iterations in a row.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Metrics = dict[str, float]

_FIRST = 3  # iterations whose median says what is usual in this run


class Rule(NamedTuple):
    """``says``: the line, where the rule holds; None elsewhere. ``patience``: iterations in a row
    before the line comes. ``is_collapse``: the policy cannot recover.
    """

    name: str
    says: "Callable[[RunHealth, Metrics], str | None]"
    patience: int = 1
    is_collapse: bool = False


class Finding(NamedTuple):
    """What is wrong. ``since``: the first iteration of those in a row."""

    since: int
    text: str
    is_collapse: bool

    def __str__(self) -> str:
        return f"{self.text} (since iteration {self.since})"


@dataclass
class RunHealth:
    """Follows one run of step 3.

    ``first``: metrics of its first iterations and of its first evaluation.
    """

    first: dict[str, list[float]] = field(default_factory=dict)
    streaks: dict[str, int] = field(default_factory=dict)  # iterations in a row that a rule holds

    def read(self, iteration: int, metrics: Metrics) -> list[Finding]:
        """What is wrong anew after ``iteration``; ``metrics`` are its own or an evaluation's."""
        rules = EVALUATION_RULES if "eval/answer_length" in metrics else UPDATE_RULES
        found = []
        for rule in rules:
            text = rule.says(self, metrics)
            streak = self.streaks[rule.name] = (
                0 if text is None else self.streaks.get(rule.name, 0) + 1
            )
            if text is not None and streak == rule.patience:
                since = iteration - rule.patience + 1 if rules is UPDATE_RULES else iteration
                found.append(Finding(since, text, rule.is_collapse))
        for name, value in metrics.items():
            known = self.first.setdefault(name, [])
            if len(known) < _FIRST and math.isfinite(value):
                known.append(value)
        return found

    def usual(self, name: str) -> float:
        """The median of a metric in the first iterations; NaN until there are enough of them."""
        values = sorted(self.first.get(name, ()))
        return values[_FIRST // 2] if len(values) == _FIRST else math.nan

    def at_first(self, name: str, form: str) -> str:
        """``, at first 0.004``; empty where that is not known."""
        usual = self.usual(name)
        return "" if math.isnan(usual) else f", at first {usual:{form}}"


def findings(rows: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """What `RunHealth` finds in the ``rows`` of a run's metrics.jsonl."""
    health, found = RunHealth(), []
    for row in rows:
        numbers = {k: v for k, v in row.items() if isinstance(v, (int, float)) and k != "step"}
        found += health.read(int(row.get("step") or 0), numbers)
    return found


# -- rules -----------------------------------------------------------------------------------------


def _far_step(health: RunHealth, metrics: Metrics) -> str | None:
    kl, usual = metrics.get("policy/approxkl_avg", 0.0), health.usual("policy/approxkl_avg")
    # 0 at first: of steps at a rate of 0, or of an actor that waited for its critic.
    if not (kl > 0.5 or (kl > 0.05 and kl > 20 * usual > 0)):
        return None
    return (
        f"an update moves the policy far: policy/approxkl_avg {kl:.3g}"
        f"{health.at_first('policy/approxkl_avg', '.3g')}; lower "
        "--actor_learning_rate, or take fewer --ppo_epochs"
    )


def _no_entropy(health: RunHealth, metrics: Metrics) -> str | None:
    entropy = metrics.get("objective/entropy", math.inf)
    if entropy > 1e-3:
        return None
    return (
        f"the policy no longer explores: objective/entropy {entropy:.2g} nats a token"
        f"{health.at_first('objective/entropy', '.2g')}; lower "
        "--actor_learning_rate, or raise --kl_coef or --entropy_coef"
    )


def _equal_scores(health: RunHealth, metrics: Metrics) -> str | None:
    share, mean = metrics.get("frac_reward_zero_std", 0.0), metrics.get("objective/scores")
    if share < 0.98 or mean is None or "objective/teacher_kl" in metrics:  # which may teach alone
        return None
    return (
        f"all answers to a prompt have the same score, for {share:.0%} of the prompts (mean score "
        f"{mean:.3g}): there is nothing to learn from; look at the reward and at the difficulty of "
        "the prompts"
    )


def _no_gradient(health: RunHealth, metrics: Metrics) -> str | None:
    is_trained = metrics.get("policy/learning_rate") != 0 and metrics.get("val/ratio") != 0
    if not is_trained or metrics.get("policy/grad_norm", 1.0) > 1e-8:  # no ratio: no update
        return None
    return "the actor's gradient is 0: nothing is learned; look at the reward and --kl_coef"


def _at_the_limit(health: RunHealth, metrics: Metrics) -> str | None:
    share = metrics.get("completions/clipped_ratio", 0.0)
    if not share > 0.9:
        return None
    return (
        f"{share:.0%} of the answers reach --max_answer_seq_len without an end"
        f"{health.at_first('completions/clipped_ratio', '.0%')}: the reward may like length; "
        "see --missing_eos_penalty and --overlong_penalty, or raise the limit"
    )


def _cut_scores(health: RunHealth, metrics: Metrics) -> str | None:
    share = metrics.get("objective/clipped_share", 0.0)
    if share <= 0.5:
        return None
    return (
        f"--clip_reward cuts {share:.0%} of the scores, which then say little about an answer; "
        "raise it, or set --normalize_reward"
    )


def _far_from_start(health: RunHealth, metrics: Metrics) -> str | None:
    kl, length = metrics.get("objective/kl", 0.0), metrics.get("rollout/answer_length", math.inf)
    per_token = kl / max(length, 1.0)
    if not per_token > 1.0:
        return None
    score, before = metrics.get("objective/scores", math.nan), health.usual("objective/scores")
    rises = f" while the score rises ({before:.3g} to {score:.3g}): it may be hacked"
    return (
        f"the policy is far from the one it started from, objective/kl {per_token:.2g} nats a "
        f"token{rises if score > before else ''}; raise --kl_coef, lower --actor_learning_rate, "
        "and read the sample answers"
    )


def _worse_than_before(health: RunHealth, metrics: Metrics) -> str | None:
    name = next((n for n in ("eval/gold", "eval/pass@1", "eval/score") if n in metrics), "")
    if not name or not health.first.get(name):
        return None
    value, before = metrics[name], health.first[name][0]
    if not value < before - max(0.1, 0.25 * abs(before)):
        return None
    return (
        f"held-out answers are worse than before training: {name} {value:.3g}, at first "
        f"{before:.3g}; use an earlier checkpoint, raise --kl_coef, or lower --actor_learning_rate"
    )


UPDATE_RULES = (
    Rule("far step", _far_step, is_collapse=True),
    Rule("no entropy", _no_entropy, 2, is_collapse=True),
    Rule("equal scores", _equal_scores, 3),
    Rule("no gradient", _no_gradient, 3, is_collapse=True),
    Rule("at the limit", _at_the_limit, 3),
    Rule("cut scores", _cut_scores, 3),
    Rule("far from start", _far_from_start, 2),
)
EVALUATION_RULES = (Rule("worse than before", _worse_than_before),)
