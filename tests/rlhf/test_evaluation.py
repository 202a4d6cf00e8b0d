"""pass@k, scores by source, the best actor, on held-out prompts; the flags of evaluations."""

import copy
import itertools
import json
import logging
import math
import shutil
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from float64_step import answer_logprobs
from program_cases import parity, sums_of, trainer_of
from quick import slow
from step_rows import PROMPTS
from tiny_models import tokenizer
from transformers import AutoModelForCausalLM

from dschat.config import RLHFConfig, UserError
from dschat.data.batches import PromptTable
from dschat.inference.protocol import Rollout
from dschat.rewards.scoring import SourceScores
from dschat.rlhf.evaluation import HeldOutPrompts, check_evaluation, evaluate_policy, pass_at
from dschat.rlhf.experience import from_rollout
from dschat.rlhf.prompts import prompt_table
from dschat.rlhf.reporter import Reporter
from dschat.rlhf.trainer import DeepSpeedPPOTrainer
from dschat.runtime.deepspeed_engine import unwrap
from dschat.runtime.gold_eval import EVAL_SEED


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_draws_that_hold_one(n):
    for right in range(n + 1):
        answers = [True] * right + [False] * (n - right)
        for k in range(1, n + 1):
            draws = list(combinations(answers, k))
            assert pass_at(k, n, right) == pytest.approx(sum(map(any, draws)) / len(draws))


def held_out(count=6):
    prompts = prompt_table(PromptTable(PROMPTS[:count], texts=[str(i) for i in range(count)]))
    return HeldOutPrompts(prompts, 0, count, gold=False)


def half(answers):
    return [0.5] * len(answers)


def evaluation_of(trainer):
    """The metrics of an evaluation, and its answers."""
    shown = []
    with trainer.engine.rollout_mode() as generator:
        metrics = evaluate_policy(
            trainer.engine, generator, held_out(), trainer.collector, shown.append
        )
    return metrics, *shown


def test_scores_by_source_and_passes(models_folder):
    trainer = trainer_of(models_folder, [parity, (half, 2.0)], eval_num_samples=5)
    trainer.args.eval_pass_score = 2.0
    metrics, e = evaluation_of(trainer)
    assert e.num_sequences == 30
    even = (sums_of(e) % 2 == 0).float().reshape(6, 5)
    assert metrics["eval/scores/parity"] == pytest.approx(float(even.mean()))
    assert metrics["eval/scores/half"] == pytest.approx(0.5)
    assert metrics["eval/score"] == pytest.approx(float(even.mean()) + 1)
    assert metrics["eval/pass@1"] == pytest.approx(float(even.mean()))
    assert metrics["eval/pass@5"] == pytest.approx(float(even.any(1).float().mean()))
    by_hand = sum(pass_at(2, 5, int(right)) for right in even.sum(1)) / 6
    assert metrics["eval/pass@2"] == pytest.approx(by_hand)
    assert set(metrics) >= {"eval/kl", "eval/answer_length", "eval/eos_share", "eval/pass@4"}
    assert "eval/gold" not in metrics


def test_answers_that_could_not_be_scored_are_not_in_the_mean(models_folder):
    def moody(answer_ids):
        if any(sum(ids) % 2 for ids in answer_ids):
            raise ValueError("odd")
        return [3.0] * len(answer_ids)

    options = {"on_reward_error": "skip", "eval_num_samples": 2, "eval_pass_score": 1.0}
    trainer = trainer_of(models_folder, [moody], **options)
    metrics, _ = evaluation_of(trainer)
    assert metrics["eval/score"] == 3
    assert metrics["eval/pass@1"] == 1  # as every answer that has a score


@pytest.fixture
def reported(models_folder, tmp_path):
    """``reported(**options)``: the rows of metrics.jsonl after six iterations."""

    def run(**options):
        options |= {"output_dir": str(tmp_path), "report_to": ["none"]}
        trainer = trainer_of(models_folder, **options)
        report = Reporter(trainer, held_out(), 6)
        report.begin()
        e = trainer.generate_experience(PROMPTS[:8])
        for trainer.iteration in range(1, 7):
            report.step(e)
        report.close()
        return list(map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()))

    return run


