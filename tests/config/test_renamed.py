"""Old flags: those of DeepSpeed-Chat work, others name their new form, records are translated."""

import json
from dataclasses import asdict, fields
from types import SimpleNamespace

import pytest
import yaml

from dschat.checkpoint.compatibility import changes, settings_of
from dschat.checkpoint.manifest import manifest_bytes, read_manifest
from dschat.config import RewardConfig, RLHFConfig, SFTConfig, UserError, parser
from dschat.config.renamed import ELSEWHERE, RENAMED, accepted
from dschat.launch.step_runs import finished_differences
from dschat.observability.metrics_log import SETTINGS
from dschat.trainers import SFTTrainer

# Settings of an older version, and the same settings today.
OLD = {
    "offload": ({"offload": True, "offload_reward_model": True}, {"offload": ["auto", "reward"]}),
    "no offload": ({"offload": False, "offload_optimizer": False}, {"offload": None}),
    "parts": (
        {"offload_parameters": True, "offload_training_states": True},
        {"offload": ["params", "rollout"]},
    ),
}
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
    if name in accepted([flag]):
        parser.given(RLHFConfig, [f"--{name}"])
    else:
        with pytest.raises(UserError, match=f"unknown flag --{line}"):
            parser.given(RLHFConfig, [f"--{name}", "1"])
    with pytest.raises(UserError, match=f"here: unknown key {line}"):
        parser.values_of(RLHFConfig, {name: 1}, "here")


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


@pytest.mark.parametrize("config", [SFTConfig, RewardConfig, RLHFConfig])
def test_names_from_elsewhere(config):
    """Each leads to a flag of some step; those that are flags of a step are no names of another."""
    names = {f.name for f in fields(config)}
    for name in {name for others in ELSEWHERE.values() for name in others}:
        forms = [form for form, others in ELSEWHERE.items() if name in others]
        known = [form for form in forms if form.partition(" ")[0] in names]
        if known and name not in parser.flag_names(config):
            with pytest.raises(UserError, match=f"unknown flag --{name}; here it is --{known[0]}$"):
                parser.parse(config, [f"--{name}", "1"])


def test_every_name_from_elsewhere_leads_somewhere():
    names = {f.name for config in (SFTConfig, RewardConfig, RLHFConfig) for f in fields(config)}
    assert {form.partition(" ")[0] for form in ELSEWHERE} <= names


def test_a_setting_of_a_trainer_and_a_key_of_a_file_are_led_there_too(tmp_path):
    with pytest.raises(UserError, match="no setting is called lr; here it is learning_rate"):
        SFTTrainer("m", "d", lr=1e-5)
    with pytest.raises(UserError, match="unknown key epochs; here it is num_train_epochs"):
        parser.values_of(SFTConfig, {"epochs": 2}, "a.yaml")
