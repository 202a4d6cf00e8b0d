"""The flags of step 3."""

from dataclasses import dataclass
from typing import Any, Literal, Optional

from dschat.config.algorithm import RATES, AlgorithmConfig, DistillationConfig
from dschat.config.deepspeed import FROZEN
from dschat.config.errors import require
from dschat.config.fields import flag, log_flag, speed_flag
from dschat.config.lora import LoraConfig
from dschat.config.reward import EnvironmentConfig
from dschat.config.steps import RATE, STAGE, CommonConfig

_RATES = "set base_lrs of the schedule, trainer.engine.actor.lr_scheduler (or critic)"


@dataclass
class RLHFConfig(LoraConfig, DistillationConfig, AlgorithmConfig, EnvironmentConfig, CommonConfig):
    """Step 3: RLHF. Counts are global unless the name says per_device."""

    default_output_dir = "output/step3_rlhf"
    deepspeed_models = ("actor", "critic")
    offload_values = (*CommonConfig.offload_values, *FROZEN, "frozen", "rollout")
    quantizable = ("actor", "critic", "reward", "teacher")

    actor_model_name_or_path: str = flag(
        "", "Initial actor: step 1's folder, or any causal LM.", short=True
    )
    critic_model_name_or_path: str = flag(
        "",
        "Initial critic, and the reward model if there is no other reward source; default: "
        "--reward_model_name_or_path, else the actor.",
        short=True,
    )
    save_steps: int = log_flag(
        10,
        "Save a checkpoint every N iterations; 0: never, and a signal then stops the step "
        "without saving.",
        short=True,
        ge=0,
    )
    keep_rollouts: int = log_flag(
        0,
        "Keep the rollouts of the last N iterations in OUTPUT_DIR/rollouts, for dschat replay.",
        ge=0,
    )
    # optimization
    per_device_training_batch_size: int = flag(
        16, "Sequences per training micro-batch and process.", short=True, ge=1
    )
    actor_learning_rate: Optional[float] = flag(
        None,
        f"Peak learning rate of the actor; default: {RATES}; adapters 10 times that.",
        short=True,
        **RATE,
        read_once=_RATES,
    )
    critic_learning_rate: Optional[float] = flag(
        None,
        "Peak learning rate of the critic; default: 5e-6, adapters 5e-5.",
        short=True,
        **RATE,
        read_once=_RATES,
    )
    actor_weight_decay: float = flag(0.0, "Weight decay of the actor.", **RATE)
    critic_weight_decay: float = flag(0.0, "Weight decay of the critic.", **RATE)
    actor_dropout: Optional[float] = flag(
        None,
        "Dropout rate of the actor; default: 0. Above 0, the first ratio is not 1.",
        ge=0,
        lt=1,
    )
    critic_dropout: Optional[float] = flag(
        None, "Dropout rate of the critic; default: 0.", ge=0, lt=1
    )
    enable_ema: bool = flag(False, "Keep an exponential moving average of the actor.")
    ema_decay: float = flag(
        0.992, "Decay of --enable_ema per optimizer step.", ge=0, le=1, needs="enable_ema"
    )
    unsupervised_dataset_name: Optional[str] = flag(
        None,
        "Text of the pretraining loss (ptx): a local file or a hub name (`NAME:CONFIG` for one "
        "configuration).",
        reads="files",
    )
    unsup_column: str = flag("text", "Text column of --unsupervised_dataset_name.")
    unsup_coef: float = flag(
        27.8, "Weight of the pretraining loss.", ge=0, needs="unsupervised_dataset_name"
    )
    # DeepSpeed and memory
    actor_zero_stage: int = speed_flag(
        0, "ZeRO stage of the actor and the reference model.", short=True, **STAGE
    )
    critic_zero_stage: int = speed_flag(
        0, "ZeRO stage of the critic and the reward model.", short=True, **STAGE
    )
    actor_deepspeed_config: Optional[str] = flag(
        None, "DeepSpeed file of the actor; default: --deepspeed_config.", reads="files"
    )
    critic_deepspeed_config: Optional[str] = flag(
        None, "DeepSpeed file of the critic; default: --deepspeed_config.", reads="files"
    )
    align_overflow: bool = flag(
        False, "If the gradient of actor or critic is not finite, skip the step of both."
    )
    actor_gradient_checkpointing: bool = speed_flag(
        False, "Recompute the actor's activations in the backward pass."
    )
    critic_gradient_checkpointing: bool = speed_flag(
        False, "Recompute the critic's activations in the backward pass."
    )
    # evaluation and printing
    eval_steps: int = flag(
        0,
        "Evaluate every N iterations, and before and after training; 0: only these two.",
        short=True,
        ge=0,
    )
    eval_batch_size: int = speed_flag(
        32, "Held-out prompts per evaluation batch and process.", ge=1
    )
    eval_num_samples: int = flag(1, "Answers per held-out prompt; k of pass@k.", ge=1)
    stop_on: Literal["never", "collapse"] = log_flag(
        "never",
        "End the run where metrics say that the policy has collapsed; the last line names the "
        "latest checkpoint. A warning says so in any case.",
    )
    sample_steps: int = log_flag(
        10,
        "Log sample answers, also to samples.jsonl, every N iterations; 0: never.",
        aliases=["--print_answers_interval"],
        ge=0,
    )

    def __post_init__(self, _named: Any) -> None:
        critic, reward = self.critic_model_name_or_path, self.reward_model_name_or_path
        if not reward and not self.has_reward_functions:
            self.reward_model_name_or_path = critic
        if not critic:
            actor = self.actor_model_name_or_path if self.has_reward_functions else ""
            self.critic_model_name_or_path = reward or actor
        if self.share_base:
            self.critic_lora_dim = self.critic_lora_dim or self.actor_lora_dim

    @property
    def schedule(self) -> str:
        return self.lr_scheduler_type or self.estimator.schedule

    def _default_rate(self, model: str) -> float:
        return 5e-6 if model == "critic" else self.estimator.learning_rate

    def chosen(self) -> dict[str, Any]:
        return super().chosen() | {"kl_coef": self.kl_weight}

    def mini_batch_size(self, world_size: int) -> int:
        """Sequences in one optimizer step, over all processes."""
        return self.per_device_training_batch_size * self.gradient_accumulation_steps * world_size

    @property
    def longest_row(self) -> int:
        """Tokens of the longest prompt and answer together."""
        return self.max_prompt_seq_len + self.max_answer_seq_len

    def validate(self) -> None:
        """`validate_models`, and require a reward source or a teacher."""
        self.validate_models()
        if not (self.reward_model_name_or_path or self.has_reward_functions):
            require(
                self.has_teacher,
                "nothing scores; name --reward_model_name_or_path or --reward_fn",
            )
            self.validate_teacher_alone(self.advantage_estimator, self.dynamic_sampling)

    def validate_models(self) -> None:
        """Raise ``UserError`` for the first invalid flag, whatever the reward source."""
        super().validate()
        self.validate_rollout()
        self.validate_algorithm(self.num_samples_per_prompt, self.max_answer_seq_len)
        self.validate_rewards()
        self.validate_distillation()
        self.validate_shared_base()
        require(
            bool(self.actor_model_name_or_path),
            "--actor_model_name_or_path is missing; name a folder or a hub model",
        )
        require(
            not (self.partial_rollout and self.dynamic_sampling),
            "--partial_rollout and --dynamic_sampling exclude each other: leave one out",
        )
        self.validate_micro_batches(self.longest_row, "--max_prompt_seq_len + --max_answer_seq_len")
        self.mini_batches_of(self.rollout_prompts(1), 1)
