"""Parses train.py's command line and a recipe file into the given fields of each step.

The fields have their types; defaults are left to the step. `step_runs` decides which steps run.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Optional

from dschat.checkpoint.compatibility import BASE
from dschat.checkpoint.manifest import COMPLETE
from dschat.config import CommonConfig, RewardConfig, RLHFConfig, SFTConfig, UserError, parser
from dschat.config.errors import require
from dschat.config.fields import flag, require_valid
from dschat.config.renamed import hint, require_known, unknown
from dschat.estimate.devices import find_speed
from dschat.launch.cluster import ClusterConfig

Fields = Mapping[str, Any]
Reason = Literal[
    "asked for", "needed", "finished", "input", "base", "trained already", "not needed"
]


@dataclass(frozen=True)
class TrainingStep:
    """One of the three steps. Its script is ROOT/name/main.py."""

    number: int
    name: str
    title: str
    config_class: type[CommonConfig]
    base_flag: str = ""  # train.py's flag for its base model

    @property
    def fields(self) -> set[str]:
        """Fields that a recipe or a flag may set; ``output_dir`` follows from OUT."""
        return {f.name for f in fields(self.config_class)} - {"output_dir"}

    @cached_property
    def flags(self) -> set[str]:
        """``fields`` in every spelling: aliases and ``no_*`` too."""
        return parser.flag_names(self.config_class) - {"output_dir"}


STEPS = {
    1: TrainingStep(1, "step1_sft", "supervised fine-tuning", SFTConfig, "actor_model"),
    2: TrainingStep(2, "step2_reward", "reward model", RewardConfig, "reward_model"),
    3: TrainingStep(3, "step3_rlhf", "RLHF", RLHFConfig),
}


@dataclass(frozen=True)
class StepRun:
    """A step of a run. A plan is made in stages that take and return a list of these."""

    step: TrainingStep
    folder: str  # of its output
    fields: Fields  # given ones; from `step_runs.choose` on with ``output_dir``
    compared: Optional[Fields] = None  # what a finished step is compared by; None: ``fields``
    reason: Reason = "not needed"  # why it trains, is reused or is left out
    note: str = ""  # a line for the user, from the last stage

    @property
    def number(self) -> int:
        return self.step.number

    @property
    def trains(self) -> bool:
        return self.reason in ("asked for", "needed")

    @property
    def is_reused(self) -> bool:
        """Whether its finished output is used."""
        return self.reason in ("finished", "input", "base")

    @property
    def is_finished(self) -> bool:
        return os.path.exists(os.path.join(self.folder, COMPLETE))


# Metrics of steps 1 and 2; the others are of step 3.
_SUPERVISED = ("eval/loss", "eval/perplexity", "eval/accuracy", "eval/margin", "eval/rewards/")
_SECTIONS = ("model", "common", "step1", "step2", "step3", "launch", "summary")
# Sections of train.py's own flags, and the flags that each may have.
_OWN = {"model": ("actor_model", "reward_model"), "launch": ("num_nodes", "num_gpus")}


@dataclass
class TrainConfig(ClusterConfig):
    """Train a chat model. Flags of step*/main.py work too; `--step3.seed 1` is for step 3 only."""

    step: Optional[list[int]] = flag(
        None, "Steps to run, any of 1 2 3; default: all that the policy needs.", short=True
    )
    actor_model: Optional[str] = flag(
        None,
        "Base model of step 1 (a folder or a hub name), or a finished step1_sft folder.",
        short=True,
    )
    reward_model: Optional[str] = flag(
        None,
        "Base model of step 2, or a folder with a trained reward model (one from the hub: "
        "--critic_model_name_or_path).",
        short=True,
    )
    output_dir: Optional[str] = flag(
        None, "Folder of the run (OUT); default: output/NAME of the recipe or model.", short=True
    )
    recipe: Optional[str] = flag(
        None,
        "Name in training/recipes, or a YAML file; default: demo if no model is given.",
        short=True,
    )
    restart: bool = flag(
        False,
        "Start interrupted steps over; do not resume from their latest checkpoints.",
        short=True,
    )
    reuse: bool = flag(
        False, "Use finished steps in OUT even if they were trained with other settings."
    )
    dry_run: bool = flag(False, "Print the commands, run nothing.", short=True)
    plan: bool = flag(
        False,
        "Print the estimated memory of each step, on a GPU its time and cost too, and whether it "
        "fits; run nothing. Exit code 0 in both cases.",
        short=True,
    )
    report: bool = flag(True, "Write OUT/report.html at the end.", short=True)
    device_memory_gib: Optional[float] = flag(
        None,
        "Device memory for --plan, in GiB; default: of --plan_device, or of this machine.",
        short=True,
        gt=0,
    )
    plan_device: Optional[str] = flag(
        None,
        "GPU for --plan: V100-32, A6000-48, A100-40, A100-80, A800-80, H100-80 or H200-141; "
        "default: this machine's device.",
        short=True,
    )
    plan_price: Optional[float] = flag(
        None, "Dollars of a device hour for --plan; default: hours only.", short=True, ge=0
    )
    plan_tokens: Optional[list[int]] = flag(
        None,
        "Mean tokens of a prompt and of an answer for --plan's times; default: the maxima.",
    )
    plan_examples: Optional[int] = flag(
        None,
        "Examples of an epoch for --plan's hours (step 3: prompts); default: hours of --max_steps, "
        "or of 1,000 steps.",
        ge=1,
    )

    def validate(self) -> None:
        require_valid(self)
        for number in self.step or ():
            require(number in STEPS, f"--step {number} does not exist; choose from 1, 2 and 3")
        if self.plan_device is not None:
            find_speed(self.plan_device)
        tokens = self.plan_tokens
        require(
            tokens is None or (len(tokens) == 2 and min(tokens) > 0),
            "--plan_tokens needs two numbers of at least 1: tokens of a prompt and of an answer",
        )
        self.validate_cluster()


@dataclass
class Recipe:
    """A validated recipe file; ``values[n]`` are step n's fields."""

    name: str = ""
    values: dict[int, dict[str, Any]] = field(default_factory=lambda: {n: {} for n in STEPS})
    train: dict[str, Any] = field(default_factory=dict)  # train.py's own, of `_OWN`
    summary: bool = False  # print a table of all steps at the end


