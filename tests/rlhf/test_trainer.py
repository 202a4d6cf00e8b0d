"""The trainer of step 3: first ratios, awkward rollouts, schedules, resumed runs."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from program_cases import around_fill_in, ppo_trainer, trainer_of, weights_of
from quick import each_once, slow
from step_cases import Case, my_prompts
from step_rows import NUM_ITERATIONS, PROMPTS
from tiny_models import EOS

from dschat.config import UserError
from dschat.data.batches import PromptTable
from dschat.models.routing import routers_of, routing_metrics
from dschat.rlhf.evaluation import HeldOutPrompts, evaluate_policy
from dschat.rlhf.forwards import action_values
from dschat.rlhf.run_state import Run
from dschat.rlhf.trainer import DeepSpeedPPOTrainer
from dschat.runtime.deepspeed_engine import unwrap
from dschat.runtime.optimizer_step import learning_rate

ONE = Case("ppo", iterations=1)


def one_iteration(trainer, prompts=None):
    if prompts is None:
        prompts = my_prompts(ONE, 0, trainer.args)
    experience = trainer.generate_experience(prompts)
    trainer.train_rlhf(experience)
    return experience


FIRST = {"ppo_epochs": 1, "per_device_training_batch_size": 16, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize(
    ("zero", "dtype", "rounding"),
    [
        (0, "fp32", 1e-5),
        *slow([(3, "fp32", 1e-5), (0, "bf16", 1e-2), (2, "bf16", 1e-2), (3, "bf16", 1e-2)]),
    ],
)
def test_the_first_ratio_is_one(zero, dtype, rounding, models_folder):
    trainer = ppo_trainer(models_folder, Case("ppo", zero), dtype=dtype, **FIRST)
    for iteration in range(2):
        one_iteration(trainer, my_prompts(ONE, iteration, trainer.args))
        assert trainer.metrics["val/ratio_abs_dev"] < rounding
        assert trainer.metrics["val/ratio"] == pytest.approx(1, abs=rounding)
        assert trainer.metrics["policy/grad_norm"] > 0
        assert trainer.metrics["train/bad_steps"] == 0
        if dtype == "fp32":
            assert trainer.metrics["rollout/logprob_gap"] < 1e-5


@pytest.mark.parametrize(
    ("dtype", "old_logprobs"),
    [("fp32", "rollout"), *slow([("fp32", "recompute"), ("bf16", "recompute")])],
)
def test_a_gap_beyond_rounding_is_warned_of_once(
    dtype, old_logprobs, models_folder, monkeypatch, caplog
):
    """As if the generator had another distribution: 0.03 nats a token, then 0.3, and 0.3 again."""
    trainer = ppo_trainer(models_folder, dtype=dtype, old_logprobs=old_logprobs, **FIRST)
    shift, warned = [0.0], []

    def before(e, args):
        e.rollout_logprobs = e.rollout_logprobs - shift[0] * e.answer_mask

    around_fill_in(monkeypatch, before)
    for shift[0] in (0.0, 0.03, 0.3, 0.3):
        caplog.clear()
        one_iteration(trainer, PROMPTS[:8])
        warned.append(caplog.text.count("rollout/logprob_gap is"))
    assert warned == ([0, 1, 0, 0] if dtype == "fp32" else [0, 0, 1, 0])


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {"max_answer_seq_len": 1}),
        ("llama_padeos", {}),
        *slow([("gpt2", {"temperature": 0.0, "whiten_advantages": False, "kl_estimator": "k3"})]),
    ],
    ids=["one_token", "pad_is_eos", "greedy"],
)
def test_awkward_rollouts(model, options, models_folder):
    trainer = ppo_trainer(models_folder, Case("ppo", model=model, micro=4), **options)
    e = one_iteration(trainer, [[3] * n for n in range(1, 9)])  # every length once
    assert torch.equal(e.lengths - e.prompt_lengths, e.answer_mask.sum(1))
    assert e.answer_mask.any(1).all()
    assert all(np.isfinite(value) for value in trainer.metrics.values())
    ended = e.input_ids.gather(1, (e.lengths - 1).unsqueeze(1)).squeeze(1) == EOS
    assert torch.equal(ended, e.finished)
    assert trainer.metrics["train/bad_steps"] == 0
    assert (trainer.metrics["loss/policy_avg"], trainer.metrics["loss/value_avg"]) != (0, 0)


def test_scoring_and_evaluation_have_no_dropout(models_folder):
    """The models train with dropout before and after."""
    dropout = {"actor_dropout": 0.5, "critic_dropout": 0.5, "actor_lora_dim": 4}
    case = Case("ppo", model="opt", reward="opt_350m_reward")
    trainer = ppo_trainer(models_folder, case, **dropout)
    engine = trainer.engine
    models = (engine.actor, engine.critic)
    for model in models:
        model.train()
    e = trainer.generate_experience(PROMPTS[:4])
    assert trainer.metrics["rollout/logprob_gap"] < 1e-5
    # The reference is the actor without its adapters, which have not learned anything yet.
    assert trainer.metrics["objective/kl"] == pytest.approx(0, abs=1e-4)
    prompts = HeldOutPrompts(PromptTable(PROMPTS[:4]), 0, 4, gold=False)
    with engine.rollout_mode() as generator:
        evaluated = evaluate_policy(engine, generator, prompts, trainer.collector)
    assert evaluated["eval/kl"] == pytest.approx(0, abs=1e-4)
    assert all(unwrap(model).training for model in models)
    engine.critic.eval()
    batch = e.take(list(range(8)), torch.device("cpu"))
    with torch.no_grad():
        values = torch.where(batch.answer_mask, action_values(engine.critic, batch), 0.0)
    torch.testing.assert_close(e.values, values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("coefficient", [*slow([None]), 0.5])
def test_experts_are_balanced_where_asked(coefficient, tiny, models_folder):
    """The added loss is the mean over the micro-batches, each of which weighs as its actions do."""
    options = {"actor_model_name_or_path": tiny("qwen3_moe"), "router_aux_loss_coef": coefficient}
    trainer = trainer_of(models_folder, **options, kl_coef=0.0, max_grad_norm=0.0)
    routers = [p for n, p in unwrap(trainer.engine.actor).named_parameters() if "mlp.gate" in n]
    before = [p.detach().clone() for p in routers]
    e = one_iteration(trainer)
    assert 1 <= trainer.metrics["moe/max_load"] <= 4
    assert ("moe/aux_loss" in trainer.metrics) == (coefficient is not None)
    if coefficient:
        assert trainer.metrics["moe/aux_loss"] >= 2  # the experts of a token
        assert all((p != q).any() for p, q in zip(before, routers, strict=True))
    assert e.num_sequences


@pytest.mark.parametrize(
    ("family", "lora"),
    each_once(["qwen3_moe", "gpt_oss"], [{}, {"actor_lora_dim": 4, "only_optimize_lora": True}]),
)
def test_training_runs_the_experts_of_the_rollout(family, lora, tiny, models_folder):
    """Of a KL to the actor itself, the reference's forward chooses its own."""
    options = {"actor_model_name_or_path": tiny(family), "old_logprobs": "recompute", **lora}
    trainer = trainer_of(models_folder, **FIRST, **options, moe_routing_replay=True)
    actor, chosen = trainer.engine.actor, []
    routers = routers_of(actor.module.base)
    e = trainer.generate_experience(my_prompts(ONE, 0, trainer.args))
    for row, experts in enumerate(e.experts):
        assert experts.shape == (int(e.lengths[row]), len(routers), experts.shape[2])
    hooks = [r.register_forward_hook(lambda m, args, out: chosen.append(out[-1])) for r in routers]
    trainer.train_rlhf(e)
    assert trainer.metrics["moe/routing_agreement"] == 1.0
    for router in routers:  # then the weights are others
        router.weight.data.add_(torch.randn_like(router.weight))
    chosen.clear()
    batch = e.take(list(range(e.num_sequences)), torch.device("cpu"))
    given = batch.rows.experts
    with torch.no_grad():
        actor(batch.rows)
    now, known = torch.stack(chosen, 1), given[:, 0, 0] >= 0
    assert torch.equal(now[known], given[known].long())
    assert 0 < known.sum() < len(known)  # not the last token of an answer
    assert routing_metrics(actor)["moe/routing_agreement"] < 1
    for hook in hooks:
        hook.remove()


