"""Train a chat model: any of the three steps, on any number of devices.

    python train.py                                       the demo: a tiny model, offline, on a CPU
    python train.py --actor-model facebook/opt-1.3b --reward-model facebook/opt-350m
    python train.py --recipe demo-dpo                     two steps: the policy learns from pairs
    python train.py --step 3 --recipe opt-1.3b --step3.kl_coef 0.05 --dry-run
    python train.py --recipe opt-1.3b --plan --device-memory-gib 80

Checks the flags of all steps before anything runs. Each step runs as a subprocess (several under
DeepSpeed's launcher), and the first failure ends the run. Ctrl-C, SIGTERM and SIGUSR1 stop training
after the current optimizer step, save a checkpoint and exit with code 75; the same command resumes.
"""

if __name__ == "__main__":  # before the other imports, which take a second
    from dschat.startup import exit_on_interrupt

    exit_on_interrupt()

import os
import shlex
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dschat.checkpoint.manifest import newest
from dschat.config import UserError
from dschat.config.errors import printable
from dschat.distributed import entrypoint, stop_signals
from dschat.estimate import PlanRequest
from dschat.launch import recipe, run_plan, supervisor
from dschat.launch.summary import Summary, format_summary, write_summary
from dschat.launch.supervisor import RunReport, preflight_lines
from dschat.runtime.output_dir import COMPLETE

ROOT = Path(__file__).resolve().parent


def main() -> int:
    # Parse and plan.
    config, step_flags = recipe.parse_args(sys.argv[1:])
    # Like --dry_run, --plan may be for machines that do not exist.
    plan = run_plan.plan(replace(config, dry_run=config.dry_run or config.plan), step_flags, ROOT)
    request = plan_request(config, plan)
    if config.plan:
        from dschat.estimate.report import tables  # loads torch

        for note in plan.notes:
            say(note)
        say(tables(request) if plan.commands else "nothing to run")
        return 0
    if config.dry_run:
        for _, command in plan.commands:
            print(shlex.join(command))
        return 0
    lines = []
    if plan.commands and plan.cluster.is_first:
        # Raises for what a later step cannot use.
        lines = preflight_lines(request, plan.environment)
    for line in [*plan.notes, *lines]:
        say(line)

    # Run the steps, one after another.
    reports = config.report and plan.cluster.is_first
    report = RunReport(plan.output_dir, plan.environment)
    with supervisor.ProcessSupervisor() as runner:
        for run, command in plan.commands:
            if runner.stop_requested:
                return stopped(f"stopped before step {run.number}", plan)
            say(f"\n== step {run.number}: {run.step.title}, into {run.folder}")
            start = time.monotonic()
            code = runner.run(command, plan.environment, Path(run.folder), plan.cluster)
            seconds = time.monotonic() - start
            if plan.cluster.is_first and code != 2:  # a mistake leaves nothing behind
                note_seconds(plan.output_dir, {run.number: seconds}, "--resume" in command)
            if code == stop_signals.EXIT_CODE:
                return stopped(f"stopped in step {run.number}", plan, Path(run.folder))
            if code == 0 and not plan.finished(run):
                # DeepSpeed's launcher exits with 0 if a signal killed a rank.
                say(f"step {run.number} exited without finishing; see its last lines above")
                code = 1
            if code:
                return code
            say(f"== step {run.number} finished in {seconds:.0f} s")

    marks = [Path(run.folder, COMPLETE) for run in plan.runs]
    is_due = reports and (plan.commands or not report.is_current(filter(Path.exists, marks)))
    show_results(plan, report if is_due else None)
    return 0


def show_results(plan: run_plan.RunPlan, report: RunReport | None) -> None:
    """Write the report, print the summary and how to talk to the model."""
    finished = [plan.finished(run) for run in plan.runs]
    if plan.summary and all(finished) and (summary := note_seconds(plan.output_dir, {})):
        say("\n" + format_summary(summary))
    if report is not None:
        say("\n" + report.write())
    if finished[-1] and plan.cluster.is_first:
        say("\nchat with it: " + shlex.join(chat_command(Path(plan.runs[-1].folder, "actor"))))


def chat_command(actor: Path) -> list[str]:
    """The command that talks to ``actor``, as this one was started."""
    here = os.path.relpath(sys.executable)
    python = "python" if here.startswith("..") else here
    chat = ["dschat", "chat"] if sys.argv[0] == "dschat train" else [python, "chat.py"]
    return [*chat, "--path", str(actor)]


def note_seconds(output_dir: Path, seconds: dict[int, float], resumed: bool = False) -> Summary:
    """The summary that was written; empty where it could not be."""
    try:
        return write_summary(output_dir, seconds, resumed)
    except OSError as error:  # a full disk
        say(f"could not write summary.json: {error}")
        return {}


def stopped(event: str, plan: run_plan.RunPlan, folder: Path | None = None) -> int:
    """Tell the user how to resume, and return the exit code."""
    checkpoint = None
    with suppress(UserError):
        checkpoint = newest(folder) if folder else None
    saved = f", saved in {checkpoint.folder}" if checkpoint else ""
    changes = f" without {' and '.join(plan.restart_flags)}" if plan.restart_flags else ""
    supervisor.say(f"{event}{saved}; the same command{changes} resumes from there")
    return stop_signals.EXIT_CODE


def plan_request(config: recipe.TrainConfig, plan: run_plan.RunPlan) -> PlanRequest:
    """The input of the estimate."""
    return PlanRequest(
        {run.number: run.fields for run, _ in plan.commands},
        plan.cluster.num_processes,
        plan.cluster.processes_here,
        config.device_memory_gib,
        config.plan_device,
        config.plan_price,
        config.plan_tokens,
        config.plan_examples,
    )


def say(line: str) -> None:
    try:
        print(printable(line), flush=True)  # before the output of the next step
    except OSError:  # a closed terminal, or Ctrl-C ended `| tee`: keep training
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    entrypoint.run(main, joins_group=False)
