"""Measures how many tokens of a micro-batch fit in memory (``--max_tokens_per_micro_batch auto``).

Runs forward and backward through the real engines on ever larger micro-batches, without an
optimizer step: weights, optimizer states, schedules and random numbers stay as they are.
"""

import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import dschat.distributed as dist
from dschat.config import UserError
from dschat.distributed.memory import free_bytes, peak_bytes, restart_peak
from dschat.models.training_engine import TrainingEngine, full_shape
from dschat.runtime.optimizer_step import OptimizerStep

logger = logging.getLogger("dschat")

FIRST_TRIAL_TOKENS = 1024  # tokens of the first trial, unless a row is longer
_SHARE = 0.9  # of the free memory; the rest is for fragmentation
_FASTER = 1.05  # on a CPU: tokens per second of twice the tokens that make it worth the memory

# A model and the forward of its micro-batch of so many longest rows, which returns a loss (0-d).
Trained = tuple[TrainingEngine, Callable[[int], Tensor]]


@dataclass(frozen=True)
class _Trial:
    num_rows: int
    num_bytes: int  # beyond what was held before the first trial
    rows_per_s: float


def measure_budget(
    models: Sequence[Trained], longest: int, most: int, keeps_gradients: bool = False
) -> int:
    """Collective. The most tokens that train within 0.9 of the free memory on every rank, doubled
    from about 1,024 on; on a CPU no more than make it faster.

    Args:
        models: those that are trained in turn.
        longest: tokens of the longest row.
        most: rows of an optimizer step on each rank.
        keeps_gradients: whether one model's gradients are kept while the next is trained.

    Leaves the models in training mode.

    Raises:
        UserError: one row does not fit on the device, or the measurement cannot continue after
            running out of memory.
    """
    device = dist.device()
    reserved = sum(_states_to_come(engine) for engine, _ in models)
    held = restart_peak(device)
    room = int(_SHARE * max(0, free_bytes(device) // _sharing_ranks(device) - reserved))
    trial = partial(_try, models, held, keeps_gradients)
    for engine, _ in models:
        engine.train()  # with dropout and gradient checkpointing
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        best = _search(trial, min(max(1, FIRST_TRIAL_TOKENS // longest), most), most, room)
    tokens = best.num_rows * longest
    logger.info(
        "micro-batches of up to %s tokens (auto: %.3g of %.3g GiB)",
        f"{tokens:,}",
        best.num_bytes / 2**30,
        room / 2**30,
    )
    return tokens


def _search(trial: Callable[[int], _Trial | None], first: int, most: int, room: int) -> _Trial:
    """Collective. NOTE every decision is taken by all ranks together; a trial fails on all."""
    best = _smallest(trial, first, room)
    before = None
    while first <= best.num_rows < most:
        num_rows = min(2 * best.num_rows, most)
        if _any(_predicted(before, best, num_rows) > room):  # also where ``best`` does not fit
            break
        larger = trial(num_rows)
        if larger is None:
            trial(best.num_rows)  # clears what the failed one left
            break
        is_faster = larger.rows_per_s > _FASTER * best.rows_per_s
        if _any(larger.num_bytes > room or not (is_faster or dist.device().type == "cuda")):
            break
        before, best = best, larger
    return best


def _smallest(trial: Callable[[int], _Trial | None], num_rows: int, room: int) -> _Trial:
    """Collective. The trial of ``num_rows`` or, as long as it does not fit, of half of them; of one
    row in any case.
    """
    while True:
        result = trial(num_rows)
        fits = result is not None and not _any(result.num_bytes > room)
        if fits or num_rows == 1:
            break
        num_rows //= 2
    if result is None:
        raise UserError(
            "--max_tokens_per_micro_batch auto: the longest row does not fit in the memory of the "
            "device; lower --max_seq_len (step 3: --max_answer_seq_len)"
        )
    return result


def _predicted(before: _Trial | None, last: _Trial, num_rows: int) -> float:
    """Bytes of a micro-batch of ``num_rows``, linear in them.

    NOTE: a larger trial starts only where this fits. On a CPU the system would kill the process;
    on a GPU, a backward pass without memory ends the run.
    """
    if before is None:
        return last.num_bytes * num_rows / last.num_rows
    slope = (last.num_bytes - before.num_bytes) / (last.num_rows - before.num_rows)
    return last.num_bytes + max(0.0, slope) * (num_rows - last.num_rows)


def _try(
    models: Sequence[Trained], held: int, keeps_gradients: bool, num_rows: int
) -> _Trial | None:
    """Collective. One micro-batch; None where the GPU of a rank has no memory for it."""
    device, started, alone = dist.device(), time.perf_counter(), dist.world_size() == 1
    restart_peak(device)
    steps: list[OptimizerStep] = []
    losses: list[Tensor] = []
    for engine, forward in models:
        stage, step = engine.zero_optimization_stage(), OptimizerStep(engine, 1, 1.0)
        steps.append(step)
        # NOTE: the others would wait in ZeRO-3's forward, or for the gradients. And the buckets of
        # ZeRO, of one process too, are then half full, and nothing empties them.
        if not _fits(alone or stage < 3, num_rows, lambda f: losses.append(f(num_rows)), forward):
            return None
        if not _fits(alone and stage == 0, num_rows, step.backward, losses.pop()):
            return None
        if not keeps_gradients:
            steps.pop().finish(skip=True)
    for step in steps:
        step.finish(skip=True)
    seconds = time.perf_counter() - started
    return _Trial(num_rows, peak_bytes(device) - held, num_rows / seconds)


def _fits(may_fail: bool, num_rows: int, work: Callable[..., object], given: Any) -> bool:
    """Collective. Whether ``work(given)`` has memory on every rank; unless it ``may_fail`` it must
    have.
    """
    fits = True
    try:
        work(given)
    except torch.OutOfMemoryError:
        fits = False
        if not may_fail:
            raise UserError(
                "--max_tokens_per_micro_batch auto ran out of memory in a pass that cannot be "
                f"repeated, at {num_rows} of the longest rows; pass the tokens of fewer as a number"
            ) from None
    return not _any(not fits)


def _any(condition: bool) -> bool:
    """Collective. Whether ``condition`` holds on any rank."""
    return dist.max_int(int(condition)) == 1


def _sharing_ranks(device: torch.device) -> int:
    """Collective. Ranks that share the memory of ``device``: for a CPU this host's."""
    host = socket.gethostname()
    hosts = dist.gather_objects(host)
    return 1 if device.type == "cuda" else hosts.count(host)


def _states_to_come(engine: TrainingEngine) -> int:
    """Bytes of the optimizer states that the first step allocates on this rank: Adam's moments in
    fp32.
    """
    in_host_memory = engine.zero_offload_optimizer() is not None
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    if optimizer.state or (in_host_memory and dist.device().type == "cuda"):
        return 0
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    ranks = dist.world_size() if engine.zero_optimization_stage() else 1
    return 8 * sum(full_shape(p).numel() for p in trained) // ranks
