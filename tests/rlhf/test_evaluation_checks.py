"""Evaluations without any model: which answers pass, which flags are refused before loading."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch

from dschat.config import RLHFConfig, UserError
from dschat.data.batches import PromptTable
from dschat.inference.protocol import Rollout
from dschat.rewards.scoring import SourceScores
from dschat.rlhf import evaluation
from dschat.rlhf.evaluation import HeldOutPrompts, check_evaluation, evaluate_policy
from dschat.rlhf.experience import from_rollout


@pytest.fixture(autouse=True)
def any_text(monkeypatch):
    monkeypatch.setattr(evaluation, "continued_texts", lambda tokenizer, rows: ["a"] * len(rows))


def evaluated(sources, has_functions=True, **knobs):
    """The metrics of 2 prompts x 2 answers that ``sources`` scored so."""
    args = RLHFConfig(eval_num_samples=2, **knobs)
    rollout = Rollout([[5]] * 4, [[-1.0]] * 4, ["stop"] * 4)
    answers = from_rollout([[1]] * 4, rollout, 0)
    scored = SimpleNamespace(experience=answers, metrics={}, sources=lambda _: sources)
    functions = SimpleNamespace(names=["rule"] if has_functions else [], logged=dict)
    collector = SimpleNamespace(
        answers_of=lambda *_: scored, scorer=SimpleNamespace(functions=functions)
    )
    engine = SimpleNamespace(args=args, has_reference=False, teacher=None, tokenizer=None)
    held_out = HeldOutPrompts(PromptTable([[1], [1]]), ["", ""], 0, 2, gold=False)
    return evaluate_policy(engine, None, held_out, collector)


def source(name, weight, scores, **more):
    return SourceScores(name, weight, torch.tensor(scores), **more)


def test_rounding_fails_no_answer():
    weights = (0.7, 0.2, 0.1)
    assert sum(weights) < 1
    parts = [source(str(weight), weight, [1.0] * 4) for weight in weights]
    assert evaluated(parts)["eval/pass@1"] == 1
    assert evaluated(parts, eval_pass_score=1.001)["eval/pass@1"] == 0


def test_one_source_may_decide_what_passes():
    """By what it gave, not by its weight, nor what shapes the sum; what it did not score fails."""
    right = source("right", 0.5, [1.0, 0.0, 0.0, 1.0], applies=torch.tensor([1, 1, 1, 0]).bool())
    parts = [right, source("length", 1.0, [0.5] * 4)]
    assert evaluated(parts)["eval/pass@1"] == 0.5
    own = evaluated(parts, eval_pass_source="right")
    assert (own["eval/pass@1"], own["eval/pass@2"]) == (0.25, 0.5)
    model = [source("reward_model", 1.0, [2.0, 0.0, 0.0, 0.0])]
    assert "eval/pass@1" not in evaluated(model, has_functions=False)
    judged = evaluated(model, has_functions=False, eval_pass_source="reward_model")
    assert judged["eval/pass@1"] == 0.25
    with pytest.raises(UserError, match="--eval_pass_source rigth does not score .* right, length"):
        evaluated(parts, eval_pass_source="rigth")


def test_declined_answers_are_in_no_mean_and_do_not_pass():
    applies = torch.tensor([True, False, True, True])
    parts = [source("right", 2.0, [1.0, 0.0, 0.5, 0.0], applies=applies)]
    metrics = evaluated(parts, eval_pass_score=0.0)
    assert (metrics["eval/score"], metrics["eval/pass@1"]) == (1, 0.75)
    both = evaluated([*parts, source("length", 1.0, [3.0] * 4)], eval_pass_score=0.0)
    assert (both["eval/score"], both["eval/pass@1"]) == (3.75, 1)


def test_a_source_that_is_only_logged_fails_no_answer():
    parts = [source("right", 1.0, [1.0] * 4), source("logged", 0.0, [math.nan] * 4)]
    metrics = evaluated(parts)
    assert (metrics["eval/score"], metrics["eval/pass@1"]) == (1, 1)


@pytest.mark.parametrize(
    ("knobs", "sources", "num_held_out", "words"),
    [
        ({"keep_best": "eval/score"}, ["reward_model"], 0, "--keep_best .* no prompt is held out"),
        (
            {"keep_best": "eval/pass@1"},
            ["reward_model"],
            9,
            "--keep_best eval/pass@1 is not measured; .* eval/score, .*eval/kl, eval/rlhf_reward$",
        ),
        (
            {"keep_best": "eval/kl", "kl_coef": 0.0},
            ["length"],
            9,
            "--keep_best eval/kl is not measured; .* eval/score, .*eval/pass@1$",
        ),
        ({"eval_pass_source": "lenth"}, ["length"], 9, "--eval_pass_source lenth .* length$"),
    ],
)
def test_refused_before_weights_load(knobs, sources, num_held_out, words):
    with pytest.raises(UserError, match=words):
        check_evaluation(RLHFConfig(data_path=["mine.jsonl"], **knobs), sources, num_held_out)


@pytest.mark.parametrize("name", ["eval/score", "eval/pass@2", "eval/scores/length", "eval/gold"])
def test_known_before_weights_load(name):
    args = RLHFConfig(keep_best=name, eval_num_samples=2)
    check_evaluation(args, ["reward_model", "length"], 1)


def test_metric_names_are_known_before_an_evaluation():
    parts = [source("a", 1.0, [1.0] * 4), source("b", 1.0, [1.0] * 4)]
    for name in evaluated(parts):
        args = RLHFConfig(keep_best=name, eval_num_samples=2)
        check_evaluation(args, ["a", "b"], 1)


def test_an_evaluation_without_prompts_is_warned_about(caplog):
    with caplog.at_level(logging.WARNING, "dschat"):
        check_evaluation(RLHFConfig(), ["length"], 0)
        assert not caplog.text
        check_evaluation(RLHFConfig(eval_steps=5), ["length"], 0)
    assert "--eval_steps evaluates nothing: no prompt is held out" in caplog.text
