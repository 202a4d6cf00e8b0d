"""Folders are read as they are, and what cannot be read is one line."""

import shutil

import pytest
from damages import LINES
from run_folders import sample, write_rows, write_run

from dschat.config import UserError
from dschat.reporting.run_files import named_paths, read_runs, read_warnings, short_names


def test_a_run_has_the_steps_of_its_folder(tmp_path):
    (run,) = read_runs([str(write_run(tmp_path / "out"))])
    assert run.name == "out"
    assert list(run.steps) == ["step1_sft", "step3_rlhf"]
    assert run.steps["step1_sft"].series("eval/loss") == [(0, 5.0), (4, 1.0)]
    assert run.steps["step3_rlhf"].series("custom/metric_s") == [(2, 1.0), (3, 1.0)]  # not NaN


@pytest.mark.parametrize("folder", ["step3_rlhf", "renamed"])
def test_a_folder_of_one_step(tmp_path, folder):
    write_run(tmp_path / "out")
    shutil.copytree(tmp_path / "out/step3_rlhf", tmp_path / folder)
    (run,) = read_runs([str(tmp_path / folder)])
    assert (run.name, list(run.steps)) == (folder, ["step3_rlhf"])


def test_names_are_as_long_as_they_must_be(tmp_path):
    folders = [write_run(tmp_path / name) for name in ("a/out", "b/out")]
    steps = [str(folder / "step3_rlhf") for folder in (*folders, folders[0])]
    names = [run.name for run in read_runs(steps)]
    assert names == ["a/out/step3_rlhf", "b/out/step3_rlhf"]  # and each folder once


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["out/step3_rlhf/actor"], ["step3_rlhf"]),
        (["a/step3_rlhf/actor", "b/step3_rlhf/actor/"], ["a/step3_rlhf", "b/step3_rlhf"]),
        (["a/s3/actor", "a/s3/actor_best"], ["s3", "s3/actor_best"]),
        (["a/actor_best", "b/actor_best"], ["a/actor_best", "b/actor_best"]),
        (["a/step2_reward", "a/reward_best"], ["step2_reward", "a/reward_best"]),
        (["/actor", "../actor"], ["actor", ".."]),
        (["owner/model", "actor", "/"], ["model", "actor", ""]),
        (["one.jsonl", "one.jsonl"], ["one.jsonl", "one.jsonl"]),
        ([], []),
    ],
)
def test_a_model_has_the_same_name_everywhere(paths, names):
    """In serve, eval and report: its run's, as short as it is distinct."""
    assert short_names(paths) == names


