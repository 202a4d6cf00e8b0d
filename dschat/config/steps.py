"""The flags of steps 1 and 2, and of every step: one dataclass per step, with ``validate()``; step
3's are in `dschat.config.rlhf`.

Names are DeepSpeed-Chat's where it has one. Global batch sizes are derived in these two alone.
"""

import logging
from dataclasses import dataclass, fields
from typing import Any, Literal, Optional, TypeVar

from dschat.config.algorithm import SCHEDULES
from dschat.config.data import DataConfig, MicroBatchConfig, SavingConfig
from dschat.config.deepspeed import DeepSpeedConfig
from dschat.config.errors import UserError, require
from dschat.config.fields import Named, flag, place_flag, require_valid, speed_flag
from dschat.config.preference import PreferenceConfig
from dschat.config.renamed import hint, set_in, translated, unknown

logger = logging.getLogger("dschat")
Config = TypeVar("Config", bound="CommonConfig")
# An AdamW step moves each weight by about the rate: more destroys any model.
RATE: dict[str, Any] = {"ge": 0, "le": 10}
_REMAKE = "make the engine again: its schedule is laid"
STAGE: dict[str, Any] = {"ge": 0, "le": 3, "remedy": ": ZeRO has stages 0, 1, 2 and 3"}


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
    lr_scheduler_type: Optional[Literal["cosine", "linear", "constant", "constant_with_warmup"]] = (
        flag(
            None,
            f"Learning-rate schedule over optimizer steps; default: cosine; in step 3 {SCHEDULES}.",
            short=True,
            read_once=_REMAKE,
        )
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
        """Raise ``UserError`` where a field that is read once is not as in ``before``, which has
        what is `chosen` too.
        """
        chosen = self.chosen()
        for f in fields(self):
            remedy, then = f.metadata.get("read_once"), before[f.name]
            now = chosen.get(f.name, getattr(self, f.name))
            if remedy and now != then:
                raise UserError(f"args.{f.name} {now} comes too late, {then} is in use; {remedy}")

    @property
    def schedule(self) -> str:
        return self.lr_scheduler_type or "cosine"

    def rate_of(self, model: str = "") -> float:
        """Peak learning rate of a model: actor, critic, or "" in steps 1 and 2."""

        def flag_of(name: str) -> Any:
            return getattr(self, f"{model}_{name}".removeprefix("_"))

        if (given := flag_of("learning_rate")) is not None:
            return given
        only_adapters = flag_of("lora_dim") > 0 and getattr(self, "only_optimize_lora")  # noqa: B009
        rate = self._default_rate(model)
        return float(f"{10 * rate:g}") if only_adapters else rate

    def _default_rate(self, model: str) -> float:
        return 1e-5

    def chosen(self) -> dict[str, Any]:
        """What is used of the flags whose default other flags choose."""
        rates = {f"{m}_learning_rate".removeprefix("_"): m for m in self.deepspeed_models}
        used: dict[str, Any] = {name: self.rate_of(model) for name, model in rates.items()}
        return used | {"lr_scheduler_type": self.schedule}

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
    learning_rate: Optional[float] = flag(
        None, "Peak learning rate; default: 1e-5, adapters 1e-4.", short=True, **RATE
    )
    weight_decay: float = flag(
        0.0, "AdamW's weight decay; not applied to biases and norms.", **RATE
    )
    dropout: Optional[float] = flag(None, "Dropout rate; default: the model's.", ge=0, lt=1)
    eval_steps: int = flag(
        0,
        "Evaluate every N optimizer steps, and before and after training; 0: only these two.",
        short=True,
        aliases=["--eval_interval"],
        ge=0,
    )
    zero_stage: int = speed_flag(0, "ZeRO stage: 0, 1, 2 or 3.", short=True, **STAGE)
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
    train_on_prompt: bool = flag(False, "Compute the loss on prompt tokens too.")

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

    @property
    def loads_reference(self) -> bool:
        """Whether a frozen reference model is loaded. Not with LoRA on frozen base weights: there
        the policy without its adapters is the reference.
        """
        is_its_own = self.lora_dim > 0 and self.only_optimize_lora
        return self.trains_policy and not is_its_own and not self.precompute_ref_logprobs

    def validate(self) -> None:
        super().validate()
        self.validate_preferences()
        require(
            self.trains_policy or not self.offloads("reference"),
            f"--offload {' '.join(self.offload or ())}: --loss pairwise has no reference model; "
            "leave it out, or choose --loss dpo or ipo or kto",
        )
        answers = 3 if self.loss == "kto" else 2
        self.validate_micro_batches(answers * self.max_seq_len, f"{answers} x --max_seq_len")