def test_an_experience_whose_experts_are_not_known_is_refused(models_folder):
    trainer = trainer_of(models_folder)
    trainer.args.moe_routing_replay = True  # as if the model had experts
    with pytest.raises(UserError, match="--moe_routing_replay needs the inference engine"):
        one_iteration(trainer)


@pytest.mark.slow
def test_all_answers_truncated(models_folder):
    trainer = ppo_trainer(models_folder)
    trainer.engine.stop_ids = ()
    e = one_iteration(trainer)
    assert not e.finished.any()
    assert e.answer_mask.all()
    assert trainer.metrics["rollout/eos_share"] == 0


def test_run_state_restores_a_trainer(models_folder):
    trainer = ppo_trainer(models_folder, kl_target=1.0, normalize_reward=True)
    one_iteration(trainer)
    values = json.loads(json.dumps(Run(trainer).state_dict()))
    values |= {"iteration": 3, "version": 7, "kl_coef": 0.23, "bad": {"actor": 2, "critic": 1}}
    other = ppo_trainer(models_folder, kl_target=1.0, normalize_reward=True)
    Run(other).load_state_dict(values)
    assert json.loads(json.dumps(Run(other).state_dict())) == values
    assert other.sampling().seed != trainer.sampling().seed  # that of the fourth iteration


