"""Every knob of the three steps, declared once: name, type, default, help, and what makes it valid.

Comes in: keyword arguments, or any namespace that has some of the fields. Goes out: dataclasses
whose ``validate()`` raises ``UserError`` with the flag and the remedy. This module must not know
torch, argparse or the file system: the standard library is all it imports.

Names are DeepSpeed-Chat's where DeepSpeed-Chat has one. Batch sizes are derived here and nowhere
else.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal, Optional

from dschat.config.algorithm import AlgorithmConfig
from dschat.config.data import DataConfig
from dschat.config.deepspeed import DeepSpeedConfig
from dschat.config.errors import require
from dschat.config.fields import flag, require_types
from dschat.config.preference import PreferenceConfig
from dschat.config.reward import RewardSourcesConfig
from dschat.config.rollout import RolloutConfig


@dataclass
class CommonConfig(DeepSpeedConfig, DataConfig):
    """What all three steps share: data, numerics, DeepSpeed, logging."""

    # where
    output_dir: Optional[str] = flag(None, "Folder for the model, metrics and log of this step.")
    overwrite_output_dir: bool = flag(
        False,
        "Write into an output folder that already holds a finished step, or an unfinished one's "
        "checkpoints, and remove those.",
    )
    # going on
    save_steps: int = flag(
        50,
        "Write a checkpoint every N optimizer steps, to go on from; 0: never, and a signal then "
        "ends the step at once.",
    )
    save_total_limit: int = flag(2, "Keep the newest K checkpoints; 0: all.")
    resume: Optional[str] = flag(
        None,
        "Go on from OUTPUT_DIR's newest whole checkpoint (latest, the default where no value is "
        "given; without any, begin) or from the folder of one; changed settings are named and "
        "hold. train.py says so by itself.",
        nargs="?",
        const="latest",
    )
    # numerics and DeepSpeed
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = flag(
        "auto", "Training precision; auto is bf16 on an accelerator and fp32 on a CPU."
    )
    max_grad_norm: float = flag(1.0, "Clip the gradient's global 2-norm to this; 0 turns it off.")
    lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup"] = flag(
        "cosine", "Learning-rate schedule, by optimizer step."
    )
    num_warmup_steps: int = flag(0, "Optimizer steps of linear warm-up.")
    adam_betas: list[float] = flag([0.9, 0.95], "AdamW's two decay rates.")
    gradient_accumulation_steps: int = flag(
        1, "Micro-batches per optimizer step and process.", aliases=["--gradient_accumulation"]
    )
    num_train_epochs: int = flag(1, "Passes over this step's part of the data.")
    max_steps: int = flag(
        0, "Optimizer steps (step 3: iterations) in place of --num_train_epochs; 0: by epochs."
    )
    max_bad_steps: int = flag(
        20, "Stop with an error after this many steps in a row with a non-finite loss or gradient."
    )
    attn_implementation: Optional[str] = flag(
        None,
        "Attention of the training form: sdpa, eager or flash_attention_2; transformers chooses.",
    )
    trust_remote_code: bool = flag(False, "Let a checkpoint bring and run its own Python code.")
    # tokenizer
    add_eot_token: bool = flag(
        False, "End answers with --eot_token, added to the tokenizer (and embedding) if missing."
    )
    eot_token: str = flag("<|endoftext|>", "The token that --add_eot_token ends answers with.")
    chat_template: Optional[str] = flag(
        None, "File with a Jinja chat template, in place of the tokenizer's own."
    )
    # logging
    logging_steps: int = flag(1, "Print and record metrics every N steps.")
    enable_tensorboard: bool = flag(True, "Write TensorBoard events into OUTPUT_DIR/tensorboard.")
    enable_wandb: bool = flag(False, "Report to Weights & Biases (needs the [wandb] extra).")
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "Verbosity of the log.")
    disable_tqdm: bool = flag(False, "No progress bars, even on a terminal.")
    local_rank: int = flag(-1, "Set by the launcher; not read.")

    def validate(self) -> None:
        """Raise ``UserError`` (flag and remedy in one line) for the first knob that cannot work."""
        require_types(self)
        self.validate_data()
        require(
            not self.streaming or self.max_steps > 0,
            "--streaming needs --max_steps: how many steps to train, since rows are not counted",
        )
        require(
            len(self.adam_betas) == 2 and all(0 <= b < 1 for b in self.adam_betas),
            f"--adam_betas {self.adam_betas} must be two numbers in [0, 1)",
        )
        for name in (
            "gradient_accumulation_steps",
            "num_train_epochs",
            "max_bad_steps",
            "logging_steps",
        ):
            value = getattr(self, name)
            require(value >= 1, f"--{name} {value} must be at least 1")
        for name in (
            "max_grad_norm",
            "num_warmup_steps",
            "max_steps",
            "save_steps",
            "save_total_limit",
        ):
            value = getattr(self, name)
            require(value >= 0, f"--{name} {value} must not be negative")
        require(
            not (self.resume and self.overwrite_output_dir),
            "--resume goes on with a run and --overwrite_output_dir begins it anew; leave one out",
        )
        require(
            not self.add_eot_token or bool(self.eot_token.strip()),
            "--eot_token is empty; name the token that ends an answer, such as <|im_end|>",
        )
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name.endswith("zero_stage"):
                require(
                    value in (0, 1, 2, 3),
                    f"--{f.name} {value} does not exist; ZeRO has stages 0, 1, 2 and 3",
                )
            if f.name.endswith(("learning_rate", "weight_decay", "lora_dim", "lora_alpha")):
                require(value >= 0, f"--{f.name} {value} must not be negative")
            if f.name.endswith(("learning_rate", "weight_decay")):
                # AdamW moves a weight by about the rate: beyond this nothing is left of a model.
                require(value <= 10, f"--{f.name} {value} must be between 0 and 10")
            if f.name.endswith("dropout"):
                require(value is None or 0 <= value < 1, f"--{f.name} {value} must be in [0, 1)")
        self.validate_deepspeed()

    @property
    def end_of_turn(self) -> Optional[str]:
        """What ends an answer in place of the tokenizer's own EOS; None: nothing does."""
        return self.eot_token if self.add_eot_token else None

    @classmethod
    def from_namespace(cls, args: Any):
        """This dataclass from ``args``: ours, a dict, or any object with some of the fields.

        Raises ``UserError`` for a value of the wrong type.
        """
        if not isinstance(args, cls):
            given = args if isinstance(args, dict) else getattr(args, "__dict__", None)
            require(given is not None, f"args {args!r} is no {cls.__name__}, dict or namespace")
            args = cls(**{f.name: given[f.name] for f in fields(cls) if f.name in given})
        require_types(args)
        return args


