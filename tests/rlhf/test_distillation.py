"""On-policy distillation: what the teacher gives to an experience, and what the actor learns."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from quick import slow
from step_cases import Case, build_trainer, my_prompts, ppo_config, probe_logprobs
from step_rows import PROMPTS
from tiny_models import causal_lm

from dschat.config import UserError
from dschat.inference.protocol import SamplingParams
from dschat.models.heads import LanguageModel
from dschat.models.packing import pack
from dschat.rlhf.evaluation import HeldOutPrompts, check_evaluation, evaluate_policy
from dschat.rlhf.prompts import prompt_table
from dschat.runtime.gold_eval import EVAL_SEED

ALONE = (("teacher_model_name_or_path", "gpt2"), ("advantage_estimator", "reinforce"))
ALONE += (("kl_coef", 0.0), ("missing_eos_penalty", 0.0))
TOP_K = 5


def trainer_of(models_folder, zero=0, **options):
    """A trainer whose only source is a teacher of another family."""
    case = Case("ppo", zero, reward="", options=ALONE + tuple(options.items()))
    config = ppo_config(case, models_folder)
    config.critic_model_name_or_path = config.reward_model_name_or_path = ""
    if options.get("teacher_model_name_or_path") == "":
        config.teacher_model_name_or_path = ""  # the actor is its own
    return build_trainer(config), case


@torch.no_grad()
def plain_logprobs(model, e):
    """Log-probs of the whole vocabulary before each action, one sequence at a time, in float64."""
    rows = []
    for ids, start, end in zip(e.input_ids, e.prompt_lengths, e.lengths, strict=True):
        logits = model(input_ids=ids[None, :end], use_cache=False).logits[0, start - 1 : end - 1]
        rows.append(logits.double().log_softmax(-1).numpy())
    return rows


def drawn(rows, e):
    """The log-probs of the actions of all sequences, in a row."""
    actions = [
        ids[start:end]
        for ids, start, end in zip(e.input_ids, e.prompt_lengths, e.lengths, strict=True)
    ]
    return np.concatenate(
        [row[np.arange(len(a)), a.numpy()] for row, a in zip(rows, actions, strict=True)]
    )


@pytest.mark.parametrize("zero", [0, *slow([3])])
def test_a_teacher_alone_gives_the_advantages(zero, models_folder):
    trainer, case = trainer_of(models_folder, zero, offload=["teacher"] if zero == 0 else None)
    engine = trainer.engine
    assert (engine.ref, engine.critic, engine.reward) == (None, None, None)
    e = trainer.generate_experience(my_prompts(case, 0, trainer.args))
    teacher = drawn(plain_logprobs(causal_lm("gpt2"), e), e)
    actor = drawn(plain_logprobs(causal_lm("llama"), e), e)
    np.testing.assert_allclose(e.teacher_logprobs[e.answer_mask], teacher, atol=2e-5)
    np.testing.assert_allclose(e.advantages[e.answer_mask], teacher - actor, atol=4e-5)
    kl = (actor - teacher).sum() / e.num_sequences
    assert trainer.metrics["objective/teacher_kl"] == pytest.approx(kl, rel=1e-4)
    assert not [name for name in trainer.metrics if name.startswith("objective/scores/")]


@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_candidates_and_the_loss_over_them(zero, models_folder):
    options = {"distill_top_k": TOP_K, "actor_learning_rate": 0.0}
    trainer, case = trainer_of(models_folder, zero, **options)
    e = trainer.generate_experience(my_prompts(case, 0, trainer.args))
    models = [plain_logprobs(causal_lm(name), e) for name in ("llama", "gpt2")]
    assert not e.advantages.any()
    total = 0.0
    for i, (actor, teacher) in enumerate(zip(*models, strict=True)):
        for t, (p, q) in enumerate(zip(actor, teacher, strict=True)):
            ids = e.candidates[i, t].tolist()
            assert ids[:TOP_K] == np.argsort(-p)[:TOP_K].tolist()
            assert ids[TOP_K:] == np.argsort(-q)[:TOP_K].tolist()
            np.testing.assert_allclose(e.teacher_candidates[i, t], q[ids], atol=2e-5)
            ids = sorted(set(ids))
            a, b = np.exp(p[ids]), np.exp(q[ids])
            rest, other = 1 - a.sum(), 1 - b.sum()
            total += (a * (p - q)[ids]).sum() + rest * np.log(rest / other)
    np.testing.assert_allclose(e.teacher_logprobs[e.answer_mask], drawn(models[1], e), atol=2e-5)
    trainer.train_rlhf(e)
    mean = total / int(e.answer_mask.sum())
    assert trainer.metrics["loss/distill_avg"] == pytest.approx(mean, rel=1e-4)


def test_a_family_that_changes_logits_has_the_same_candidates():
    """It computes the logits of all positions first."""
    rows = pack([[5, 6, 7, 8], [9, 10]], [range(3), range(1)])
    rows.candidates = torch.tensor([[3, 4], [7, 7], [2, 63], [11, 1]])
    expected = LanguageModel(causal_lm("llama"))(rows, 0.7, True, 4, 30)
    model = LanguageModel(causal_lm("llama", logit_scale=2.0))  # a field that llama's does not read
    for value, other in zip(model(rows, 0.7, True, 4, 30), expected, strict=True):
        torch.testing.assert_close(value, other, atol=2e-5, rtol=1e-5)
    ids = expected[2]
    assert ids.shape == (4, 1 + 2 + 4)
    assert torch.equal(ids[:, 1:3], rows.candidates)
    assert int(ids[:, 3:].max()) < 30


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [0, TOP_K])
def test_the_actor_comes_closer_to_the_teacher(top_k, models_folder):
    rate = {"actor_learning_rate": 3e-3, "lr_scheduler_type": "constant"}
    trainer, case = trainer_of(models_folder, distill_top_k=top_k, **rate)
    engine, kl = trainer.engine, []
    teacher = probe_logprobs(engine.teacher)
    for iteration in range(12):
        trainer.train_rlhf(trainer.generate_experience(my_prompts(case, iteration, trainer.args)))
        kl.append(trainer.metrics["objective/teacher_kl"])
    assert np.mean(kl[-3:]) < 0.85 * np.mean(kl[:3]), kl
    assert probe_logprobs(engine.teacher) == teacher


def test_evaluation_measures_the_kl_to_the_teacher(models_folder):
    """And no score, where nothing scores."""
    trainer, _ = trainer_of(models_folder)
    engine, prompts = trainer.engine, prompt_table(PROMPTS[:4])
    sampling = SamplingParams.from_config(trainer.args, EVAL_SEED, 1)
    with engine.rollout_mode() as generator:
        held_out = HeldOutPrompts(prompts, 0, 4, gold=False)
        metrics = evaluate_policy(engine, generator, held_out, trainer.collector)
        e, _ = trainer.collector.answers_of(generator, prompts, sampling, 0)
    actor, teacher = (drawn(plain_logprobs(causal_lm(name), e), e) for name in ("llama", "gpt2"))
    assert metrics["eval/teacher_kl"] == pytest.approx((actor - teacher).sum() / 4, rel=1e-4)
    assert set(metrics) == {"eval/teacher_kl", "eval/answer_length", "eval/eos_share"}
    for name in metrics:  # all are known before weights load
        check_evaluation(replace(trainer.args, keep_best=name), [], 1)


def test_picked_sequences_keep_their_candidates(models_folder):
    trainer, case = trainer_of(models_folder, distill_top_k=TOP_K)
    e = trainer.generate_experience(my_prompts(case, 0, trainer.args))
    part = e.pick([3, 1])
    width = part.answer_mask.shape[1]
    assert torch.equal(part.candidates, e.candidates[[3, 1], :width])
    assert part.teacher_candidates.shape == (2, width, 2 * TOP_K)


HINTS = """
def hint(prompt, completion, secret):
    return None if secret is None else f"{prompt} {secret}"

