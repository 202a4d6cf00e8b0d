"""Plans a run of train.py: which steps run, with which commands.

Flags, recipe, paths and folders are checked first; no model is loaded and nothing is written. A
step is a script, its flags and an output folder.
"""

import glob
import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

import dschat.distributed as dist
from dschat.config import UserError, parser
from dschat.config.fields import read_text
from dschat.data.sources.readers import SUFFIXES, TEXT_SUFFIX, kind_of
from dschat.launch import cluster, supervisor
from dschat.launch.cluster import Cluster
from dschat.launch.recipe import (
    STEPS,
    Recipe,
    TrainConfig,
    TrainingStep,
    earlier_step_values,
    flag_name,
    load_recipe,
    step_values,
)
from dschat.launch.step_runs import (
    BASE,
    Fields,
    StepRun,
    check_finished,
    folder_of,
    resume,
    select_steps,
    step_runs,
)
from dschat.observability.metrics_log import SETTINGS
from dschat.runtime.output_dir import COMPLETE, check_apart, check_writable
from dschat.startup.performance import num_cores


@dataclass(frozen=True)
class RunPlan:
    """The steps to run, in order, and notes for the user."""

    output_dir: Path
    steps: list[TrainingStep]  # of the run, including finished ones
    runs: list[StepRun]
    notes: list[str]
    environment: dict[str, str]
    summary: bool
    cluster: Cluster
    restart_flags: list[str]  # given flags that keep the same command from resuming
    root: Path

    @property
    def commands(self) -> list[tuple[TrainingStep, list[str]]]:
        return [(run.step, self._command(run)) for run in self.runs]

    def _command(self, run: StepRun) -> list[str]:
        script = os.path.relpath(self.root / run.step.name / "main.py")
        return self.cluster.command(run.number, [script, *parser.to_flags(run.fields)])

    def folder(self, step: TrainingStep) -> Path:
        return self.output_dir / step.folder

    def finished(self, step: TrainingStep) -> bool:
        """Whether the step wrote its COMPLETE file. Other machines than the first rely on the
        launcher's exit code: their disk may not have the file, or not yet.
        """
        return not self.cluster.is_first or _finished(self.output_dir, step)


def plan(config: TrainConfig, groups: Sequence[Sequence[str]], root: Path) -> RunPlan:
    """The commands for ``config`` and the steps' flags ``groups`` (both from ``parse_args``).

    Raises:
        UserError: an invalid flag, recipe, data file or model folder.
    """
    if dist.world_size() > 1 and config.node_rank is None:
        raise UserError(
            f"{dist.world_size()} processes run train.py, which starts the processes itself: run "
            "it once (on SLURM with --launcher slurm), or once per machine with its --node_rank"
        )
    recipe, out = _recipe_and_folder(config, groups, root)
    # The fields of each step, from recipe and flags.
    sft_folder = folder_of(out, STEPS[1])
    values = step_values(config, groups, recipe, sft_folder)
    steps, notes = select_steps(config, values)
    asked, last = config.step or (), max(steps)
    if not asked or last in asked:
        _check_same_policy(steps[last], values[last], out)
    # Which steps run, from which models, into which folders.
    finished = [n for n, step in steps.items() if _finished(out, step)]
    trained = [
        n
        for n, is_trained in ((1, _is_finished_sft), (2, _is_score_model))
        if n in steps and (base := values[n].get(BASE)) and is_trained(Path(base))
    ]
    chosen = step_runs(steps, values, asked, finished, trained, out)
    notes += [note for run in chosen if (note := run.note(last, out))]
    runs, reused = ([r for r in chosen if r.status == status] for status in ("runs", "reused"))
    if any([supervisor.wait_until_free(Path(r.folder), config.node_rank or 0) for r in runs]):
        return plan(config, groups, root)  # the other run may have saved more
    for run in runs:
        run.step.config_class(**run.fields).validate()
        _check_inputs(run.fields, made_here={earlier.folder for earlier in runs})
        check_apart(run.folder, run.fields)
    # On which machines.
    example = root / "training" / "launch" / "hostfile"
    machines = cluster.find(config, recipe.train, _num_gpus(), example, config.dry_run)
    num_processes = machines.num_processes
    # What becomes of finished and interrupted steps.
    earlier = earlier_step_values(config, groups, recipe, sft_folder)
    for run in reused:
        compared = None
        if run.number not in (asked or steps):
            compared = earlier[run.number]
            run = replace(run, fields={**compared, "output_dir": run.folder})
        notes += check_finished(run, compared, num_processes, config.reuse)
    _check_parallel(runs, num_processes)
    for run in runs if machines.is_first and not config.dry_run else ():
        check_writable(Path(run.folder))
    restart_flags = _restart_flags(config, runs)
    runs, resume_notes = resume(runs, config, num_processes)
    return RunPlan(
        out,
        list(steps.values()),
        runs,
        notes + resume_notes,
        _environment(root, machines.processes_here, machines.gpus_here),
        recipe.summary and machines.is_first,
        machines,
        restart_flags,
        root,
    )


def _recipe_and_folder(
    config: TrainConfig, groups: Sequence[Sequence[str]], root: Path
) -> tuple[Recipe, Path]:
    """The recipe, which is the demo's if no model is named, and OUT."""
    _check_sizes({"--actor_model": config.actor_model, "--reward_model": config.reward_model})
    names_model = any("model_name_or_path" in flag_name(group) for group in groups)
    recipe = Recipe()
    if config.recipe or not (config.actor_model or config.reward_model or names_model):
        recipe = load_recipe(config.recipe or "demo", root / "training" / "recipes")
    base = Path(config.actor_model or config.reward_model or "run").name
    _check_model("--actor_model", config.actor_model)
    _check_model("--reward_model", config.reward_model)
    return recipe, Path(config.output_dir or Path("output", recipe.name or base))


