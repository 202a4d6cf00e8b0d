"""The flags of DeepSpeed-Chat's 33 training scripts parse and pass the checks before weights load.

A script is a row of our own: its folders and name, and its flags where they differ from others'.
"""

from pathlib import Path

import pytest
from documentation import CONFIGS

from dschat.config import RLHFConfig, parser

PAIRS = (
    "--data_path Dahoas/rm-static Dahoas/full-hh-rlhf Dahoas/synthetic-instruct-gptj-pairwise "
    "yitingxie/rlhf-reward-datasets --data_split 2,4,4"
)
RM_STATIC = "--data_path Dahoas/rm-static --data_split 2,4,4"
CHINESE = (
    "--data_path wangrui6/Zhihu-KOL Cohere/miracl-zh-queries-22-12 Hello-SimpleAI/HC3-Chinese "
    "mkqa-Chinese --data_split 10,0,0"
)
JAPANESE = (
    "--data_path mkqa-Japanese Cohere/miracl-ja-queries-22-12 lmqg/qg_jaquad lmqg/qag_jaquad "
    "--data_split 10,0,0 --deepspeed_config ./ds_config.json"
)
SCHEDULE = "--lr_scheduler_type cosine --seed 1234 --deepspeed --output_dir ./output"
STEP_1 = f"--gradient_accumulation_steps 1 --num_warmup_steps 0 {SCHEDULE}"
BOARD = "--enable_tensorboard --tensorboard_path ./output"
SAVING = "--gradient_checkpointing"
OPT_LORA = "--lora_dim 128 --lora_module_name decoder.layers."
LLAMA_LORA = "--lora_dim 128 --lora_module_name layers."
LLAMA = "--model_name_or_path meta-llama/Llama-2-7b-hf"
OPT_350M = "--model_name_or_path facebook/opt-350m --weight_decay 0.1 --dropout 0.0"


def sft(model: str, batch: int, epochs: int, rate: str, decay: str, stage: int, more="") -> str:
    return (
        f"{PAIRS} --model_name_or_path {model} --per_device_train_batch_size {batch} "
        f"--per_device_eval_batch_size {batch} --max_seq_len 512 --learning_rate {rate} "
        f"--weight_decay {decay} --num_train_epochs {epochs} --zero_stage {stage} {STEP_1} {more}"
    )


def rm(model: str, data: str, batch: int, rate: str, stage: int, more="") -> str:
    return (
        f"{data} {model} --per_device_train_batch_size {batch} --per_device_eval_batch_size "
        f"{batch} --max_seq_len 512 --learning_rate {rate} --weight_decay 0.1 --num_train_epochs 1 "
        f"--zero_stage {stage} {STEP_1} {more}"
    )


def rlhf(batch: int, rate: str, stage: int, more="", accumulate=1) -> str:
    return (
        f"{RM_STATIC} --actor_model_name_or_path a --critic_model_name_or_path c "
        f"--num_padding_at_beginning 1 --per_device_generation_batch_size {batch} "
        f"--per_device_training_batch_size {batch} --generation_batches 1 --ppo_epochs 1 "
        f"--max_answer_seq_len 256 --max_prompt_seq_len 256 --actor_learning_rate {rate} "
        f"--critic_learning_rate 5e-6 --num_train_epochs 1 --actor_dropout 0.0 "
        f"--gradient_accumulation_steps {accumulate} --num_warmup_steps 100 "
        f"--actor_zero_stage {stage} --critic_zero_stage {stage} {SCHEDULE} {more}"
    )


