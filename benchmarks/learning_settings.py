"""Translates the settings of step 3 to TRL's GRPOConfig.

TRL is not imported here: names and defaults are those of TRL 1.16.
"""

from dataclasses import asdict, replace
from typing import Any

from dschat.config import RLHFConfig, UserError

TRL_SIDES: dict[str, dict[str, Any]] = {
    "trl": {},
    "trl_continuous": {"use_transformers_continuous_batching": True},
}

_SCALES = {"grpo": "group", "dr_grpo": "none"}  # advantage_estimator -> scale_rewards
_LOSS_TYPES = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}  # by aggregation

# Settings that TRL does not have, or with another meaning.
_MUST_BE = {
    "policy_loss": "ppo",
    "dual_clip": None,
    "kl_target": None,
    "entropy_coef": 0.0,
    "missing_eos_penalty": 0.0,
    "overlong_buffer_len": 0,
    "overlong_filter": False,
    "dynamic_sampling": False,
    "rollout_is": "off",
    "normalize_reward": False,
    "min_answer_seq_len": 0,
    "actor_lora_dim": 0,
    "actor_dropout": None,
    "unsupervised_dataset_name": None,
}


def check_comparable(config: RLHFConfig) -> None:
    """Raise ``UserError``, naming the flag, for a setting without equivalent in GRPOTrainer."""
    if config.advantage_estimator not in _SCALES:
        raise UserError(
            f"--advantage_estimator {config.advantage_estimator} is not available in TRL's "
            f"GRPOTrainer; choose from {', '.join(_SCALES)}"
        )
    if config.kl_weight and not (config.kl_is_in_loss and config.kl_by == "k3"):
        raise UserError("TRL's GRPOTrainer has only the k3 KL in the loss; or set --kl_coef 0")
    for name, value in _MUST_BE.items():
        if getattr(config, name) != value:
            raise UserError(
                f"--{name} {getattr(config, name)} has no equivalent in TRL's GRPOTrainer; leave "
                f"it at its default, {value}"
            )


def dschat_settings(config: RLHFConfig) -> dict[str, Any]:
    """Fields of RLHFConfig; the reward function is passed as a callable."""
    no_models = {"critic_model_name_or_path": "", "reward_model_name_or_path": ""}
    return asdict(replace(config, reward_fn=None, dtype="fp32", **no_models))


def trl_settings(config: RLHFConfig, side: str = "trl") -> dict[str, Any]:
    """Fields of GRPOConfig for one of `TRL_SIDES`, for one process on a CPU."""
    low, high = config.cliprange_sides
    settings = {
        "seed": config.seed,
        # batches and steps
        "max_steps": config.max_steps * config.num_mini_batches * config.ppo_epochs,
        "num_generations": config.num_samples_per_prompt,
        "per_device_train_batch_size": config.per_device_training_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "steps_per_generation": config.num_mini_batches * config.gradient_accumulation_steps,
        "num_iterations": config.ppo_epochs,
        "shuffle_dataset": False,
        # sampling
        "max_completion_length": config.max_answer_seq_len,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "min_p": config.min_p or None,
        # loss
        "loss_type": _LOSS_TYPES[config.aggregation],
        "scale_rewards": _SCALES[config.advantage_estimator],
        "epsilon": low,
        "epsilon_high": high,
        "beta": config.kl_weight,
        "use_bias_correction_kl": False,
        "disable_dropout": True,
        # optimizer
        "optim": "adamw_torch_fused",
        "learning_rate": config.rate_of("actor"),
        "lr_scheduler_type": config.schedule,
        "warmup_steps": config.num_warmup_steps,
        "adam_beta1": config.adam_betas[0],
        "adam_beta2": config.adam_betas[1],
        "weight_decay": config.actor_weight_decay,
        "max_grad_norm": config.max_grad_norm,
        # TRL's defaults are slow on a CPU
        "gradient_checkpointing": False,
        "bf16": False,
        # no files, no reports
        "use_cpu": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return settings | TRL_SIDES[side]
