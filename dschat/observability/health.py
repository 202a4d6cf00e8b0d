"""Reads each iteration's metrics and says what is going wrong, since when, and what to change.

Every rule is about numbers that metrics.jsonl has. A line comes when a rule begins to hold and
again when it returns, not in every iteration. The bounds are far from what healthy runs show, and a
rule that may hold by chance must hold for some iterations in a row.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple

Metrics = dict[str, float]
# collapse: the policy cannot recover. hacked: a higher score may be no better answer.
Kind = Literal["warning", "hacked", "collapse"]

# How good held-out answers are: the first of these that an evaluation has.
LEADING = ("eval/gold", "eval/pass@1", "eval/score")
_SCORE, _SPREAD = "objective/scores", "objective/scores_std"
_FIRST = 3  # iterations whose median says what is usual in this run


class Rule(NamedTuple):
    """``says``: the line, where the rule holds; None elsewhere. ``patience``: iterations in a row
    before the line comes. ``once``: it comes a single time.
    """

    name: str
    says: "Callable[[RunHealth, Metrics], str | None]"
    patience: int = 1
    kind: Kind = "warning"
    once: bool = False


class Finding(NamedTuple):
    """What is wrong. ``since``: the first iteration of those in a row."""

    since: int
    text: str
    kind: Kind
    unit: str = "iteration"

    def __str__(self) -> str:
        return f"{self.text} (since {self.unit} {self.since})"


class Settings(NamedTuple):
    """What rules have to know of a run."""

    unit: str = "iteration"
    temperature: float = 1.0
    most_clipped: float = 0.3  # of policy/clipfrac_avg
    num_samples: int = 1  # answers to a prompt
    num_held_out: int = 1  # prompts


@dataclass
class RunHealth:
    """Follows one run of a step. All but ``settings`` is of the metrics so far."""

    settings: Settings = Settings()
    first: dict[str, list[float]] = field(default_factory=dict)  # in the first iterations
    extremes: dict[str, list[float]] = field(default_factory=dict)  # the lowest and the highest
    streaks: dict[str, int] = field(default_factory=dict)  # iterations in a row that a rule holds
    iteration: int = 0
    pass_rate: float = 0.0  # eval/pass@1 of the last evaluation
    is_doubtful: bool = False  # a collapse, or a score that may be hacked, was found

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on with, as JSON."""
        return {name: value for name, value in asdict(self).items() if name != "settings"}

    def read(self, iteration: int, metrics: Metrics) -> list[Finding]:
        """What has gone wrong in ``iteration``; ``metrics`` are its own or an evaluation's."""
        self.iteration, found = iteration, []
        rules = next((of for name, of in _RULES_OF.items() if name in metrics), UPDATE_RULES)
        for rule in rules:
            text, held = rule.says(self, metrics), self.streaks.get(rule.name, 0)
            if text is None and not (rule.once and held >= rule.patience):
                self.streaks[rule.name] = 0
            elif text is not None:
                self.streaks[rule.name] = held + 1
                if held + 1 == rule.patience:
                    since = iteration - held
                    found.append(Finding(since, text, rule.kind, self.settings.unit))
        self.is_doubtful |= any(finding.kind != "warning" for finding in found)
        for name, value in metrics.items():
            if math.isfinite(value):
                known = self.first.setdefault(name, [])
                known += [value] if len(known) < _FIRST else []
                low, high = self.extremes.get(name, (value, value))
                self.extremes[name] = [min(low, value), max(high, value)]
        self.pass_rate = metrics.get("eval/pass@1", self.pass_rate)
        return found

    def usual(self, name: str) -> float:
        """The median of a metric in the first iterations; NaN until there are enough of them."""
        values = self.first.get(name, [])
        return median(values) if len(values) == _FIRST else math.nan

    def range(self, name: str) -> list[float]:
        """The lowest and the highest value so far; NaN before the first."""
        return self.extremes.get(name, [math.nan, math.nan])


# -- rules of an update ----------------------------------------------------------------------------


def _warmer(health: RunHealth) -> str:
    """The first remedy where answers are drawn almost without chance."""
    temperature = health.settings.temperature
    return f"raise --temperature, which is {temperature:g}, or " if temperature < 0.5 else ""


