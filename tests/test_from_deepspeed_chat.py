"""docs/from-deepspeed-chat.md: every flag of DeepSpeed-Chat, and what becomes of it here."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from documentation import CONFIGS, FLAGS, PAGES, TRAIN_FLAGS, known_flag, tables

from dschat.config import RLHFConfig, UserError, parser
from dschat.config.renamed import hint
from dschat.launch import recipe

# Every flag of DeepSpeed-Chat's three main.py, older names included, with a value as its own
# training scripts have it.
ALL_STEPS = (
    "--data_path Dahoas/rm-static --data_split 2,4,4 --data_output_path /tmp/data_files/ "
    "--num_train_epochs 1 --lr_scheduler_type cosine --gradient_accumulation_steps 1 "
    "--num_warmup_steps 100 --output_dir ./output --seed 1234 --local_rank -1 --offload "
    "--dtype bf16 --only_optimize_lora --compute_fp32_loss --enable_tensorboard "
    "--tensorboard_path ./output --add_eot_token --deepspeed --deepspeed_config ds.json "
    "--deepscale --deepscale_config ds.json "
)
ONE_MODEL = (
    "--model_name_or_path facebook/opt-350m --per_device_train_batch_size 8 "
    "--per_device_eval_batch_size 8 --max_seq_len 512 --learning_rate 5e-5 --weight_decay 0.1 "
    "--gradient_checkpointing --dropout 0.0 --zero_stage 3 --lora_dim 128 "
    "--lora_module_name decoder.layers. --lora_learning_rate 5e-4 --disable_dropout "
)
THEIRS = {
    1: ALL_STEPS + ONE_MODEL + "--sft_only_data_path pvduy/sharegpt --eot_token <|endoftext|> "
    "--print_loss",
    2: ALL_STEPS + ONE_MODEL + "--num_padding_at_beginning 1 --eval_interval 50 --eval_iters 100 "
    "--no_bf16_to_fp32_loss --no_fused_kernels",
    3: ALL_STEPS + "--unsupervised_dataset_name wikitext --unsupervised_dataset_config_name "
    "wikitext-103-v1 --unsup_coef 27.8 --actor_model_name_or_path a --critic_model_name_or_path c "
    "--num_padding_at_beginning 1 --per_device_generation_batch_size 4 "
    "--per_device_training_batch_size 4 --generation_batches 1 --ppo_epochs 1 "
    "--max_prompt_seq_len 256 --max_answer_seq_len 256 --actor_learning_rate 9.65e-6 "
    "--critic_learning_rate 5e-6 --actor_weight_decay 0.1 --critic_weight_decay 0.1 "
    "--preprocessing_num_workers 2 --enable_hybrid_engine --unpin_actor_parameters "
    "--release_inference_cache --inference_tp_size 2 --tp_gather_partition_size 4 "
    "--offload_reference_model --actor_zero_stage 3 --critic_zero_stage 3 "
    "--actor_gradient_checkpointing --critic_gradient_checkpointing --actor_dropout 0.0 "
    "--critic_dropout 0.0 --actor_lora_dim 128 --actor_lora_module_name decoder.layers. "
    "--critic_lora_dim 128 --critic_lora_module_name decoder.layers. --enable_ema "
    "--actor_lora_learning_rate 5e-4 --critic_lora_learning_rate 5e-4 "
    "--enable_mixed_precision_lora --align_overflow --print_answers --print_answers_interval 1 "
    "--enable_test_mode --test_stop_step 10 --per_device_train_batch_size 4 "
    "--per_device_mini_train_batch_size 4 --generation_batch_numbers 1 --disable_actor_dropout "
    "--disable_critic_dropout",
    "dpo": "--beta 0.1 --label_smoothing 0.0 --offload_reference_model",
    "train.py": "--step 1 --actor-model 1.3b --reward-model 350m --actor-zero-stage 2 "
    "--reward-zero-stage 2 --output-dir ./output --num-gpus 8 --deployment-type single_node",
}
DS_CHAT_FLAGS = {name for text in THEIRS.values() for name in re.findall(r"--([\w-]+)", text)}


def verdicts() -> dict[tuple[object, str], tuple[str, str]]:
    """(step, DeepSpeed-Chat's flag) -> (same, as, use or no; our name)."""
    found = {}
    for cells in tables(PAGES["from-deepspeed-chat.md"], "step", "here"):
        match = re.match(r"(same|as|use|no|ignored)(?: `--([\w.-]+)`)?(?::|$)", cells[2])
        assert match, cells
        for step in cells[1].split():
            for flag in re.findall(r"`--([\w-]+)`", cells[0]):
                key = (int(step) if step.isdecimal() else step, flag)
                assert key not in found, key
                found[key] = (match[1], match[2] or flag)
    return found


VERDICTS = verdicts()


def test_every_flag_of_deepspeed_chat_is_there():
    theirs = {
        (step, name) for step, text in THEIRS.items() for name in re.findall(r"--([\w-]+)", text)
    }
    assert theirs - set(VERDICTS) == set()
    assert set(VERDICTS) - theirs == set()  # and none that it never had


@pytest.mark.parametrize("step", THEIRS)
def test_a_flag_is_what_the_table_says(step):
    names = FLAGS.get(step, TRAIN_FLAGS)
    config = CONFIGS.get(step, recipe.TrainConfig)
    own = {f.name for f in fields(config)} if step in CONFIGS else names
    for (where, flag), (verdict, ours) in VERDICTS.items():
        if where != step:
            continue
        flag, ours = flag.replace("-", "_"), ours.replace("-", "_")
        said = f"step {step}: {flag}: {verdict} {ours}"
        assert (flag in names) == (verdict in ("same", "as", "ignored")), said
        assert verdict != "ignored" or flag not in own, said
        assert verdict != "same" or (flag == ours and flag in own), said
        assert verdict != "as" or ours in own, said
        assert verdict != "as" or flag not in own or step == "dpo", said
        assert verdict != "use" or (known_flag(ours) and (ours in names or "." in ours)), said


def test_the_program_says_what_the_page_says():
    """Of a flag that is not accepted, in the same words."""
    prefixed = {f"step{n}.{flag}" for n, flags in FLAGS.items() for flag in flags}
    for flags, steps, here in tables(PAGES["from-deepspeed-chat.md"], "step", "here"):
        said = re.sub(r"`|, see \[.*\)", "", here).replace("no: ", "leave it out: ")
        for flag in re.findall(r"`--([\w-]+)`", flags) if here.startswith(("use", "no")) else ():
            for step in steps.split():
                names = FLAGS[int(step)] if step.isdecimal() else TRAIN_FLAGS | prefixed
                answer = hint(flag.replace("-", "_"), names, "--")
                assert answer == f"; {said}", (flag, step)


@pytest.mark.parametrize("step", CONFIGS)
def test_what_is_accepted_parses_as_their_scripts_write_it(step, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text("{}")
    groups = [group.split() for group in re.split(r" (?=--)", THEIRS[step])]
    accepted = {"same", "as", "ignored"}
    kept = [g for g in groups if VERDICTS[step, g[0][2:]][0] in accepted]
    argv = [word for group in kept for word in group]
    given = parser.given(CONFIGS[step], argv)
    found = [VERDICTS[step, group[0][2:]] for group in kept]
    assert set(given) == {ours for verdict, ours in found if verdict != "ignored"}
    parser.parse(CONFIGS[step], argv)
    for group in groups:
        if group not in kept:
            with pytest.raises(UserError, match=f"unknown flag {group[0]}"):
                parser.parse(CONFIGS[step], [*argv, *group])


def test_their_dpo_script_is_a_loss_of_step_2():
    """It has step 2's flags, save the one of reward models, and its own."""
    steps = re.sub(r"--num_padding_at_beginning \S+", "", THEIRS[2])
    groups = [g.split() for g in re.split(r" (?=--)", f"{steps} {THEIRS['dpo']}")]
    kept = [g for g in groups if VERDICTS.get((2, g[0][2:]), ["same"])[0] in ("same", "as")]
    argv = [word for group in kept for word in group if "deepspeed" not in group[0]]
    config = parser.parse(CONFIGS[2], ["--loss", "dpo", *argv])
    assert (config.used_beta, config.offload) == (0.1, ["auto", "reference"])


def test_defaults_that_differ():
    rows = tables(PAGES["from-deepspeed-chat.md"], "step", "there", "here")
    assert len(rows) > 5
    for flag, steps, _, ours in rows:
        for step in map(int, steps.split()):
            name = flag.strip("`-")
            config = CONFIGS[step]()
            value = (vars(config) | config.chosen())[name]
            shown = " ".join(value) if isinstance(value, list) else str(value)
            assert shown == ours, (step, name)
    paragraph = re.search(r"PPO's constants.*?\n\n", PAGES["from-deepspeed-chat.md"], re.DOTALL)
    constants = re.findall(r"`--(\w+)`\s+([\d.]+\d|\d)", paragraph[0])
    assert len(constants) == 6
    config = RLHFConfig()
    used = {"clip_reward": config.clip_where(True), "cliprange": config.cliprange_sides[0]}
    for name, value in constants:
        assert (vars(config) | config.chosen() | used)[name] == float(value), name
