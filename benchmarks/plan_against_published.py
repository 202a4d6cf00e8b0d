"""Compares the time model with published hours and seconds of DeepSpeed-Chat and OpenRLHF.

    python benchmarks/plan_against_published.py          the table: predicted, published, ratio
    python benchmarks/plan_against_published.py --fit    fit the shares again on the rows marked so

Sources: DeepSpeed-Chat's announcement (April 2023, github.com/deepspeedai/DeepSpeed, blogs/
deepspeed-chat), tables 1, 2, 4, 5 and 6; OpenRLHF's benchmark against it (its README, early 2024;
A800-80, 1,024 + 1,024 tokens, rollouts of 1,024, 128 sequences per optimizer step).

Settings that a source does not state are the same for all of its rows: see `deepspeed_chat_s` and
`openrlhf_s`. No row has a constant of its own.
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dschat.estimate.devices import DEVICES  # noqa: E402
from dschat.estimate.memory import Model  # noqa: E402
from dschat.estimate.models import Sizes, Use  # noqa: E402
from dschat.estimate.seconds import ENGINE, HF_LOOP, Fleet, Rows, Shares  # noqa: E402
from dschat.observability.flops import ModelShape  # noqa: E402
from dschat.runtime.deepspeed_engine import ZeroSettings  # noqa: E402

# DeepSpeed-Chat in 2023: fitted on 6.7B and 13B of its tables, and its 7B row at OpenRLHF.
DEEPSPEED_CHAT = replace(ENGINE, products=0.2658, step_launches=0)
FP16 = torch.float16
OPT_VOCAB = 50272


def opt(hidden: int, layers: int, embed: int | None = None) -> ModelShape:
    matrices, projections = 12 * hidden**2, 2 * hidden * embed if embed else 0
    return ModelShape(
        layers, hidden, matrices, projections, OPT_VOCAB, hidden, hidden, embed or hidden
    )


def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> ModelShape:
    matrices = hidden * (2 * (heads + kv_heads) * 128 + 3 * inner)
    return ModelShape(layers, hidden, matrices, 0, 32000, 128 * heads, 128 * kv_heads, hidden)


SHAPES = {
    "opt-350m": opt(1024, 24, 512),
    "opt-1.3b": opt(2048, 24),
    "opt-6.7b": opt(4096, 32),
    "opt-13b": opt(5120, 40),
    "opt-30b": opt(7168, 48),
    "opt-66b": opt(9216, 64),
    "opt-175b": opt(12288, 96),
    "llama-7b": llama(4096, 11008, 32, 32, 32),
    "llama-13b": llama(5120, 13824, 40, 40, 40),
    "llama-34b": llama(8192, 22016, 48, 64, 8),
    "llama-70b": llama(8192, 28672, 80, 64, 8),
}


def parameters(shape: ModelShape) -> int:
    """Matrices only: within 0.3% of the models' own counts."""
    tied = shape.vocab == OPT_VOCAB
    tables = (1 if tied else 2) * shape.vocab * shape.embed_dim
    return round(shape.num_layers * shape.layer_weights) + tables


def model_of(
    shape: ModelShape,
    zero: ZeroSettings,
    kind: Literal["lm", "score"] = "lm",
    trained: int | None = None,
    checkpointing: bool = True,
) -> Model:
    """A model in 16 bits; ``trained``: parameters of its adapters, None: all train."""
    rank = 0 if trained is None else LORA
    use = Use("", "", kind, FP16, gradient_checkpointing=checkpointing, lora_dim=rank)
    total = parameters(shape)
    sizes = Sizes(total, trained or total, 0, shape)
    return Model("", use, sizes, "policy", zero, {}, 0)


def adapters(shape: ModelShape, rank: int) -> int:
    """Parameters of LoRA on every matrix of OPT's layers, and what trains beside it there."""
    attention = 2 * shape.hidden * 4
    mlp = 2 * (shape.hidden + 4 * shape.hidden)
    return rank * shape.num_layers * (attention + mlp) + shape.vocab * shape.embed_dim


