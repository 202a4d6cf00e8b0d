"""Finished steps: which settings differ, and when a step is reused or refused."""

import json
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import yaml

from dschat.checkpoint.compatibility import MAY_CHANGE, describe
from dschat.config import RewardConfig, RLHFConfig, SFTConfig, UserError
from dschat.launch import finished_steps
from dschat.launch.finished_steps import LAYOUT, SETTINGS, check_finished, differences
from dschat.launch.recipe import STEPS
from dschat.runtime.output_dir import COMPLETE, record_of


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("rows.jsonl").write_text('{"prompt": "a", "chosen": "b"}\n')


def sft(**values):
    given = {"model_name_or_path": "hub/actor", "output_dir": "out/step1_sft", "seed": 3}
    return SFTConfig(**given | values)


def finish(config, num_processes=1):
    """Write the files of a step that finished with ``config``."""
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SETTINGS).write_text(yaml.safe_dump(asdict(config)))
    record = json.loads(record_of(config)) | {"num_processes": num_processes}
    (folder / COMPLETE).write_text(json.dumps(record))
    return config


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        ({}, {"seed": 4}, "seed: 3 -> 4"),
        ({}, {"model_name_or_path": "hub/b"}, "model_name_or_path: hub/actor -> hub/b"),
        ({"max_steps": 9}, {}, "max_steps: 9 -> 0"),
        ({"data_path": ["rows.jsonl"]}, {"data_path": ["rows.jsonl:0.5"]}, "data_path: "),
        ({"data_path": ["rows.jsonl"]}, {"data_path": ["rows.jsonl", "hub/x"]}, "data_path: "),
        ({"data_path": ["a/rows.jsonl"]}, {"data_path": ["rows.jsonl"]}, "data_path: a/rows"),
        ({"per_device_train_batch_size": 4}, {"per_device_train_batch_size": 2}, "per_device_"),
        # no difference
        ({}, {}, ""),
        ({}, {"model_name_or_path": None}, ""),  # not given
        ({"model_name_or_path": "base"}, {"model_name_or_path": "../work/./base"}, ""),
        ({"data_path": ["rows.jsonl:2"]}, {"data_path": ["../work/rows.jsonl:2"]}, ""),
        ({"zero_stage": 3, "offload": True}, {"logging_steps": 5, "save_steps": 0}, ""),
        ({"adam_betas": [0.9, 0.95]}, {"adam_betas": [0.9, 0.95]}, ""),
    ],
)
def test_what_counts_as_a_difference(then, now, expected):
    finish(sft(**then))
    difference = describe(differences(sft(**now), None, num_processes=1))
    assert difference.startswith(expected)
    assert bool(difference) == bool(expected)


def test_the_number_of_processes_is_no_difference():
    rows = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    finish(sft(**rows), num_processes=2)
    assert not differences(sft(**rows), None, num_processes=8)  # equal per process
    alone = {"per_device_train_batch_size": 16}
    assert not differences(sft(**alone), None, num_processes=1)  # equal in total
    both = describe(differences(sft(**alone), None, num_processes=4))
    assert both == "gradient_accumulation_steps: 2 -> 1; per_device_train_batch_size: 4 -> 16"


def test_edited_data_differs_and_moved_data_does_not(tmp_path):
    finish(sft(data_path=["rows.jsonl"]))
    (tmp_path / "away").mkdir()
    away = Path("rows.jsonl").rename(tmp_path / "away/rows.jsonl")
    moved = sft(data_path=[str(away)])
    assert not differences(moved, None, 1)
    away.write_text("{}")
    assert describe(differences(moved, None, 1)).startswith("data_path: rows.jsonl -> ")
    away.rename("rows.jsonl")
    edited = describe(differences(sft(data_path=["rows.jsonl"]), None, 1))
    assert edited == "data_path: rows.jsonl -> rows.jsonl, changed since"


def rlhf(out="out", **values):
    models = {f"{name}_model_name_or_path": f"{out}/step1_sft" for name in ("actor", "critic")}
    return RLHFConfig(**models | {"output_dir": f"{out}/step3_rlhf"} | values)


def test_a_moved_run_is_equal_and_a_retrained_model_is_not(tmp_path, monkeypatch):
    finish(sft())
    finish(rlhf())
    Path("out").rename("elsewhere")
    assert not differences(rlhf("elsewhere"), None, 1)
    monkeypatch.chdir(tmp_path)
    assert not differences(rlhf("work/elsewhere"), None, 1)
    finish(sft(output_dir="work/elsewhere/step1_sft"))
    again = [name for name, *_ in differences(rlhf("work/elsewhere"), None, 1)]
    assert [n for n in again if "reward" not in n] == [
        "actor_model_name_or_path",
        "critic_model_name_or_path",
    ]


def test_a_step_outside_of_step_flag_is_compared_by_given_fields():
    finish(sft(max_steps=9))
    assert differences(sft(seed=4), ["model_name_or_path"], 1) == []
    assert differences(sft(seed=4), ["seed"], 1) == [("seed", 3, 4)]


def test_an_older_complete_file_is_compared_by_settings():
    config = finish(sft(data_path=["rows.jsonl"]))
    Path("rows.jsonl").write_text("{}")
    for mark in ("", "yes", "1"):
        (Path(config.output_dir) / COMPLETE).write_text(mark)
        assert not differences(sft(data_path=["./rows.jsonl"]), None, 1)
    assert describe(differences(sft(seed=4, data_path=["rows.jsonl"]), None, 1)) == "seed: 3 -> 4"
    settings = Path(config.output_dir) / SETTINGS
    settings.write_text("model_name_or_path: hub/actor\nseed: 3\n")  # a version with fewer flags
    assert describe(differences(sft(max_steps=1), None, 1)) == "max_steps: 0 -> 1"
    settings.unlink()
    assert not differences(sft(seed=4), None, 1)


def test_the_error_names_both_remedies():
    finish(sft())
    other = sft(seed=4)
    remedies = r"\(seed: 3 -> 4\); --reuse uses it as it is, --step1.overwrite_output_dir trains it"
    with pytest.raises(UserError, match=rf"out/step1_sft is finished, with .*{remedies}"):
        check_finished(STEPS[1], other, None, 1, reuse=False)
    with pytest.raises(UserError, match="--step1.overwrite_output_dir, with 1 in --step, trains"):
        check_finished(STEPS[1], other, ["seed"], 1, reuse=False)
    assert check_finished(STEPS[1], other, None, 1, reuse=True) == [
        "step 1 is reused from out/step1_sft with other settings (seed: 3 -> 4)"
    ]
    assert check_finished(STEPS[1], sft(), None, 1, reuse=False) == []


def test_layout_names_flags():
    known = {f.name for config in (SFTConfig, RewardConfig, RLHFConfig) for f in fields(config)}
    bare = {name.removeprefix("actor_").removeprefix("critic_") for name in known}
    assert bare >= finished_steps.LAYOUT
    assert not LAYOUT & MAY_CHANGE.keys()
