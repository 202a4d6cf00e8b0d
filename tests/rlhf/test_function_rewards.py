"""Rollouts with reward functions: their arguments, dynamic sampling, dropped samples."""

import math

import numpy as np
import pytest
import torch
from program_cases import parity, sums_of, trainer_of
from quick import slow
from step_cases import Case, build_trainer, ppo_config
from step_rows import PROMPTS

from dschat.config import UserError
from dschat.data.batches import PromptTable
from dschat.rlhf.experience import mini_batch_of


def test_reward_functions_alone_need_no_other_model(models_folder):
    trainer = trainer_of(models_folder)
    engine = trainer.engine
    assert (engine.critic, engine.reward) == (None, None)
    assert engine.ref is not None
    e = trainer.generate_experience(PROMPTS[:8])
    assert torch.equal(e.scores, (sums_of(e) % 2 == 0).float())
    before = [p.detach().clone() for p in engine.actor.module.parameters()]
    actor_loss, critic_loss = trainer.train_rlhf(e)
    assert critic_loss is None
    assert np.isfinite(actor_loss)
    assert not all(map(torch.equal, before, engine.actor.module.parameters()))
    metrics = trainer.metrics
    assert not [name for name in metrics if name.startswith(("val/v", "loss/value"))]
    assert metrics["objective/scores/parity"] == metrics["objective/scores"] == e.scores.mean()
    assert metrics["loss/kl_avg"] >= 0  # grpo has the KL in the loss, by k3
    assert all(np.isfinite(value) for value in metrics.values())


# With the KL in the loss, in the reward.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_kl_that_is_logged_alone_changes_nothing(models_folder, name):
    found = []
    for log_kl in (True, False):
        options = {"advantage_estimator": name, "kl_coef": 0.0, "log_kl": log_kl}
        trainer = trainer_of(models_folder, **options)
        assert (trainer.engine.ref is not None) == log_kl
        for _ in range(2):
            trainer.train_rlhf(trainer.generate_experience(PROMPTS[:8]))
        found.append((trainer.metrics, list(trainer.engine.actor.parameters())))
    (logged, weights), (metrics, others) = found
    assert logged["objective/kl"] != 0
    assert "objective/kl" not in metrics
    assert all(map(torch.equal, weights, others))


def test_without_reward_model_gae_has_a_critic_that_starts_as_the_actor(models_folder):
    trainer = trainer_of(models_folder, advantage_estimator="gae")
    engine = trainer.engine
    assert engine.reward is None
    assert engine.checkpoints.critic == engine.checkpoints.actor
    trainer.train_rlhf(trainer.generate_experience(PROMPTS[:8]))
    assert trainer.metrics["loss/value_avg"] > 0


def test_a_run_without_a_score_source_is_an_error(models_folder):
    with pytest.raises(UserError, match="nothing scores the answers"):
        trainer_of(models_folder, reward_fns=())