STEP_2 = {
    "llama2/run_llama2_7b": rm(LLAMA, RM_STATIC, 8, "9.65e-6", 3, f"{SAVING} --offload"),
    "llama2/run_llama2_7b_lora": rm(
        LLAMA, RM_STATIC, 8, "9.65e-6", 3, f"{SAVING} --offload {LLAMA_LORA}"
    ),
    "opt/multi_node/run_350m": rm(OPT_350M, PAIRS, 2, "5e-5", 0),
    "opt/single_gpu/run_350m": (
        f"{OPT_350M} --gradient_accumulation_steps 4 --zero_stage 0 {BOARD} --deepspeed "
        "--output_dir ./output"
    ),
    "opt/single_node/run_350m": rm(OPT_350M, PAIRS, 4, "5e-5", 0),
}
DECAYED = "--actor_weight_decay 0.1 --critic_weight_decay 0.1"
ACTOR_LORA = "--actor_lora_dim 128 --actor_lora_module_name decoder.layers."
HYBRID, RECOMPUTE = "--enable_hybrid_engine", "--actor_gradient_checkpointing"
LLAMA_RLHF = f"{DECAYED} {RECOMPUTE} --critic_gradient_checkpointing --offload_reference_model"
BOTH_LORA = (
    "--actor_lora_dim 64 --critic_lora_dim 64 --actor_lora_module_name layers. "
    "--critic_lora_module_name layers."
)
SCRIPTS = {
    1: {
        "llama2/run_llama2_7b": sft("meta-llama/Llama-2-7b-hf", 4, 4, "9.65e-6", "0.", 3, SAVING),
        "llama2/run_llama2_7b_lora": sft(
            "meta-llama/Llama-2-7b-hf", 4, 4, "9.65e-6", "0.", 3, f"{SAVING} {LLAMA_LORA}"
        ),
        "opt/multi_node/run_66b": sft(
            "facebook/opt-66b", 4, 2, "1e-4", "0.1", 3, f"{SAVING} {OPT_LORA}"
        ),
        "opt/single_gpu/run_1.3b": (
            "--model_name_or_path facebook/opt-1.3b --gradient_accumulation_steps 8 "
            f"--lora_dim 128 --zero_stage 0 {BOARD} --deepspeed --output_dir ./output"
        ),
        "opt/single_gpu/run_6.7b_lora": sft(
            *("facebook/opt-6.7b", 8, 16, "1e-3", "0.", 0),
            f"--gradient_accumulation_steps 16 {SAVING} {OPT_LORA}",
        ),
        "opt/single_node/run_1.3b": sft("facebook/opt-1.3b", 8, 16, "9.65e-6", "0.", 2, BOARD),
        "opt/single_node/run_1.3b_lora": sft(
            "facebook/opt-1.3b", 8, 16, "1e-3", "0.1", 0, f"{OPT_LORA} --only_optimize_lora"
        ),
        "opt/single_node/run_13b": sft(
            "facebook/opt-13b", 4, 2, "1e-4", "0.1", 3, f"{SAVING} {OPT_LORA}"
        ),
        "opt/single_node/run_30b_lora": sft(
            "facebook/opt-30b", 4, 16, "9.65e-6", "0.", 3, f"{SAVING} --lora_dim 128"
        ),
        "opt/single_node/run_6.7b": sft("facebook/opt-6.7b", 6, 16, "9.65e-6", "0.", 3, SAVING),
        "other_language/run_chinese": sft(
            "bigscience/bloom-1b1", 8, 16, "9.65e-6", "0.", 2, CHINESE
        ),
        "other_language/run_japanese": (
            f"{JAPANESE} --model_name_or_path sberbank-ai/mGPT --per_device_train_batch_size 2 "
            "--per_device_eval_batch_size 2 --learning_rate 9.65e-6 --num_train_epochs 16 "
            f"--num_warmup_steps 0 {SCHEDULE}"
        ),
    },
    2: {name: f"{flags} --num_padding_at_beginning 1" for name, flags in STEP_2.items()},
    "dpo": {name: f"--loss dpo {flags}" for name, flags in STEP_2.items()},
    3: {
        "llama2/run_llama2_7b": rlhf(1, "9.65e-6", 3, f"{LLAMA_RLHF} {HYBRID}"),
        "llama2/run_llama2_7b_lora": rlhf(1, "9.65e-6", 3, f"{LLAMA_RLHF} {HYBRID} {BOTH_LORA}"),
        "llama2/run_llama2_7b_mixz": rlhf(
            1, "9.65e-6", 3, f"{LLAMA_RLHF} {BOTH_LORA} --enable_mixed_precision_lora"
        ),
        "opt/multi_node/run_66b": rlhf(
            *(4, "5e-4", 3),
            f"{DECAYED} {HYBRID} {RECOMPUTE} {ACTOR_LORA} --inference_tp_size 8 "
            "--tp_gather_partition_size 4",
        ),
        "opt/single_gpu/run_1.3b": (
            "--actor_model_name_or_path a --critic_model_name_or_path c --actor_zero_stage 0 "
            "--critic_zero_stage 0 --num_padding_at_beginning 1 --gradient_accumulation_steps 2 "
            f"--deepspeed --actor_lora_dim 128 {HYBRID} {RECOMPUTE} --actor_dropout 0.0 "
            "--output_dir ./output"
        ),
        "opt/single_gpu/run_6.7b_lora": rlhf(
            *(8, "5e-4", 0),
            f"--actor_lora_dim 128 {RECOMPUTE} --critic_gradient_checkpointing {HYBRID}",
            accumulate=16,
        ),
        "opt/single_node/run_1.3b": rlhf(4, "9.65e-6", 2, f"{HYBRID} --enable_ema {BOARD}"),
        "opt/single_node/run_1.3b_lora": rlhf(4, "9.65e-6", 2, f"{HYBRID} {ACTOR_LORA}"),
        "opt/single_node/run_13b": rlhf(
            16, "5e-4", 3, f"{HYBRID} --inference_tp_size 2 {RECOMPUTE} {ACTOR_LORA}"
        ),
        "opt/single_node/run_30b_lora": rlhf(4, "5e-4", 3, f"{RECOMPUTE} {HYBRID} {ACTOR_LORA}"),
        "opt/single_node/run_6.7b": rlhf(4, "9.65e-6", 3, f"{DECAYED} {RECOMPUTE} {HYBRID}"),
    },
}
CASES = [(step, name) for step, scripts in SCRIPTS.items() for name in scripts]