@pytest.mark.parametrize(
    ("paths", "named"),
    [
        (["A=out/x", "y"], [("A", "out/x"), ("y", "y")]),
        (["A=x", "B=x"], [("A", "x"), ("B", "x")]),  # one folder twice, and it is meant
        ([".", "run/actor"], [("here", "."), ("run", "run/actor")]),
        (["./actor"], [("here", "./actor")]),
        (["lr=1", "lr=2"], [("lr=1", "lr=1"), ("lr", "2")]),  # the first is a folder
        (["~/lr=1"], [("lr=1", "~/lr=1")]),
        (["runs/lr=2"], [("lr=2", "runs/lr=2")]),
        (["=x", "y="], [("=x", "=x"), ("y=", "y=")]),
    ],
)
def test_a_name_may_be_given(paths, named, tmp_path, monkeypatch):
    (tmp_path / "here/lr=1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "here"))
    assert named_paths(paths, "--path") == named


@pytest.mark.parametrize("paths", [["x", "./x"], ["x", "y/../x/"], ["x=a", "x=b"], ["x=a", "x"]])
def test_two_of_one_name_are_refused(paths):
    with pytest.raises(UserError, match="^--path: two are named (/.*/)?x; .* write NAME=FOLDER$"):
        named_paths(paths, "--path")


def test_a_run_of_a_given_name(tmp_path):
    out = write_run(tmp_path / "out")
    assert [run.name for run in read_runs([f"mine={out}", str(out)])] == ["mine", "out"]


def test_the_verdict_is_the_last_one(tmp_path):
    """Older versions wrote none; a good one is no warning."""
    out = write_run(tmp_path)
    rows = [{"step": 3, "verdict": "worse", "warning": "worse"}, {"step": 4, "verdict": "better"}]
    write_rows(out / "step3_rlhf/warnings.jsonl", [{"step": 1, "warning": "far"}, *rows])
    (run,) = read_runs([str(out)])
    assert run.steps["step3_rlhf"].verdict == "better"
    assert run.steps["step1_sft"].verdict == ""
    assert read_warnings(out / "step3_rlhf") == ["far", "worse"]


def test_a_row_that_is_being_written_is_left_out(tmp_path):
    metrics = write_run(tmp_path) / "step1_sft/metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"step": 5, "lo')
    (run,) = read_runs([str(tmp_path)])
    assert run.steps["step1_sft"].rows[-1]["step"] == 4


@pytest.mark.parametrize("line", LINES)
def test_a_damaged_line_is_left_out(tmp_path, line, caplog):
    metrics = write_run(tmp_path) / "step1_sft/metrics.jsonl"
    (whole,) = read_runs([str(tmp_path)])
    lines = metrics.read_bytes().split(b"\n")
    metrics.write_bytes(b"\n".join([*lines[:2], line.encode("latin-1"), *lines[2:]]))
    (run,) = read_runs([str(tmp_path)])
    assert run.steps["step1_sft"].rows == whole.steps["step1_sft"].rows
    assert f"{metrics}: damaged lines left out: 1" in caplog.text


@pytest.mark.parametrize(
    "broken", [{"tokens": "4"}, {"prompt": None}, {"token_kl": [0.0]}, {"advantages": "x"}]
)
def test_broken_samples_are_left_out(tmp_path, broken, caplog):
    out = write_run(tmp_path)
    row = {"step": 7, "samples": [sample(**broken)], "scores": [], "answer_lengths": []}
    write_rows(out / "step3_rlhf/samples.jsonl", [row, row | {"samples": 1}, row | {"samples": []}])
    (run,) = read_runs([str(out)])
    assert [row["samples"] for row in run.steps["step3_rlhf"].samples] == [[]]
    assert "samples.jsonl: damaged lines left out: 2" in caplog.text


DEEP = 100_000  # of YAML 1,000: PyYAML takes a minute for as many


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("training_config.yaml", "a: " + "[" * DEEP + "]" * DEEP, "cannot be read"),
        ("training_config.yaml", "[" * 1_000, "cannot be read"),
        ("training_config.yaml", "a: &a [1]\nb: [*a, *a]\n", "cannot be read"),
    ],
)
def test_files_nested_without_end(name, text, said, tmp_path):
    (write_run(tmp_path) / "step1_sft" / name).write_text(text)
    with pytest.raises(UserError, match=said):
        read_runs([str(tmp_path)])


def test_settings_are_text(tmp_path):
    """Python does not write an integer of so many digits."""
    number = "0x" + "f" * 5000
    (write_run(tmp_path) / "step1_sft/training_config.yaml").write_text(f"seed: {number}\n")
    (run,) = read_runs([str(tmp_path)])
    assert run.steps["step1_sft"].settings == {"seed": number}


def test_numbers_larger_than_floats_are_not_finite(tmp_path):
    write_rows(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 10**400}, {"step": 2, "loss": 1}])
    (run,) = read_runs([str(tmp_path)])
    assert run.steps["step1_sft"].series("loss") == [(2, 1)]


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "training_config.yaml"])
def test_a_link_to_a_file_outside_the_run_is_not_read(name, tmp_path, caplog):
    file = write_run(tmp_path / "out") / "step3_rlhf" / name
    file.unlink()
    file.symlink_to(tmp_path / "theirs")
    (tmp_path / "theirs").write_text('{"step": 1, "secret": 1}\n')
    if name == "training_config.yaml":
        with pytest.raises(UserError, match=f"{name} cannot be read"):
            read_runs([str(tmp_path / "out")])
    else:
        assert "secret" not in str(read_runs([str(tmp_path / "out")]))
        assert f"{name} cannot be read: Too many levels of symbolic links" in caplog.text