# -- DeepSpeed-Chat --------------------------------------------------------------------------------

# Of step 3, 256 + 256 tokens each: the announced 135M tokens. The 131.9k queries and answers, which
# it names too, would be half of them.
SEQUENCES = 135_000_000 // 512
STEP_SEQUENCES = 1_024  # of an optimizer step and its rollout, at most
LORA = 128  # of its scripts from 13B on


@dataclass(frozen=True)
class Trained:
    """A row of DeepSpeed-Chat's tables.

    Attributes:
        hours: published.
        rows: sequences of a micro-batch and device: the largest power of two that fits in memory by
            `--plan`, at most the device's part of the step.
        tp_size: of the rollout.
        offload: of the optimizer, where `--plan` says that it does not fit otherwise.
    """

    table: str
    step: int
    model: str
    gpu: str
    count: int
    hours: float
    rows: int
    fitted: bool = False
    tp_size: int = 1
    offload: bool = False
    sequences: int = SEQUENCES


def deepspeed_chat_s(row: Trained, shares: Shares) -> float:
    """Seconds of one step of a row; every sequence is 256 + 256 tokens, one epoch.

    The announcement names models, GPUs and tokens. The rest is from its scripts: ZeRO-3 (ZeRO-2 on
    one GPU), gradient checkpointing, LoRA of rank 128 from 13B on, OPT-350M as reward model and
    critic under the same rows. Steps 1 and 2: a half as many examples as step 3, and as many pairs.
    """
    fleet, shape = Fleet(DEVICES[row.gpu], row.count, min(row.count, 8), shares), SHAPES[row.model]
    zero = ZeroSettings(3 if row.count > 1 else 2, FP16, offload_optimizer=row.offload)
    actor = model_of(shape, zero, trained=adapters(shape, LORA) if shape.hidden >= 5120 else None)
    plain = ZeroSettings(0, torch.float32)  # stage 0, which dschat itself has for fp32 only
    critic = model_of(SHAPES["opt-350m"], plain, "score", None, row.step == 3)
    if row.step != 3:
        model = actor if row.step == 1 else critic
        sequences = row.sequences // 2 if row.step == 1 else 2 * row.sequences
        rows = Rows(sequences, 256, 256)
        batches = math.ceil(sequences / row.count / row.rows)
        steps = sequences / STEP_SEQUENCES
        return fleet.train(model, rows, batches) + fleet.update(model, steps)
    rows = Rows(STEP_SEQUENCES, 256, 256)
    batches = math.ceil(STEP_SEQUENCES / row.count / row.rows)
    phases = [
        fleet.refresh(actor, row.tp_size),
        fleet.prefill(actor, rows, row.tp_size),
        fleet.decode(actor, rows, row.rows * row.tp_size, row.tp_size),
        *(fleet.score(m, rows, batches) for m in (actor, actor, critic, critic)),
        *(fleet.train(m, rows, batches) for m in (actor, critic)),
        *(fleet.update(m, 1) for m in (actor, critic)),
    ]
    return row.sequences / STEP_SEQUENCES * sum(phases)