def test_critic_warmup_leaves_iterations_for_the_actor(models_folder):
    with pytest.raises(UserError, match=f"3 leaves none of {NUM_ITERATIONS} iterations"):
        ppo_trainer(models_folder, critic_warmup_steps=NUM_ITERATIONS)


def test_a_warmup_that_the_run_does_not_reach_is_named(models_folder, caplog):
    ppo_trainer(models_folder, num_warmup_steps=100)
    assert "--num_warmup_steps 100 of" in caplog.text


@pytest.mark.parametrize("warmup", [1, *slow([0])])
def test_schedules_end_with_the_run_and_critic_warmup_leaves_the_actor_alone(warmup, models_folder):
    """Its schedule too, whose length is that of the iterations that train it."""
    trainer = ppo_trainer(models_folder, critic_warmup_steps=warmup, kl_target=1.0)
    engine, args = trainer.engine, trainer.args
    for done in range(1, NUM_ITERATIONS + 1):
        actor, critic = weights_of(engine.actor), weights_of(engine.critic)
        rate = learning_rate(engine.actor)
        one_iteration(trainer)
        assert trainer.metrics["policy/learning_rate"] == rate
        same = all(map(torch.equal, actor, weights_of(engine.actor)))
        assert same == (trainer.kl.value == args.kl_weight) == (done <= warmup)
        assert not all(map(torch.equal, critic, weights_of(engine.critic)))
        num_trained = max(0, done - warmup)
        for model, rate, share in (
            (engine.actor, args.actor_learning_rate, num_trained / (NUM_ITERATIONS - warmup)),
            (engine.critic, args.critic_learning_rate, done / NUM_ITERATIONS),
        ):
            cosine = rate * (1 + np.cos(np.pi * share)) / 2
            assert learning_rate(model) == pytest.approx(cosine, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("counts", [*slow([((4, 4, 4),)]), (12, 2, 8)], ids=str)
def test_own_batches_take_the_steps_that_args_say(counts, models_folder, caplog):
    """Of 8 sequences each, where a full rollout of 8 prompts takes two; the schedule follows."""
    trainer = ppo_trainer(models_folder, lr_scheduler_type="linear", ppo_epochs=1)
    engine, rate = trainer.engine, trainer.args.actor_learning_rate
    for done, count in enumerate(counts):
        before, num_steps = engine.version, max(1, count * 2 // 8)
        one_iteration(trainer, PROMPTS[:count])
        assert engine.version - before == engine.updates == num_steps
        assert trainer.metrics["policy/learning_rate"] == pytest.approx(rate * (3 - done) / 3)
        one_step = trainer.metrics["val/ratio_abs_dev"] == 0  # divides by its own log-probs
        assert one_step == (num_steps == 1)
        for model in (engine.actor, engine.critic):
            assert learning_rate(model) == pytest.approx(
                model.lr_scheduler.base_lrs[0] * (2 - done) / 3
            )
    assert "left out" not in caplog.text


def test_own_batches_that_steps_do_not_divide_are_refused(models_folder):
    trainer = ppo_trainer(models_folder)
    with pytest.raises(UserError, match="= 8 does not divide the 12 sequences .* .6 prompts x"):
        trainer.generate_experience(PROMPTS[:6])


def test_rows_that_dynamic_sampling_leaves_do_not_change_the_steps(models_folder):
    def scores(answer_ids):
        return [float(i < 1) for i in range(len(answer_ids))]  # the first two of a call differ

    trainer = trainer_of(
        models_folder, [scores], dynamic_sampling=True, max_sampling_rounds=1, kl_coef=0.0
    )
    e = one_iteration(trainer, PROMPTS[:8])
    assert 0 < e.num_sequences < 16
    assert (e.num_mini_batches, trainer.engine.updates) == (2, 4)


@pytest.mark.parametrize("samples", [4, *slow([16])])
def test_answers_to_one_prompt_share_a_step_where_the_steps_divide_the_prompts(
    samples, models_folder
):
    trainer = ppo_trainer(models_folder, num_samples_per_prompt=samples)
    e = trainer.generate_experience(PROMPTS[:6])
    assert e.num_mini_batches == 6 * samples // 8
    first, second = (trainer._mini_batches(e, epoch).reshape(6, samples) for epoch in (0, 1))
    assert [len(set(of_prompt)) == 1 for of_prompt in first.tolist()] == [samples == 4] * 6
    assert np.bincount(first.ravel()).tolist() == [8] * e.num_mini_batches
    assert first.tolist() != second.tolist()


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ((0.1, 6.0), (0.1, 6.0), 0.37),
        ((0.1, 6.0), (0.1, 3.0), 0.37),  # steered to another target from where it is
        ((0.1, 6.0), (0.2, 6.0), 0.2),
        ((0.1, 6.0), (0.1, None), 0.1),
        ((0.1, None), (0.02, None), 0.02),
        ((0.1, None), (0.1, 6.0), 0.1),
    ],
)
def test_a_resumed_kl_coefficient_is_state_only_where_it_is_adapted(
    before, now, expected, models_folder, one_engine
):
    first, second = (
        DeepSpeedPPOTrainer(one_engine, replace(one_engine.args, kl_coef=coef, kl_target=target))
        for coef, target in (before, now)
    )
    if first.kl.target is not None:
        first.kl.value = 0.37
    Run(second).load_state_dict(Run(first).state_dict())
    assert second.kl.value == expected