def _far_step(health: RunHealth, metrics: Metrics) -> str | None:
    for name in ("policy/approxkl_after", "policy/approxkl_avg"):
        kl, usual = metrics.get(name, 0.0), health.usual(name)
        # 0 at first: of steps at a rate of 0, or of an actor that waited for its critic.
        has_grown = kl > 20 * usual > 0
        # A few unlikely tokens of an eighth of the answers make 0.1.
        if kl > 0.5 or (kl > 0.05 and has_grown and name == "policy/approxkl_avg"):
            before = f", at first {usual:.3g}" if has_grown else ""
            return (
                f"an update moves the policy far: {name} {kl:.3g}{before}; {_warmer(health)}lower "
                "--actor_learning_rate, or take fewer --ppo_epochs"
            )
    return None


def _no_entropy(health: RunHealth, metrics: Metrics) -> str | None:
    entropy = metrics.get("objective/entropy", math.inf)
    if entropy > 1e-3:
        return None
    return (
        f"the policy no longer explores: objective/entropy {entropy:.2g} nats a token; "
        f"{_warmer(health)}lower --actor_learning_rate, or raise --kl_coef or --entropy_coef"
    )


def _equal_scores(health: RunHealth, metrics: Metrics) -> str | None:
    share, mean = metrics.get("frac_reward_zero_std", 0.0), metrics.get(_SCORE)
    if share < 0.98 or mean is None or "objective/teacher_kl" in metrics:  # which may teach alone
        return None
    return (
        f"all answers to a prompt have the same score, for {share:.0%} of the prompts (mean score "
        f"{mean:.3g}): there is nothing to learn from; {_warmer(health)}look at the reward and at "
        "the difficulty of the prompts"
    )


def _no_gradient(health: RunHealth, metrics: Metrics) -> str | None:
    is_trained = metrics.get("policy/learning_rate") != 0 and metrics.get("val/ratio") != 0
    if not is_trained or metrics.get("policy/grad_norm", 1.0) > 1e-8:  # no ratio: no update
        return None
    return "the actor's gradient is 0: nothing is learned; look at the reward and --kl_coef"


def _is_solved(health: RunHealth, metrics: Metrics) -> bool:
    """Whether the score is at its highest and has risen, or held-out answers pass. A constant
    reward has neither.
    """
    score, start = metrics.get(_SCORE, math.nan), health.usual(_SCORE)
    highest = max(score, health.range(_SCORE)[1])
    has_risen = highest - start > health.usual(_SPREAD) / 4
    if not (has_risen and not health.usual("frac_reward_zero_std") >= 0.98):
        has_risen = health.pass_rate > 0.95
    return has_risen and score >= highest - 0.05 * max(abs(highest), abs(highest - start))


_Says = Callable[[RunHealth, Metrics], str | None]


def _unless_solved(says: _Says) -> _Says:
    return lambda health, metrics: None if _is_solved(health, metrics) else says(health, metrics)


def _solved(health: RunHealth, metrics: Metrics) -> str | None:
    """Equal scores without a gradient or entropy look like a collapse, and are none."""
    stands = any(says(health, metrics) for says in (_equal_scores, _no_entropy, _no_gradient))
    if not stands or not _is_solved(health, metrics):
        return None
    return (
        f"solved: the score is at its highest, {metrics[_SCORE]:.3g}, and these prompts teach "
        "nothing more; give harder ones, or end the run"
    )


def _part_falls(health: RunHealth, metrics: Metrics) -> str | None:
    """Of a source of the score, of any weight, while the sum rises."""
    rise = metrics.get(_SCORE, math.nan) - health.usual(_SCORE)
    parts = [name for name in metrics if name.startswith(f"{_SCORE}/") and f"{name}_std" in metrics]
    for name in parts if rise > health.usual(_SPREAD) / 4 else ():
        start, spread = health.usual(name), health.usual(f"{name}_std")
        if metrics[name] < start - max(abs(start), spread) / 2:
            return (
                f"the score rises and a part of it falls: {name} {metrics[name]:.3g}, at first "
                f"{start:.3g}: it may be hacked; read the sample answers, and weigh that part more"
            )
    return None


def _bad_critic(health: RunHealth, metrics: Metrics) -> str | None:
    explained = metrics.get("val/explained_variance", 0.0)
    loss, (start, *_) = metrics.get("loss/value_avg", 0.0), health.first.get("loss/value_avg", [0])
    if not (health.iteration > 5 and explained < -1) and not loss > 20 * start > 0:
        return None
    return (
        f"the critic predicts badly: loss/value_avg {loss:.3g}, val/explained_variance "
        f"{explained:.3g}; lower --critic_learning_rate"
    )


def _clipped(health: RunHealth, metrics: Metrics) -> str | None:
    share = metrics.get("policy/clipfrac_avg", 0.0)
    if not share > health.settings.most_clipped:
        return None
    return (
        f"{share:.0%} of the tokens are clipped and teach nothing: policy/clipfrac_avg; lower "
        "--actor_learning_rate, take fewer --ppo_epochs, or widen --cliprange"
    )


