"""A whole iteration through the trainer, rollout to gradient and metrics, against float64 autograd:
every policy loss, advantage estimator and aggregation, the pretraining loss, and whatever else a
loss is made of.
"""

import copy
import functools
import itertools

import numpy as np
import pytest
import torch
from float64_step import iteration, norm, token_scores
from program_cases import around_fill_in, trainer_of
from step_rows import PROMPTS, text_steps
from tiny_models import EOS, ensure
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
)

from dschat.config.methods import CORRECTIONS, POLICY_LOSSES
from dschat.config.methods import ESTIMATORS as ROWS
from dschat.rlhf.trainer import DeepSpeedPPOTrainer
from dschat.runtime.deepspeed_engine import unwrap

ESTIMATORS = tuple(ROWS)
LOSSES = tuple(name for name, row in POLICY_LOSSES.items() if not row.clips_covariance)
AGGREGATIONS = ("token", "sequence", "constant")
ENDS = [EOS, *range(2, 12)]
EVERY = list(itertools.product(ESTIMATORS, LOSSES, AGGREGATIONS))


def is_quick(case):
    """One for each estimator, and each loss and aggregation."""
    estimator, *others = map(tuple.index, (ESTIMATORS, LOSSES, AGGREGATIONS), case)
    return others == [estimator % len(LOSSES), estimator % 3]


def the_rest(number, estimator, loss):
    """All other loss options, drawn for this case."""
    rng = np.random.default_rng(number)

    def one_of(*values):
        return values[rng.integers(len(values))]

    in_loss = one_of(True, False)
    options = {
        "kl_in_loss": in_loss,
        "kl_estimator": one_of("k2", "k3") if in_loss else one_of("k1", "k2", "k3"),
        "kl_coef": 0.3,
        "kl_target": one_of(None, 0.5),
        "kl_horizon": 40,
        "entropy_coef": one_of(0.0, 0.05, 0.05),
        "temperature": one_of(0.8, 1.0, 1.3),
        "gamma": one_of(0.9, 1.0),
        "lam": one_of(0.8, 0.95),
        "whiten_advantages": one_of(True, False),
        "cliprange": [0.1, 0.15],
        "cliprange_value": 0.1,
        "dual_clip": one_of(None, 1.05) if loss == "ppo" else None,
        "missing_eos_penalty": one_of(0.0, 0.3),
        "overlong_buffer_len": one_of(0, 3),
        "overlong_penalty": 0.7,
        "overlong_filter": one_of(True, False),
        "clip_reward": one_of(None, 0.4),
        "old_logprobs": one_of("recompute", "recompute", "rollout"),
        "rollout_is": "off",
    }
    if options["old_logprobs"] == "recompute":
        options["rollout_is"] = one_of("off", *CORRECTIONS)
        options["rollout_is_range"] = [0.9, 1.1]
    options["use_bias_correction_kl"] = in_loss and one_of(True, False)
    options["off_policy_mask_threshold"] = one_of(None, 0.02)
    if not POLICY_LOSSES[loss].has_range:
        options["cliprange"] = None
    if estimator == "gdpo" and not in_loss:
        options |= {"kl_in_loss": True, "kl_estimator": "k3"}
    return options


@pytest.fixture(scope="module")
def built(models_folder, tmp_path_factory):
    """``built(has_critic)``: a trainer that leaves its weights as they are, the texts of its
    pretraining loss, and the actor, another reference, the critic and the reward model in float64.
    A sixth of the tokens end an answer.
    """
    actor = ensure(tmp_path_factory.mktemp("ends"), "llama")
    GenerationConfig(eos_token_id=ENDS, pad_token_id=1).save_pretrained(actor)
    reward = str(models_folder / "llama_reward")

    @functools.cache
    def build(has_critic):
        trainer = trainer_of(
            models_folder,
            (),
            critic=reward if has_critic else None,
            actor_model_name_or_path=str(actor),
            reward_model_name_or_path=reward,
            advantage_estimator="gae" if has_critic else "grpo",
            per_device_generation_batch_size=2,
            num_samples_per_prompt=4,
            per_device_training_batch_size=4,
            gradient_accumulation_steps=4,
            ppo_epochs=1,
            actor_learning_rate=0.0,
            critic_learning_rate=0.0,
            unsup_coef=0.7,
        )
        own, texts = itertools.tee(text_steps(trainer.args))
        trainer = DeepSpeedPPOTrainer(trainer.engine, trainer.args, own)
        reference = unwrap(trainer.engine.ref)
        generator = torch.Generator().manual_seed(5)
        for p in reference.parameters():
            p.data += 0.03 * torch.randn(p.shape, generator=generator)
        policy = AutoModelForCausalLM.from_pretrained(actor).double()
        score = AutoModelForSequenceClassification.from_pretrained(reward).double()
        for model in (policy, score):  # the pad token may be drawn, and then learns as any other
            model.get_input_embeddings().padding_idx = None
        critic = copy.deepcopy(score) if has_critic else None
        return trainer, texts, policy, copy.deepcopy(reference).double(), critic, score

    return build


