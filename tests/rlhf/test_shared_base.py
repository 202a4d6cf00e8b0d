"""Models on one base compute what models with weights of their own do."""

import copy
from dataclasses import replace

import pytest
import torch
from step_cases import Case, build_trainer, my_prompts, ppo_config, probe_logprobs, probe_scores

from dschat.models import shared_base
from dschat.models.packing.model import PackedModel
from dschat.models.score_model import ScoreModel
from dschat.rlhf.initial_checkpoints import find_checkpoints
from dschat.runtime.deepspeed_engine import initialize_frozen, unwrap, zero_settings

LORA = (("actor_lora_dim", 4), ("critic_lora_dim", 4))
SHARED = (*LORA, ("share_base", True))
GRPO = (("advantage_estimator", "grpo"), ("kl_coef", 0.3))
RECOMPUTED = (("actor_gradient_checkpointing", True), ("critic_gradient_checkpointing", True))


def trainer_of(models_folder, zero=0, model="llama", options=()):
    case = Case("ppo", zero, 4, model=model, reward=f"{model}_adapted", options=options)
    return build_trainer(ppo_config(case, models_folder)), case


def history(trainer, case, iterations=3):
    """Metrics and probes after each iteration."""
    result = []
    for iteration in range(iterations):
        experience = trainer.generate_experience(my_prompts(case, iteration, trainer.args))
        trainer.train_rlhf(experience)
        engine = trainer.engine
        metrics = {
            k: v for k, v in trainer.metrics.items() if not k.startswith(("time", "through"))
        }
        metrics = {k: v for k, v in metrics.items() if "/" in k and not k.startswith("memory")}
        probes = [*probe_logprobs(engine.actor), probe_scores(engine.reward)]
        if engine.critic is not None:
            probes.append(probe_scores(engine.critic))
        result.append(
            (
                dict(trainer.metrics),
                experience.input_ids.tolist(),
                [x for row in probes for x in row],
            )
        )
    return result


def assert_equal(actual, expected):
    for (metrics, ids, probes), (metrics_2, ids_2, probes_2) in zip(actual, expected, strict=True):
        assert ids == ids_2
        losses = {
            k: v for k, v in metrics.items() if k.startswith(("loss/", "objective/", "val/v"))
        }
        assert len(losses) > 10
        assert losses == pytest.approx({k: metrics_2[k] for k in losses}, abs=1e-5, rel=1e-5)
        assert probes == pytest.approx(probes_2, abs=1e-5)


def merged_reward(trainer):
    """The reward model of step 2's merged folder, as a run without a shared base loads it."""
    args = replace(trainer.args, share_base=False)
    names = args.actor_model_name_or_path, args.critic_model_name_or_path
    zero = zero_settings(args, "critic").frozen(False)
    model = find_checkpoints(*names, args).reward_model(zero)
    return initialize_frozen(ScoreModel(model), zero)


def parameters_of(engine):
    models = (engine.actor, engine.critic, engine.reward)
    return [list(unwrap(model).parameters()) for model in models if model is not None]


@pytest.mark.parametrize(
    ("zero", "model", "more"),
    [
        (0, "llama", ()),
        (2, "gpt2", RECOMPUTED),
        *(
            pytest.param(zero, model, more, marks=pytest.mark.slow)
            for zero in (0, 1, 2)
            for model in ("llama", "gpt2")
            for more in ((), RECOMPUTED)
        ),
    ],
)
def test_ppo_is_that_of_four_models(zero, model, more, models_folder, monkeypatch):
    shared, case = trainer_of(models_folder, zero, model, (*SHARED, *more))
    actor, critic, reward = map(set, parameters_of(shared.engine))
    base = actor & critic
    assert base == actor & reward == critic & reward
    assert not any(p.requires_grad for p in base)
    assert all(p.requires_grad for p in critic - base)
    result = history(shared, case)

    monkeypatch.setattr(shared_base, "sharing_copy", copy.deepcopy)
    apart, _ = trainer_of(models_folder, zero, model, SHARED)
    apart.engine.reward = merged_reward(apart)
    actor, critic, reward = map(set, parameters_of(apart.engine))
    assert actor.isdisjoint(critic | reward)
    assert critic.isdisjoint(reward)
    assert_equal(result, history(apart, case))


def test_it_starts_as_models_from_merged_checkpoints_do(models_folder):
    """Then the critic trains the reward model's adapter on, in place of a new one."""
    shared, case = trainer_of(models_folder, options=SHARED)
    merged, _ = trainer_of(models_folder, options=LORA)
    assert isinstance(merged.engine.reward, PackedModel)
    scores = probe_scores(merged.engine.reward)
    for model in (shared.engine.reward, shared.engine.critic, merged.engine.critic):
        assert probe_scores(model) == pytest.approx(scores, abs=1e-5)
    first, expected = (
        trainer.generate_experience(my_prompts(case, 0, trainer.args))
        for trainer in (shared, merged)
    )
    torch.testing.assert_close(first.advantages, expected.advantages, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("zero", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_grpo_is_that_of_merged_checkpoints(zero, models_folder):
    """Without a critic: actor and reward model on one base."""
    histories = []
    for options in (SHARED, LORA):
        trainer, case = trainer_of(models_folder, zero, options=(*options, *GRPO))
        histories.append(history(trainer, case))
    assert_equal(*histories)