def parsed(step, name):
    config = CONFIGS[2 if step == "dpo" else step]
    return parser.parse(config, SCRIPTS[step][name].split())


def test_all_33_are_there():
    counts = {step: len(scripts) for step, scripts in SCRIPTS.items()}
    assert counts == {1: 12, 2: 5, "dpo": 5, 3: 11}


@pytest.mark.parametrize(("step", "name"), CASES)
def test_the_flags_of_a_script_pass_the_checks(step, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text("{}")
    parsed(step, name).validate()


@pytest.mark.parametrize(
    ("name", "sequences"), [("opt/single_gpu/run_1.3b", 32), ("opt/single_gpu/run_6.7b_lora", 128)]
)
def test_accumulation_over_rollouts(name, sequences):
    """Theirs steps once in 2 or 16 rollouts of 16 or 8 sequences, all by the policy before."""
    args = parsed(3, name)
    for processes in (1, 8):
        assert args.rollout_prompts(processes) == sequences * processes
        assert args.mini_batch_size(processes) == sequences * processes
    assert args.num_mini_batches == 1


@pytest.mark.parametrize(
    ("sizes", "prompts"),
    [
        ((8, 2, 4, 1, 2), 8),  # 16 sequences, of which a step takes 8
        ((4, 4, 8, 2, 1), 32),
        ((4, 4, 8, 1, 2), 16),
    ],
)
def test_a_rollout_has_the_sequences_of_a_step(sizes, prompts):
    names = (
        *("per_device_generation_batch_size", "gradient_accumulation_steps"),
        *("per_device_training_batch_size", "generation_batches", "num_samples_per_prompt"),
    )
    models = {"actor_model_name_or_path": "a", "critic_model_name_or_path": "c"}
    args = RLHFConfig(**models, **dict(zip(names, sizes, strict=True)))
    args.validate()
    assert args.rollout_prompts(3) == 3 * prompts
