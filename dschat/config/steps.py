"""The flags of the three steps: one dataclass per step, with ``validate()``.

Names are DeepSpeed-Chat's where it has one. Global batch sizes are derived here and nowhere else.
"""

import logging
from dataclasses import dataclass, fields
from typing import Any, Literal, Optional, TypeVar

from dschat.config.algorithm import AlgorithmConfig, DistillationConfig, PreferenceConfig
from dschat.config.data import DataConfig, MicroBatchConfig, SavingConfig
from dschat.config.deepspeed import FROZEN, DeepSpeedConfig
from dschat.config.errors import UserError, require
from dschat.config.fields import Named, flag, log_flag, place_flag, require_valid, speed_flag
from dschat.config.lora import LoraConfig
from dschat.config.renamed import hint, set_in, translated, unknown
from dschat.config.reward import EnvironmentConfig

logger = logging.getLogger("dschat")
Config = TypeVar("Config", bound="CommonConfig")
# An AdamW step moves each weight by about the rate: more destroys any model.
_RATE: dict[str, Any] = {"ge": 0, "le": 10}
_RATES = "set base_lrs of the schedule, trainer.engine.actor.lr_scheduler (or critic)"
_REMAKE = "make the engine again: its schedule is laid"
_STAGE: dict[str, Any] = {"ge": 0, "le": 3, "remedy": ": ZeRO has stages 0, 1, 2 and 3"}


@dataclass
class CommonConfig(DeepSpeedConfig, MicroBatchConfig, DataConfig, SavingConfig, Named):
    """Output, optimization and tokenizer."""

    # output
    output_dir: Optional[str] = place_flag(
        None,
        "Folder for the model, metrics and log; default: output/step1_sft, /step2_reward or "
        "/step3_rlhf.",
        short=True,
    )
    overwrite_output_dir: bool = place_flag(
        False,
        "Start over in a folder with a finished step or with checkpoints; deletes the checkpoints.",
    )
    # optimization
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = flag(
        "auto",
        "Training precision; auto: the DeepSpeed file's, else bf16 on an accelerator and fp32 on a "
        "CPU.",
        short=True,
    )
    max_grad_norm: float = flag(1.0, "Maximum global 2-norm of the gradient; 0: no clipping.", ge=0)
    lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup"] = flag(
        "cosine", "Learning-rate schedule over optimizer steps.", short=True, read_once=_REMAKE
    )
    num_warmup_steps: int = flag(
        0, "Linear warm-up, in optimizer steps.", short=True, ge=0, read_once=_REMAKE
    )
    adam_betas: list[float] = flag([0.9, 0.95], "AdamW's beta1 and beta2.", ge=0, lt=1)
    num_train_epochs: int = flag(
        1,
        "Passes over this step's share of the data.",
        short=True,
        form="; --max_steps ends a run within an epoch",
        ge=1,
    )
    max_steps: int = flag(
        0, "Optimizer steps (step 3: iterations); 0: --num_train_epochs decides.", short=True, ge=0
    )
    router_aux_loss_coef: Optional[float] = flag(
        None,
        "Load-balancing loss of a mixture of experts; default: its config's, 0 for a policy.",
        ge=0,
    )
    trust_remote_code: bool = place_flag(False, "Run Python code that a checkpoint brings.")
    # tokenizer
    eot_token: Optional[str] = flag(
        None,
        "End answers with this token, added to tokenizer and embedding if missing; default: EOS.",
    )

    def validate(self) -> None:
        require_valid(self)
        self.validate_data()
        require(
            not self.streaming or self.max_steps > 0,
            "--streaming needs --max_steps: the length of an epoch is not known",
        )
        require(len(self.adam_betas) == 2, f"--adam_betas {self.adam_betas} must be two numbers")
        require(
            not (self.resume and self.overwrite_output_dir),
            "--resume continues a run and --overwrite_output_dir starts it over; leave one out",
        )
        require(
            self.eot_token is None or bool(self.eot_token.strip()),
            "--eot_token is empty; name the token that ends an answer, such as <|im_end|>",
        )
        self.validate_deepspeed()

    def require_unchanged(self, before: dict[str, Any]) -> None:
        """Raise ``UserError`` where a field that is read once is not as ``before``."""
        for f in fields(self):
            remedy, then, now = f.metadata.get("read_once"), before[f.name], getattr(self, f.name)
            if remedy and now != then:
                raise UserError(f"args.{f.name} {now} comes too late, {then} is in use; {remedy}")

    @property
    def tokenizer_flags(self) -> dict[str, Any]:
        return {"eot_token": self.eot_token, **self.template_flags}

    @classmethod
    def from_namespace(cls: type[Config], args: Any) -> Config:
        """This dataclass from ``args``: an instance, a dict, or any object with some of the fields.
        None is a default. Other attributes are not read; a warning names
        the settings of other trainers among them.

        Raises:
            UserError: a value of the wrong type.
        """
        if not isinstance(args, cls):
            names = {f.name for f in fields(cls)}
            given = args if isinstance(args, dict) else set_in(args, names)
            if given is None:
                raise UserError(f"args {args!r} is not a {cls.__name__}, dict or namespace")
            given = {n: v for n, v in translated(given).items() if v is not None}
            hints = {name: hint(name, names) for name in given if name not in names}
            if used := {n: text for n, text in hints.items() if text.startswith("; use ")}:
                logger.warning("args: %s", unknown("setting", used))
            args = cls(**{name: given[name] for name in names if name in given})
        require_valid(args)
        return args