def parse_args(argv: Sequence[str]) -> tuple[TrainConfig, list[list[str]]]:
    """train.py's own flags, and the steps' flags as groups ``[flag, value, ...]``.

    Raises:
        UserError: a value before any flag, or a wrong value of train.py's own flags.
    """
    groups: list[list[str]] = []
    for token in argv:
        if token.startswith("--") or token == "-h":
            groups.append([token])
        elif groups:
            groups[-1].append(token)
        else:
            raise UserError(f"unexpected argument {token!r}; flags look like --name value")
    names = parser.flag_names(TrainConfig) | {"h", "help"}
    train_argv = [token for group in groups if flag_name(group) in names for token in group]
    config = parser.parse(TrainConfig, train_argv, takes_file=False)
    return config, [group for group in groups if flag_name(group) not in names]


def flag_name(group: Sequence[str]) -> str:
    """``kl_coef`` for ``["--kl-coef=0.1"]``; keeps the prefix of a step."""
    return parser.underscored(group[0]).lstrip("-").partition("=")[0]


def load_recipe(name: str, folder: Path) -> Recipe:
    """The recipe ``name`` in ``folder``, or the YAML file ``name``.

    Raises:
        UserError: no such recipe, an empty one, or an unknown key (with the closest one) or value.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not os.path.isfile(path):
        names = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
        raise UserError(f"--recipe {name}: no such recipe; name a .yaml file or one of {names}")
    content = parser.read_yaml(path)
    if not content:
        raise UserError(f"{path}: the recipe is empty; add some of {', '.join(_SECTIONS)}")
    require_known(content, _SECTIONS, str(path))
    sections = {key: content.get(key) or {} for key in _SECTIONS if key != "summary"}
    for key, section in sections.items():
        if not isinstance(section, Mapping):
            raise UserError(f"{path}: {key} must be a mapping of names to values")
    require_known(
        sections["common"], set().union(*(s.fields for s in STEPS.values())), f"{path}: common"
    )
    for key, own in _OWN.items():
        require_known(sections[key], own, f"{path}: {key}")
    for key, name in sections["model"].items():
        require(
            name is None or isinstance(name, str),
            f"{path}: model: {key} {name!r} is not a name; give a folder or a hub model",
        )
    train: dict[str, Any] = {}
    for key in _OWN:
        where = f"{path}: {key}"
        own_values = parser.values_of(TrainConfig, sections[key], where)
        require_valid(TrainConfig(**own_values), f"{where}: --")
        train |= own_values
    values = {}
    for n, step in STEPS.items():
        where, section = f"{path}: step{n}", sections[f"step{n}"]
        require_known(section, step.fields, where)
        shared = {key: value for key, value in sections["common"].items() if key in step.fields}
        values[n] = parser.values_of(step.config_class, shared | section, where)
    return Recipe(path.stem, values, train, content.get("summary") is True)


def given_steps(
    config: TrainConfig, groups: Sequence[Sequence[str]], recipe: Recipe, out: Path
) -> list[StepRun]:
    """All three steps with their given fields: from the recipe, --actor_model and --reward_model,
    then flags.

    Raises:
        UserError: an unknown flag (with the closest one), a flag of a step outside ``--step``, or
            a value of the wrong type.
    """
    asked = config.step or STEPS
    # Of a step outside of --step: with --step 3, --data_path is not about the data of step 1.
    taken = set().union(*(STEPS[n].flags for n in asked))
    others = [group for group in groups if flag_name(group) not in taken]
    argv, own_argv = _route(config, groups), _route(config, others)
    return [
        StepRun(
            step,
            str(out / step.name),
            _given_fields(step, config, recipe, argv[n], out),
            None if n in asked else _given_fields(step, config, recipe, own_argv[n], out),
        )
        for n, step in STEPS.items()
    ]


def _given_fields(
    step: TrainingStep, config: TrainConfig, recipe: Recipe, argv: Sequence[str], out: Path
) -> Fields:
    """``{step1}`` in a recipe's value stands for the output folder of step 1. Where step 2 trains
    the policy, it does not take the base of a reward model.
    """
    values, given = dict(recipe.values[step.number]), parser.given(step.config_class, argv)
    losses = [given.get("loss", values.get("loss")), values.get("loss")]
    if losses.count("ipo") == 1:  # its beta is on another scale
        values.pop("beta", None)
    is_policy = step.number == 2 and RewardConfig(**values | given).trains_policy
    if step.base_flag and not is_policy:
        named, default = getattr(config, step.base_flag), recipe.train.get(step.base_flag)
        if base := named or values.get(BASE) or default:
            values[BASE] = base
    for key, value in values.items():
        if isinstance(value, str):
            values[key] = value.replace("{step1}", str(out / STEPS[1].name))
    return values | given


def _route(config: TrainConfig, groups: Sequence[Sequence[str]]) -> dict[int, list[str]]:
    """The argv of each step: a flag goes to the step of its prefix, or all steps that have it."""
    known = {n: step.flags for n, step in STEPS.items()}
    running = set(config.step or STEPS)
    if 3 in running:  # which may have to run the steps before it
        running = set(STEPS)
    argv: dict[int, list[str]] = {n: [] for n in STEPS}
    prefixed = {f"step{n}.{name}" for n, names in known.items() for name in names}
    hints: dict[str, str] = {}
    for group in groups:
        prefix, dot, name = flag_name(group).rpartition(".")
        typed, equals, value = group[0].partition("=")
        takers = [n for n in STEPS if prefix in ("", f"step{n}") and name in known[n]]
        if name == "keep_best" and not prefix and (metric := value or "".join(group[1:])):
            is_supervised = metric.startswith(_SUPERVISED)
            takers = [n for n in takers if is_supervised == (n < 3)]
        if not takers:
            of_step = [known[n] for n in STEPS if prefix == f"step{n}"]
            every = [*known.values(), parser.flag_names(TrainConfig), prefixed]
            names = set().union(*(of_step or every))
            start = f"--{prefix}{dot}" if of_step else "--"
            hints[typed] = hint(name, names, start)
        elif not running.intersection(takers):
            steps = " and ".join(map(str, takers))
            raise UserError(f"{typed} is a flag of step {steps}; add the step to --step")
        for n in takers:
            argv[n] += [f"--{name}{equals}{value}", *group[1:]]
            if name == "push_to_hub" and not prefix and (value or group[1:]):
                argv[n][-1] += f"-{STEPS[n].name}"  # each step has a repository of its own
    if hints:
        raise unknown("flag", hints)
    return argv