def test_samples_are_recorded_at_the_first_iteration_and_every_n(reported, tmp_path, caplog):
    caplog.set_level("INFO", "dschat")
    reported(sample_steps=3)
    rows = sample_rows(tmp_path)
    assert [row["step"] for row in rows if "held_out" not in row] == [1, 3, 6]
    assert caplog.text.count("sample answers") == 3
    lines = {text.split()[0]: text for text in caplog.messages if "0/6" in text or "1/6" in text}
    for line in (lines["step"], lines["held"]):  # one name for one thing
        assert [word for word in (" score ", " length ", " eos_share ") if word not in line] == []


def sample_rows(folder):
    return list(map(json.loads, (folder / "samples.jsonl").read_text().splitlines()))


def test_what_functions_of_trl_log_is_recorded(reported, tmp_path):
    def lengths(completions, log_metric, log_extra, trainer_state):
        known = [len(completion) for completion in completions]
        log_metric("longest", max(known))
        log_extra("known", known)
        return [float(trainer_state.max_steps)] * len(known)

    rows = reported(reward_fns=[lengths], sample_steps=1)
    assert all(row["eval/longest"] > 0 for row in rows if "eval/score" in row)
    assert all(row["longest"] > 0 for row in rows if "objective/scores" in row)
    assert rows[1]["objective/scores"] == 3  # iterations that the trainer is made for
    row = next(row for row in sample_rows(tmp_path) if "held_out" not in row)
    assert len(row["extra"]["known"]) == len(row["scores"])


def test_with_evaluations_the_tables_are_of_the_same_prompts(reported, tmp_path, caplog):
    """Of held-out ones; samples.jsonl has them beside answers of rollouts. The last step leaves its
    evaluation to the end: it would be the same again.
    """
    caplog.set_level("INFO", "dschat")
    rows = reported(sample_steps=3, eval_steps=2)
    assert [row["step"] for row in rows if "eval/score" in row] == [0, 2, 4]
    rows = sample_rows(tmp_path)
    held_out = [row for row in rows if row.get("held_out")]
    assert [row["step"] for row in rows if row not in held_out] == [1, 3, 6]
    assert [row["step"] for row in held_out] == [0, 2, 4]
    answered = [[sample["prompt"] for sample in row["samples"]] for row in held_out]
    assert answered == answered[:1] * 3
    assert {sample["advantages"] for row in held_out for sample in row["samples"]} == {None}
    tables = [text for text in caplog.messages if text.startswith("sample answers")]
    shown = [[line.split(" -> ")[0] for line in table.splitlines()[1:]] for table in tables]
    assert len(tables) == 3  # before training, after iterations 2 and 4
    prompts = [[line.split("'")[1] for line in lines] for lines in shown]
    assert len(prompts[0]) == 3
    assert prompts[1:] == prompts[:1] * 2


def test_the_kl_is_that_of_the_policy_to_the_reference(models_folder):
    """In nats an answer, log-probs of what was sampled less the reference's: in float64."""
    trainer = trainer_of(models_folder, eval_num_samples=2, temperature=0.8)
    reference = unwrap(trainer.engine.ref)
    generator = torch.Generator().manual_seed(5)
    for p in reference.parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=generator)
    metrics, e = evaluation_of(trainer)
    actor = AutoModelForCausalLM.from_pretrained(models_folder / "llama").double()
    total = 0.0
    with torch.no_grad():
        models = (actor, copy.deepcopy(reference).double())
        ours, theirs = (answer_logprobs(model, e, 0.8) for model in models)
    for i in range(e.num_sequences):
        for t, token in enumerate(e.input_ids[i, e.prompt_lengths[i] : e.lengths[i]].tolist()):
            total += float(ours[i][t, token] - theirs[i][t, token])
    assert metrics["eval/kl"] == pytest.approx(total / 12, abs=1e-4)
    assert metrics["eval/kl"] > 0.1


def test_the_same_draws_every_time(models_folder):
    trainer = trainer_of(models_folder)
    both = []
    for _ in range(2):
        both.append(evaluation_of(trainer)[0])
        trainer.iteration += 1
    assert both[0] == both[1]
    assert trainer.sampling().seed != EVAL_SEED