def _at_the_limit(health: RunHealth, metrics: Metrics) -> str | None:
    share = metrics.get("completions/clipped_ratio", 0.0)
    if not share > 0.5:
        return None
    return (
        f"{share:.0%} of the answers reach --max_answer_seq_len without an end: the reward may "
        "like length; see --missing_eos_penalty and --overlong_penalty, or raise the limit"
    )


def _far_from_start(health: RunHealth, metrics: Metrics) -> str | None:
    kl, length = metrics.get("objective/kl", 0.0), metrics.get("rollout/answer_length", math.inf)
    per_token = kl / max(length, 1.0)
    if not per_token > 1.0:
        return None
    score, before = metrics.get(_SCORE, math.nan), health.usual(_SCORE)
    rises = f" while the score rises ({before:.3g} to {score:.3g}): it may be hacked"
    return (
        f"the policy is far from the one it started from, objective/kl {per_token:.2g} nats a "
        f"token{rises if score > before else ''}; raise --kl_coef, lower --actor_learning_rate, "
        "and read the sample answers"
    )


# -- rules of scores and losses against the best so far --------------------------------------------


def _has_fallen(value: float, best: float, spread: float, num_prompts: float) -> bool:
    """Whether a mean over prompts is a quarter, and 0.1, below the best one, where chance does not
    explain it: three standard errors of a difference. False where the spread is not known yet.
    """
    error = spread * math.sqrt(2 / max(num_prompts, 1.0))
    return value < best - 3 * error and value < best - max(0.1, 0.25 * abs(best))


def _worse_answers(health: RunHealth, metrics: Metrics) -> str | None:
    """Of training, or of an evaluation."""
    name = next((name for name in (*LEADING, _SCORE) if name in metrics), _SCORE)
    value, best = metrics.get(name, math.nan), health.range(name)[1]
    spread, num_prompts = health.usual(_SPREAD), float(health.settings.num_held_out)
    if name == _SCORE:
        spread = metrics.get(_SPREAD, math.inf)
        num_prompts = metrics.get("rollout/sequences", 0.0) / health.settings.num_samples
    elif name != "eval/score":  # in [0, 1]
        spread = math.sqrt(max(value * (1 - value), best * (1 - best), 0.0))
    if not _has_fallen(value, best, spread, num_prompts):
        return None
    return (
        f"answers are worse than before: {name} {value:.3g}, at best {best:.3g}; use an earlier "
        "checkpoint, raise --kl_coef, or lower --actor_learning_rate"
    )


def _loss_rises(health: RunHealth, metrics: Metrics) -> str | None:
    loss, lowest = metrics["eval/loss"], health.range("eval/loss")[0]
    if not loss > lowest + max(0.01, 0.1 * abs(lowest)):
        return None
    return (
        f"the held-out loss rises: eval/loss {loss:.3g}, at its lowest {lowest:.3g}; train for "
        "fewer steps, or lower --learning_rate"
    )


def _chosen_fall(health: RunHealth, metrics: Metrics) -> str | None:
    """Of a policy that learns from pairs: both answers may become less likely, and others more."""
    name = "eval/logps/chosen"
    logp, (start, *_) = metrics.get(name, math.nan), health.first.get(name, [math.nan])
    if not logp < start - max(2.0, 0.05 * abs(start)):
        return None
    return (
        f"the chosen answers become less likely: {name} {logp:.3g}, at first {start:.3g}; raise "
        "--beta, or lower --learning_rate"
    )


UPDATE_RULES = (
    Rule("far step", _far_step, kind="collapse"),
    Rule("no entropy", _unless_solved(_no_entropy), 2, "collapse"),
    Rule("equal scores", _unless_solved(_equal_scores), 3),
    Rule("no gradient", _unless_solved(_no_gradient), 3, "collapse"),
    Rule("solved", _solved, 3, once=True),
    Rule("part falls", _part_falls, 3, "hacked"),
    Rule("bad critic", _bad_critic, 2),
    Rule("clipped", _clipped, 3),
    Rule("at the limit", _at_the_limit, 3),
    Rule("far from start", _far_from_start, 2, "hacked"),
    Rule("score falls", _worse_answers, 3),
)
_RULES_OF = {  # evaluations, by a metric that they have
    "eval/answer_length": (Rule("worse answers", _worse_answers),),
    "eval/loss": (Rule("loss rises", _loss_rises), Rule("chosen fall", _chosen_fall)),
}
