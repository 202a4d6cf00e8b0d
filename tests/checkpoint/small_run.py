"""A small training run that can be saved and resumed, for tests of checkpoints.

Apart from rounding its losses do not depend on ZeRO stage and world size. Beside the engine it has
every kind of state that a checkpoint holds: sharded tensors, counters, random generators.
"""

import json
import random
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import forked
import numpy as np
import torch
import torch.nn.functional as F
from tiny_models import VOCAB, causal_lm
from transformers import AutoModelForCausalLM, set_seed

import dschat.distributed as dist
from dschat.checkpoint.manager import CheckpointManager, RunState
from dschat.hybrid.weight_stream import ShardedEMA
from dschat.models.lora import prepare_for_training
from dschat.models.quantized import finish_loading, loading_options
from dschat.runtime.deepspeed_engine import ZeroSettings, initialize_training, sharded_loading
from dschat.runtime.optimizer_step import OptimizerStep

NUM_STEPS, SAVED_AT, ROWS = 6, 3, 4
TIMEOUT_S = 120  # of two processes that start, and of every six jobs of theirs


@dataclass(frozen=True)
class Spec:
    zero: int = 0
    dtype: str = "float32"
    lora: bool = False
    offload: bool = False
    model: str = "llama"
    bits: int = 0  # of quantized weights

    @property
    def name(self) -> str:
        extras = "_lora" * self.lora + "_offload" * self.offload + f"_{self.bits}" * bool(self.bits)
        return f"{self.model}_z{self.zero}_{self.dtype}{extras}"


@dataclass(frozen=True)
class Settings:
    """What may change when a run is resumed, and must then be used."""

    lr: float = 3e-3
    decay: float = 0.5
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: str = "cosine"
    warmup: int = 2
    steps: int = NUM_STEPS  # of the schedule
    clip: float = 1.0
    scaling: dict = field(default_factory=dict)  # DeepSpeed's section fp16


DEFAULT = Settings()


class SmallRun:
    """An engine, its moving average and a counter, taken through `NUM_STEPS` steps."""

    def __init__(self, spec: Spec, folder: Path, settings: Settings = DEFAULT) -> None:
        set_seed(1)
        zero = ZeroSettings(
            spec.zero,
            getattr(torch, spec.dtype),
            offload_optimizer=spec.offload,
            offload_parameters=spec.offload and spec.zero == 3,
            max_grad_norm=settings.clip,
            overrides={"fp16": settings.scaling} if settings.scaling else {},
        )
        path = _saved_model(spec.model, folder)
        with sharded_loading(zero):
            quantized = loading_options(spec.bits, zero.dtype) if spec.bits else {}
            model = AutoModelForCausalLM.from_pretrained(path, dtype=zero.dtype, **quantized)
        if spec.bits:
            finish_loading(model, zero.dtype)
        modules = ["q_proj", "v_proj"]
        model = prepare_for_training(
            model, False, 4 if spec.lora else 0, 0.0, modules, True, "--lora_modules"
        )
        s = settings
        self.engine = initialize_training(
            model, zero, s.lr, s.decay, list(s.betas), s.schedule, s.warmup, s.steps
        )
        self.engine.train()
        self.ema = ShardedEMA(self.engine.module, 0.9)
        self.num_rows = 0
        self.done = 0

    def state(self) -> RunState:
        return RunState(
            {"model": self.engine},
            {"ema": self.ema.tensors},
            {"num_rows": self.num_rows, "done": self.done},
        )

    def steps(self, until: int = NUM_STEPS) -> list[list[float]]:
        """[loss, gradient norm, sum of the average, random numbers] of each step."""
        rows = []
        while self.done < until:
            rows.append(self._step())
        return rows

    def _step(self) -> list[float]:
        mine = batch_of(self.done)[dist.my_share(list(range(ROWS)))]
        step = OptimizerStep(self.engine, len(mine), ROWS * 8)
        total = 0.0
        for row in mine:
            row = row[None]
            loss = causal_loss(self.engine, row)
            step.backward(loss)
            total += float(loss.detach())
        assert step.finish()
        self.ema.update()
        self.done += 1
        self.num_rows += ROWS
        average = sum(float(t.sum()) for t in self.ema.tensors.values())
        loss, average = dist.sum_floats([total / (ROWS * 8), average])
        drawn = [float(torch.rand(1)), random.random(), random.gauss(), float(np.random.randn())]
        return [loss, step.grad_norm, average, self.num_rows, *drawn]


def causal_loss(model, ids: torch.Tensor) -> torch.Tensor:
    """Next-token cross entropy of rows (B, T), summed."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def batch_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(2, VOCAB, (ROWS, 9), generator=generator)


def _saved_model(name: str, folder: Path) -> Path:
    """Its folder. NOTE: not inside `sharded_loading`, where a new model has no weights to save."""
    path = folder / name
    if not path.exists():
        causal_lm(name).save_pretrained(path)
    return path


def straight(spec: Spec, folder: Path) -> list[list[float]]:
    """The run, uninterrupted."""
    return SmallRun(spec, folder).steps()


def saved(spec: Spec, folder: Path) -> list[list[float]]:
    """The run until `SAVED_AT`, saved, and on: what training does to the state meanwhile is not
    saved.
    """
    run = SmallRun(spec, folder)
    checkpoints = CheckpointManager(folder / f"{spec.name}_{dist.world_size()}", {"seed": 7})
    rows = run.steps(SAVED_AT)
    checkpoints.save(SAVED_AT, run.state())
    rows += run.steps()
    checkpoints.wait()
    return rows


def taken_up(spec: Spec, folder: Path, source: Path, settings: Settings = DEFAULT) -> SmallRun:
    """A new run, where the one that was saved in ``source`` had come."""
    run = SmallRun(spec, folder, settings)
    checkpoints = CheckpointManager(source, {"seed": 7})
    values = checkpoints.load(checkpoints.latest(), run.state())
    run.num_rows, run.done = values["num_rows"], values["done"]
    return run


def resumed(
    spec: Spec, folder: Path, world_size: int, saved_by: dict | None = None
) -> list[list[float]]:
    """The rest of a run of ``world_size`` processes that was `saved`: by another spec perhaps."""
    source = Spec(**saved_by) if saved_by else spec
    run = taken_up(spec, folder, folder / f"{source.name}_{world_size}")
    assert run.done == SAVED_AT
    return run.steps()


# What two processes do with a spec, once one process has `saved`: name -> function, arguments.
JOBS = {
    "saved": ("saved", ()),
    "from two": ("resumed", (2,)),
    "from one": ("resumed", (1,)),
}


def launch(folder: Path, jobs: list[tuple[str, Spec, tuple]]) -> list[list[list[float]]]:
    """What two new processes make of ``jobs``: functions of this module by name, and arguments."""
    text = json.dumps([(function, asdict(spec), args) for function, spec, args in jobs])
    ranks = forked.run_ranks(
        [__file__, str(folder), text],
        Path(tempfile.mkdtemp(dir=folder)),
        TIMEOUT_S * (1 + len(jobs) / 6),
    )
    assert not any(rank.code for rank in ranks), "\n".join(rank.stderr[-3000:] for rank in ranks)
    return json.loads((folder / "results.json").read_text())


def main(out: str, jobs: str) -> None:
    """One of several processes; RANK, WORLD_SIZE, ... are in the environment."""
    dist.init(timeout_minutes=3)
    folder = Path(out)
    results = [
        globals()[function](Spec(**spec), folder, *arguments)
        for function, spec, arguments in json.loads(jobs)
    ]
    if dist.is_main_process():
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.shutdown()
    dist.exit_process(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
