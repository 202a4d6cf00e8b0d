"""Defines the cases of `iteration.py`: models, rows of every round, and settings.

Every side gets the same rows: they are drawn from the number of the round and the rank.
"""

import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rollout_workloads import MODELS as ROLLOUT_MODELS
from rollout_workloads import llama
from transformers import LlamaConfig, OPTConfig, PretrainedConfig

from dschat.config import RewardConfig, RLHFConfig, SFTConfig
from dschat.config.steps import SupervisedConfig
from dschat.distributed import device

PAD, EOS, UNK = range(3)
FIRST_ID = 3  # of the ids that rows are drawn from
SCHEDULE_STEPS = 1000  # of the learning rate: nearly constant over a measurement

MODELS = {
    **ROLLOUT_MODELS,
    "opt-125m": lambda: OPTConfig(vocab_size=32_000),
    "llama-256x4": lambda: llama(256, 4, 4, 688, 150_000),
    "llama-40m": lambda: LlamaConfig(
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=2048,
        vocab_size=8192,
        max_position_embeddings=2**16,
    ),
    "llama-1b": lambda: LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=128_256,
        tie_word_embeddings=True,
    ),
}


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens: uniform in [low, high], or log-normal around ``median`` and cut to it."""

    low: int
    high: int
    median: int = 0

    def draw(self, rng: random.Random) -> int:
        if not self.median:
            return rng.randint(self.low, self.high)
        drawn = round(rng.lognormvariate(math.log(self.median), 0.8))
        return min(max(drawn, self.low), self.high)


@dataclass(frozen=True)
class Case:
    """One benchmark case. Counts are per rank."""

    task: Literal["ppo", "grpo", "sft", "rm", "dpo"]
    model: str
    rows: int  # prompts of a rollout; rows or pairs of an optimizer step
    prompt: Lengths
    answer: Lengths
    samples: int = 1  # answers per prompt, all of one length
    micro_batch: int = 16
    ranks: int = 1
    stages: tuple[int, ...] = (2,)  # of ZeRO; each is a side of its own
    logits: int = 0  # tokens x vocabulary of a micro-batch, where memory is the question
    needs_gpu: bool = False
    is_shared: bool = False  # the ranks compute each row together

    @property
    def is_rlhf(self) -> bool:
        return self.task in ("ppo", "grpo")

    @property
    def in_turns(self) -> bool:
        """Whether the sides stay loaded and take turns; else one runs after the other."""
        return not self.needs_gpu and not self.logits and not self.is_shared

    @property
    def max_prompt(self) -> int:
        """The limit of prompts: the longest, rounded up to 64."""
        return -(-self.prompt.high // 64) * 64

    @property
    def max_len(self) -> int:
        return self.prompt.high + self.answer.high

    def config(self) -> PretrainedConfig:
        config = MODELS[self.model]()
        config.pad_token_id, config.eos_token_id, config.bos_token_id = PAD, EOS, None
        config.dropout = 0.0  # of OPT
        return config

    def tiny(self) -> "Case":
        """The same with a tiny model and at most 16 tokens of prompt and answer each."""
        return replace(
            self,
            model="opt-tiny" if self.model.startswith("opt") else "llama3-tiny",
            rows=1 if self.is_shared else 4,
            micro_batch=4,
            samples=min(self.samples, 2),
            prompt=Lengths(3, 16),
            answer=Lengths(2, 16),
            logits=0,
        )


# Like the lengths of chat preferences: many short ones, a long tail; 20 to 512 in all.
_PROMPT, _ANSWER = Lengths(10, 256, median=80), Lengths(10, 256, median=60)
_PPO = Case("ppo", "opt-125m", 16, Lengths(15, 60), Lengths(16, 64))

CASES = {
    "ppo": _PPO,
    "grpo-prefix": Case("grpo", "llama-384x6", 8, Lengths(256, 256), Lengths(16, 64), samples=8),
    "sft": Case("sft", "llama-384x6", 16, _PROMPT, _ANSWER),
    "rm": Case("rm", "llama-384x6", 16, _PROMPT, _ANSWER),
    "dpo": Case("dpo", "llama-384x6", 16, _PROMPT, _ANSWER),
    "dpo-long-prompt": Case("dpo", "llama-384x6", 16, Lengths(256, 256), Lengths(16, 96)),
    "vocab-150k": Case(
        "sft", "llama-256x4", 16, Lengths(1, 1), Lengths(511, 511), logits=16 * 512 * 150_000
    ),
    **{
        f"row-{kilo}k-{ranks}": Case(
            *("sft", "llama-40m", 1, Lengths(1024 * kilo - 256, 1024 * kilo - 256)),
            answer=Lengths(256, 256),
            ranks=ranks,
            stages=(0,),
            is_shared=True,
        )
        for kilo in (4, 16, 64)
        for ranks in (1, 2)
    },
    "zero3": replace(_PPO, rows=8, micro_batch=8, ranks=2, stages=(3, 2)),
    "train-1b": Case(
        "sft", "llama-1b", 46, _PROMPT, _ANSWER, 1, 46, logits=46 * 512 * 128_256, needs_gpu=True
    ),
}


def find_case(name: str, tiny: bool) -> Case:
    """The case; one that needs GPUs runs on all of them."""
    case = CASES[name]
    if case.needs_gpu:
        case = replace(case, ranks=max(1, torch.cuda.device_count()))
    return case.tiny() if tiny else case


# -- rows ------------------------------------------------------------------------------------------


def rollout_rows(case: Case, number: int, rank: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of round ``number``, and the answers that are scored and trained on, prompt-major."""
    rng = random.Random(f"{number}, {rank}")
    vocab = range(FIRST_ID, case.config().vocab_size)
    prompts = [rng.choices(vocab, k=case.prompt.draw(rng)) for _ in range(case.rows)]
    lengths = [case.answer.draw(rng) for _ in range(case.rows)]
    answers = [rng.choices(vocab, k=length) for length in lengths for _ in range(case.samples)]
    return prompts, answers


