"""Trainers with reward functions, on the tiny checkpoints."""

import torch
from step_cases import Case, ppo_config

from dschat.models.tokenizer import load_tokenizer
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


def trainer_of(models_folder, reward_fns=(parity,), more=None, critic=None, **options):
    config = ppo_config(Case("ppo"), models_folder)
    defaults = {"advantage_estimator": "grpo", "critic_model_name_or_path": ""}
    defaults |= {"reward_model_name_or_path": "", "enable_ema": False}
    for name, value in (defaults | options).items():
        setattr(config, name, value)
    tokenizer = load_tokenizer(config.actor_model_name_or_path, "--actor_model_name_or_path")
    engine = DeepSpeedRLHFEngine(
        config.actor_model_name_or_path, critic, tokenizer, num_total_iters=3, args=config
    )
    return DeepSpeedPPOTrainer(engine, config, reward_fns=reward_fns, more_prompts=more)
