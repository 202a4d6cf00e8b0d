"""Decides which steps of a run are trained, from which models, and why.

All three steps; steps 1 and 2 if step 2 trains the policy on pairs (DPO, IPO, KTO); steps 1 and 3
if functions or an endpoint score, or a teacher is all that step 3 learns from. Functions of what
was asked for and of what lies on disk; `run_plan` looks at the disk.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dschat.checkpoint.compatibility import BASE
from dschat.config import RewardConfig, RLHFConfig, UserError
from dschat.launch.recipe import STEPS, TrainConfig, TrainingStep

ACTOR, CRITIC, REWARD = f"actor_{BASE}", f"critic_{BASE}", f"reward_{BASE}"

Fields = Mapping[str, Any]
Values = Mapping[int, Fields]
Reason = Literal["asked for", "needed", "finished", "input", "base", "trained already"]

_NOTES: dict[Reason, str] = {
    "needed": "step {n} runs first: a later step needs its model, which is not in {out}",
    "finished": "step {n} is finished in {folder}: skipped (--overwrite_output_dir runs it again)",
    "input": "step {last} starts from {folder}, finished earlier",
    "trained already": "step {last} starts from {base}, which is trained already",
}
_BASE_FLAGS = {1: "--actor_model", 2: "--reward_model"}


@dataclass(frozen=True)
class StepRun:
    """A step that runs with ``fields``, whose finished output is reused, or that is left out
    because its base model is trained already. The fields have its ``output_dir``.
    """

    step: TrainingStep
    fields: Fields
    reason: Reason

    @property
    def number(self) -> int:
        return self.step.number

    @property
    def status(self) -> Literal["runs", "reused", "left out"]:
        if self.reason in ("asked for", "needed"):
            return "runs"
        return "left out" if self.reason == "trained already" else "reused"

    @property
    def folder(self) -> str:
        return self.fields["output_dir"]

    def note(self, last: int, out: Path) -> str:
        """A line for the user; empty where they get what they asked for."""
        text, base = _NOTES.get(self.reason, ""), self.fields.get(BASE)
        return text.format(n=self.number, last=last, folder=self.folder, base=base, out=out)


def select_steps(config: TrainConfig, values: Values) -> tuple[dict[int, TrainingStep], list[str]]:
    """The steps of the run by number, and a line for the user if there are fewer than three.

    Raises:
        UserError: --step or --reward_model does not fit the run.
    """
    pairs = RewardConfig(**values[2])
    if pairs.trains_policy:
        return _two_steps(config, pairs.loss)
    rlhf = RLHFConfig(**values[3])
    needs_no_model = rlhf.has_reward_functions or rlhf.has_teacher
    if not needs_no_model or rlhf.reward_model_name_or_path:
        return dict(STEPS), []
    if config.reward_model or 2 in (config.step or ()):
        return dict(STEPS), []
    if values[2].get(BASE) and not config.step:
        return dict(STEPS), [
            "step 3 also scores with the reward model of step 2; --step 1 3 leaves it out"
        ]
    scores = "--reward_fn or --reward_url scores"
    if not rlhf.has_reward_functions:
        scores = "--teacher_model_name_or_path alone is learned from"
    return {1: STEPS[1], 3: STEPS[3]}, [f"{scores}: no reward model, so no step 2"]


def _two_steps(config: TrainConfig, loss: str) -> tuple[dict[int, TrainingStep], list[str]]:
    """Steps 1 and 2, with step 2 writing the policy into step 3's folder."""
    if config.reward_model:
        raise UserError(
            f"--reward_model {config.reward_model} is not used with --loss {loss}, which trains "
            "the policy itself; leave it out"
        )
    if 3 in (config.step or ()):
        raise UserError(
            f"--step 3 does not exist with --loss {loss}: step 2 trains the policy itself; leave "
            "one of them out"
        )
    policy = replace(STEPS[2], title=loss.upper(), folder=STEPS[3].folder)
    notes = [] if config.step else [f"step 2 trains the policy itself (--loss {loss}): no step 3"]
    return {1: STEPS[1], 2: policy}, notes