def _restart_flags(config: TrainConfig, runs: Sequence[StepRun]) -> list[str]:
    """Given flags that keep the same command from resuming."""
    given = {
        "--restart": config.restart,
        "--overwrite_output_dir": any(run.fields.get("overwrite_output_dir") for run in runs),
        "--resume": any(run.fields.get("resume") not in (None, "latest") for run in runs),
    }
    return [flag for flag, is_given in given.items() if is_given]


def _check_parallel(runs: Sequence[StepRun], num_processes: int) -> None:
    """Checked by the steps too, but only after those before them have run."""
    for run in runs:
        for flag in ("inference_tp_size", "sequence_parallel_size"):
            size = run.fields.get(flag, 1)
            if num_processes % size:
                plural = "es" if num_processes > 1 else ""
                raise UserError(
                    f"--{flag} {size} does not divide the {num_processes} process{plural}; "
                    "choose a divisor, or another --num_gpus"
                )


def _finished(out: Path, step: TrainingStep) -> bool:
    return os.path.exists(out / step.folder / COMPLETE)


def _check_same_policy(last: TrainingStep, values: Fields, out: Path) -> None:
    """Refuse a finished policy of the other kind: DPO (step 2) and RLHF (step 3) share a folder."""
    if values.get("overwrite_output_dir") or not _finished(out, last):
        return
    try:
        from_pairs = "loss" in parser.read_yaml(out / last.folder / SETTINGS)  # a flag of step 2
    except UserError:
        return  # `check_finished` reports it
    if from_pairs != (last.number == 2):
        raise UserError(
            f"--output_dir {out} has a policy that step {2 if from_pairs else 3} trained, in "
            f"{last.folder}; choose another, or --overwrite_output_dir"
        )


def _is_score_model(folder: Path) -> bool:
    """Whether the folder holds a trained reward model."""
    try:
        architectures = json.loads(read_text(folder / "config.json")).get("architectures")
    except (OSError, ValueError, RecursionError, AttributeError):
        return False
    return "ForSequenceClassification" in str(architectures)


def _is_finished_sft(folder: Path) -> bool:
    # NOTE os.path: pathlib raises where a name is too long for the disk
    return os.path.exists(folder / COMPLETE) and not _is_score_model(folder)


def _check_inputs(values: Fields, made_here: Collection[str]) -> None:
    """Require every local file and folder in ``values``, unless an earlier step makes it."""
    for key, value in values.items():
        if key.endswith("model_name_or_path") and value not in made_here:
            _check_model(f"--{key}", value)
    for key in ("data_path", "eval_data_path", "unsupervised_dataset_name"):
        names = values.get(key) or []
        for name in [names] if isinstance(names, str) else names:
            path = os.path.expanduser(re.sub(r":[0-9.]+(e[+-]?\d+)?$", "", name))  # PATH:WEIGHT
            means_file = kind_of(path) in (*SUFFIXES, TEXT_SUFFIX) or path.endswith("/")
            is_local = means_file or glob.has_magic(path) or _is_local(path)
            if is_local and not (os.path.exists(path) or glob.glob(path, recursive=True)):
                raise UserError(f"--{key}: no such data file: {path}; check the path")


def _check_sizes(models: Mapping[str, Optional[str]]) -> None:
    """Refuse what DeepSpeed-Chat's train.py calls a model by: 1.3b for facebook/opt-1.3b."""
    given = " ".join(
        f"{flag} {name}"
        for flag, name in models.items()
        if re.fullmatch(r"(opt-)?[\d.]+[bm]", name or "", re.I) and not os.path.isdir(name or "")
    )
    if given:
        whole = re.sub(r" (opt-)?(?=\d)", " facebook/opt-", given.lower())
        raise UserError(f"{given}: not the name of a model; write it whole: {whole}")


def _check_model(flag: str, name: Optional[str]) -> None:
    """Require a config.json in a local model folder; hub names and builtins are not checked."""
    if not name or not (_is_local(name) or os.path.isdir(name)):
        return
    if not os.path.isdir(os.path.expanduser(name)):
        raise UserError(f"{flag} {name}: no such folder; check the path")
    if not os.path.isfile(Path(os.path.expanduser(name)) / "config.json"):
        raise UserError(f"{flag} {name}: no config.json there; name the folder that has it")


def _is_local(name: str) -> bool:
    """Whether ``name`` can only be a path: a hub name is NAME or OWNER/NAME."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1


def _num_gpus() -> int:
    """Number of GPUs that torch sees, from a subprocess; 0 without a driver."""
    if not (Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()):
        return 0
    code = "import torch; print(torch.cuda.device_count())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return int(result.stdout) if result.returncode == 0 else 0


def _environment(root: Path, num_processes: int, num_gpus: int) -> dict[str, str]:
    """The environment of the steps: this process's, with defaults."""
    defaults = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # of loading weights too
    }
    if not num_gpus:
        defaults["OMP_NUM_THREADS"] = str(max(1, num_cores() // num_processes))
    environment = defaults | dict(os.environ)
    # The launcher, pdsh, and ninja for DeepSpeed's kernels are installed beside Python.
    for name, first in (("PATH", Path(sys.executable).parent), ("PYTHONPATH", root)):
        environment[name] = os.pathsep.join(filter(None, [str(first), environment.get(name)]))
    return environment
