"""The loop of steps 1 and 2: numbers against plain torch, evaluations, bad steps, memory
options.
"""

import json
import math

import numpy as np
import pytest
import torch
from step_cases import Case, build_supervised, run
from step_rows import pair_rows, sft_rows
from tiny_models import EOS
from torch import nn
from transformers import AutoModelForCausalLM

from dschat.observability.metrics_log import MetricsLog
from dschat.runtime.best_model import BestModel
from dschat.supervised import loop, setup
from dschat.supervised.loop import SFTTask

SFT = Case("sft", micro=4)


def train(
    models_folder,
    tmp_path,
    case=SFT,
    rows=None,
    held_out=None,
    task=None,
    save=lambda: None,
    call=lambda *_: None,
    **options,
):
    """Run the loop; returns the result and the rows of metrics.jsonl."""
    options = tuple({**dict(case.options), **options}.items())
    case = Case(case.step, case.zero, case.micro, case.model, options=options)
    engine, own_task, config, files = build_supervised(case, models_folder, tmp_path)
    rows = rows if rows is not None else sft_rows()
    batches = setup.step_batches(config, rows, held_out if held_out is not None else rows[:5])
    log = MetricsLog(config.output_dir, config)
    try:
        task = task(own_task) if task else own_task
        best = BestModel(config, "actor_best", lambda f: setup.save(engine, config, files, f.name))
        result = loop.train(engine, task, config, *batches, log, save, call, best)
    finally:
        log.close()
    return result, rows_in(tmp_path)