@pytest.fixture(scope="module")
def engine(models_folder):
    """One for all of this module's reports, which train nothing."""
    return trainer_of(models_folder, sample_steps=0).engine


@pytest.fixture
def keeper(engine, monkeypatch, tmp_path):
    """A trainer that keeps the best actor, what evaluations find, and where the actor is kept."""
    options = {"keep_best": "eval/score", "output_dir": str(tmp_path), "report_to": ["none"]}
    trainer, found = (
        DeepSpeedPPOTrainer(engine, replace(engine.args, **options), reward_fns=[parity]),
        {},
    )
    monkeypatch.setattr("dschat.rlhf.reporter.evaluate_policy", lambda *args: dict(found))
    return trainer, found, tmp_path / "actor_best"


def test_the_best_actor_is_kept(keeper, models_folder):
    trainer, found, folder = keeper
    report = Reporter(trainer, held_out(), 3)
    expected = AutoModelForCausalLM.from_pretrained(models_folder / "llama")
    for score, is_best in ((0.2, 1), (0.5, 1), (0.4, 0), (float("nan"), 0), (0.5, 0)):
        found["eval/score"] = score
        report.evaluate()
        assert folder.exists() == is_best
        if is_best:
            kept = AutoModelForCausalLM.from_pretrained(folder)
            assert all(map(torch.equal, kept.parameters(), expected.parameters()))
            shutil.rmtree(folder)
    report.close()


def test_with_a_teacher_alone_the_best_actor_is_the_nearest(keeper):
    trainer, found, folder = keeper
    trainer.args.keep_best = "auto"
    report = Reporter(trainer, held_out(), 3)
    for kl, is_best in ((0.5, True), (0.7, False), (0.3, True)):
        found["eval/teacher_kl"] = kl
        report.evaluate()
        assert folder.exists() == is_best
        shutil.rmtree(folder, ignore_errors=True)
    report.close()


def test_a_resumed_run_compares_with_the_best_of_the_same_metric(keeper):
    trainer, found, folder = keeper
    found |= {"eval/score": 0.5, "eval/kl": 0.1}
    first = Reporter(trainer, held_out(), 3)
    first.begin()
    first.step(None)
    first.close()
    values = json.loads(json.dumps(first.state_dict()))
    trainer.args.resume = "latest"
    for metric, is_better in (("eval/score", False), ("eval/kl", True)):
        trainer.args.keep_best = metric
        second = Reporter(trainer, held_out(), 3)
        second.load_state_dict(values)
        second.begin()
        before = (folder / "model.safetensors").stat().st_mtime_ns
        second.evaluate()
        second.close()
        assert ((folder / "model.safetensors").stat().st_mtime_ns > before) == is_better


@pytest.mark.parametrize(
    ("first", "metric"), [((0.0, 1.0), "eval/pass@1"), ((0.5, 1.0), "eval/score")]
)
def test_pass_at_1_is_decided_once_and_kept_when_resumed(
    first, metric, models_folder, tmp_path, monkeypatch
):
    """By the first evaluation; also which metric the best one has."""
    now = [first]

    def rule(answers):
        return [now[0][i % 2] for i in range(len(answers))]

    options = {"output_dir": str(tmp_path), "report_to": ["none"], "sample_steps": 0}
    trainer = trainer_of(models_folder, [rule], **options)
    report = Reporter(trainer, held_out(), 3)
    report.begin()
    report.step(None)
    report.close()
    trainer.args.resume, now[0] = "latest", (0.25, 1.0) if metric == "eval/pass@1" else (0.0, 1.0)
    resumed = Reporter(trainer, held_out(), 3)
    resumed.load_state_dict(json.loads(json.dumps(report.state_dict())))
    resumed.begin()
    resumed.evaluate()
    resumed.close()
    assert resumed._best.metric == metric
    rows = list(map(json.loads, (tmp_path / "metrics.jsonl").open()))
    has = ["eval/pass@1" in row for row in rows if "eval/score" in row]
    assert has == [metric == "eval/pass@1"] * 2