@dataclass
class SupervisedConfig(CommonConfig):
    """Model, batches and LoRA.

    Global batch size = micro-batch size x accumulation x processes.
    """

    model_name_or_path: str = flag(
        "builtin/tiny", "Base model: a folder, a hub name or builtin/tiny.", short=True
    )
    tokenizer_name_or_path: Optional[str] = flag(
        None, "Tokenizer: a folder or a hub name; default: the model's."
    )
    max_seq_len: int = flag(
        512,
        "Maximum sequence length in tokens; longer sequences lose the start of the prompt.",
        short=True,
        ge=1,
    )
    per_device_train_batch_size: int = flag(
        16, "Examples per micro-batch and process.", short=True, ge=1
    )
    per_device_eval_batch_size: int = speed_flag(
        16, "Examples per evaluation micro-batch and process.", ge=1
    )
    learning_rate: float = flag(1e-5, "Peak learning rate.", short=True, **_RATE)
    weight_decay: float = flag(
        0.0, "AdamW's weight decay; not applied to biases and norms.", **_RATE
    )
    dropout: Optional[float] = flag(None, "Dropout rate; default: the model's.", ge=0, lt=1)
    eval_steps: int = flag(
        0,
        "Evaluate every N optimizer steps, and before and after training; 0: only these two.",
        short=True,
        aliases=["--eval_interval"],
        ge=0,
    )
    zero_stage: int = speed_flag(0, "ZeRO stage: 0, 1, 2 or 3.", short=True, **_STAGE)
    gradient_checkpointing: bool = speed_flag(
        False, "Recompute activations in the backward pass.", short=True
    )
    lora_dim: int = flag(0, "LoRA rank; 0: full fine-tuning.", short=True, ge=0)
    lora_alpha: float = flag(0.0, "LoRA alpha; 0: twice the rank.", ge=0)
    lora_modules: list[str] = flag(
        ["all-linear"],
        "Modules with LoRA adapters: names as in PEFT, or all-linear.",
        aliases=["--lora_module_name"],
    )
    only_optimize_lora: bool = flag(True, "Train LoRA adapters (and the score head) only.")

    def global_batch_size(self, world_size: int) -> int:
        """Examples per optimizer step, over all processes."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * world_size


@dataclass
class SFTConfig(SupervisedConfig):
    """Step 1: supervised fine-tuning."""

    default_output_dir = "output/step1_sft"
    train_on: Literal["auto", "all", "last"] = flag(
        "auto", "Assistant turns with loss: all, or the last. auto: all, but a completion's alone."
    )
    shuffle: Literal["rows", "dialogues"] = flag(
        "rows", "What is shuffled: rows, or dialogues; rows of one then share their tokens."
    )
    train_on_prompt: bool = flag(False, "Compute the loss on prompt tokens too.")
    train_on_reasoning: bool = flag(True, "Compute the loss on the thoughts of answers.")

    def validate(self) -> None:
        super().validate()
        self.validate_micro_batches(self.max_seq_len, "--max_seq_len")


@dataclass
class RewardConfig(PreferenceConfig, SupervisedConfig):
    """Step 2: a reward model, or the policy on preference pairs."""

    offload_values = (*CommonConfig.offload_values, "reference", "frozen")

    @property
    def default_output_dir(self) -> str:  # type: ignore[override]
        return "output/step3_rlhf" if self.trains_policy else "output/step2_reward"

    shuffle_labels: bool = flag(
        False, "Swap chosen and rejected at random in training; a control experiment."
    )

    @property
    def loads_reference(self) -> bool:
        """Whether a frozen reference model is loaded. Not with LoRA on frozen base weights: there
        the policy without its adapters is the reference.
        """
        is_its_own = self.lora_dim > 0 and self.only_optimize_lora
        return self.trains_policy and not is_its_own and not self.precompute_ref_logprobs

    def validate(self) -> None:
        super().validate()
        self.validate_preferences(self.streaming)
        require(
            self.trains_policy or not self.offloads("reference"),
            f"--offload {' '.join(self.offload or ())}: --loss pairwise has no reference model; "
            "leave it out, or choose --loss dpo or cdpo or ipo or kto",
        )
        answers = 3 if self.loss == "kto" else 2
        self.validate_micro_batches(answers * self.max_seq_len, f"{answers} x --max_seq_len")


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
    # optimization
    per_device_training_batch_size: int = flag(
        16, "Sequences per training micro-batch and process.", short=True, ge=1
    )
    actor_learning_rate: float = flag(
        9.65e-6, "Peak learning rate of the actor.", short=True, **_RATE, read_once=_RATES
    )
    critic_learning_rate: float = flag(
        5e-6, "Peak learning rate of the critic.", short=True, **_RATE, read_once=_RATES
    )
    actor_weight_decay: float = flag(0.0, "Weight decay of the actor.", **_RATE)
    critic_weight_decay: float = flag(0.0, "Weight decay of the critic.", **_RATE)
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
        0, "ZeRO stage of the actor and the reference model.", short=True, **_STAGE
    )
    critic_zero_stage: int = speed_flag(
        0, "ZeRO stage of the critic and the reward model.", short=True, **_STAGE
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
        require(
            not self.streaming or self.prompt_sampling == "uniform",
            f"--prompt_sampling {self.prompt_sampling} needs all prompts; leave --streaming out",
        )
        self.validate_micro_batches(self.longest_row, "--max_prompt_seq_len + --max_answer_seq_len")
        self.mini_batches_of(self.rollout_prompts(1), 1)