def supervised_rows(case: Case, number: int, rank: int) -> list[dict[str, Any]]:
    """Rows of ``sft_dataset``, or of ``preference_dataset``, of optimizer step ``number``."""
    rng = random.Random(f"{number}, {rank}")
    vocab = range(FIRST_ID, case.config().vocab_size)
    rows: list[dict[str, Any]] = []
    for _ in range(case.rows):
        prompt = rng.choices(vocab, k=case.prompt.draw(rng))
        chosen, rejected = (prompt + rng.choices(vocab, k=case.answer.draw(rng)) for _ in range(2))
        if case.task == "sft":
            mask = [i >= len(prompt) for i in range(len(chosen))]
            rows.append({"input_ids": chosen, "loss_mask": mask})
        else:
            pair = {"chosen_ids": chosen, "rejected_ids": rejected}
            rows.append(pair | {"prompt_length": len(prompt)})
    return rows


def parity_reward(answers: list[str]) -> list[float]:
    """The reward function of ``grpo``: the share of even ids in an answer's text."""
    return parity_scores([[int(word[1:]) for word in answer.split()] for answer in answers])


def parity_scores(answers: list[list[int]]) -> list[float]:
    """`parity_reward` of ids."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in answers]


# -- models and settings ---------------------------------------------------------------------------


def write_models(case: Case, folder: Path) -> None:
    """Write ``actor`` and, where the task scores, ``reward``: random weights and a tokenizer whose
    tokens are t0, t1, ...
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    config = case.config()
    tokens = Tokenizer(
        models.WordLevel({f"t{i}": i for i in range(config.vocab_size)}, unk_token=f"t{UNK}")
    )
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token=f"t{EOS}", pad_token=f"t{PAD}", unk_token=f"t{UNK}"
    )
    dtype = torch.bfloat16 if case.needs_gpu else torch.float32
    torch.manual_seed(0)
    classes = {"actor": AutoModelForCausalLM}
    if case.task in ("ppo", "rm"):
        classes["reward"] = AutoModelForSequenceClassification
        config.num_labels = 1
    for name, auto in classes.items():
        with device():
            model = auto.from_config(config, dtype=dtype)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def rlhf_config(case: Case, folder: Path, stage: int, **changes: Any) -> RLHFConfig:
    """Step 3's flags: the defaults, but for sizes, ZeRO, DeepSpeed-Chat's plain advantages and, in
    GRPO too, a reference model.
    """
    reward = str(folder / "reward") if case.task == "ppo" else ""
    config = RLHFConfig(
        actor_model_name_or_path=str(folder / "actor"),
        critic_model_name_or_path=reward,
        advantage_estimator="gae" if case.task == "ppo" else "grpo",
        whiten_advantages=False,
        kl_coef=0.1,
        max_prompt_seq_len=case.max_prompt,
        max_answer_seq_len=case.answer.high,
        per_device_generation_batch_size=case.rows,
        num_samples_per_prompt=case.samples,
        per_device_training_batch_size=case.micro_batch,
        actor_zero_stage=stage,
        critic_zero_stage=stage,
        **changes,
    )
    config.validate_models()
    return config


def supervised_config(case: Case, folder: Path, stage: int, **changes: Any) -> SupervisedConfig:
    """The flags of step 1 or 2: the defaults, but for sizes and ZeRO."""
    given = {
        "model_name_or_path": str(folder / ("reward" if case.task == "rm" else "actor")),
        "max_seq_len": case.max_len,
        "per_device_train_batch_size": case.micro_batch,
        "zero_stage": stage,
    }
    if case.is_shared:
        given |= {"gradient_checkpointing": True, "sequence_parallel_size": case.ranks}
    if case.task == "sft":
        return SFTConfig(**given, **changes)
    return RewardConfig(loss="dpo" if case.task == "dpo" else "pairwise", **given, **changes)