@pytest.fixture(scope="module")
def one_engine(models_folder):
    return ppo_trainer(models_folder).engine


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("kl_coef", 0.2, "args.kl_coef 0.2 comes too late, 0.1 is in use; set trainer.kl.value"),
        ("kl_target", 6.0, "set trainer.kl.target"),
        ("actor_learning_rate", 1e-5, "set base_lrs of the schedule, trainer.engine.actor.lr_sch"),
        ("num_warmup_steps", 3, "make the engine again: its schedule is laid"),
    ],
)
def test_settings_that_are_read_once_are_refused_later(name, value, remedy, one_engine):
    """Of our config; another namespace is copied, and a later trainer takes what it has then."""
    args = replace(one_engine.args)
    trainer = DeepSpeedPPOTrainer(one_engine, args)
    copied = DeepSpeedPPOTrainer(one_engine, other := SimpleNamespace(**vars(args)))
    for of in (args, other):
        setattr(of, name, value)
    with pytest.raises(UserError, match=remedy):
        trainer.generate_experience(PROMPTS[:4])
    copied.generate_experience(PROMPTS[:4])
    assert getattr(DeepSpeedPPOTrainer(one_engine, args).args, name) == value


@pytest.mark.slow
def test_the_remedies_work(models_folder):
    trainer = ppo_trainer(models_folder, lr_scheduler_type="linear")
    trainer.kl.value = 0.2
    trainer.engine.actor.lr_scheduler.base_lrs = [1e-5] * len(
        trainer.engine.actor.optimizer.param_groups
    )
    one_iteration(trainer, PROMPTS[:4])  # half of the steps, which the schedule follows
    assert trainer.metrics["objective/kl_coef"] == 0.2
    one_iteration(trainer, PROMPTS[:4])
    assert trainer.metrics["policy/learning_rate"] == pytest.approx(1e-5 * 2 / 3)


@pytest.mark.slow
def test_a_smaller_batch_does_not_warm_up_again(models_folder):
    settings = {"lr_scheduler_type": "constant_with_warmup", "num_warmup_steps": 3}
    trainer = ppo_trainer(models_folder, **settings)
    for prompts in (PROMPTS[:8], PROMPTS[:4]):  # 4 steps and 2
        one_iteration(trainer, prompts)
    assert trainer.metrics["policy/learning_rate"] == trainer.args.actor_learning_rate


def test_bad_steps_are_counted_and_end_the_run(models_folder):
    trainer = ppo_trainer(models_folder, max_bad_steps=6)
    e = trainer.generate_experience(PROMPTS[:8])
    e.advantages[:] = float("nan")
    before = weights_of(trainer.engine.actor)
    trainer.train_rlhf(e)
    assert trainer.metrics["train/bad_steps"] == 4
    assert all(map(torch.equal, before, weights_of(trainer.engine.actor)))
    # The critic's steps in between are good ones, and must not hide that the actor never learns.
    with pytest.raises(FloatingPointError, match="6 steps of the actor in a row .*max_bad_steps"):
        trainer.train_rlhf(e)


def test_a_prompt_that_is_too_long(models_folder):
    with pytest.raises(UserError, match="exceeds --max_prompt_seq_len . --max_answer_seq_len"):
        ppo_trainer(models_folder).generate_experience([[3] * 60])


def test_a_rollout_reports_its_refresh_and_its_engine(models_folder):
    trainer = ppo_trainer(models_folder)
    prompts = [[3, 4, 5], [6, 7]]
    trainer.generate_experience(prompts)
    first = dict(trainer.metrics)
    assert first["memory/refresh_gib"] > 0
    assert first["time/refresh_s"] > 0
    assert first["throughput/prefill_tokens_per_s"] > 0
    assert first["throughput/decode_tokens_per_s"] > 0
    assert 0 < first["throughput/occupancy"] <= 1
    assert 0 < first["throughput/cache_use"] <= 1
    assert first["throughput/preemptions"] == 0
    trainer.generate_experience(prompts)
    assert trainer.metrics["memory/refresh_gib"] == 0  # no step between: nothing to refresh