@dataclass
class SupervisedConfig(CommonConfig):
    """What steps 1 and 2 share. Global batch = micro-batch x accumulation x processes."""

    model_name_or_path: str = flag(
        "builtin/tiny", "Base model: a folder, a hub name or builtin/tiny."
    )
    tokenizer_name_or_path: Optional[str] = flag(
        None, "Tokenizer, where it is not the model's own."
    )
    max_seq_len: int = flag(
        512, "Longest sequence in tokens; longer ones lose the prompt's beginning."
    )
    per_device_train_batch_size: int = flag(16, "Examples per micro-batch and process.")
    per_device_eval_batch_size: int = flag(16, "Examples per evaluation micro-batch and process.")
    learning_rate: float = flag(1e-5, "Peak learning rate.")
    weight_decay: float = flag(0.0, "AdamW's decoupled weight decay (not on biases and norms).")
    dropout: Optional[float] = flag(
        None, "Dropout everywhere in the model; default: the model's own."
    )
    eval_steps: int = flag(
        0,
        "Evaluate every N optimizer steps, besides before and after.",
        aliases=["--eval_interval"],
    )
    zero_stage: int = flag(0, "ZeRO stage: 0, 1, 2 or 3.")
    gradient_checkpointing: bool = flag(False, "Recompute activations in the backward pass.")
    lora_dim: int = flag(0, "Rank of LoRA adapters; 0: train the whole model.")
    lora_alpha: float = flag(0.0, "LoRA's alpha; 0: twice the rank.")
    lora_modules: list[str] = flag(
        ["all-linear"],
        "Modules that get adapters: names as PEFT takes them, or all-linear.",
        aliases=["--lora_module_name"],
    )
    only_optimize_lora: bool = flag(
        True, "Freeze everything but the adapters (and the score head)."
    )

    def global_batch_size(self, world_size: int) -> int:
        """Examples per optimizer step, over all processes."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * world_size

    def validate(self) -> None:
        super().validate()
        for name in ("max_seq_len", "per_device_train_batch_size", "per_device_eval_batch_size"):
            value = getattr(self, name)
            require(value >= 1, f"--{name} {value} must be at least 1")
        require(self.eval_steps >= 0, f"--eval_steps {self.eval_steps} must not be negative")


@dataclass
class SFTConfig(SupervisedConfig):
    """Step 1."""

    train_on_prompt: bool = flag(False, "Put the loss on prompt tokens too, not on answers only.")


@dataclass
class RewardConfig(PreferenceConfig, SupervisedConfig):
    """Step 2."""

    num_padding_at_beginning: Optional[int] = flag(
        None, "Accepted from DeepSpeed-Chat's scripts; not needed, nothing stands before a prompt."
    )
    shuffle_labels: bool = flag(
        False,
        "Swap chosen and rejected at random in training: the control that must learn nothing.",
    )

    @property
    def loads_reference(self) -> bool:
        """Whether a frozen copy of the policy is loaded beside it. Under LoRA on a frozen base the
        policy without its adapters is the reference.
        """
        is_its_own = self.lora_dim > 0 and self.only_optimize_lora
        return self.trains_policy and not is_its_own and not self.precompute_ref_logprobs

    def validate(self) -> None:
        super().validate()
        self.validate_preferences(self.streaming)


@dataclass
class RLHFConfig(AlgorithmConfig, RewardSourcesConfig, RolloutConfig, CommonConfig):
    """Step 3. Counts are of the whole rollout, unless the name says per_device."""

    deepspeed_models = ("actor", "critic")

    actor_model_name_or_path: str = flag(
        "", "The policy to start from: step 1's folder, or any causal LM."
    )
    critic_model_name_or_path: str = flag(
        "",
        "What the critic starts from; default: --reward_model_name_or_path, or the actor where no "
        "reward model scores. Without a critic (--advantage_estimator): the reward model, where "
        "neither that is named nor programs score.",
    )
    num_padding_at_beginning: Optional[int] = flag(
        None, "Accepted from DeepSpeed-Chat's scripts; not needed, nothing stands before a prompt."
    )
    save_steps: int = flag(
        10,
        "Write a checkpoint every N iterations, to go on from; 0: never, and a signal then ends "
        "the step at once.",
    )
    # learning
    per_device_training_batch_size: int = flag(
        16, "Sequences per training micro-batch and process."
    )
    actor_learning_rate: float = flag(9.65e-6, "Peak learning rate of the actor.")
    critic_learning_rate: float = flag(5e-6, "Peak learning rate of the critic.")
    actor_weight_decay: float = flag(0.0, "Weight decay of the actor.")
    critic_weight_decay: float = flag(0.0, "Weight decay of the critic.")
    actor_dropout: Optional[float] = flag(
        None, "Dropout of the actor; default 0. Above 0, the first ratio is no longer 1."
    )
    critic_dropout: Optional[float] = flag(None, "Dropout of the critic; default 0.")
    enable_ema: bool = flag(False, "Keep an exponential moving average of the actor.")
    ema_decay: float = flag(0.992, "Decay of the moving average, per optimizer step.")
    unsupervised_dataset_name: Optional[str] = flag(
        None, "Text for the pretraining loss (ptx): a hub name or a local file."
    )
    unsupervised_dataset_config_name: Optional[str] = flag(
        None, "Configuration of that hub data set."
    )
    unsup_column: str = flag("text", "Its text column.")
    unsup_coef: float = flag(27.8, "Weight of the pretraining loss.")
    # DeepSpeed and memory
    actor_zero_stage: int = flag(0, "ZeRO stage of the actor (and of the reference).")
    critic_zero_stage: int = flag(0, "ZeRO stage of the critic (and of the reward model).")
    actor_deepspeed_config: Optional[str] = flag(
        None, "The actor's own file in place of --deepspeed_config."
    )
    critic_deepspeed_config: Optional[str] = flag(
        None, "The critic's own file in place of --deepspeed_config."
    )
    offload_reference_model: bool = flag(False, "Keep the reference model's weights in CPU memory.")
    offload_reward_model: bool = flag(False, "Keep the reward model's weights in CPU memory.")
    align_overflow: bool = flag(
        False, "Skip a step of actor and critic together where either's gradient is not finite."
    )
    actor_gradient_checkpointing: bool = flag(False, "Recompute the actor's activations.")
    critic_gradient_checkpointing: bool = flag(False, "Recompute the critic's activations.")
    # LoRA
    actor_lora_dim: int = flag(0, "Rank of the actor's LoRA adapters; 0: train the whole actor.")
    critic_lora_dim: int = flag(0, "Rank of the critic's LoRA adapters; 0: train the whole critic.")
    lora_alpha: float = flag(0.0, "LoRA's alpha; 0: twice the rank.")
    actor_lora_modules: list[str] = flag(
        ["all-linear"],
        "Modules of the actor that get adapters.",
        aliases=["--actor_lora_module_name"],
    )
    critic_lora_modules: list[str] = flag(
        ["all-linear"],
        "Modules of the critic that get adapters.",
        aliases=["--critic_lora_module_name"],
    )
    only_optimize_lora: bool = flag(
        True, "Freeze everything but the adapters (and the score head)."
    )
    # evaluation and printing
    eval_steps: int = flag(0, "Evaluate every N iterations, besides before and after.")
    eval_batch_size: int = flag(32, "Held-out prompts per evaluation batch and process.")
    eval_num_samples: int = flag(1, "Answers sampled for each held-out prompt; k of pass@k.")
    keep_best: bool = flag(False, "Keep the actor of the best evaluation as OUTPUT_DIR/actor_best.")
    best_metric: str = flag("eval/score", "Which evaluation is best: of the highest such metric.")
    print_answers: bool = flag(False, "Log a few sampled answers every --print_answers_interval.")
    print_answers_interval: int = flag(10, "Iterations between printed answers.")

    def __post_init__(self) -> None:
        critic, reward = self.critic_model_name_or_path, self.reward_model_name_or_path
        if not reward and not self.has_reward_programs:
            self.reward_model_name_or_path = critic
        if not critic:
            alone = self.actor_model_name_or_path if self.has_reward_programs else ""
            self.critic_model_name_or_path = reward or alone

    def mini_batch_size(self, world_size: int) -> int:
        """Sequences in one optimizer step, over all processes."""
        return self.per_device_training_batch_size * self.gradient_accumulation_steps * world_size

    @property
    def num_mini_batches(self) -> int:
        """Optimizer steps in one PPO epoch. The number of processes cancels out."""
        return self.rollout_samples(1) // self.mini_batch_size(1)

    def validate(self) -> None:
        """`validate_models`, and that something scores the answers."""
        self.validate_models()
        require(
            bool(self.reward_model_name_or_path) or self.has_reward_programs,
            "--critic_model_name_or_path is missing; name a reward model (a folder or a hub "
            "model), or score with --reward_fn or --reward_url",
        )

    def validate_models(self) -> None:
        """Raise ``UserError`` for the first knob that cannot work, whatever scores the answers."""
        super().validate()
        self.validate_rollout()
        self.validate_learning(self.num_samples_per_prompt, self.max_answer_seq_len)
        self.validate_rewards()
        require(
            bool(self.actor_model_name_or_path),
            "--actor_model_name_or_path is missing; name a folder or a hub model",
        )
        for name in (
            "per_device_training_batch_size",
            "eval_batch_size",
            "eval_num_samples",
            "print_answers_interval",
        ):
            value = getattr(self, name)
            require(value >= 1, f"--{name} {value} must be at least 1")
        for name in ("unsup_coef", "eval_steps"):
            value = getattr(self, name)
            require(value >= 0, f"--{name} {value} must not be negative")
        require(0 <= self.ema_decay <= 1, f"--ema_decay {self.ema_decay} must be in [0, 1]")
        require(
            self.best_metric.startswith("eval/"),
            f"--best_metric {self.best_metric} is no metric of an evaluation, such as eval/score",
        )
        samples, mini = self.rollout_samples(1), self.mini_batch_size(1)
        require(
            samples % mini == 0,
            f"--per_device_training_batch_size x --gradient_accumulation_steps = {mini} does not "
            f"divide the {samples} sequences of a rollout (--per_device_generation_batch_size x "
            f"--generation_batches x --num_samples_per_prompt); choose numbers that divide",
        )
