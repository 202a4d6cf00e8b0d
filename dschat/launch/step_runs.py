"""Decides which steps of a run are trained, from which models, and why.

All three steps; steps 1 and 2 if step 2 trains the policy on pairs (DPO, IPO, KTO); steps 1 and 3
if functions score, or a teacher is all that step 3 learns from. `given_steps` of
`dschat.launch.recipe` comes before these stages, `reuse` and `resume` of
`dschat.launch.earlier_runs` come after them.
"""

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from dschat.checkpoint.compatibility import BASE
from dschat.checkpoint.manifest import COMPLETE
from dschat.config import RewardConfig, RLHFConfig, UserError, parser
from dschat.config.fields import read_text
from dschat.launch.recipe import Reason, StepRun, TrainConfig
from dschat.observability.metrics_log import SETTINGS

ACTOR, CRITIC, REWARD = f"actor_{BASE}", f"critic_{BASE}", f"reward_{BASE}"

_NOTES: dict[Reason, str] = {
    "needed": "step {n} runs first: a later step needs its model, which is not in {out}",
    "finished": "step {n} is finished in {folder}: skipped (--overwrite_output_dir runs it again)",
    "input": "step {last} starts from {folder}, finished earlier",
    "trained already": "step {last} starts from {base}, which is trained already",
}


def select(runs: Sequence[StepRun], train: TrainConfig) -> list[StepRun]:
    """The steps that the run has.

    Raises:
        UserError: --step or --reward_model does not fit the run.
    """
    sft, reward, rlhf = runs
    asked, note = train.step or (), ""
    pairs = RewardConfig(**reward.fields)
    if pairs.trains_policy:
        if train.reward_model:
            raise UserError(
                f"--reward_model {train.reward_model} is not used with --loss {pairs.loss}, which "
                "trains the policy itself; leave it out"
            )
        if 3 in asked:
            raise UserError(
                f"--step 3 does not exist with --loss {pairs.loss}: step 2 trains the policy "
                "itself; leave one of them out"
            )
        if not asked:
            note = f"step 2 trains the policy itself (--loss {pairs.loss}): no step 3"
        policy = replace(reward.step, title=pairs.loss.upper())
        return [sft, replace(reward, step=policy, folder=rlhf.folder, note=note)]
    c = RLHFConfig(**rlhf.fields)
    names_model = c.reward_model_name_or_path or train.reward_model
    if not (c.has_reward_functions or c.has_teacher) or names_model or 2 in asked:
        return list(runs)
    if reward.fields.get(BASE) and not asked:
        note = "step 3 also scores with the reward model of step 2; --step 1 3 leaves it out"
        return [sft, replace(reward, note=note), rlhf]
    scores = "--reward_fn scores"
    if not c.has_reward_functions:
        scores = "--teacher_model_name_or_path alone is learned from"
    return [sft, replace(rlhf, note=f"{scores}: no reward model, so no step 2")]


def choose(runs: Sequence[StepRun], asked: Collection[int]) -> list[StepRun]:
    """Which steps train, are reused or are left out, from the last to the first: a step that trains
    needs the steps whose output its fields name.

    ``asked``: numbers of ``--step``; none: all.

    Raises:
        UserError: a step lacks its base model, or a finished step would get another one.
    """
    chosen: list[StepRun] = []
    last = runs[-1]
    for run in reversed(_connected(runs, asked)):
        readers = [later for later in chosen if run.folder in later.fields.values()]
        is_input = any(later.trains for later in readers)
        # The last step may be part of the run without training: finished, or not asked for.
        read_by_last = any(later.number == last.number for later in readers)
        read_by_last &= not asked or last.number in asked
        is_done = run.is_finished and not run.fields.get("overwrite_output_dir")
        reason = run.reason
        if run.number in asked if asked else (not chosen or read_by_last):
            reason = "finished" if is_done else "asked for"
        elif is_input and not run.is_finished:
            reason = "needed"
        elif read_by_last and chosen[-1].trains:
            reason = "input"
        elif (read_by_last or is_input) and run.is_finished:
            reason = "base"
        names = {"n": run.number, "last": last.number, "folder": run.folder}
        names |= {"base": run.fields.get(BASE), "out": Path(last.folder).parent}
        note = _NOTES.get(reason, "").format(**names)
        fields = {**run.fields, "output_dir": run.folder}
        chosen.insert(0, replace(run, fields=fields, reason=reason, note=note))
    _check_same_policy(chosen[-1])
    _check_finished_models(chosen)
    _check_base_models([run for run in chosen if run.trains])
    return chosen


