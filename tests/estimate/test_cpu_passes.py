"""The time model of a CPU: passes that run, and how a step is made of them."""

from dataclasses import replace

import pytest
import torch
from estimates import rlhf_fields

from dschat.estimate import Request, cpu_passes
from dschat.estimate.activations import Batch
from dschat.estimate.cpu_passes import CpuPasses
from dschat.estimate.devices import DEVICES
from dschat.estimate.models import Models, Use
from dschat.estimate.run import make_estimator
from dschat.estimate.seconds import TimedModel
from dschat.estimate.timing import Timer
from dschat.inference import InferenceEngine
from dschat.inference.hf_generator import HuggingFaceGenerator

CPU = replace(DEVICES["V100-32"], name="cpu", flops=1e9)


@pytest.fixture(autouse=True)
def measured_briefly(monkeypatch):
    monkeypatch.setattr(cpu_passes, "_REPEATS", 1)
    monkeypatch.setattr(cpu_passes, "_LEAST_S", 0.0)


@pytest.fixture(scope="module")
def fields(tiny):
    """One device: 8 prompts, 16 answers, 2 optimizer steps of 2 micro-batches."""
    return rlhf_fields(tiny("llama")) | {"old_logprobs": "recompute", "max_num_seqs": 16}


def times(fields, number=3):
    """Phase -> its `Phase`."""
    request, models = Request({number: fields}, 1, 1), Models()
    estimate = make_estimator(request, models)(request.config(number))
    return {phase.name: phase for phase in Timer(models, CPU, 1).time(estimate).phases}


def timed(use: Use, models: Models) -> TimedModel:
    sizes = models.sizes(use)
    head = "lm" if use.kind == "lm" else "score"
    return TimedModel(sizes.shape, sizes.total, sizes.trained, head, 4, checkpointing=False)


def test_a_step_is_made_of_measured_passes(fields, monkeypatch):
    """Where a pass takes a second and 8 decode steps take 2: 4 micro-batches of two models train,
    as many of four models are scored, one prefill, 15 decode steps.
    """
    measured = []

    def seconds(run):
        measured.append(run)
        return 3.0 if len(measured) == 2 else 1.0  # the second one: generation of 9 tokens, not 1

    monkeypatch.setattr(cpu_passes, "_seconds", seconds)
    phases = times(fields)
    assert phases["train"].total_s == pytest.approx(4 * 2)
    assert phases["score"].total_s == pytest.approx(4 * 4)
    assert phases["prefill"].total_s == pytest.approx(1 / 2)  # one prompt for two samples
    assert phases["decode"].total_s == pytest.approx(15 * 2 / 8, rel=0.1)  # later tokens see more
    assert phases["decode"].memory_s == 0
    # Actor and reference are one model, critic and reward model another.
    assert len(measured) == 3 + 2 + 2
    without = times(fields | {"old_logprobs": "rollout"})  # the actor is not scored
    assert without["score"].total_s == pytest.approx(4 * 3)


def test_passes_run(fields):
    """Every phase takes time."""
    engine = times(fields)
    assert {"prefill", "decode", "score", "train", "update"} <= {*engine}
    assert all(0 < phase.total_s < 1000 for phase in engine.values())


def test_either_generator_is_measured(fields, monkeypatch):
    made = []
    generator = CpuPasses._generator
    monkeypatch.setattr(
        CpuPasses, "_generator", lambda _, *args: made.append(generator(*args)) or made[-1]
    )
    for in_engine in (True, False):
        times(fields | {"enable_hybrid_engine": in_engine})
    assert [type(made) for made in made] == [InferenceEngine, HuggingFaceGenerator]


@pytest.mark.parametrize("loss", ["pairwise", "dpo", "kto"])
def test_supervised_passes_run(tiny, loss):
    fields = {"model_name_or_path": tiny("gpt2"), "max_seq_len": 32, "loss": loss}
    phases = times(fields, number=2)
    assert ("reference" in phases) == (loss != "pairwise")
    assert 0 < phases["train"].total_s < 1000


@pytest.mark.parametrize(("size", "layers"), [("small", 1), ("1.3b", None)])
def test_large_models_are_cut(opt, size, layers):
    """8 layers of 12.6M and an embedding of 4.2M: one runs. A layer and the embeddings of OPT-1.3B
    are too large.
    """
    models = Models()
    use = Use(opt(size), "--model", "lm", torch.float32)
    model = timed(use, models)
    cut = CpuPasses(models)._cut(model, use)
    assert (cut and cut.shape.num_layers) == layers
    if cut is None:
        assert CpuPasses(models).rate(model, use, "sft", Batch(1, 8, 7), True) is None
        assert CpuPasses(models).generation_rates(model, use, True, 4, (8, 8)) is None


def test_large_batches_are_cut(tiny, monkeypatch):
    """As many rows run as their FLOPs allow, and of one that takes more its first tokens."""
    models, rows = Models(), []
    use = Use(tiny("llama"), "--model", "lm", torch.float32)
    model = timed(use, models)
    make = Batch.rows
    monkeypatch.setattr(Batch, "rows", lambda b, device: rows.append(b[:2]) or make(b, device))
    for flops in (3.5 * model.training_flops(8), 1.0 * model.training_flops(4)):
        monkeypatch.setattr(cpu_passes, "_FLOPS", flops)
        assert CpuPasses(models).rate(model, use, "sft", Batch(64, 8, 7), True) > 0
    assert rows == [(3, 8), (1, 4)]


@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize(("prompt", "answer"), [(62, 2), (63, 1), (1, 63)])
def test_generation_stays_within_the_models_positions(tiny, prompt, answer, engine):
    models = Models()
    use = Use(tiny("opt"), "--model", "lm", torch.float32)
    assert models.config(use).max_position_embeddings == 64
    rates = CpuPasses(models).generation_rates(timed(use, models), use, engine, 3, (prompt, answer))
    assert min(rates) > 0