def test_a_best_actor_that_was_not_kept_is_not_claimed(keeper, caplog):
    trainer, found, folder = keeper
    found["eval/score"], trainer.args.keep_best = 0.9, None
    first = Reporter(trainer, held_out(), 3)
    first.begin()
    first.step(None)
    first.close()
    trainer.args.resume, trainer.args.keep_best = "latest", "eval/score"
    second = Reporter(trainer, held_out(), 3)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.begin()
    for score in (0.5, 0.2):
        found["eval/score"] = score
        second.evaluate()
    second.close()
    assert folder.exists()
    assert "eval/score 0.9 at first, 0.2 at the end" in caplog.text
    assert "has the actor" not in caplog.text


def test_the_verdict_names_the_best_actor(keeper):
    """And is stored with the warnings."""
    trainer, found, folder = keeper
    report = Reporter(trainer, held_out(), 3)
    for trainer.iteration, score in enumerate((0.2, 0.9, 0.5)):
        found["eval/score"] = score
        report.evaluate()
    report.close()
    (row,) = map(json.loads, (folder.parent / "warnings.jsonl").open())
    assert "got better until iteration 1 of 2, and worse after it" in row["verdict"]
    assert f"{folder} has the actor with eval/score 0.9." in row["verdict"]


def iterations(report, trainer, numbers, **metrics):
    """Report iterations that have ``metrics``."""
    trainer.metrics = metrics
    for trainer.iteration in numbers:
        report.step(None)


COLLAPSE = {"policy/approxkl_avg": 5.0}


def test_by_default_the_best_actor_is_of_a_run_that_has_not_warned(keeper):
    """Also once it is resumed; of a metric that was named it is the best in any case."""
    trainer, found, folder = keeper
    for keep_best, is_kept in (("auto", False), ("eval/score", True)):
        trainer.args.keep_best, trainer.args.resume = keep_best, None
        report = Reporter(trainer, held_out(), 9)
        found["eval/score"] = 0.2
        report.begin()
        found["eval/score"] = 0.3
        iterations(report, trainer, [1], **{"completions/clipped_ratio": 0.9})
        report.evaluate()
        before = model_time(folder)
        iterations(report, trainer, [2], **COLLAPSE)
        report.close()
        trainer.args.resume, found["eval/score"] = "latest", 0.9
        resumed = Reporter(trainer, held_out(), 9)
        values = json.loads(json.dumps(report.state_dict()))
        resumed.load_state_dict(values)
        resumed.begin()
        resumed.evaluate()
        resumed.close()
        assert (model_time(folder) > before) == is_kept


def model_time(folder):
    return (folder / "model.safetensors").stat().st_mtime_ns


def test_findings_are_stored_when_they_come(keeper):
    """Whether their iterations are logged or not; those of an evaluation too."""
    (trainer, found, folder), still = keeper, {"policy/grad_norm": 0.0, "objective/scores": 0.5}
    trainer.args.logging_steps, found["eval/score"] = 10, 2.0
    report = Reporter(trainer, held_out(), 40)
    report.begin()
    iterations(report, trainer, range(1, 5), **still | {"objective/scores_std": 0.0})
    found |= {"eval/score": 0.1, "eval/answer_length": 9.0}
    report.evaluate()
    report.close()
    *rows, last = map(json.loads, (folder.parent / "warnings.jsonl").open())
    assert [row["step"] for row in rows] == [3, 4]
    assert "got worse: eval/score 2 at first, 0.1 at the end" in last["verdict"]
    assert rows[0]["warning"].endswith("(since iteration 1)")
    assert "eval/score 0.1, at best 2" in rows[1]["warning"]
    logged = map(json.loads, (folder.parent / "metrics.jsonl").open())
    assert [row["step"] for row in logged] == [0, 4]


def test_a_collapse_ends_the_run_if_asked_to(keeper):
    trainer, _, _ = keeper
    report = Reporter(trainer, held_out(0), 9)
    report.begin()
    iterations(report, trainer, [1], **COLLAPSE)
    trainer.args.stop_on = "collapse"
    iterations(report, trainer, [2], **{"completions/clipped_ratio": 0.9})
    with pytest.raises(FloatingPointError, match="by --stop_on collapse: an update moves .* far"):
        iterations(report, trainer, [3], **COLLAPSE)
    report.close()