def text_loss(model, rows):
    """The mean over all tokens but the first of each row."""
    logprobs = []
    for ids in (torch.tensor(row["input_ids"]) for row in rows):
        table = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)
        logprobs.append(table.gather(1, ids[1:, None]))
    return -torch.cat(logprobs).mean()


def drift(monkeypatch, seed):
    """The generator, the actor before the update and the critic's old values lie elsewhere, as
    after some steps: differences that ratios, weights and clips are about.
    """
    generator = torch.Generator().manual_seed(seed)

    def near(x, mask, by):
        return torch.where(mask, x + by * torch.randn(x.shape, generator=generator), 0.0)

    def before(e, args):
        e.rollout_logprobs = near(e.rollout_logprobs, e.answer_mask, 0.1)

    def after(e, args):
        if args.old_logprobs == "recompute":
            e.logprobs = near(e.logprobs, e.answer_mask, 0.1)
        e.values = near(e.values, e.answer_mask, 0.2)

    around_fill_in(monkeypatch, before, after)


@pytest.mark.parametrize(
    ("number", "case"),
    [
        pytest.param(n, case, marks=() if is_quick(case) else pytest.mark.slow, id="-".join(case))
        for n, case in enumerate(EVERY)
    ],
)
def test_gradients_and_metrics_of_an_iteration(number, case, built, monkeypatch, kept_gradients):
    estimator, loss, aggregation = case
    trainer, texts, actor, reference, critic, score = built(estimator == "gae")
    args = trainer.args
    options = {"advantage_estimator": estimator, "policy_loss": loss}
    options |= {"loss_aggregation": aggregation} | the_rest(number, estimator, loss)
    for name, value in options.items():
        setattr(args, name, value)
    args.validate_models()
    trainer = DeepSpeedPPOTrainer(trainer.engine, args, trainer.unsupervised)
    drift(monkeypatch, number)
    engines = {"actor": trainer.engine.actor, "critic": trainer.engine.critic}
    gradients = {name: kept_gradients(engine) for name, engine in engines.items() if engine}
    e = trainer.generate_experience(PROMPTS[:4])
    trainer.train_rlhf(e)

    bound = 5.0 if args.clip_reward is None else args.clip_reward
    args.source_weights = trainer.collector.weights
    known, losses, metrics = iteration(e, args, bound, actor, reference, critic)
    of_text = text_loss(actor, next(texts))
    losses["actor"] = losses["actor"] + 0.7 * of_text
    metrics["loss/ptx_avg"] = float(of_text.detach())
    last = token_scores(score, e).gather(1, e.lengths.unsqueeze(1) - 1).squeeze(1)
    torch.testing.assert_close(e.scores.double(), last.detach(), atol=1e-4, rtol=1e-4)
    for i, a in enumerate(known):
        assert e.finished[i] == (a.ids[-1] in ENDS)
        torch.testing.assert_close(
            e.advantages[i, : a.n].double(), a.advantages, atol=1e-4, rtol=1e-4
        )
    assert 0 < metrics["rollout/eos_share"] < 1
    actual = trainer.metrics | {"kl.value": trainer.kl.value}
    assert set(losses) == set(gradients)
    for name, model in (("actor", actor), ("critic", critic)):
        if model is None:
            continue
        model.zero_grad()
        losses[name].backward()
        metrics[f"{'policy' if name == 'actor' else 'val'}/grad_norm"] = norm(model)
        for n, p in model.named_parameters():
            scale = float(p.grad.abs().max())
            torch.testing.assert_close(
                gradients[name][n].double(), p.grad, atol=1e-4 * scale + 1e-7, rtol=1e-3
            )
    assert {name: actual[name] for name in metrics} == pytest.approx(metrics, rel=1e-4, abs=1e-5)
