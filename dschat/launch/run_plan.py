"""Plans a run of train.py: which steps run, with which commands.

Flags, recipe, paths and folders are checked first; no model is loaded and nothing is written. A
step is a script, its flags and an output folder.
"""

import glob
import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import dschat.distributed as dist
from dschat.config import UserError, parser
from dschat.data.sources.readers import SUFFIXES, TEXT_SUFFIX, kind_of
from dschat.launch import cluster, supervisor
from dschat.launch.cluster import Cluster
from dschat.launch.earlier_runs import resume, reuse
from dschat.launch.recipe import (
    Fields,
    Recipe,
    StepRun,
    TrainConfig,
    flag_name,
    given_steps,
    load_recipe,
)
from dschat.launch.step_runs import choose, select
from dschat.runtime.output_dir import check_apart, check_writable
from dschat.startup.performance import num_cores


@dataclass(frozen=True)
class RunPlan:
    """The steps to run, in order, and notes for the user."""

    output_dir: Path
    runs: list[StepRun]  # every step of the run: that trains, is reused or is left out
    commands: list[tuple[StepRun, list[str]]]
    notes: list[str]
    environment: dict[str, str]
    summary: bool
    cluster: Cluster
    restart_flags: list[str]  # given flags that keep the same command from resuming

    def finished(self, run: StepRun) -> bool:
        """Whether the step wrote its COMPLETE file. Other machines than the first rely on the
        launcher's exit code: their disk may not have the file, or not yet.
        """
        return not self.cluster.is_first or run.is_finished


def plan(config: TrainConfig, groups: Sequence[Sequence[str]], root: Path) -> RunPlan:
    """The commands for ``config`` and the steps' flags ``groups`` (both from ``parse_args``).

    Every stage takes the steps of the run and returns them: `given_steps`, `select`, `choose`,
    `reuse`, `resume`. `_command` shows a step after any of them.

    Raises:
        UserError: an invalid flag, recipe, data file or model folder.
    """
    if dist.world_size() > 1 and config.node_rank is None:
        raise UserError(
            f"{dist.world_size()} processes run train.py, which starts the processes itself: run "
            "it once (on SLURM with --launcher slurm), or once per machine with its --node_rank"
        )
    notes: list[str] = []

    def noted(runs: list[StepRun]) -> list[StepRun]:
        notes.extend(run.note for run in runs if run.note)
        return runs

    recipe, out = _recipe_and_folder(config, groups, root)
    runs = noted(select(given_steps(config, groups, recipe, out), config))
    runs = noted(_chosen_when_free(runs, config))
    _check(runs)
    example = root / "training" / "launch" / "hostfile"
    machines = cluster.find(config, recipe.train, _num_gpus(), example, config.dry_run)
    runs = noted(reuse(runs, config, machines.num_processes))
    _check_machines(runs, machines, config.dry_run)
    restart_flags = _restart_flags(config, runs)
    runs = noted(resume(runs, config, machines.num_processes))
    return RunPlan(
        out,
        runs,
        [(run, _command(run, machines, root)) for run in runs if run.trains],
        notes,
        _environment(root, machines.processes_here, machines.gpus_here),
        recipe.summary and machines.is_first,
        machines,
        restart_flags,
    )


def _chosen_when_free(runs: Sequence[StepRun], config: TrainConfig) -> list[StepRun]:
    """What to run, once the processes of a killed train.py have left the folders."""
    machine = config.node_rank or 0
    while True:
        chosen = choose(runs, config.step or ())
        folders = [Path(run.folder) for run in chosen if run.trains]
        if not any([supervisor.wait_until_free(folder, machine) for folder in folders]):
            return chosen  # else they may have saved more


def _command(run: StepRun, machines: Cluster, root: Path) -> list[str]:
    script = os.path.relpath(root / run.step.name / "main.py")
    return machines.command(run.number, [script, *parser.to_flags(run.fields)])


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
    fields = [run.fields for run in runs if run.trains]
    given = {
        "--restart": config.restart,
        "--overwrite_output_dir": any(given.get("overwrite_output_dir") for given in fields),
        "--resume": any(given.get("resume") not in (None, "latest") for given in fields),
    }
    return [flag for flag, is_given in given.items() if is_given]


def _check(runs: Sequence[StepRun]) -> None:
    """Raise ``UserError`` for settings that a step would refuse, and for missing inputs or inputs
    in its output folder.
    """
    training = [run for run in runs if run.trains]
    for run in training:
        run.step.config_class(**run.fields).validate()
        _check_inputs(run.fields, made_here={earlier.folder for earlier in training})
        check_apart(run.folder, run.fields)


def _check_machines(runs: Sequence[StepRun], machines: Cluster, dry_run: bool) -> None:
    """Checked by the steps too, but only after the steps before them have run."""
    count, training = machines.num_processes, [run for run in runs if run.trains]
    for run in training:
        for flag in ("inference_tp_size", "sequence_parallel_size"):
            size = run.fields.get(flag, 1)
            if count % size:
                raise UserError(
                    f"--{flag} {size} does not divide the {count} process{'es' * (count > 1)}; "
                    "choose a divisor, or another --num_gpus"
                )
    for run in training if machines.is_first and not dry_run else ():
        check_writable(Path(run.folder))


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