def rows_in(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_ten_steps_against_plain_torch(models_folder, run_here):
    """SFT in float64 without DeepSpeed or micro-batches: the very same losses."""
    result, _ = run_here(Case("sft", options=(("num_train_epochs", 2),)))
    model = AutoModelForCausalLM.from_pretrained(models_folder / "llama").double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    rows, losses = sft_rows(), []
    for step in range(10):
        order = np.random.default_rng([1234, step // 5]).permutation(37)
        total, count = 0.0, 0
        for i in order[step % 5 * 8 : step % 5 * 8 + 8]:
            ids, targets = rows[i]["input_ids"], rows[i]["loss_mask"]
            logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
            for t in range(1, len(ids)):
                if targets[t]:
                    total, count = total - logprobs[t - 1, ids[t]], count + 1
        optimizer.zero_grad()
        (total / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * 0.5 * (1 + math.cos(math.pi * step / 10))
        optimizer.step()
        losses.append(float(total.detach()) / count)
    assert result["loss"] == pytest.approx(losses, rel=1e-4)
    assert losses[-1] < losses[0]


def test_evaluations_and_schedule(models_folder, tmp_path, caplog):
    caplog.set_level("INFO", "dschat")
    result, lines = train(
        models_folder, tmp_path, eval_steps=3, num_warmup_steps=2, num_train_epochs=2
    )
    evaluated = [line["step"] for line in lines if "eval/loss" in line]
    assert evaluated == [0, 3, 6, 9, 10]
    assert result["eval/loss"] == lines[-1]["eval/loss"] < lines[0]["eval/loss"]
    assert result["eval/perplexity"] == pytest.approx(math.exp(result["eval/loss"]))
    first, last = (f"{line['eval/loss']:.4g}" for line in (lines[0], lines[-1]))
    assert caplog.messages[-1] == f"held-out loss: {first} at first, {last} at the end"
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line]
    assert len(rates) == 10
    assert rates[:3] == pytest.approx([0, 1.5e-3, 3e-3])
    assert rates[-1] < 5e-4


def test_hooks_of_the_loop_and_one_evaluation_of_the_last_step(models_folder, tmp_path):
    seen = []

    def call(event, engine, *args):
        seen.append(event)
        if event == "on_step":
            args[0]["of_mine"] = 2.5

    options = {"eval_steps": 2, "max_steps": 4, "logging_steps": 3}
    _, lines = train(models_folder, tmp_path, call=call, **options)
    two_steps = ["on_evaluate", "on_step", "on_step"]
    assert seen == [*two_steps, *two_steps, "on_save", "on_evaluate"]
    assert [line["step"] for line in lines if "eval/loss" in line] == [0, 2, 4]
    assert [(line["step"], line["of_mine"]) for line in lines if "loss" in line] == [(3, 2.5)]


@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_evaluations_are_without_dropout(kind, models_folder, tmp_path):
    """Equal before and after a step that changes nothing, for a model that trains with dropout."""
    rows = sft_rows() if kind == "sft" else pair_rows()
    options = {"learning_rate": 0.0, "max_steps": 1}
    case = Case(kind, micro=8, model="opt")
    losses = []
    for dropout in (0.0, 0.5):
        _, lines = train(models_folder, tmp_path, case, rows, dropout=dropout, **options)
        losses += [line["eval/loss"] for line in lines if "eval/loss" in line]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)


def test_sft_weighs_targets_that_are_predicted():
    task = SFTTask()
    batch = task.collate([{"input_ids": [4, EOS, EOS], "loss_mask": [1, 0, 1]}])
    assert (
        task.weight(batch) == 1
    )  # the first token is predicted by nothing; padding that is EOS is none
    assert task.weight(task.collate([])) == 0


def test_a_loss_that_has_run_away_is_still_a_number():
    metrics = SFTTask().summarize({"loss": 1e4, "tokens": 2.0})
    assert metrics["loss"] == 5000
    assert metrics["perplexity"] == math.exp(100)


class _Wrapped:
    """A task, but for what a subclass does otherwise."""

    def __init__(self, task):
        self._task = task

    def __getattr__(self, name):
        return getattr(self._task, name)


class _AlwaysBad(_Wrapped):
    def loss(self, model, batch):
        total, sums = self._task.loss(model, batch)
        return (total * float("inf") if torch.is_grad_enabled() else total), sums


def test_bad_steps_end_the_run_and_change_nothing(models_folder, tmp_path, caplog):
    with pytest.raises(FloatingPointError, match="3 steps in a row"):
        train(models_folder, tmp_path, task=_AlwaysBad, max_bad_steps=3)
    assert "step 2 skipped: its loss or gradient is not finite (2 in a row)" in caplog.text
    assert [row["bad_steps"] for row in rows_in(tmp_path) if "bad_steps" in row] == [1, 2]
    # Too few for that, and no others: it has not finished either.
    with pytest.raises(FloatingPointError, match="no step was applied: all 2 were skipped"):
        train(models_folder, tmp_path / "few", task=_AlwaysBad, max_steps=2)


def test_bad_steps_in_a_row_are_counted_on_after_a_break(models_folder, tmp_path):
    for resume in (None, "latest"):
        options = {"max_bad_steps": 3, "save_steps": 1, "resume": resume}
        with pytest.raises(FloatingPointError, match="3 steps in a row"):
            train(models_folder, tmp_path, task=_AlwaysBad, **options)
    assert [row["bad_steps"] for row in rows_in(tmp_path) if "bad_steps" in row] == [1, 2]


@pytest.mark.parametrize(("later", "best"), [((2.0, 3.0), 2), ((2.0, 0.5), 4)])
def test_the_best_model_of_a_run_that_was_cut(later, best, models_folder, tmp_path, monkeypatch):
    """It is that of a run without a break: by default of the lowest loss on held-out rows."""
    options = {"keep_best": "auto", "eval_steps": 1, "save_steps": 1, "max_steps": 4}

    def run(folder, *losses, resume=None, ends_at=9):
        levels, done = iter(losses), []

        def call(event, engine, *_):
            done.append(event == "on_step")
            if sum(done) == ends_at:
                raise FloatingPointError("cut")

        monkeypatch.setattr(loop, "evaluate", lambda *_: {"eval/loss": next(levels)})
        train(models_folder, tmp_path / folder, call=call, resume=resume, **options)

    def kept(folder):
        return AutoModelForCausalLM.from_pretrained(tmp_path / folder / "actor_best").state_dict()

    run("whole", 4.0, 3.0, 1.0, *later)
    with pytest.raises(FloatingPointError, match="cut"):
        run("cut", 4.0, 3.0, 1.0, ends_at=3)
    second = kept("cut")
    run("cut", *later, resume="latest")
    whole, cut = kept("whole"), kept("cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert all(torch.equal(second[name], cut[name]) for name in whole) == (best == 2)


def test_after_the_last_step_the_model_is_saved_and_no_checkpoint(models_folder, tmp_path):
    train(models_folder, tmp_path, save_steps=2, max_steps=4, held_out=[])
    saved = [path.name for path in (tmp_path / "checkpoints").glob("step_*")]
    assert saved == ["step_000002"]


def test_lora_with_the_base_trained_too(models_folder, tmp_path):
    """The merged model is saved, but no adapter: its base was trained too and is not kept."""
    options = (("lora_dim", 4), ("only_optimize_lora", False), ("max_steps", 3))
    run(Case("sft", options=options), models_folder, tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(models_folder / "llama")
    for (name, p), q in zip(saved.named_parameters(), base.parameters(), strict=True):
        assert not torch.equal(p, q), name
    assert not (tmp_path / "adapter").exists()


@pytest.mark.slow
def test_a_lora_run_that_trains_a_score_head(models_folder, tmp_path):
    options = {"lora_dim": 4, "num_train_epochs": 6}
    _, lines = train(models_folder, tmp_path, Case("reward", micro=8), pair_rows(), **options)
    losses = [line["eval/loss"] for line in lines if "eval/loss" in line]
    assert losses[-1] < 0.7 * losses[0]


class _EndsOutOfMemory(_Wrapped):
    """Its second evaluation, after training, fails as a CUDA device without memory does."""

    evaluations = 0

    def summarize(self, sums):
        self.evaluations += not torch.is_grad_enabled()
        if self.evaluations == 2:
            raise torch.OutOfMemoryError("in the evaluation")
        return self._task.summarize(sums)


def test_a_last_evaluation_that_fails_does_not_lose_the_model(models_folder, tmp_path):
    saved = []
    options = {"max_steps": 2, "save": lambda: saved.append("model")}
    with pytest.raises(torch.OutOfMemoryError):
        train(models_folder, tmp_path, task=_EndsOutOfMemory, **options)
    assert saved == ["model"]
