"""Old flags: those of DeepSpeed-Chat work, others name their new form, records are translated; and
names of other trainers are answered by what they are here.
"""

import json
import re
from dataclasses import asdict, fields
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from dschat import __version__
from dschat.checkpoint.compatibility import changes, settings_of
from dschat.checkpoint.manifest import manifest_bytes, read_manifest
from dschat.config import RewardConfig, RLHFConfig, SFTConfig, UserError, parser
from dschat.config.renamed import (
    _FLAG,
    DEPRECATED,
    RENAMED,
    accepted,
    elsewhere,
    hint,
    warn_if_deprecated,
)
from dschat.launch import recipe
from dschat.launch.earlier_runs import finished_differences
from dschat.observability.metrics_log import SETTINGS
from dschat.trainers import GRPOTrainer, SFTTrainer

# Settings of an older version, and the same settings today.
OLD = {
    "offload": ({"offload": True, "offload_reward_model": True}, {"offload": ["auto", "reward"]}),
    "no offload": ({"offload": False, "offload_optimizer": False}, {"offload": None}),
    "parts": (
        {"offload_parameters": True, "offload_training_states": True},
        {"offload": ["params", "rollout"]},
    ),
}
OLD["no endpoint"] = ({"reward_url": None, "reward_url_weight": 1.0}, {})
OLD["without effect"] = ({"num_padding_at_beginning": 1, "deepspeed": "true"}, {})
OLD["end of turn"] = ({"add_eot_token": True, "eot_token": "<|x|>"}, {"eot_token": "<|x|>"})
OLD["no end of turn"] = ({"add_eot_token": False, "eot_token": "<|x|>"}, {"eot_token": None})
OLD["text"] = (
    {"unsupervised_dataset_name": "wikitext", "unsupervised_dataset_config_name": "103"},
    {"unsupervised_dataset_name": "wikitext:103"},
)
OLD["columns"] = (
    {"prompt_column": "q", "chosen_column": "a=b", "messages_column": None},
    {"columns": ["prompt=q", "chosen=a=b"]},
)
OLD["a file"] = ({"deepspeed": "ds.json"}, {"deepspeed_config": "ds.json"})
OLD["sinks"] = (
    {"enable_tensorboard": False, "enable_wandb": True},
    {"report_to": ["wandb"]},
)
OLD["one more sink"] = ({"enable_wandb": True}, {"report_to": ["tensorboard", "wandb"]})
OLD["no sink"] = ({"enable_tensorboard": False}, {"report_to": ["none"]})
older = pytest.mark.parametrize(("old", "now"), OLD.values(), ids=OLD)


@pytest.mark.parametrize(
    ("config_class", "argv", "expected"),
    [
        (RLHFConfig, "--offload", ["auto"]),
        (RLHFConfig, "--offload optimizer,params rollout", ["optimizer", "params", "rollout"]),
        (RLHFConfig, "--offload_reference_model --offload", ["auto", "reference"]),
        (RLHFConfig, "--offload --offload-reference-model true", ["auto", "reference"]),
        (RewardConfig, "--offload_reference_model", ["reference"]),
        (SFTConfig, "--offload optimizer --offload params", ["params"]),
        (SFTConfig, "--offload --no_offload", None),
        (SFTConfig, "--offload false", None),
    ],
)
def test_offload(config_class, argv, expected):
    assert parser.given(config_class, argv.split()) == {"offload": expected}


@pytest.mark.parametrize("name", RENAMED)
def test_an_old_flag_works_or_names_the_new_one(name):
    flag, value = RENAMED[name]
    line = f"{name}; it is now --{flag} {value}"
    if name in elsewhere():  # without effect
        line = f"{name}; leave it out: "
    if name in accepted([flag]):
        parser.given(RLHFConfig, [f"--{name}", *(["x"] if "column" in name else [])])
    else:
        with pytest.raises(UserError, match=f"unknown flag --{line}"):
            parser.given(RLHFConfig, [f"--{name}", "1"])
    with pytest.raises(UserError, match=f"here: unknown key {line.replace('--', '')}"):
        parser.values_of(RLHFConfig, {name: 1}, "here")


def test_a_deprecated_flag_works_with_one_warning(caplog):
    """Until the minor version after next begins: then its row must go."""
    warn_if_deprecated.cache_clear()
    for _ in range(2):
        given = parser.given(SFTConfig, ["--prompt-column", "q", "--offload_optimizer"])
        assert given == {"columns": ["prompt=q"], "offload": ["optimizer"]}
    assert [record.getMessage() for record in caplog.records] == [
        "--prompt_column is deprecated: it is now --columns prompt=COLUMN; version 0.3 will not "
        "take it",
        "--offload_optimizer is deprecated: it is now --offload optimizer; version 0.3 will not "
        "take it",
    ]
    numbers = [[*map(int, version.split("."))] for version in DEPRECATED.values()]
    assert min(numbers) > [*map(int, __version__.split(".")[:2])]
    assert accepted(parser.flag_names(RLHFConfig)).keys() >= DEPRECATED.keys()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--add_eot_token", "<|endoftext|>"),
        ("--eot_token <|x|> --add-eot-token", "<|x|>"),
        ("--eot_token <|x|>", "<|x|>"),
    ],
)
def test_the_end_of_a_turn(argv, expected):
    assert parser.given(SFTConfig, argv.split()) == {"eot_token": expected}


