"""Models on one base compute what models with weights of their own do."""

import copy
import itertools
import json
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from quick import some
from step_cases import Case, build_trainer, my_prompts, ppo_config, probe_logprobs, probe_scores
from tiny_models import VOCAB, causal_lm, ensure
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from dschat.checkpoint.compatibility import started_from
from dschat.checkpoint.manager import CheckpointManager
from dschat.config import RewardConfig, UserError
from dschat.models import heads, quantized
from dschat.models.checkpoint import Checkpoint
from dschat.models.heads import ScoreModel
from dschat.models.packing.model import PackedModel
from dschat.rlhf.engine import base_of
from dschat.rlhf.initial_checkpoints import find_checkpoints
from dschat.rlhf.run_state import Run
from dschat.runtime.deepspeed_engine import initialize_frozen, unwrap, zero_settings
from dschat.runtime.output_dir import record_of

LORA = (("actor_lora_dim", 4), ("critic_lora_dim", 4))
SHARED = (*LORA, ("share_base", True))
BORROWED = (("rollout_layout", "zero_copy"),)  # which moves weights, of all models
RECOMPUTED = (("actor_gradient_checkpointing", True), ("critic_gradient_checkpointing", True))


def trainer_of(models_folder, zero=0, model="llama", options=()):
    case = Case("ppo", zero, 4, model=model, reward=f"{model}_adapted", options=options)
    return build_trainer(ppo_config(case, models_folder)), case


def history(trainer, case, iterations=range(2)):
    """Metrics and probes after each iteration."""
    result = []
    for iteration in iterations:
        experience = trainer.generate_experience(my_prompts(case, iteration, trainer.args))
        trainer.train_rlhf(experience)
        engine = trainer.engine
        probes = [*probe_logprobs(engine.actor), probe_scores(engine.reward)]
        if engine.critic is not None:
            probes.append(probe_scores(engine.critic))
        ids = experience.input_ids.tolist()
        result.append((dict(trainer.metrics), ids, [x for row in probes for x in row]))
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
    zero = zero_settings(args, "critic")
    found = find_checkpoints(*names, args)
    model = found.score_model(found.reward, zero)
    return initialize_frozen(ScoreModel(model), zero)


def parameters_of(engine):
    models = (engine.actor, engine.critic, engine.reward)
    return [list(unwrap(model).parameters()) for model in models if model is not None]


@pytest.mark.parametrize(
    ("zero", "model", "more"),
    some(
        itertools.product((0, 1, 2), ("llama", "gpt2"), ((), RECOMPUTED, BORROWED)),
        [(2, "gpt2", ())],
    ),
)
def test_ppo_is_that_of_four_models(zero, model, more, models_folder, monkeypatch):
    shared, case = trainer_of(models_folder, zero, model, (*SHARED, *more))
    actor, critic, reward = map(set, parameters_of(shared.engine))
    base = actor & critic
    assert base == actor & reward == critic & reward
    assert not any(p.requires_grad for p in base)
    assert all(p.requires_grad for p in critic - base)
    result = history(shared, case, range(1))  # of four optimizer steps

    monkeypatch.setattr(heads, "sharing_copy", copy.deepcopy)
    apart, _ = trainer_of(models_folder, zero, model, SHARED)
    apart.engine.reward = merged_reward(apart)
    actor, critic, reward = map(set, parameters_of(apart.engine))
    assert actor.isdisjoint(critic | reward)
    assert critic.isdisjoint(reward)
    assert_equal(result, history(apart, case, range(1)))


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_resumed_run_computes_the_same_to_the_bit(zero, models_folder, tmp_path):
    first, case = trainer_of(models_folder, zero, options=SHARED)
    history(first, case, range(1))
    checkpoints = CheckpointManager(tmp_path, {})
    checkpoints.save(1, Run(first).state())
    expected = history(first, case, range(1, 2))
    second, _ = trainer_of(models_folder, zero, options=SHARED)
    run = Run(second)
    run.load_state_dict(checkpoints.load(checkpoints.latest(), run.state()))
    for (metrics, ids, probes), (*others, probes_2) in zip(
        history(second, case, range(1, 2)), expected, strict=True
    ):
        losses = [
            {k: m[k] for k in m if k.startswith(("loss/", "val/"))} for m in (metrics, others[0])
        ]
        assert losses[0] == losses[1]
        assert ids == others[1]
        assert probes == probes_2


