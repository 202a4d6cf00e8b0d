"""Old flags that became part of another, or have no effect: DeepSpeed-Chat's still work, others are
refused in one line with the new form.

Scripts of DeepSpeed-Chat and settings that were recorded under old names are translated alike.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from dschat.config.data import ROLES
from dschat.config.errors import did_you_mean

# Old flag -> its flag of today, and the value there.
RENAMED = {
    **{f"{role}_column": ("columns", f"{role}=COLUMN") for role in ROLES},
    "offload_optimizer": ("offload", "optimizer"),
    "offload_parameters": ("offload", "params"),
    "offload_params": ("offload", "params"),
    "offload_param": ("offload", "params"),
    "offload_reference_model": ("offload", "reference"),
    "offload_reward_model": ("offload", "reward"),
    "offload_teacher_model": ("offload", "teacher"),
    "offload_training_states": ("offload", "rollout"),
    "cliprange_low": ("cliprange", "LOW HIGH"),
    "cliprange_high": ("cliprange", "LOW HIGH"),
    "best_metric": ("keep_best", "METRIC"),
    "rollout_is_min": ("rollout_is_range", "MIN MAX"),
    "rollout_is_max": ("rollout_is_range", "MIN MAX"),
    "add_eot_token": ("eot_token", "TOKEN"),
    "unsupervised_dataset_config_name": ("unsupervised_dataset_name", "NAME:CONFIG"),
    "initial_scale_power": ("deepspeed_config", "FILE, with fp16.initial_scale_power"),
    "loss_scale_window": ("deepspeed_config", "FILE, with fp16.loss_scale_window"),
    "deepspeed": ("deepspeed_config", "FILE"),
    "enable_tensorboard": ("report_to", "tensorboard"),
    "enable_wandb": ("report_to", "wandb"),
    # without effect
    "print_answers": ("sample_steps", "N"),
    "num_padding_at_beginning": ("deepspeed_config", "FILE"),
    "local_rank": ("deepspeed_config", "FILE"),  # set by launchers
    "tensorboard_path": ("report_to", "tensorboard"),  # the output folder has the events
    "enable_mixed_precision_lora": ("actor_lora_dim", "N"),
}
# Flag, and the names that TRL, transformers and others have for it: the first that a step has is
# meant.
ELSEWHERE = {
    "learning_rate": ("lr",),
    "actor_learning_rate": ("lr", "learning_rate"),
    "num_train_epochs": ("epochs", "num_epochs"),
    "num_warmup_steps": ("warmup_steps",),
    "dtype": ("torch_dtype",),
    "dtype bf16": ("bf16",),
    "dtype fp16": ("fp16",),
    "per_device_train_batch_size": (
        *("batch_size", "train_batch_size", "per_device_training_batch_size"),
    ),
    "per_device_training_batch_size": (
        *("batch_size", "train_batch_size", "per_device_train_batch_size"),
    ),
    "model_name_or_path": ("model",),
    "actor_model_name_or_path": ("model", "model_name_or_path"),
    "reward_model_name_or_path": ("reward_model", "reward_model_path"),
    "reward_fn": ("reward_funcs",),
    "data_path": ("dataset", "dataset_name", "sft_only_data_path", "train_file"),
    "eval_data_path": ("validation_file",),
    "max_eval_samples": ("eval_iters",),
    "eval_steps": ("eval_interval",),
    "logging_steps": ("print_loss",),
    "report_to wandb": ("use_wandb",),
    "push_to_hub": ("hub_model_id",),
    "resume": ("resume_from_checkpoint",),
    "max_seq_len": ("max_length", "max_seq_length"),
    "max_prompt_seq_len": ("max_seq_length", "max_prompt_length"),
    "max_answer_seq_len": ("max_length", "max_completion_length", "max_new_tokens"),
    "num_samples_per_prompt": ("num_generations", "n_samples_per_prompt"),
    "ppo_epochs": ("num_ppo_epochs", "num_iterations"),
    "cliprange": ("epsilon",),
    "cliprange LOW HIGH": ("epsilon_high",),
    "kl_coef": ("beta", "init_kl_coef"),
    "lora_dim": ("lora_r", "lora_rank"),
    "actor_lora_dim": ("lora_r", "lora_rank"),
    "lora_dim N": ("use_peft",),
    "actor_lora_dim N": ("use_peft",),
    "rollout_backend vllm": ("use_vllm", "vllm_mode"),
    "kv_cache_gib": ("vllm_gpu_memory_utilization",),
    "inference_tp_size": ("vllm_tensor_parallel_size",),
}
# Old flags that still work, by the types of their values: DeepSpeed-Chat's.
_ACCEPTED = {
    bool: (
        *("offload_reference_model", "add_eot_token", "print_answers"),
        *("enable_mixed_precision_lora", "enable_tensorboard", "enable_wandb"),
    ),
    str: ("unsupervised_dataset_config_name", "deepspeed", "tensorboard_path"),
    int: ("num_padding_at_beginning", "local_rank"),
}


def accepted(names: Collection[str]) -> dict[str, type]:
    """Old flags that a dataclass with fields ``names`` accepts, and the type of their values."""
    return {
        old: kind for kind, flags in _ACCEPTED.items() for old in flags if RENAMED[old][0] in names
    }


def translated(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` by the flags of today."""
    old: Callable[[str], Any] = values.get
    new = {name: value for name, value in values.items() if name not in RENAMED}
    for name, every in (("offload", "auto"), ("load_in_4bit", "all"), ("load_in_8bit", "all")):
        if name in values:
            new[name] = _parts(values[name], every)
    for name, (flag, item) in RENAMED.items():
        if flag in ("offload", "columns") and old(name):
            new[flag] = [*(new.get(flag) or ()), item.replace("COLUMN", str(old(name)))]
    if isinstance(old("deepspeed"), str) and old("deepspeed").lower() not in ("true", "false"):
        new["deepspeed_config"] = old("deepspeed_config") or old("deepspeed")
    if old("add_eot_token") is not None:
        new["eot_token"] = (old("eot_token") or "<|endoftext|>") if old("add_eot_token") else None
    if old("unsupervised_dataset_name") and old("unsupervised_dataset_config_name"):
        names = old("unsupervised_dataset_name"), old("unsupervised_dataset_config_name")
        new["unsupervised_dataset_name"] = ":".join(names)
    sinks = {name: old(f"enable_{name}") for name in ("tensorboard", "wandb")}
    if any(given is not None for given in sinks.values()):
        known = old("report_to") or ["tensorboard"]
        on = [name for name, given in sinks.items() if (name in known if given is None else given)]
        new["report_to"] = on or ["none"]
    return new


def _parts(value: Any, every: str) -> list[str] | None:
    """``--offload`` and its like as a list of words: they may be joined by commas, or be true,
    which is the word ``every``, or false.
    """
    words = [] if isinstance(value, bool) else [w for v in value or () for w in v.split(",")]
    if value is None or value is False or words in (["false"], ["no"]):
        return None
    return [every] if words in ([], ["true"], ["yes"]) else words


def hint(name: str, names: Collection[str], prefix: str = "") -> str:
    """The end of an error about the unknown flag ``name``: what replaced it, its name here, or the
    closest of ``names``.
    """
    flag, value = RENAMED.get(name, ("", ""))
    if flag in names:
        return f"; it is now --{flag} {value}"
    for form, others in ELSEWHERE.items():
        if name in others and form.partition(" ")[0] in names:
            return f"; here it is {prefix}{form}"
    return did_you_mean(name, names, prefix)