def _connected(runs: Sequence[StepRun], asked: Collection[int]) -> list[StepRun]:
    """The last step starts from what the others train, unless its own fields name other models or
    the base of another step is trained already: a finished policy, a reward model.
    """
    *others, last = runs
    if asked and last.number not in asked:
        return list(runs)
    connected, fields = [], dict(last.fields)
    for run in others:
        if run.number == 2 and fields.get("share_base"):
            shared = dict(run.fields)
            shared.setdefault(BASE, fields[ACTOR])
            shared.setdefault("lora_dim", fields.get("actor_lora_dim", 0))
            run = replace(run, fields=shared)
        keys = _inputs(run, last)
        if all(fields.get(key, run.folder) == run.folder for key in keys):
            fields[keys[0]] = run.folder
            if run.number not in asked and _has_trained_base(run):
                fields[keys[0]] = run.fields[BASE]
                run = replace(run, reason="trained already")
        connected.append(run)
    return [*connected, replace(last, fields=fields)]


def _inputs(run: StepRun, last: StepRun) -> tuple[str, ...]:
    """The fields of the last step that name a model which ``run`` could train. Its output goes into
    the first; another value in any of them makes ``run`` unnecessary.
    """
    if last.number == 2:
        return (BASE,)
    if run.number == 1:
        return (ACTOR,)
    # With reward functions, naming a critic does not name a reward model.
    has_functions = RLHFConfig(**last.fields).has_reward_functions
    return (REWARD,) if has_functions else (CRITIC, REWARD)


def _has_trained_base(run: StepRun) -> bool:
    base = run.fields.get(BASE)
    if not base:
        return False
    try:
        content = json.loads(read_text(Path(base) / "config.json"))
        is_reward = "ForSequenceClassification" in str(content.get("architectures"))
    except (OSError, ValueError, RecursionError, AttributeError):
        is_reward = False
    if run.number == 2:
        return is_reward
    # NOTE os.path: pathlib raises where a name is too long for the disk
    return not is_reward and os.path.exists(os.path.join(base, COMPLETE))


def _check_same_policy(last: StepRun) -> None:
    """Refuse a finished policy of the other kind: DPO (step 2) and RLHF (step 3) share a folder."""
    folder = Path(last.folder)
    if last.reason != "finished":
        return
    try:
        from_pairs = "loss" in parser.read_yaml(folder / SETTINGS)  # a flag of step 2
    except UserError:
        return  # `earlier_runs.reuse` reports it
    if from_pairs != (last.number == 2):
        raise UserError(
            f"--output_dir {folder.parent} has a policy that step {2 if from_pairs else 3} "
            f"trained, in {folder.name}; choose another, or --overwrite_output_dir"
        )


def _check_finished_models(runs: Sequence[StepRun]) -> None:
    """Refuse a finished step whose initial model would be trained again."""
    trained_again = {run.folder for run in runs if run.trains}
    for run in runs:
        named = {value for value in run.fields.values() if isinstance(value, str)}
        if run.is_reused and trained_again & named:
            listed = "" if run.reason == "finished" else f", with {run.number} in --step,"
            raise UserError(
                f"{run.folder} is finished, but its initial model would be trained "
                f"again; --step{run.number}.overwrite_output_dir{listed} trains it again too, or "
                "choose another --output_dir"
            )


def _check_base_models(training: Sequence[StepRun]) -> None:
    """Refuse a step without its base model, and under --share_base a reward model that step 3 could
    not put on the actor's weights.
    """
    for run in training:
        if run.step.base_flag and not run.fields.get(BASE):
            raise UserError(
                f"--{run.step.base_flag} is missing: name the base model of step {run.number}, a "
                "folder or a hub model"
            )
    if [run.number for run in training[-2:]] != [2, 3]:
        return
    reward, rlhf = training[-2], training[-1].fields
    if rlhf.get("share_base") and rlhf.get("actor_lora_dim") and reward.folder in rlhf.values():
        base, actor = reward.fields.get(BASE), rlhf[ACTOR]
        adapters = reward.fields.get("lora_dim") and reward.fields.get("only_optimize_lora", True)
        if base != actor or not adapters:
            raise UserError(
                f"--share_base: step 2 must train LoRA adapters on the actor's weights, {actor}, "
                f"not {'adapters' if adapters else 'all weights'} of {base}; leave --reward_model "
                "and step 2's LoRA flags out"
            )
