"""Old flags that became part of another, or have no effect: DeepSpeed-Chat's still work, others are
refused in one line with the new form.

Settings that older versions recorded are translated by the same table.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from dschat.config.algorithm import CLIPRANGES
from dschat.config.columns import ROLES
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
# Names that TRL, transformers and others have for flags: the first that a step has is meant.
ELSEWHERE = {
    "lr": ("learning_rate", "actor_learning_rate"),
    "learning_rate": ("actor_learning_rate",),
    "epochs": ("num_train_epochs",),
    "num_epochs": ("num_train_epochs",),
    "bf16": ("dtype bf16",),
    "fp16": ("dtype fp16",),
    "torch_dtype": ("dtype",),
    "batch_size": ("per_device_train_batch_size", "per_device_training_batch_size"),
    "train_batch_size": ("per_device_train_batch_size", "per_device_training_batch_size"),
    "per_device_train_batch_size": ("per_device_training_batch_size",),
    "per_device_training_batch_size": ("per_device_train_batch_size",),
    "model": ("model_name_or_path", "actor_model_name_or_path"),
    "model_name_or_path": ("actor_model_name_or_path",),
    "reward_model": ("reward_model_name_or_path",),
    "reward_model_path": ("reward_model_name_or_path",),
    "dataset": ("data_path",),
    "dataset_name": ("data_path",),
    "sft_only_data_path": ("data_path",),
    "train_file": ("data_path",),
    "validation_file": ("eval_data_path",),
    "use_wandb": ("report_to wandb",),
    "hub_model_id": ("push_to_hub",),
    "eval_iters": ("max_eval_samples",),
    "print_loss": ("logging_steps",),
    "warmup_steps": ("num_warmup_steps",),
    "max_length": ("max_seq_len", "max_answer_seq_len"),
    "max_seq_length": ("max_seq_len", "max_prompt_seq_len"),
    "max_prompt_length": ("max_prompt_seq_len",),
    "max_completion_length": ("max_answer_seq_len",),
    "max_new_tokens": ("max_answer_seq_len",),
    "num_generations": ("num_samples_per_prompt",),
    "n_samples_per_prompt": ("num_samples_per_prompt",),
    "num_ppo_epochs": ("ppo_epochs",),
    "num_iterations": ("ppo_epochs",),
    "epsilon": ("cliprange",),
    "epsilon_high": ("cliprange LOW HIGH",),
    "beta": ("kl_coef",),
    "init_kl_coef": ("kl_coef",),
    "lora_r": ("lora_dim", "actor_lora_dim"),
    "lora_rank": ("lora_dim", "actor_lora_dim"),
    "use_peft": ("lora_dim N", "actor_lora_dim N"),
    "reward_funcs": ("reward_fn",),
    "eval_interval": ("eval_steps",),
    "resume_from_checkpoint": ("resume",),
    "use_vllm": ("rollout_backend vllm",),
    "vllm_mode": ("rollout_backend vllm",),
    "vllm_gpu_memory_utilization": ("kv_cache_gib",),
    "vllm_tensor_parallel_size": ("inference_tp_size",),
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
    if isinstance(old("keep_best"), bool):
        new["keep_best"] = (old("best_metric") or "eval/score") if old("keep_best") else None
    if old("add_eot_token") is not None:
        new["eot_token"] = (old("eot_token") or "<|endoftext|>") if old("add_eot_token") else None
    if old("unsupervised_dataset_name") and old("unsupervised_dataset_config_name"):
        names = old("unsupervised_dataset_name"), old("unsupervised_dataset_config_name")
        new["unsupervised_dataset_name"] = ":".join(names)
    both, low, high = (old(f"cliprange{side}") for side in ("", "_low", "_high"))
    if low or high:
        sides = [both] * 2 if both else CLIPRANGES[old("policy_loss") or "ppo"]
        new["cliprange"] = [low or sides[0], high or sides[1]]
    elif isinstance(both, float):
        new["cliprange"] = [both]
    sinks = {name: old(f"enable_{name}") for name in ("tensorboard", "wandb")}
    if any(given is not None for given in sinks.values()):
        known = old("report_to") or ["tensorboard"]
        on = [name for name, given in sinks.items() if (name in known if given is None else given)]
        new["report_to"] = on or ["none"]
    low, high = values.get("rollout_is_min", 0.5), old("rollout_is_max")
    if low != 0.5 or high:
        new["rollout_is_range"] = [low, high or (5.0 if old("rollout_is") == "icepop" else 2.0)]
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
    for form in ELSEWHERE.get(name, ()):
        if form.partition(" ")[0] in names:
            return f"; here it is {prefix}{form}"
    return did_you_mean(name, names, prefix)
