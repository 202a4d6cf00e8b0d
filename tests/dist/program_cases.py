"""Trainers of step 3 on the tiny checkpoints, with and without reward functions."""

import torch
from step_cases import Case, build_trainer, ppo_config

from dschat.models.tokenizer import load_tokenizer
from dschat.rlhf import forwards
from dschat.rlhf import trainer as ppo
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.trainer import DeepSpeedPPOTrainer


def parity(answer_ids):
    """1 where the answer's token ids have an even sum."""
    return [float(sum(ids) % 2 == 0) for ids in answer_ids]


def sums_of(e):
    """The sum of every answer's token ids."""
    return torch.where(e.answer_mask, e.input_ids.gather(1, columns_of(e)), 0).sum(1)


def columns_of(e):
    columns = e.prompt_lengths.unsqueeze(1) + torch.arange(e.answer_mask.shape[1])
    return columns.clamp(max=e.input_ids.shape[1] - 1)


def ppo_trainer(models_folder, case=Case("ppo"), ptx=False, **options):  # noqa: B008 frozen
    """The trainer of ``case``, with other ``options`` than its configuration has."""
    config = ppo_config(case, models_folder)
    for name, value in options.items():
        setattr(config, name, value)
    return build_trainer(config, ptx)


def around_fill_in(monkeypatch, before=None, after=None):
    """Change experiences before or after their log-probs and values are filled in."""

    def fill_in(engine, e, args):
        if before:
            before(e, args)
        are_rollouts = forwards.fill_in(engine, e, args)
        if after:
            after(e, args)
        return are_rollouts

    monkeypatch.setattr(ppo, "fill_in", fill_in)


def weights_of(engine):
    return [p.detach().clone() for p in engine.module.parameters()]


def trainer_of(models_folder, reward_fns=(parity,), more=None, critic=None, **options):
    config = ppo_config(Case("ppo"), models_folder)
    defaults = {"advantage_estimator": "grpo", "critic_model_name_or_path": ""}
    defaults |= {"reward_model_name_or_path": "", "enable_ema": False}
    defaults |= {"kl_coef": 0.1, "lr_scheduler_type": "cosine"}
    for name, value in (defaults | options).items():
        setattr(config, name, value)
    tokenizer = load_tokenizer(config.actor_model_name_or_path, "--actor_model_name_or_path")
    engine = DeepSpeedRLHFEngine(
        config.actor_model_name_or_path, critic, tokenizer, num_total_iters=3, args=config
    )
    return DeepSpeedPPOTrainer(engine, config, reward_fns=reward_fns, more_prompts=more)
