"""The four models: which checkpoints are refused, what the reference is, what LoRA trains."""

import gc
import logging

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from program_cases import ppo_trainer
from quick import slow
from step_cases import Case, build_trainer, my_prompts, ppo_config, probe_logprobs, probe_scores
from tiny_models import causal_lm
from transformers import AutoModelForCausalLM, AutoTokenizer

from dschat.config import UserError
from dschat.models.packing import pack
from dschat.rlhf.engine import DeepSpeedRLHFEngine, base_of
from dschat.runtime.deepspeed_engine import unwrap

LORA = (("actor_lora_dim", 4), ("critic_lora_dim", 4))
OFFLOAD = (("offload", ("auto",)),)
FROZEN = (("offload", ("reference", "reward")),)
PERSIST_NOTHING = (("deepspeed_config", "settings.json"),)  # small parameters would stay


def flat(rows):
    return [value for row in rows for value in row]


@torch.no_grad()
def reference_of(engine):
    with engine.reference() as reference:
        return flat(probe_logprobs(reference))


@pytest.mark.parametrize(
    ("zero", "options"),
    [(0, LORA), *slow([(0, ()), (3, ()), (3, LORA), (0, (*LORA, ("only_optimize_lora", False)))])],
    ids=["lora0", "full0", "full3", "lora3", "lora_and_base"],
)
def test_the_reference_stays_the_initial_actor(zero, options, models_folder):
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
@pytest.mark.parametrize("zero", [0, *slow([3])])
def test_wrong_checkpoints_are_refused(actor, critic, message, zero, models_folder):
    with pytest.raises(UserError, match=message):
        build(models_folder, actor, critic, actor_zero_stage=zero, critic_zero_stage=zero)


@pytest.mark.parametrize("zero", [0, *slow([3])])
def test_a_tokenizer_with_more_tokens_grows_actor_and_reference_alike(zero, models_folder, caplog):
    tokenizer = AutoTokenizer.from_pretrained(models_folder / "llama")
    tokenizer.add_tokens(["w64"])
    stages = {"actor_zero_stage": zero, "critic_zero_stage": zero}
    caplog.set_level(logging.INFO, logger="dschat")
    engine = build(models_folder, "llama", "llama_reward", tokenizer, **stages)
    assert base_of(engine.actor).config.vocab_size == base_of(engine.critic).config.vocab_size == 65
    rows = pack([[5, 64, 6]], [[0, 1]])
    with torch.no_grad(), engine.reference() as reference:
        logprobs = [model(rows)[0] for model in (engine.actor, reference)]
    assert torch.equal(*logprobs)
    assert engine.checkpoints.reward_tokenizer is not None, "it does not know w64"


def test_any_namespace_is_accepted(models_folder):
    engine = build(models_folder, "llama", "llama_reward", kl_coef=0.7, unknown_field=1)
    assert engine.args.kl_coef == 0.7
    assert engine.stop_ids == (0,)
    assert isinstance(
        unwrap(engine.actor), type(AutoModelForCausalLM.from_pretrained(models_folder / "llama"))
    )


def resident(model):
    """Elements of its parameters that lie where it computes, and the devices of its shards."""
    parameters = list(unwrap(model).parameters())
    devices = {p.ds_tensor.device.type for p in parameters if hasattr(p, "ds_tensor")}
    return sum(p.numel() for p in parameters), devices


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_frozen_models_lie_in_cpu_memory_between_uses(zero, models_folder):
    case = Case("ppo", zero, options=(*FROZEN, *PERSIST_NOTHING))
    trainer = build_trainer(ppo_config(case, models_folder))
    engine = trainer.engine
    for _ in range(2):
        trainer.generate_experience(my_prompts(case, 0, trainer.args))
        for model in (engine.ref, engine.reward):
            assert model.zero_offload_param().device == "cpu"
            assert resident(model) == (0, {"cpu"})
    trained = [resident(model)[0] for model in (engine.actor, engine.critic)]
    assert all(trained) == (zero == 0)  # those were not asked for: ZeRO-0 keeps them whole
    plain = build_trainer(ppo_config(Case("ppo", 0), models_folder)).engine
    assert resident(plain.ref)[0] > 0
    assert reference_of(engine) == pytest.approx(reference_of(plain), abs=1e-6)
    assert probe_scores(engine.reward) == pytest.approx(probe_scores(plain.reward), abs=1e-6)


