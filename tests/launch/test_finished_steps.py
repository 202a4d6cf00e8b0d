"""Finished steps: which settings differ, and when a step is reused or refused."""

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from damages import DAMAGES, flip
from quick import slow, some

from dschat.checkpoint.compatibility import describe
from dschat.checkpoint.manifest import Damaged
from dschat.config import RLHFConfig, SFTConfig, UserError
from dschat.launch.earlier_runs import SETTINGS, check_finished
from dschat.launch.earlier_runs import finished_differences as differences
from dschat.launch.recipe import STEPS, StepRun
from dschat.runtime.output_dir import COMPLETE, record_of, sealed


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
    (folder / COMPLETE).write_text(sealed(folder, json.dumps(record) + "\n"))
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
        ({}, {"on_callback_error": "log"}, ""),  # has no effect
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


def unknown(*args) -> str:
    with pytest.raises(Damaged) as problem:
        differences(*args)
    return str(problem.value)


def test_a_record_without_a_checksum_is_an_older_version_s():
    """Its settings may lack newer flags, and its data may be unknown, which is not equal."""
    folder = Path(finish(sft(data_path=["rows.jsonl"])).output_dir)
    record = json.loads((folder / COMPLETE).read_text().splitlines()[0])
    (folder / SETTINGS).write_text("model_name_or_path: hub/actor\nseed: 3\ndata_path: rows.jsonl")
    for text in (json.dumps(record), json.dumps(record) + "\n"):
        (folder / COMPLETE).write_text(text)
        changed = describe(differences(sft(max_steps=1, data_path=["rows.jsonl"]), None, 1))
        assert changed == "max_steps: 0 -> 1"
    (folder / COMPLETE).write_text(json.dumps(record | {"contents": {}}))
    changed = describe(differences(sft(data_path=["rows.jsonl"]), None, 1))
    assert changed == "data_path: rows.jsonl -> rows.jsonl, changed since"
    Path("rows.jsonl").unlink()
    assert not differences(sft(data_path=["rows.jsonl"]), None, 1)


QUICK = [(SETTINGS, "bit"), (SETTINGS, "folder"), (SETTINGS, "not UTF-8"), (SETTINGS, "null")]
QUICK += [(COMPLETE, "half"), (COMPLETE, "pipe"), (COMPLETE, "deep"), (COMPLETE, "digits")]


@pytest.mark.parametrize(
    ("name", "damage"), some(itertools.product([SETTINGS, COMPLETE], DAMAGES), QUICK)
)
def test_what_is_not_known_is_not_equal(name, damage):
    folder = Path(finish(sft(data_path=["rows.jsonl"])).output_dir)
    DAMAGES[damage](folder / name)
    said = unknown(sft(data_path=["rows.jsonl"]), None, 1)
    assert said in (f"{name} cannot be read", f"{SETTINGS} or {COMPLETE} was changed since")
    assert differences(sft(), [], 1) == []  # outside of --step, and nothing given
    run = StepRun(STEPS[1], "out/step1_sft", asdict(sft()))
    note = check_finished(run, 1, reuse=True)
    assert note == f"step 1 is reused from out/step1_sft with unknown settings ({said})"
    with pytest.raises(UserError, match=r"is finished, with unknown settings \(.*; --reuse uses"):
        check_finished(run, 1, reuse=False)


def test_a_record_that_is_gone():
    folder = Path(finish(sft()).output_dir)
    for text in ("", "yes", "1", "[]", "{}", "null"):  # empty: that of the first versions
        (folder / COMPLETE).write_text(text)
        assert unknown(sft(), None, 1) == "COMPLETE cannot be read"
    (folder / SETTINGS).unlink()
    assert unknown(sft(), None, 1) == "training_config.yaml cannot be read"


@pytest.mark.parametrize("apart", [101, *slow([11])])
@pytest.mark.parametrize("name", [SETTINGS, COMPLETE])
def test_any_byte_of_the_record(name, apart):
    file = Path(finish(sft()).output_dir) / name
    whole = file.read_bytes()
    for place in range(0, len(whole), apart):
        flip(file, place / len(whole), 4)
        unknown(sft(), None, 1)
        file.write_bytes(whole)
    assert differences(sft(), None, 1) == []


def test_the_error_names_both_remedies():
    finish(sft())
    same = StepRun(STEPS[1], "out/step1_sft", asdict(sft()))
    other = replace(same, fields=asdict(sft(seed=4)))
    outside = replace(same, compared={"seed": 4})
    remedies = r"\(seed: 3 -> 4\); --reuse uses it as it is, --step1.overwrite_output_dir trains it"
    with pytest.raises(UserError, match=rf"out/step1_sft is finished, with .*{remedies}"):
        check_finished(other, 1, reuse=False)
    with pytest.raises(UserError, match="--step1.overwrite_output_dir, with 1 in --step, trains"):
        check_finished(outside, 1, reuse=False)
    reused = check_finished(other, 1, reuse=True)
    assert reused == "step 1 is reused from out/step1_sft with other settings (seed: 3 -> 4)"
    assert check_finished(same, 1, reuse=False) == ""


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