def step_runs(
    steps: Mapping[int, TrainingStep],
    values: Values,
    asked: Collection[int],
    finished: Collection[int],
    trained: Collection[int],
    out: Path,
) -> list[StepRun]:
    """The steps of a run into ``out``, in order.

    The initial models of the last step come from the other steps, unless ``values`` name them.

    Args:
        asked: numbers of ``--step``; none: all.
        finished: steps that have finished in ``out``.
        trained: steps whose base model is trained already: a finished policy, a reward model.

    Raises:
        UserError: a step lacks its base model, or a finished step would get another one.
    """
    last, selected = max(steps), set(asked or steps)
    folders = {n: folder_of(out, step) for n, step in steps.items()}
    fields = {n: dict(values[n]) for n in steps}
    needed: set[int] = set()
    skipped: set[int] = set()
    for n, keys in _inputs_of(steps, values).items() if last in selected else ():
        if n == 2 and fields[last].get("share_base"):
            fields[n].setdefault(BASE, fields[last].get(ACTOR))
            fields[n].setdefault("lora_dim", fields[last].get("actor_lora_dim", 0))
        base = fields[n].get(BASE)
        if any(fields[last].get(key, folders[n]) != folders[n] for key in keys):
            continue  # its own fields name a model
        skips = bool(base) and n not in asked and n in trained
        (skipped if skips else needed).add(n)
        fields[last][keys[0]] = base if skips else folders[n]
    if not asked:  # steps whose model is trained already run only with --step
        selected -= set(steps) - {last} - needed
    done = {n for n in finished if not fields[n].get("overwrite_output_dir")}
    runs = selected - done
    before = needed.difference(finished) if last in runs else set()
    starts_from = fields[2].get(BASE) if 2 in runs | before else None
    bases = {1} if starts_from == folders[1] else set()  # a recipe's {step1}
    before |= bases.difference(finished)
    made = []
    for n in sorted(selected | needed | bases | skipped):
        if n in runs | before:
            reason: Reason = "asked for" if n in selected else "needed"
        elif n in selected:
            reason = "finished"
        elif n in skipped - bases:
            reason = "trained already"
        else:
            reason = "input" if n in needed and last in runs else "base"
        made.append(StepRun(steps[n], fields[n] | {"output_dir": folders[n]}, reason))
    _check(made, selected)
    is_shared = 3 in runs and fields[3].get("share_base") and fields[3].get("actor_lora_dim")
    if is_shared and 2 in runs | before and folders[2] in fields[3].values():
        _check_shared_base(fields[2], fields[3])
    return made


def _check(made: list[StepRun], selected: Collection[int]) -> None:
    """Raise ``UserError`` for a finished step whose model would be trained again, and for a step
    without its base model.
    """
    trains = {run.folder for run in made if run.status == "runs"}
    for run in made:
        n, named = run.number, {v for v in run.fields.values() if isinstance(v, str)}
        if run.status == "reused" and trains & named:
            listed = "" if n in selected else f", with {n} in --step,"
            raise UserError(
                f"{run.folder} is finished, but its initial model would be trained "
                f"again; --step{n}.overwrite_output_dir{listed} trains it again too, or choose "
                "another --output_dir"
            )
    for run in made:
        if run.status == "runs" and run.number in _BASE_FLAGS and not run.fields.get(BASE):
            raise UserError(
                f"{_BASE_FLAGS[run.number]} is missing: name the base model of step {run.number}, "
                "a folder or a hub model"
            )


def _check_shared_base(reward: Fields, rlhf: Fields) -> None:
    """Raise ``UserError`` where step 2 trains what step 3 cannot put on the actor's weights."""
    base, actor = reward.get(BASE), rlhf[ACTOR]
    has_adapters = reward.get("lora_dim") and reward.get("only_optimize_lora", True)
    if not (base == actor and has_adapters):
        raise UserError(
            f"--share_base: step 2 must train LoRA adapters on the actor's weights, {actor}, not "
            f"{'adapters' if has_adapters else 'all weights'} of {base}; leave --reward_model and "
            "step 2's LoRA flags out"
        )


def _inputs_of(steps: Mapping[int, TrainingStep], values: Values) -> dict[int, tuple[str, ...]]:
    """For each earlier step, the fields of the last step that name a model it could train. Its
    output goes into the first; a value in any of them makes the earlier step unnecessary.
    """
    if 3 not in steps:
        return {1: (BASE,)}
    inputs: dict[int, tuple[str, ...]] = {1: (ACTOR,)}
    if 2 in steps:
        # With reward functions, naming a critic does not name a reward model.
        has_functions = RLHFConfig(**values[3]).has_reward_functions
        inputs[2] = (REWARD,) if has_functions else (CRITIC, REWARD)
    return inputs


def folder_of(out: Path, step: TrainingStep) -> str:
    """The output folder of ``step``."""
    return str(out / step.folder)