@pytest.mark.gpu
def test_frozen_models_take_no_device_memory_between_uses(models_folder):
    trainers = []  # alive, so that nothing of one is freed while the other is measured

    def allocated(options):
        case = Case("ppo", 0, options=(*options, *PERSIST_NOTHING, ("dtype", "bf16")))
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        trainers.append(trainer := build_trainer(ppo_config(case, models_folder)))
        trainer.generate_experience(my_prompts(case, 0, trainer.args))
        assert (resident(trainer.engine.ref)[1] == {"cpu"}) == bool(options)
        gc.collect()
        return torch.cuda.memory_allocated() - before

    whole = 2 * 2 * sum(p.numel() for p in causal_lm("llama").parameters())  # two models, bf16
    assert allocated(()) - allocated(FROZEN) > 0.5 * whole


@pytest.mark.parametrize(("zero", "aligned"), [(0, False), (0, True), (3, True)])
@pytest.mark.slow  # tests/runtime aligns steps, tests/dist trains with the flag
def test_align_overflow_holds_the_actor_back(zero, aligned, models_folder):
    """The critic's returns are not finite: its steps are skipped, and the actor's if aligned."""
    trainer = ppo_trainer(models_folder, Case("ppo", zero), align_overflow=aligned)
    experience = trainer.generate_experience(my_prompts(Case("ppo"), 0, trainer.args))
    experience.returns[:] = float("inf")
    engine = trainer.engine
    engine.actor.eval()
    before, average = flat(probe_logprobs(engine.actor)), engine.ema.shards()
    average = {name: shard.tensor.clone() for name, shard in average.items()}
    trainer.train_rlhf(experience)
    engine.actor.eval()
    assert (flat(probe_logprobs(engine.actor)) == before) == aligned
    assert trainer.metrics["train/bad_steps"] == 4  # the critic's alone
    assert trainer.metrics["train/overflow_steps"] == (4 if aligned else 0)
    assert engine.version == (0 if aligned else 4)
    unmoved = all(torch.equal(average[n], s.tensor) for n, s in engine.ema.shards().items())
    assert unmoved == aligned


@pytest.mark.slow  # tests/runtime has fp16's steps
@pytest.mark.parametrize(("zero", "hybrid"), [(0, False), (3, True)])
def test_step_3_in_fp16(zero, hybrid, models_folder, tmp_path, monkeypatch):
    """The first loss scale is too high, which is no bad step; then both models train."""
    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)
    file = tmp_path / "deepspeed.json"
    file.write_text('{"fp16": {"initial_scale_power": 17}}')
    options = {"dtype": "fp16", "enable_hybrid_engine": hybrid, "deepspeed_config": str(file)}
    options |= {"align_overflow": True, "max_bad_steps": 1}
    trainer = ppo_trainer(models_folder, Case("ppo", zero), **options)
    skipped = 0.0
    for iteration in range(2):
        experience = trainer.generate_experience(my_prompts(Case("ppo"), iteration, trainer.args))
        assert trainer.metrics["rollout/logprob_gap"] < 1e-2
        trainer.train_rlhf(experience)
        assert trainer.metrics["train/bad_steps"] == 0
        skipped += trainer.metrics["train/overflow_steps"]
    assert skipped >= 2
    assert skipped % 2 == 0  # never one without the other
    assert 0 < trainer.metrics["policy/loss_scale"] < 2**17
    assert trainer.metrics["policy/grad_norm"] > 0
    assert trainer.metrics["val/grad_norm"] > 0
    assert trainer.engine.version == 8 - skipped / 2