A40, A80 = "A100-40", "A100-80"
ONE_SET = 30_500  # 40% of Dahoas/rm-static's 76,256 rows
CHAT_ROWS = [
    Trained("1", 3, "opt-6.7b", A40, 8, 5.7, 8),
    Trained("1", 3, "opt-13b", A40, 8, 10.8, 16, tp_size=2, offload=True),
    Trained("1", 3, "opt-30b", A40, 8, 1.85 * 24, 8, tp_size=4, offload=True),
    Trained("1", 3, "opt-6.7b", A80, 8, 4.1, 64, fitted=True),
    Trained("1", 3, "opt-13b", A80, 8, 9.0, 32, fitted=True, tp_size=2),
    Trained("1", 3, "opt-30b", A80, 8, 18.0, 32, tp_size=4, offload=True),
    Trained("1", 3, "opt-66b", A80, 8, 2.1 * 24, 16, tp_size=8, offload=True),
    Trained("2", 3, "opt-13b", A80, 64, 1.25, 16, fitted=True, tp_size=2),
    Trained("2", 3, "opt-30b", A80, 64, 4.0, 16, tp_size=4),
    Trained("2", 3, "opt-66b", A80, 64, 7.5, 16, tp_size=8),
    Trained("2", 3, "opt-175b", A80, 64, 20.0, 8, tp_size=8, offload=True),
    Trained("4", 1, "opt-13b", A40, 8, 2.5, 4),
    Trained("4", 2, "opt-350m", A40, 8, 0.25, 8),
    Trained("5", 1, "opt-66b", A80, 64, 82 / 60, 4),
    Trained("5", 2, "opt-350m", A80, 64, 5 / 60, 8),
    Trained("6", 1, "opt-1.3b", "A6000-48", 1, 2900 / 3600, 64, sequences=ONE_SET),
    Trained("6", 2, "opt-350m", "A6000-48", 1, 670 / 3600, 64, sequences=ONE_SET),
    Trained("6", 3, "opt-1.3b", "A6000-48", 1, 1.2, 64, sequences=ONE_SET),
]


# -- OpenRLHF --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """A row of OpenRLHF's benchmark; seconds of a rollout of 1,024 and of training on it.

    Attributes:
        groups: devices of all models together, or of reference, reward, actor, critic and vLLM.
        rows: sequences of a micro-batch in generation and in training.
        tp_size: of vLLM: the fewest devices that hold the weights.
    """

    model: str
    system: Literal["DeepSpeed-Chat", "OpenRLHF", "Ray", "Ray + vLLM"]
    groups: tuple[int, ...]
    rows: tuple[int, int]
    generation_s: float
    training_s: float
    fitted: bool = False
    tp_size: int = 1


def openrlhf_s(row: Compared, engine: Shares, loop: Shares, chat: Shares) -> tuple[float, float]:
    """Seconds of (generation, training); ZeRO-3, gradient checkpointing.

    Generation includes scoring, but not in DeepSpeed-Chat's rows: its timer stands around
    ``generate`` alone. Ray's groups work side by side: one batch is generated while others are
    scored, and actor and critic train at once. A rank asks vLLM for a micro-batch at a time, and an
    engine answers one request at a time. The optimizer is
    offloaded where fp32 states of 16 bytes a parameter take over three quarters of the memory.
    """
    is_chat, apart = row.system == "DeepSpeed-Chat", len(row.groups) > 1
    passes = chat if is_chat else engine
    writes = replace(loop, products=passes.products)
    sizes = row.groups if apart else row.groups * 4
    gen_rows, train_rows = row.rows
    shape, rows = SHAPES[row.model], Rows(1024, 1024, 1024)
    total = parameters(shape)

    def fleet(count: int, shares: Shares) -> Fleet:
        return Fleet(DEVICES["A800-80"], count, min(count, 8), shares)

    def model(name: str, count: int) -> Model:
        models = 1 if apart else 2
        offload = models * 16 * total / count > 0.75 * 80e9
        kind = "lm" if name in ("actor", "reference") else "score"
        return model_of(shape, ZeroSettings(3, FP16, offload_optimizer=offload), kind)

    scored, trained = [], []
    for name, count in zip(("reference", "reward", "actor", "critic"), sizes, strict=False):
        batches, m = 1024 / count / gen_rows, model(name, count)
        scored.append(fleet(count, passes).score(m, rows, batches))
        if name in ("actor", "critic"):
            batches = 1024 / count / train_rows
            seconds = fleet(count, passes).train(m, rows, batches)
            trained.append(seconds + fleet(count, passes).update(m, 8))
    writers = fleet(row.groups[4], engine) if "vLLM" in row.system else fleet(sizes[2], writes)
    actor = model("actor", writers.count)
    generation_s = writers.prefill(actor, rows, row.tp_size) + writers.decode(
        actor, rows, gen_rows, row.tp_size
    )
    if apart:
        return max(generation_s, *scored), max(trained)
    return generation_s + (0.0 if is_chat else sum(scored)), sum(trained)


RAY, VLLM = (1, 1, 4, 2), (1, 1, 2, 2, 2)
COMPARED_ROWS = [
    Compared("llama-7b", "DeepSpeed-Chat", (8,), (8, 8), 697.12, 492.01, fitted=True),
    Compared("llama-7b", "OpenRLHF", (8,), (8, 8), 920.81, 256.97, fitted=True),
    Compared("llama-7b", "Ray", RAY, (16, 8), 1498.77, 395.69),
    Compared("llama-7b", "Ray + vLLM", VLLM, (16, 8), 481.86, 403.29, fitted=True),
    Compared("llama-13b", "DeepSpeed-Chat", (8,), (2, 2), 2590.72, 1218.76),
    Compared("llama-13b", "Ray", RAY, (8, 4), 2722.51, 949.10),
    Compared("llama-13b", "Ray + vLLM", VLLM, (8, 4), 1425.75, 967.15),
    Compared("llama-34b", "Ray + vLLM", VLLM, (4, 2), 5518.07, 3296.18, tp_size=2),
    Compared("llama-70b", "Ray + vLLM", (2, 2, 4, 4, 4), (4, 4), 7122.65, 2699.97, tp_size=4),
]


# -- table and fit ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A published figure beside the predicted one."""

    row: str
    predicted: float
    published: float
    unit: str
    fitted: bool

    @property
    def ratio(self) -> float:
        return self.predicted / self.published

    def __str__(self) -> str:
        kind = "fitted" if self.fitted else "held out"
        numbers = f"{self.predicted:9.2f} {self.published:9.2f} {self.unit:2} {self.ratio:6.2f}"
        return f"{self.row:<50} {numbers}  {kind}"