# -- without any model: which answers pass, which flags are refused before loading


def evaluated(sources, passes=None, **knobs):
    """The metrics of 2 prompts x 2 answers that ``sources`` scored so."""
    rollout = Rollout([[5]] * 4, [[-1.0]] * 4, ["stop"] * 4)
    e = from_rollout([[1]] * 4, rollout, 0)
    collector = SimpleNamespace(
        answers_of=lambda *_: (e, None),
        sources=lambda *_: sources,
        functions=SimpleNamespace(logged=dict),
    )
    args = RLHFConfig(eval_num_samples=2, **knobs)
    engine = SimpleNamespace(args=args, has_reference=False, teacher=None, tokenizer=tokenizer())
    held_out = HeldOutPrompts(PromptTable([[1], [1]]), 0, 2, gold=False)
    return evaluate_policy(engine, None, held_out, collector, passes=passes)


def test_rounding_fails_no_answer():
    weights = (0.7, 0.2, 0.1)
    assert sum(weights) < 1
    parts = [SourceScores(str(weight), weight, [1.0] * 4) for weight in weights]
    assert evaluated(parts)["eval/pass@1"] == 1
    assert evaluated(parts, eval_pass_score=1.001)["eval/pass@1"] == 0


def test_one_source_may_decide_what_passes():
    """By what it gave, not by its weight, nor what shapes the sum. What it did not score is left
    out.
    """
    right = SourceScores("right", 0.5, [1.0, 0.0, 0.0, None])
    parts = [right, SourceScores("length", 1.0, [0.5] * 4)]
    assert "eval/pass@1" not in evaluated(parts)
    assert evaluated(parts, eval_pass_score=1.0)["eval/pass@1"] == 0.25
    own = evaluated(parts, eval_pass_source="right")
    assert (own["eval/pass@1"], own["eval/pass@2"]) == pytest.approx((1 / 3, 2 / 3))
    model = [SourceScores("reward_model", 1.0, [2.0, 0.0, 0.0, 0.0])]
    assert "eval/pass@1" not in evaluated(model)
    judged = evaluated(model, eval_pass_source="reward_model")
    assert judged["eval/pass@1"] == 0.25


@pytest.mark.parametrize(
    ("scores", "knobs", "earlier", "has"),
    [
        ([0.0, 1.0, 1.0, 0.0], {}, None, True),
        ([0.0, 1.0, 1.0, 0.5], {}, None, False),
        ([0.0, 1.0, 1.0, 0.5], {}, True, True),  # decided once
        ([0.0, 1.0, 1.0, 0.0], {}, False, False),
        ([0.0, 1.0, 1.0, 0.5], {"eval_pass_score": 1.0}, None, True),
        ([0.0, 1.0, 1.0, 0.5], {"eval_pass_source": "rule"}, None, True),
        ([0.0, 1.0, 1.0, 0.5], {"keep_best": "eval/pass@2"}, False, True),
    ],
)
def test_which_evaluations_have_pass_at_k(scores, knobs, earlier, has):
    metrics = evaluated([SourceScores("rule", 1.0, scores)], passes=earlier, **knobs)
    assert [f"eval/pass@{k}" in metrics for k in (1, 2)] == [has, has]
    assert metrics["eval/score"] == sum(scores) / 4
    assert "eval/partial" not in metrics


def test_declined_answers_are_in_no_mean_and_no_share():
    parts = [SourceScores("right", 2.0, [1.0, None, 0.5, 0.0])]
    metrics = evaluated(parts, eval_pass_score=0.0)
    assert (metrics["eval/score"], metrics["eval/pass@1"]) == (1, 1)
    both = evaluated([*parts, SourceScores("length", 1.0, [3.0] * 4)], eval_pass_score=0.0)
    assert (both["eval/score"], both["eval/pass@1"]) == (3.75, 1)