@older
def test_arguments_of_an_older_script(old, now):
    assert RLHFConfig.from_namespace(SimpleNamespace(**old)) == RLHFConfig(**now)


@older
def test_a_checkpoint_of_an_older_version_resumes(tmp_path, old, now):
    then = {**settings_of(RLHFConfig()), **old}
    folder = tmp_path / "step_000001"
    folder.mkdir()
    (folder / "manifest.json").write_bytes(manifest_bytes(1, 1, then, {}))
    found = read_manifest(folder)
    assert {name: found.settings.get(name) for name in now} == now
    assert changes(found, RLHFConfig(**now)) == []


@older
def test_a_finished_step_of_an_older_version_is_the_same(tmp_path, old, now):
    config = RLHFConfig(**now, output_dir=str(tmp_path))
    settings = {name: value for name, value in asdict(RLHFConfig()).items() if name not in now}
    content = settings | old | {"output_dir": str(tmp_path)}
    (tmp_path / SETTINGS).write_text(yaml.safe_dump(content))
    (tmp_path / "COMPLETE").write_text(json.dumps({"num_processes": 1, "contents": {}}))
    assert finished_differences(config, None, 1) == []


# -- names of other trainers

FLAGS = {n: parser.flag_names(step.config_class) for n, step in recipe.STEPS.items()}
OF_TRAIN = set().union(
    parser.flag_names(recipe.TrainConfig),
    *FLAGS.values(),
    *({f"step{n}.{flag}" for flag in flags} for n, flags in FLAGS.items()),
)
# Part of a section's title -> the steps that do what it does.
STEPS_OF = {
    **dict.fromkeys(("GRPO", "RLOO", "Distillation", "train_ppo", "train_kd", "ppo_tr"), (3,)),
    **dict.fromkeys(("DPO", "KTO", "Reward", "_dpo", "_kto", "_rm", "_prm"), (2,)),
    **dict.fromkeys(("SFT", "_sft", "sft_"), (1,)),
    **dict.fromkeys(("ModelConfig", "TrainingArguments"), (1, 2, 3)),
}


def settings_elsewhere():
    """(title of the section, name) of every setting in trainer_settings.txt."""
    title = ""
    for line in Path(__file__).with_name("trainer_settings.txt").read_text().splitlines():
        if line.startswith("["):
            title = line.strip("[]")
        elif not line.startswith("#"):
            parent, _, names = line.rpartition(": ")
            yield from ((title, f"{parent}.{name}".lstrip(".")) for name in names.split())


def test_every_setting_of_other_trainers_has_an_answer():
    """In each step that does what their trainer does."""
    found = {}
    for title, name in settings_elsewhere():
        (steps,) = (steps for part, steps in STEPS_OF.items() if part in title)
        found |= {(name, step): title for step in steps if name not in FLAGS[step]}
    without = [key for key in found if key[0] != "args" and not hint(key[0], FLAGS[key[1]])]
    assert without == []


@pytest.mark.slow  # loads transformers, whose versions add settings
def test_the_list_of_transformers_is_complete():
    from transformers import TrainingArguments

    listed = {name for title, name in settings_elsewhere() if "TrainingArguments" in title}
    assert {f.name for f in fields(TrainingArguments) if f.init} <= listed


def test_every_row_is_about_a_setting():
    """A pattern that matches nothing, or only what earlier rows match, is an error. Names without
    a dot may be those of earlier versions, or what users write.
    """
    names = {name for _, name in settings_elsewhere()}
    patterns = [row for row in elsewhere() if "*" in row]
    exact = elsewhere().keys() - set(patterns)
    assert {name for name in exact if "." in name} <= names
    left = names - exact
    for row in patterns:
        matched = {name for name in left if fnmatchcase(name, row)}
        assert matched, row
        left -= matched


def test_a_name_has_one_row():
    text = Path(parser.__file__).with_name("other_trainers.ini").read_text()
    keys = ", ".join(re.findall(r"^([^\s#\[][^=]*?) *=", text, re.M)).split(", ")
    assert sorted(keys) == sorted(elsewhere())


def test_an_answer_names_flags_that_exist():
    for text in {text for texts in elsewhere().values() for text in texts}:
        assert re.match(r"use --\S|no: \S", text), text
        assert len(text) <= 120, text
        for flag, value in _FLAG.findall(text):
            assert flag in OF_TRAIN, text
            if value:
                step = next(n for n, known in FLAGS.items() if flag in known)
                parser.given(recipe.STEPS[step].config_class, [f"--{flag}", value])