def broken(prompt, completion):
    return 3

def wants(prompt, absent):
    return prompt
"""


def hinted(models_folder, tmp_path, name="hint", **options):
    (tmp_path / "hints.py").write_text(HINTS)
    options["teacher_prompt"] = f"{tmp_path}/hints.py:{name}"
    trainer, case = trainer_of(models_folder, **options)
    prompts = prompt_table(my_prompts(case, 0, trainer.args))
    prompts.columns["secret"] = [None if i % 3 == 0 else f"se{i}cret" for i in range(len(prompts))]
    return trainer, prompts


@pytest.mark.parametrize("top_k", [0, TOP_K])
@pytest.mark.parametrize("teacher", ["", *slow(["gpt2"])])
def test_a_teacher_that_reads_more_than_the_actor(models_folder, tmp_path, teacher, top_k):
    """Its log-probs are plain transformers' after its prompt, or else after the actor's."""
    options = {"teacher_model_name_or_path": teacher, "distill_top_k": top_k}
    trainer, prompts = hinted(models_folder, tmp_path, **options)
    e = trainer.generate_experience(prompts)
    tokenizer, model = trainer.engine.tokenizer, causal_lm(teacher or "llama")
    actor = drawn(plain_logprobs(causal_lm("llama"), e), e)
    tables, answers, taught = [], [], 0
    for row in range(e.num_sequences):
        own, end = int(e.prompt_lengths[row]), int(e.lengths[row])
        ids, answer = e.input_ids[row, :own].tolist(), e.input_ids[row, own:end]
        if secret := e.columns[row]["secret"]:
            ids = tokenizer(f"{tokenizer.decode(ids, skip_special_tokens=True)} {secret}").input_ids
            taught += 1
        both = torch.tensor([[*ids, *answer.tolist()]])
        with torch.no_grad():
            logits = model(input_ids=both, use_cache=False).logits[0]
        tables.append(logits[-len(answer) - 1 : -1].double().log_softmax(-1))
        answers.append(answer)
    assert 0 < taught < e.num_sequences
    assert trainer.metrics["objective/taught_share"] == taught / e.num_sequences
    table, ids = torch.cat(tables), torch.cat(answers)
    expected = table.gather(1, ids.unsqueeze(1)).squeeze(1).numpy()
    np.testing.assert_allclose(e.teacher_logprobs[e.answer_mask], expected, atol=3e-5)
    if top_k:
        candidates = e.candidates[e.answer_mask]
        of_teacher = table.topk(top_k).indices.sort().values
        assert torch.equal(candidates[:, top_k:].sort().values, of_teacher)
        given = e.teacher_candidates[e.answer_mask].numpy()
        np.testing.assert_allclose(given, table.gather(1, candidates), atol=3e-5)
    else:
        np.testing.assert_allclose(e.advantages[e.answer_mask], expected - actor, atol=6e-5)
    trainer.train_rlhf(e)
    assert trainer.metrics["policy/grad_norm"] > 0


@pytest.mark.parametrize(
    ("name", "words"),
    [("broken", "must return text, messages or None"), ("wants", "takes absent, .*has: .*secret")],
)
def test_a_teacher_prompt_that_does_not_fit(models_folder, tmp_path, name, words):
    trainer, prompts = hinted(models_folder, tmp_path, name)
    with pytest.raises(UserError, match=f"^--teacher_prompt .*hints.py:{name} {words}"):
        trainer.generate_experience(prompts)
