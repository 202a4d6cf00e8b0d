"""The four models: which checkpoints are refused, what the reference is, what LoRA trains."""

import dataclasses

import pytest
import torch
from step_cases import Case, build_trainer, my_prompts, ppo_config, probe_logprobs, probe_scores
from tiny_models import causal_lm
from transformers import AutoModelForCausalLM, AutoTokenizer

from dschat.config import UserError
from dschat.deepspeed_setup import unwrap
from dschat.rlhf.engine import DeepSpeedRLHFEngine

LORA = (("actor_lora_dim", 4), ("critic_lora_dim", 4))


def flat(rows):
    return [value for row in rows for value in row]


@torch.no_grad()
def reference_of(engine):
    with engine.reference() as reference:
        return flat(probe_logprobs(reference))


@pytest.mark.parametrize(
    ("zero", "options"),
    [(0, ()), (3, ()), (0, LORA), (3, LORA), (0, (*LORA, ("only_optimize_lora", False)))],
    ids=["full0", "full3", "lora0", "lora3", "lora_and_base"],
)
def test_the_reference_is_the_start_and_stays_it(zero, options, models_folder):
    case = Case("ppo", zero, options=options)
    trainer = build_trainer(ppo_config(case, models_folder))
    engine = trainer.engine
    only_adapters = options == LORA
    assert (engine.ref is None) == only_adapters
    base = flat(probe_logprobs(causal_lm("llama")))
    assert reference_of(engine) == pytest.approx(base, abs=1e-5)
    reward = probe_scores(engine.reward)
    engine.critic.eval()
    assert probe_scores(engine.critic) == pytest.approx(reward, abs=1e-5)
    moved = {n for n, p in unwrap(engine.actor).named_parameters() if p.requires_grad}
    assert all(".lora_" in n for n in moved) == only_adapters
    trainer.train_rlhf(trainer.generate_experience(my_prompts(case, 0, trainer.args)))
    engine.actor.eval()
    engine.critic.eval()
    assert flat(probe_logprobs(engine.actor)) != pytest.approx(base, abs=1e-2)
    assert reference_of(engine) == pytest.approx(base, abs=1e-5)
    assert probe_scores(engine.reward) == pytest.approx(reward, abs=1e-6)
    assert probe_scores(engine.critic) != pytest.approx(reward, abs=1e-3)


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("zero", [0, 3])
def test_the_rollout_uses_the_weights_of_now(zero, hybrid, models_folder):
    case = Case("ppo", zero)
    config = dataclasses.replace(ppo_config(case, models_folder), enable_hybrid_engine=hybrid)
    trainer = build_trainer(config)
    trainer.engine.actor.eval()
    before = probe_logprobs(trainer.engine.actor)
    for iteration in range(3):
        experience = trainer.generate_experience(my_prompts(case, iteration, trainer.args))
        assert trainer.metrics["rollout/logprob_gap"] < 1e-5
        trainer.train_rlhf(experience)
    trainer.engine.actor.eval()
    after = probe_logprobs(trainer.engine.actor)
    assert flat(after) != pytest.approx(flat(before), abs=1e-2)  # older weights would have shown


def build(models_folder, actor, critic, tokenizer=None, **options):
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(models_folder / "llama")
    names = (str(models_folder / actor), str(models_folder / critic))
    return DeepSpeedRLHFEngine(*names, tokenizer=tokenizer, num_total_iters=1, args=options)


@pytest.mark.parametrize(
    ("actor", "critic", "message"),
    [
        ("llama_reward", "llama_reward", "--actor_model_name_or_path .* is a reward model"),
        ("llama", "gpt2", "--critic_model_name_or_path .* is not a reward model .*step 2"),
        ("llama", "missing", "--critic_model_name_or_path .*no such folder"),
        ("missing", "llama_reward", "--actor_model_name_or_path .*no such folder"),
    ],
)
@pytest.mark.parametrize("zero", [0, 3])
def test_wrong_checkpoints_are_refused(actor, critic, message, zero, models_folder):
    with pytest.raises(UserError, match=message):
        build(models_folder, actor, critic, actor_zero_stage=zero, critic_zero_stage=zero)


def test_a_reward_model_with_another_vocabulary(models_folder):
    tokenizer = AutoTokenizer.from_pretrained(models_folder / "llama")
    tokenizer.add_tokens(["w64"])
    with pytest.raises(UserError, match="knows 64 token ids.*ids up to 64; both must share"):
        build(models_folder, "llama", "llama_reward", tokenizer)


def test_any_namespace_will_do(models_folder):
    engine = build(models_folder, "llama", "llama_reward", kl_coef=0.7, unknown_field=1)
    assert engine.args.kl_coef == 0.7
    assert engine.stop_ids == (0,)
    assert isinstance(
        unwrap(engine.actor), type(AutoModelForCausalLM.from_pretrained(models_folder / "llama"))
    )
