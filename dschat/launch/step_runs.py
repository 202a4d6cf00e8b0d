"""Decides which steps of a run are trained, from which models, and why.

All three steps; steps 1 and 2 if step 2 trains the policy on pairs (DPO, IPO, KTO); steps 1 and 3
if functions score, or a teacher is all that step 3 learns from. A finished step on
disk is reused or refused; an interrupted one resumes, starts over, or is refused.

A step's training_config.yaml has its settings. Its COMPLETE file has their context: the working
directory, the number of processes, the precision of `dtype` auto, and fingerprints of data and
models; and a checksum of both files.
"""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Optional

from dschat.checkpoint.compatibility import (
    BASE,
    CHECKED,
    Change,
    RunRecord,
    changed_sizes,
    changes,
    check_resume,
    describe,
    differences,
    reads_model,
)
from dschat.checkpoint.manifest import FOLDER, Damaged, newest, step_folders
from dschat.config import CommonConfig, RewardConfig, RLHFConfig, UserError, parser
from dschat.config.renamed import translated
from dschat.launch.recipe import STEPS, TrainConfig, TrainingStep
from dschat.observability.metrics_log import SETTINGS
from dschat.runtime.output_dir import COMPLETE, sealed
from dschat.startup.files import no_link

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
    names_model = rlhf.reward_model_name_or_path or config.reward_model
    if not needs_no_model or names_model or 2 in (config.step or ()):
        return dict(STEPS), []
    if values[2].get(BASE) and not config.step:
        return dict(STEPS), [
            "step 3 also scores with the reward model of step 2; --step 1 3 leaves it out"
        ]
    scores = "--reward_fn scores"
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
    return str(out / step.folder)


# -- finished steps --------------------------------------------------------------------------------


def check_finished(
    run: StepRun, compared: Optional[Collection[str]], num_processes: int, reuse: bool
) -> list[str]:
    """Refuse a finished step that was trained with other settings than ``run``'s, or ``reuse`` it.

    ``compared``: names of the fields to compare; None: all. Returns a line for the user if a step
    with other settings is reused.

    Raises:
        UserError: the settings differ, and not ``reuse``.
    """
    config, kind = run.step.config_class(**run.fields), "other"
    try:
        changed = describe(finished_differences(config, compared, num_processes))
    except Damaged as error:  # unknown is not equal
        kind, changed = "unknown", str(error)
    if not changed:
        return []
    if reuse:
        return [f"step {run.number} is reused from {run.folder} with {kind} settings ({changed})"]
    again = f"--step{run.number}.overwrite_output_dir"
    if compared is not None:
        again += f", with {run.number} in --step,"
    raise UserError(
        f"{run.folder} is finished, with {kind} settings ({changed}); --reuse uses it as it is, "
        f"{again} trains it again; or choose another --output_dir"
    )


def finished_differences(
    config: CommonConfig, compared: Optional[Collection[str]], num_processes: int
) -> list[Change]:
    """What differs between the finished step in ``config.output_dir`` and one with ``config``; the
    size of a step over all processes too.

    Raises:
        Damaged: what it was trained with is not known.
    """
    if compared is not None and not compared:
        return []
    then, now = _recorded(config, num_processes), RunRecord.of(config, num_processes)
    sizes = []
    if compared is None or CHECKED & set(compared):
        sizes = changed_sizes(type(config), then, now)
    return sizes + differences(type(config), then, now, compared)


