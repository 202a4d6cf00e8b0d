"""Finished steps: which settings differ, and when a step is reused or refused."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from dschat.checkpoint.compatibility import describe
from dschat.config import RLHFConfig, SFTConfig, UserError
from dschat.launch.recipe import STEPS
from dschat.launch.step_runs import SETTINGS, StepRun, check_finished
from dschat.launch.step_runs import finished_differences as differences
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
        (
            {"per_device_train_batch_size": 4},
            {"per_device_train_batch_size": 2},
            "rows a step: 4 -> 2",
        ),
        ({}, {"dtype": "bf16"}, "dtype: auto -> bf16"),
        ({}, {"eot_token": "<|x|>"}, "eot_token: none -> <|x|>"),
        # no difference
        ({}, {}, ""),
        ({}, {"model_name_or_path": None}, ""),  # not given
        ({"model_name_or_path": "base"}, {"model_name_or_path": "../work/./base"}, ""),
        ({"data_path": ["rows.jsonl:2"]}, {"data_path": ["../work/rows.jsonl:2"]}, ""),
        ({"zero_stage": 3, "offload": ["auto"]}, {"logging_steps": 5, "save_steps": 0}, ""),
        ({"adam_betas": [0.9, 0.95]}, {"adam_betas": [0.9, 0.95]}, ""),
        ({"packing": "auto"}, {"packing": "off"}, ""),
        ({}, {"dtype": "fp32"}, ""),  # what auto is on a CPU
        ({}, {"shuffle_buffer_size": 5}, ""),  # has no effect
    ],
)
def test_what_counts_as_a_difference(then, now, expected):
    finish(sft(**then))
    difference = describe(differences(sft(**now), None, num_processes=1))
    assert difference.startswith(expected)
    assert bool(difference) == bool(expected)


def test_the_number_of_processes_counts_by_the_size_of_a_step():
    """As it does for a step that was interrupted."""
    rows = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    finish(sft(**rows), num_processes=2)
    larger = describe(differences(sft(**rows), None, num_processes=8))
    assert larger == "rows a step: 16 -> 64"
    assert not differences(sft(**rows), ["seed"], num_processes=8)  # outside of --step
    alone = {"per_device_train_batch_size": 16}
    assert not differences(sft(**alone), None, num_processes=1)
    given = describe(differences(sft(**alone), ["per_device_train_batch_size"], num_processes=4))
    assert given == "rows a step: 16 -> 64"


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
    same = StepRun(STEPS[1], asdict(sft()), "finished")
    other = StepRun(STEPS[1], asdict(sft(seed=4)), "finished")
    remedies = r"\(seed: 3 -> 4\); --reuse uses it as it is, --step1.overwrite_output_dir trains it"
    with pytest.raises(UserError, match=rf"out/step1_sft is finished, with .*{remedies}"):
        check_finished(other, None, 1, reuse=False)
    with pytest.raises(UserError, match="--step1.overwrite_output_dir, with 1 in --step, trains"):
        check_finished(other, ["seed"], 1, reuse=False)
    assert check_finished(other, None, 1, reuse=True) == [
        "step 1 is reused from out/step1_sft with other settings (seed: 3 -> 4)"
    ]
    assert check_finished(same, None, 1, reuse=False) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"environment_workers": 8},
        {"environment_pool": "process"},
        {"kl_horizon": 5},
        {"inference_tp_size": 2, "critic_zero_stage": 3},
    ],
    ids=str,
)
def test_flags_that_change_no_result_are_no_difference(changed):
    finish(rlhf())
    assert not differences(rlhf(**changed), None, 1)
    finish(rlhf(kl_target=1.0))
    horizon = describe(differences(rlhf(kl_target=1.0, **changed), None, 1))
    assert horizon == ("kl_horizon: 10000 -> 5" if "kl_horizon" in changed else "")


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_a_base_model_that_was_edited_in_place_is_a_difference(file):
    """A download has no mark."""
    Path("base").mkdir()
    for name in ("config.json", "README.md", file):
        Path("base", name).write_text("as it was")
    given = {"model_name_or_path": "base"}
    finish(sft(**given))
    Path("base/README.md").write_text("edited")
    assert not differences(sft(**given), None, 1)
    Path("base", file).write_text("edited")
    changed = describe(differences(sft(**given), None, 1))
    assert changed == "model_name_or_path: base -> base, changed since"
    Path("base").rename("elsewhere")  # as it is now
    finish(sft(**given | {"model_name_or_path": "elsewhere"}))
    Path("elsewhere").rename("base")
    assert not differences(sft(model_name_or_path="elsewhere"), None, 1)
