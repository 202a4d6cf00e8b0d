"""Trains the kept rollouts of a run again, from its checkpoint before them: ``dschat replay``.

Nothing is generated or scored, and nothing is written into the run. On as many processes as the run
had, every number is the run's, to the bit where kernels repeat themselves.
"""

from collections.abc import Sequence
from dataclasses import fields
from math import isfinite
from pathlib import Path
from typing import Any

from transformers import set_seed

import dschat.distributed as dist
from dschat.checkpoint import manager, manifest
from dschat.checkpoint.async_writer import write_generators
from dschat.checkpoint.compatibility import describe
from dschat.checkpoint.manifest import CheckpointInfo
from dschat.config import RLHFConfig, UserError
from dschat.config.errors import require
from dschat.config.reward import RewardSourcesConfig
from dschat.models.routing import AGREEMENT
from dschat.observability import console
from dschat.observability.metrics_log import METRICS, RowFile, whole_rows
from dschat.rewards.reward_functions import RewardFunctions
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.initial_checkpoints import find_checkpoints
from dschat.rlhf.kept_rollouts import Facts, KeptRollouts
from dschat.rlhf.metrics import training_metrics
from dschat.rlhf.ptx import unsupervised_steps
from dschat.rlhf.run_state import Run
from dschat.rlhf.trainer import DeepSpeedPPOTrainer

_COLUMNS = (
    *("loss/policy_avg", "loss/value_avg", "loss/ptx_avg", "loss/kl_avg", "policy/grad_norm"),
    *("val/grad_norm", "val/ratio", "val/ratio_abs_dev", "policy/approxkl_avg"),
    "policy/clipfrac_avg",
)
# Of clocks, and of forwards that score too.
_NOT_REPLAYED = ("time/", "throughput/", "memory/", AGREEMENT)


def replay(run_folder: str, iteration: int, out: str | None = None) -> None:
    """Collective. Train the iterations of a run of step 3 again, up to ``iteration``; prints a line
    for each, and for each mini-batch of the last. ``out``: new file for the same as JSON lines.

    Raises:
        UserError: before weights load; a rollout or the checkpoint is missing or damaged, or there
            are other processes or settings.
        FloatingPointError: as in the run, after the mini-batches before it.
    """
    folder = Path(run_folder, "step3_rlhf")
    folder = folder if folder.is_dir() else Path(run_folder)
    rollouts = KeptRollouts(folder)
    _check(rollouts, [iteration])
    checkpoint = _checkpoint_before(folder, iteration)
    numbers = range(checkpoint.step + 1, iteration + 1)
    trainer = _trainer_of(_check(rollouts, numbers[::-1]))
    rows = RowFile(Path(out), keeps_rows=False) if out and dist.is_main_process() else None
    run = Run(trainer)
    run.load_state_dict(manager.load(checkpoint, run.state(), trainer.args.seed))
    logged = {r["step"]: r for r in whole_rows(folder / METRICS) if "policy/learning_rate" in r}
    _say(f"from {checkpoint.folder}")
    for number in numbers:
        experience, generators, facts = rollouts.read(number)
        trainer.metrics, trainer.kl.value = facts["metrics"], facts["kl_coef"]
        trainer.engine.token_budget = facts["token_budget"]
        write_generators(generators)
        try:
            trainer.train_rlhf(experience)
        except FloatingPointError:
            _mini_batches(trainer)
            raise
        row = {n: v for n, v in trainer.metrics.items() if not n.startswith(_NOT_REPLAYED)}
        line = console.format_line("replay", number, iteration, row, _COLUMNS)
        _say(f"{line}  {_compared(row, logged.get(number, {}))}")
        parts = {"mini_batches": _mini_batches(trainer)} if number == iteration else {}
        if rows is not None:
            rows.write({"step": number} | row | parts)


def _check(rollouts: KeptRollouts, numbers: Sequence[int]) -> Facts:
    """Collective. What the first of ``numbers`` says of the run. ``UserError`` on all ranks where
    one has no such file, or one of a run with other processes, or where settings changed.
    """
    free = {f.name for f in fields(RLHFConfig) if f.metadata.get("affects") in ("log", "place")}
    problem, first, now = "", Facts(), dist.world_size()
    try:
        for number in numbers:
            *_, facts = rollouts.read(number)
            first, then = first or facts, facts["world_size"]
            require(
                then == now,
                f"iteration {number} was trained by {then} processes, and this is {now}; start "
                f"{then}: deepspeed --num_gpus {then} --module dschat replay ...",
            )
            pairs = [(n, v, first["settings"][n]) for n, v in facts["settings"].items()]
            changed = describe([p for p in pairs if p[1] != p[2] and p[0] not in free])
            require(not changed, f"settings changed after iteration {number} ({changed}); name it")
    except UserError as error:
        problem = str(error)
    if problem := next(filter(None, dist.gather_objects(problem)), ""):
        raise UserError(problem)
    return first


def _checkpoint_before(folder: Path, iteration: int) -> CheckpointInfo:
    """Collective. The latest checkpoint of an earlier iteration."""
    where = folder / manifest.FOLDER
    (steps, *_) = dist.gather_objects(manifest.step_folders(where))
    path = next((path for path, step in steps.items() if step < iteration), None)
    checkpoint, problem = manager.verified(path) if path else (None, f"{where} has none")
    if checkpoint is None:
        raise UserError(
            f"no checkpoint before iteration {iteration} ({problem}); name a later --iteration, or "
            "train with a larger --save_total_limit"
        )
    return checkpoint


def _trainer_of(facts: Facts) -> DeepSpeedPPOTrainer:
    """Collective. The learner of a run, with the weights that it started from."""

    class Config(RLHFConfig):
        scores_with_objects = facts["has_reward_functions"]  # which are not loaded

    args = Config(**facts["settings"])
    args.output_dir = args.environment = args.tools = None
    args.rollout_backend = "engine"
    set_seed(args.seed)
    names = args.actor_model_name_or_path, args.critic_model_name_or_path or None
    found = find_checkpoints(*names, args)
    with dist.main_process_first():
        text = unsupervised_steps(args, found.tokenizer)
    engine = DeepSpeedRLHFEngine(*names, found.tokenizer, facts["num_iters"], args, found)
    unused = RewardFunctions(RewardSourcesConfig(), [lambda answers: [0.0] * len(answers)])
    return DeepSpeedPPOTrainer(engine, args, text, reward_functions=unused)


def _compared(metrics: dict[str, float], logged: dict[str, Any]) -> str:
    """Whether the run has ``logged`` the same, with null for NaN."""
    shown = {name: value if isfinite(value) else None for name, value in metrics.items()}
    other = [name for name in shown if name in logged and logged[name] != shown[name]]
    differs = f"NOT as logged: {other[0]} {logged[other[0]]}" if other else "as logged"
    return differs if logged else "(not logged)"


def _mini_batches(trainer: DeepSpeedPPOTrainer) -> list[dict[str, float]]:
    """Collective. Metrics of each mini-batch of the last iteration; prints them."""
    parts = [training_metrics(sums) for sums in trainer.mini_batches]
    for number, part in enumerate(parts, 1):
        _say(console.format_line("  mini-batch", number, len(parts), part, _COLUMNS))
    return parts


def _say(line: str) -> None:
    if dist.is_main_process():
        console.write_output(f"{line}\n")