@pytest.mark.parametrize("knobs", [*slow([{}]), {"eval_pass_source": "right"}])
def test_answers_on_which_a_function_failed_are_not_wrong(knobs):
    """With --on_reward_error skip: of scores that are 0 or 1, pass@1 is the mean, as score is."""
    for scores in itertools.product((0.0, 1.0, math.nan), repeat=4):
        metrics = evaluated([SourceScores("right", 1.0, scores)], **knobs)
        assert metrics["eval/pass@1"] == pytest.approx(metrics["eval/score"])
        known = [[x for x in pair if x == x] for pair in (scores[:2], scores[2:])]
        both = sum(len(pair) * max(pair, default=0.0) for pair in known)
        assert metrics["eval/pass@2"] == pytest.approx(both / max(1, sum(map(len, known))))
        assert "eval/known" not in metrics


def test_a_source_that_is_only_logged_fails_no_answer():
    parts = [SourceScores("right", 1.0, [1.0] * 4), SourceScores("logged", 0.0, [math.nan] * 4)]
    metrics = evaluated(parts)
    assert (metrics["eval/score"], metrics["eval/pass@1"]) == (1, 1)


@pytest.mark.parametrize(
    ("knobs", "sources", "num_held_out", "words"),
    [
        ({"keep_best": "eval/score"}, ["reward_model"], 0, "--keep_best .* nothing is held out"),
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


@pytest.mark.parametrize(
    ("measured", "keep_best", "metric"),
    [
        (("gold", "pass@1", "score"), "auto", "eval/gold"),
        (("pass@1", "score"), None, "eval/pass@1"),
        (("score",), "auto", "eval/score"),
        (("gold", "score"), "eval/score", "eval/score"),
    ],
)
def test_the_metric_of_the_best_evaluation(measured, keep_best, metric, keeper):
    """The first evaluation decides, and a resumed run keeps it; also where it named another."""
    trainer, found, _ = keeper
    trainer.args.keep_best = keep_best
    found |= {f"eval/{name}": 0.5 for name in measured}
    first = Reporter(trainer, held_out(), 3)
    first.begin()
    first.step(None)
    first.close()
    values = json.loads(json.dumps(first.state_dict()))
    assert (values["best_metric"], values["passes"]) == (metric, "pass@1" in measured)
    trainer.args.resume = "latest"
    for saved, expected in ((values, metric), (values | {"best_metric": "eval/kl"}, metric)):
        resumed = Reporter(trainer, held_out(), 3)
        resumed.load_state_dict(saved)
        resumed.begin()
        resumed.evaluate()
        resumed.close()
        assert resumed._best.metric == expected
    found.clear()  # with other held-out rows, which have scores alone
    found["eval/score"] = 0.1
    other = Reporter(trainer, held_out(), 3)
    other.load_state_dict(values)
    other.begin()
    other.evaluate()
    other.close()
    assert other._best.metric == "eval/score"


def test_without_a_kl_the_penalized_score_is_the_score(caplog):
    for kl_coef in (0.1, 0.0):
        assert "it is eval/score" not in caplog.text
        args = RLHFConfig(keep_best="eval/rlhf_reward", kl_coef=kl_coef, log_kl=True)
        check_evaluation(args, ["length"], 9)
    assert "--keep_best eval/rlhf_reward: with --kl_coef 0 it is eval/score" in caplog.text


@pytest.mark.parametrize("name", ["eval/score", "eval/pass@2", "eval/scores/length", "eval/gold"])
def test_known_before_weights_load(name):
    args = RLHFConfig(keep_best=name, eval_num_samples=2)
    check_evaluation(args, ["reward_model", "length"], 1)


def test_metric_names_are_known_before_an_evaluation():
    parts = [SourceScores("a", 1.0, [1.0] * 4), SourceScores("b", 1.0, [1.0] * 4)]
    for name in evaluated(parts):
        args = RLHFConfig(keep_best=name, eval_num_samples=2)
        check_evaluation(args, ["a", "b"], 1)


def test_an_evaluation_without_prompts_is_warned_about(caplog):
    with caplog.at_level(logging.WARNING, "dschat"):
        check_evaluation(RLHFConfig(), ["length"], 0)
        assert not caplog.text
        check_evaluation(RLHFConfig(eval_steps=5), ["length"], 0)
    assert "--eval_steps evaluates nothing: nothing is held out" in caplog.text