def _recorded(config: CommonConfig, num_processes: int) -> RunRecord:
    """The run that finished in ``config.output_dir``. Settings of newer versions have their
    defaults. Raises ``Damaged`` where its files do not say, or are not what was written.
    """
    folder = Path(str(config.output_dir))
    try:
        content = parser.read_yaml(folder / SETTINGS)
    except UserError:
        raise Damaged(f"{SETTINGS} cannot be read") from None
    try:
        with open(folder / COMPLETE, encoding="utf-8", opener=no_link) as mark:
            text = mark.readline()
            is_whole = mark.read() in ("", sealed(folder, text).removeprefix(text))
        record = json.loads(text)
        contents = record["contents"]
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        raise Damaged(f"{COMPLETE} cannot be read") from None
    if not is_whole:
        raise Damaged(f"{SETTINGS} or {COMPLETE} was changed since")
    content = translated(json.loads(json.dumps(content, default=str)))
    defaults = json.loads(json.dumps(asdict(type(config)(output_dir=config.output_dir))))
    settings = {name: content.get(name, default) for name, default in defaults.items()}
    return RunRecord(
        settings,
        contents,
        record.get("num_processes", num_processes),
        settings["output_dir"],
        record.get("working_directory", os.getcwd()),
        record.get("auto_dtype", ""),
    )


# -- interrupted steps -----------------------------------------------------------------------------


def resume(
    runs: Sequence[StepRun], config: TrainConfig, num_processes: int
) -> tuple[list[StepRun], list[str]]:
    """``runs``, of which those with a checkpoint resume or start over; and lines for the user.

    A step resumes if its settings equal the checkpoint's; with changed ones the user decides:
    ``--resume latest`` or ``--restart``. The step itself resumes.

    Raises:
        UserError: the settings have changed and the user has not decided, or the checkpoint cannot
            be resumed with them.
    """
    paths = [run for run in runs if run.fields.get("resume") not in (None, "latest")]
    if len(paths) > 1:
        raise UserError(
            f"--resume {paths[0].fields['resume']} is a checkpoint of one step; name the step: "
            f"--step{paths[-1].number}.resume"
        )
    resumed = [
        _resumed(run, {earlier.folder for earlier in runs[:index]}, config, num_processes)
        for index, run in enumerate(runs)
    ]
    return [run for run, _ in resumed], [note for _, note in resumed if note]


def _resumed(
    run: StepRun, made_here: Collection[str], train: TrainConfig, num_processes: int
) -> tuple[StepRun, str]:
    """``run`` as it resumes or starts over, and a line for the user; unchanged, and none, without a
    checkpoint. ``made_here``: output folders of earlier steps of this run.
    """
    values, given = run.fields, run.fields.get("resume")
    if train.restart and given:
        raise UserError("--restart starts over and --resume resumes; leave one out")
    checkpoints = Path(run.folder) / FOLDER
    if not step_folders(checkpoints):
        return run, ""
    if train.restart or values.get("overwrite_output_dir"):
        again = replace(run, fields={**values, "overwrite_output_dir": True})
        return again, f"step {run.number} starts over: {checkpoints} is deleted"
    if given not in (None, "latest"):
        return run, f"step {run.number} resumes from {given}"
    resumed = replace(run, fields={**values, "resume": "latest"})
    checkpoint = newest(run.folder)
    if checkpoint is None:  # the step reports what is wrong with each
        return resumed, f"step {run.number}: {checkpoints} has no complete checkpoint"
    config = run.step.config_class(**values)
    check_resume(checkpoint, config, num_processes)
    models = {k: v for k, v in values.items() if reads_model(k) and v in made_here}
    changed = [change for change in changes(checkpoint, config) if change[0] not in models]
    changed += [(key, name, f"{name}, trained again") for key, name in models.items()]
    if changed and given is None and not train.dry_run:
        raise UserError(
            f"{run.folder} has an unfinished run with other settings ({describe(changed)}); "
            "--resume latest resumes with the new ones, --restart starts step "
            f"{run.number} over, or choose another --output_dir"
        )
    note = f"step {run.number} resumes from {checkpoint.folder}"
    note += f", with changed settings ({describe(changed)})" if changed else ""
    if checkpoint.world_size != num_processes:
        plural = "es" if num_processes > 1 else ""
        note += f", on {num_processes} process{plural}, not {checkpoint.world_size}"
    return resumed, note