def test_what_a_function_gets(models_folder):
    seen = []

    def record(prompts, answers, prompt_ids, answer_ids, finish_reasons, difficulty):
        seen.append((prompts, answers, prompt_ids, answer_ids, finish_reasons, difficulty))
        return [0.0] * len(prompts)

    trainer = trainer_of(models_folder, reward_fns=[record])
    batch = PromptTable(PROMPTS[:3], texts=["a", "b", "c"], columns={"difficulty": [1, 2, 3]})
    e = trainer.generate_experience(batch)
    ((prompts, answers, prompt_ids, answer_ids, reasons, difficulty),) = seen
    assert prompts == ["a", "a", "b", "b", "c", "c"]
    assert difficulty == [1, 1, 2, 2, 3, 3]
    assert prompt_ids == [PROMPTS[i // 2] for i in range(6)]
    for i in range(6):
        n, p = int(e.lengths[i]), int(e.prompt_lengths[i])
        assert answer_ids[i] == e.input_ids[i, p:n].tolist()
        assert (reasons[i] == "stop") == bool(e.finished[i])
    decode = trainer.engine.tokenizer.decode
    assert answers == [decode(ids, skip_special_tokens=True) for ids in answer_ids]


@pytest.mark.parametrize("form", [*slow([list, np.array]), torch.tensor])
def test_columns_of_an_own_loop(form, models_folder):
    def asked(answers, solution):
        return [float(value) for value in solution]

    trainer = trainer_of(models_folder, reward_fns=[asked])
    e = trainer.generate_experience(PROMPTS[:3], columns={"solution": form([5, 6, 7])})
    assert e.scores.tolist() == [5, 5, 6, 6, 7, 7]
    with pytest.raises(UserError, match="^columns: solution has 2 values for 3 prompts$"):
        trainer.generate_experience(PROMPTS[:3], columns={"solution": form([5, 6])})
    with pytest.raises(UserError, match="solution"):
        trainer.generate_experience(PROMPTS[:3])


def test_weights_and_a_reward_model_add_up(models_folder):
    model = str(models_folder / "llama_reward")
    trainer = trainer_of(
        models_folder,
        [(parity, 3.0)],
        reward_model_name_or_path=model,
        reward_model_weight=0.5,
        clip_reward=1.0,
    )
    assert trainer.engine.critic is None
    e = trainer.generate_experience(PROMPTS[:8])
    even = (sums_of(e) % 2 == 0).float()
    alone = build_trainer(ppo_config(Case("ppo"), models_folder))
    expected = alone.generate_experience(PROMPTS[:8])
    assert torch.equal(e.input_ids, expected.input_ids)
    torch.testing.assert_close(e.scores, 0.5 * expected.scores + 3 * even)
    mean = trainer.metrics["objective/scores/reward_model"]
    assert mean == pytest.approx(float(expected.scores.mean()), rel=1e-5)
    # The clip is counted, and leaves the scores that are told alone.
    share = float((e.scores.abs() > 1).float().mean())
    assert trainer.metrics["objective/clipped_share"] == pytest.approx(share)
    assert 0 < share < 1


def test_groups_of_equal_scores_are_replaced(models_folder):
    """Half of the prompts can differ; more come until 8 groups do, in order, and no more."""
    later = iter([PROMPTS[8:12], PROMPTS[4:12], PROMPTS[:8]] * 20)
    calls = []

    def of_long_prompts(prompt_ids, answer_ids):
        calls.append(len(prompt_ids))
        both = zip(prompt_ids, answer_ids, strict=True)
        return [sum(a) % 2 if len(p) > 3 else 7.0 for p, a in both]

    options = {"dynamic_sampling": True, "num_samples_per_prompt": 4, "max_sampling_rounds": 40}
    options |= {"per_device_generation_batch_size": 4, "overlong_buffer_len": 3}
    trainer = trainer_of(models_folder, [of_long_prompts], later, **options)
    e = trainer.generate_experience(PROMPTS[:8])
    assert e.num_sequences == 8 * 4
    assert e.numbers.tolist() == list(range(32))
    groups = e.scores.reshape(8, 4)
    assert (groups.max(1).values > groups.min(1).values).all()
    assert (e.prompt_lengths > 3).all()
    metrics = trainer.metrics
    assert metrics["sampling/rounds"] == len(calls) > 1
    assert metrics["sampling/prompts"] * 4 == sum(calls)
    assert metrics["sampling/waste"] == pytest.approx(1 - 8 * 4 / sum(calls))
    trainer.train_rlhf(e)
    assert metrics["policy/grad_norm"] > 0
    assert all(np.isfinite(value) for value in trainer.metrics.values())


def test_dynamic_sampling_ends(models_folder, caplog):
    trainer = trainer_of(
        models_folder, [lambda answers: [1.0] * len(answers)], dynamic_sampling=True
    )
    before = [p.detach().clone() for p in trainer.engine.actor.module.parameters()]
    e = trainer.generate_experience(PROMPTS[:8])
    assert e.num_sequences == 0
    assert trainer.metrics["sampling/rounds"] == trainer.args.max_sampling_rounds
    assert trainer.metrics["sampling/waste"] == 1
    trainer.train_rlhf(e)  # nothing to learn
    assert all(map(torch.equal, before, trainer.engine.actor.module.parameters()))
    assert caplog.text.count("none of 80 sampled prompts (10 rounds) has") == 1
    # Means over no answers are not 0, which would be a fall of the score, KL and entropy.
    nothing = {name for name, value in trainer.metrics.items() if math.isnan(value)}
    assert {"objective/scores", "objective/kl", "objective/entropy", "rollout/answer_length"} <= (
        nothing
    )
    assert trainer.metrics["sampling/scores"] == 1
    assert trainer.metrics["rollout/sequences"] == trainer.metrics["rollout/tokens"] == 0
    assert not any(name.startswith(("time/", "throughput/", "train/")) for name in nothing)


@pytest.mark.parametrize(
    "options", [{"dynamic_sampling": True}, *slow([{"align_overflow": True}])], ids=str
)
def test_nothing_moves_where_nothing_has_a_score(models_folder, options, caplog):
    """Adam's moments of the first iteration would."""
    declines = []

    def score(answer_ids):
        return [None if declines else float(sum(ids) % 2) for ids in answer_ids]

    options = options | {"advantage_estimator": "gae"}
    trainer = trainer_of(models_folder, [score], **options)
    trained = [*trainer.engine.critic.module.parameters(), *trainer.engine.actor.parameters()]
    weights = [[p.detach().clone() for p in trained]]
    for _ in range(2):
        e = trainer.generate_experience(PROMPTS[:8])
        trainer.train_rlhf(e)
        weights.append([p.detach().clone() for p in trained])
        declines.append(True)
    assert not e.scored.any()
    assert not all(map(torch.equal, *weights[:2]))
    assert all(map(torch.equal, *weights[1:]))
    assert "iteration 1: a step without a scored answer is left out" in caplog.text
    assert trainer.metrics["loss/value_avg"] == trainer.metrics["val/grad_norm"] == 0


def undecided(answer_ids):
    return [float(sum(ids) % 2) if sum(ids) % 3 else None for ids in answer_ids]


@pytest.mark.parametrize("aggregation", ["token", *slow(["sequence"])])
def test_answers_without_a_score_teach_the_actor_nothing(models_folder, aggregation):
    """Neither by their KL nor by the denominator of the loss: as if they were not there."""
    options = {"advantage_estimator": "grpo", "kl_coef": 0.5, "loss_aggregation": aggregation}
    options |= {"per_device_training_batch_size": 16, "gradient_accumulation_steps": 1}
    after = []
    for left_out in (False, True):
        trainer = trainer_of(models_folder, [undecided], **options)
        e = trainer.generate_experience(PROMPTS[:8])
        e.ref_logprobs -= 0.1
        assert 0 < e.scored.sum() < 16
        trainer.train_rlhf(e.pick(e.scored.nonzero().flatten().tolist()) if left_out else e)
        after.append([p.detach().clone() for p in trainer.engine.actor.module.parameters()])
    for one, other in zip(*after, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)  # a step is 1e-3


def test_answers_without_a_score_teach_the_critic_nothing(models_folder):
    """Whatever their returns are; and no mean of scores, rewards or returns counts them."""
    options = {"advantage_estimator": "gae", "kl_coef": 0.0, "ppo_epochs": 1}
    options |= {"per_device_training_batch_size": 16, "gradient_accumulation_steps": 1}
    after = []
    for wrong in (0.0, 1e3):
        torch.manual_seed(0)  # of the critic's new head
        trainer = trainer_of(models_folder, [undecided], **options)
        trainer.args.missing_eos_penalty = 0.0
        e = trainer.generate_experience(PROMPTS[:8])
        scored = sums_of(e) % 3 != 0
        assert torch.equal(e.scored, scored)
        assert 0 < (~scored).sum() == trainer.metrics["rollout/unscored"] < 16
        assert not e.advantages[~scored].any()
        mean = float(e.scores[scored].mean())
        for name in ("objective/scores", "objective/scores/undecided", "objective/rlhf_reward"):
            assert trainer.metrics[name] == pytest.approx(mean)
        actions = e.answer_mask & scored[:, None]
        returns = float(e.returns[actions].mean())
        assert trainer.metrics["val/returns"] == pytest.approx(returns, rel=1e-5)
        error = float((e.values - e.returns)[actions].square().mean())
        e.returns[~scored] += wrong
        trainer.train_rlhf(e)
        assert trainer.metrics["loss/value_avg"] == pytest.approx(error / 2, rel=1e-5)
        after.append([p.detach().clone() for p in trainer.engine.critic.module.parameters()])
    assert all(map(torch.equal, *after))


def test_the_gap_is_measured_by_the_first_mini_batch_that_trains(models_folder):
    """Against the actor's log-probs before its first step, in whichever mini-batch that is."""
    trainer = trainer_of(models_folder, old_logprobs="rollout", ppo_epochs=2)
    e = trainer.generate_experience(PROMPTS[:8])
    e.rollout_logprobs[e.answer_mask] -= 0.5
    number = mini_batch_of(e.numbers, 2, [trainer.args.seed, 0, 0], e.together)
    e.loss_mask[torch.from_numpy(number == 0)] = False  # nothing to learn there
    trainer.train_rlhf(e)
    assert trainer.engine.version == 3
    metrics = trainer.metrics
    assert metrics["rollout/logprob_gap"] == pytest.approx(0.5, abs=1e-5)
    k3 = np.exp(0.5) - 1 - 0.5
    assert metrics["rollout/mismatch_kl"] == pytest.approx(k3, abs=1e-5)


def test_gdpo_compares_each_source_alone(models_folder):
    """Sources whose weighted sum is always 0 leave GRPO nothing; GDPO weighs each by its spread."""

    def even(answers):
        return [float(len(answer) % 2) for answer in answers]

    def odd(answers):
        return [-10 * score for score in even(answers)]

    options = {"num_samples_per_prompt": 4, "max_sampling_rounds": 1, "dynamic_sampling": True}
    fns = [(even, 1.0), (odd, 0.1)]
    none = trainer_of(models_folder, fns, advantage_estimator="grpo", **options)
    assert none.generate_experience(PROMPTS[:4]).num_prompts == 0
    trainer = trainer_of(models_folder, fns, advantage_estimator="gdpo", **options)
    e = trainer.generate_experience(PROMPTS[:4])
    assert 0 < e.num_prompts <= 4
    by_answer = np.array([[row["even"], row["odd"]] for row in e.source_scores]).reshape(-1, 4, 2)
    assert (by_answer.std(axis=1) > 0).all()  # dynamic sampling looks at each source
    normal = by_answer - by_answer.mean(1, keepdims=True)
    normal /= by_answer.std(1, ddof=1, keepdims=True) + 1e-6
    total = torch.tensor((normal * [1.0, 0.1]).sum(-1).reshape(-1, 1)).expand(e.answer_mask.shape)
    chosen = total[e.answer_mask]
    expected = (chosen - chosen.mean()) / chosen.std(unbiased=False)
    actual = e.advantages[e.answer_mask].double()
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    spread = by_answer.std(axis=1, ddof=1).mean(axis=0)
    assert trainer.metrics["reward/even/std"] == pytest.approx(spread[0], rel=1e-5)
    assert trainer.metrics["reward/odd/std"] == pytest.approx(spread[1], rel=1e-5)