# What users meet first, to the word.
@pytest.mark.parametrize(
    ("step", "name", "expected"),
    [
        (1, "lr", "use --learning_rate"),
        (3, "lr", "use --actor_learning_rate and --critic_learning_rate"),
        (3, "num_generations", "use --num_samples_per_prompt"),
        (3, "beta", "use --kl_coef: by default 0.1 for gae, 0 for grpo as in TRL"),
        (3, "mask_truncated_completions", "use --overlong_filter"),
        (3, "delta", "use --dual_clip: the same bound"),
        (
            1,
            "warmup_ratio",
            "use --num_warmup_steps: optimizer steps, the ratio times their number",
        ),
        (1, "save_strategy", "use --save_steps: every N steps; 0 for no"),
        (1, "bf16", "use --dtype bf16: auto is bf16 on a GPU and fp32 on a CPU"),
        (3, "use_vllm", "use --rollout_backend vllm"),
        (1, "train_dataset", "use --data_path"),
        (1, "reward_funcs", ""),  # no step 1 has it, and no guess
        (1, "learning_rte", "did you mean --learning_rate?"),
        (3, "vllm_model_impl", "leave it out: settings of vLLM are chosen by dschat"),
        (3, "algorithm.gamma", "use --gamma"),
        (3, "load_best_model_at_end", "use --keep_best: the best model is saved as actor_best"),
    ],
)
def test_names_that_users_meet(step, name, expected):
    assert hint(name, FLAGS[step], "--").removeprefix("; ") == expected


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("save_strategy", "hub_strategy"),
        ("peft_config", "deepspeed_config"),
        ("environment_factory", "environment_lag"),
        ("reward_weights", "reward_model_weight"),
        ("scale_rewards", "clip_reward"),
        ("logging_dir", "logging_steps"),
    ],
)
def test_no_name_is_guessed_from_half_of_its_letters(name, guess):
    assert guess not in hint(name, FLAGS[3], "--")


def test_all_names_are_in_one_message():
    with pytest.raises(UserError) as error:
        parser.parse(
            RLHFConfig, ["--num-generations", "8", "--seed", "8", "--loss_typo=x", "--beta", "8"]
        )
    assert str(error.value) == (
        "unknown flags: --num-generations (use --num_samples_per_prompt), --loss_typo, "
        "--beta (use --kl_coef: by default 0.1 for gae, 0 for grpo as in TRL)"
    )
    with pytest.raises(UserError, match=r"a.yaml: unknown keys: lr \(use learning_rate\), x$"):
        parser.values_of(SFTConfig, {"lr": 2, "seed": 1, "x": 1}, "a.yaml")
    config, groups = recipe.parse_args(["--lr", "1", "--step3.lr", "2", "--step2.sed", "1"])
    with pytest.raises(UserError) as error:
        recipe.given_steps(config, groups, recipe.Recipe(), Path("out"))
    assert str(error.value) == (
        "unknown flags: --lr (use --learning_rate; use --actor_learning_rate and "
        "--critic_learning_rate), --step3.lr (use --step3.actor_learning_rate and "
        "--step3.critic_learning_rate), --step2.sed (did you mean --step2.seed?)"
    )


def test_settings_of_verl_are_recognized_without_dashes():
    argv = ["--seed", "1", "actor_rollout_ref.rollout.n=8", "algorithm.gamma=1", "a.b=1"]
    with pytest.raises(UserError) as error:
        parser.parse(RLHFConfig, argv)
    expected = "actor_rollout_ref.rollout.n (use --num_samples_per_prompt), algorithm.gamma (use"
    assert f"unknown flags: {expected} --gamma)" == str(error.value)
    with pytest.raises(UserError, match="unexpected argument 'a.b=1'; flags look like"):
        parser.parse(RLHFConfig, ["a.b=1", *argv])


def test_python_has_the_names_of_python():
    with pytest.raises(UserError) as error:
        GRPOTrainer("m", "d", reward_function=len, dataset="d", use_vllm=True, reward_fnss=1, lr=1)
    assert str(error.value) == (
        "GRPOTrainer: unknown settings: reward_function (use reward_fns), dataset (use data), "
        'use_vllm (use rollout_backend="vllm"), reward_fnss (did you mean reward_fns?), '
        "lr (use actor_learning_rate and critic_learning_rate)"
    )
    with pytest.raises(UserError, match="setting train_datset; did you mean train_dataset"):
        SFTTrainer("m", train_datset="d")
    with pytest.raises(UserError, match="setting processing_clas; did you mean processing_"):
        GRPOTrainer("m", processing_clas=None, reward_fns=len)
    with pytest.raises(UserError, match="SFTTrainer: unknown setting lr; use learning_rate$"):
        SFTTrainer("m", "d", lr=1e-5)