def table(
    chat: Shares = DEEPSPEED_CHAT, engine: Shares = ENGINE, loop: Shares = HF_LOOP
) -> list[Line]:
    """Every published figure."""
    lines = []
    for row in CHAT_ROWS:
        name = f"table {row.table}: step {row.step}, {row.model}, {row.count} x {row.gpu}"
        hours = deepspeed_chat_s(row, chat) / 3600
        lines.append(Line(name, hours, row.hours, "h", row.fitted))
    for case in COMPARED_ROWS:
        seconds = openrlhf_s(case, engine, loop, chat)
        published = case.generation_s, case.training_s
        for phase, ours, theirs in zip(("generation", "training"), seconds, published, strict=True):
            name = f"{case.model}, {case.system}, {':'.join(map(str, case.groups))}: {phase}"
            lines.append(Line(name, ours, theirs, "s", case.fitted))
    return lines


# Copies of large tensors reach nine tenths of an A100's bandwidth; no decode step reaches more.
LIMITS = {"products": 1.0, "decode": 0.9, "step_launches": math.inf}


def fit() -> dict[str, dict[str, float]]:
    """The shares with the least squared log ratio of the fitted rows, by coordinate descent."""
    sets = {"chat": DEEPSPEED_CHAT, "engine": ENGINE, "loop": HF_LOOP}
    free = [
        ("chat", "products"),
        ("engine", "products"),
        ("engine", "decode"),
        ("loop", "step_launches"),
    ]

    def loss() -> float:
        lines = table(**sets)
        return sum(math.log(line.ratio) ** 2 for line in lines if line.fitted)

    step = 1.3
    while step > 1.005:
        improved = False
        for which, name in free:
            for factor in (step, 1 / step):
                before, best = sets[which], loss()
                value = getattr(before, name) * factor
                if value > LIMITS[name]:
                    continue
                sets[which] = replace(before, **{name: value})
                if loss() < best - 1e-9:
                    improved = True
                else:
                    sets[which] = before
        if not improved:
            step = 1 + (step - 1) / 2
    return {
        which: {name: round(getattr(sets[which], name), 4) for w, name in free if w == which}
        for which in sets
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true")
    if parser.parse_args().fit:
        print(json.dumps(fit(), indent=2))
        return
    print(f"{'row':<50} {'predicted':>9} {'published':>9}    {'ratio':>6}")
    for line in table():
        print(line)


if __name__ == "__main__":
    main()