@pytest.mark.slow
def test_a_critic_with_one_more_token_for_padding_has_an_embedding_of_its_own(
    models_folder, tmp_path
):
    """Its tokenizer has a pad token beside EOS, as others' pooling needs; the actor's has not."""
    actor = ensure(tmp_path, "llama_padeos")
    ensure(tmp_path, "llama_padeos_adapted")
    trainer, case = trainer_of(tmp_path, model="llama_padeos", options=SHARED)
    weights = causal_lm("llama").get_input_embeddings().weight
    history(trainer, case, range(1))
    engine = trainer.engine
    assert torch.equal(base_of(engine.actor).get_input_embeddings().weight, weights)
    rows = base_of(engine.critic).get_input_embeddings().weight
    assert torch.equal(rows[:-1], weights)
    torch.testing.assert_close(rows[-1], weights.mean(0))
    actor, critic, reward = map(set, parameters_of(engine))
    assert len(actor & reward) == len(actor & critic) + 1
    engine.save(tmp_path / "saved")
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved" / "critic")
    assert critic.config.pad_token_id == VOCAB == critic.config.vocab_size - 1


@pytest.mark.slow
def test_a_critic_without_a_reward_model(models_folder):
    """It has a new score head and a new adapter, of the actor's rank."""
    options = (
        ("share_base", True),
        ("reward_fn", "mostly_alike"),
        ("reward_model_name_or_path", ""),
    )
    config = ppo_config(Case("ppo", options=options), models_folder)
    config = replace(config, critic_model_name_or_path="", actor_lora_dim=4)
    assert config.critic_lora_dim == 4
    trainer = build_trainer(config)
    actor, critic = map(set, parameters_of(trainer.engine))
    ranks = {
        p.shape[0] for n, p in unwrap(trainer.engine.critic).named_parameters() if "lora_A" in n
    }
    assert ranks == {4}
    assert len(actor & critic) == len(list(causal_lm("llama").model.parameters()))
    before = probe_scores(trainer.engine.critic)
    trainer.train_rlhf(trainer.generate_experience([[3, 4, 5], [6, 7]] * 4))
    assert probe_scores(trainer.engine.critic) != pytest.approx(before, abs=1e-4)


@pytest.mark.parametrize(
    ("recorded", "changes", "actor", "problem"),
    [
        (True, False, "base", None),
        (True, False, "moved", None),
        (
            True,
            True,
            "base",
            "an adapter of .*base as it was then, and the actor is .*base as it is",
        ),
        (
            True,
            True,
            "moved",
            "an adapter of .*base as .* the actor is .*moved as it is: .* one base",
        ),
        (False, True, "base", None),  # of another program: its name decides
        (
            False,
            False,
            "moved",
            "an adapter of .*base as .* the actor is .*moved as it is: .* one base",
        ),
        (None, False, "base", None),  # of an older version
        ("hub", False, "base", None),
    ],
)
def test_one_base_is_one_set_of_weights(recorded, changes, actor, problem, models_folder, tmp_path):
    base, reward = tmp_path / "base", tmp_path / "reward"
    shutil.copytree(models_folder / "llama", base)
    shutil.copytree(models_folder / "llama_adapted", reward)
    settings = reward / "adapter/adapter_config.json"
    values = json.loads(settings.read_text()) | {"base_model_name_or_path": str(base)}
    settings.write_text(json.dumps(values))
    if recorded is not None:
        config = RewardConfig(output_dir=str(reward), model_name_or_path=str(base))
        record = json.loads(record_of(config)) if recorded else {}
        if recorded == "hub":
            record["contents"] = {}
        (reward / "COMPLETE").write_text(json.dumps(record) + "\n1234\n")
    if changes:
        weights = bytearray((base / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (base / "model.safetensors").write_bytes(weights)
    shutil.copytree(base, tmp_path / "moved")
    models = [Checkpoint(reward, "--critic_model_name_or_path")]
    with pytest.raises(UserError, match=problem) if problem else nullcontext():
        heads.check_shared(
            Checkpoint(tmp_path / actor, "--actor_model_name_or_path"), models, started_from
        )


def test_a_quantized_base_is_shared_too(models_folder):
    """With what decodes its weights, in layers of 4 bits: those stay small."""
    pytest.importorskip("bitsandbytes")
    options = quantized.loading_options(4, torch.float32) | {"dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(models_folder / "llama", **options)
    quantized.finish_loading(model, torch.float32)
    reward = Checkpoint(models_folder / "llama_adapted", "--x")
    scores = heads.SharedBase(model).score_model(reward, 1)
    layers = [
        m.get_submodule("model.layers.1.mlp.up_proj") for m in (model, scores.get_base_model())
    ]
    assert layers[1].base_layer.weight is layers[0].weight
    assert layers[1].base_layer.quant_state is layers[0].quant_state
    expected = AutoModelForSequenceClassification.from_pretrained(
        models_folder / "llama", num_labels=1, **options
    )
    quantized.finish_loading(expected, torch.float32)
    expected = PeftModel.from_pretrained(expected, models_folder / "llama_adapted" / "adapter")
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        values = [m.eval()(input_ids=ids).logits.item() for m in (scores, expected)]
    assert values[0] == pytest.approx(values[1], abs=1e-5)
