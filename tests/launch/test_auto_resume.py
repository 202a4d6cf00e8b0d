"""Interrupted steps: resumed, started over, or refused after a change of settings."""

from pathlib import Path

import pytest
from stub_steps import QUIET, finish, plan, planned

from dschat.checkpoint import compatibility
from dschat.checkpoint.manifest import manifest_bytes
from dschat.config import CommonConfig, RLHFConfig, SFTConfig, UserError


def interrupt(folder: Path, config: CommonConfig, step: int = 12, world_size: int = 1) -> Path:
    """Write a checkpoint of an interrupted run with these settings."""
    checkpoint = folder / "checkpoints" / f"step_{step:06d}"
    checkpoint.mkdir(parents=True)
    text = manifest_bytes(step, world_size, compatibility.settings_of(config), {})
    (checkpoint / "manifest.json").write_bytes(text)
    return checkpoint


def sft(**values: object) -> SFTConfig:
    """Step 1's configuration of the recipe quiet."""
    return SFTConfig(**{"model_name_or_path": "hub/actor", "seed": 3} | values)


def test_an_unfinished_step_resumes(tree):
    step1 = Path("out/step1_sft")
    interrupt(step1, sft(), step=12)
    half = sft().per_device_train_batch_size // 2
    smaller = sft(per_device_train_batch_size=half)
    newest = interrupt(step1, smaller, step=24, world_size=2)
    interrupt(step1, sft(), step=36).joinpath("manifest.json").write_text("{")  # damaged
    fields = planned(tree, *QUIET, "--save-steps", "7", "--log-level", "error")
    assert [fields[n].get("resume") for n in (1, 2, 3)] == ["latest", None, None]
    assert "overwrite_output_dir" not in fields[1]
    note = f"step 1 resumes from {newest}, on 1 process, not 2"
    assert plan(tree, *QUIET).notes == [note]
    finish(step1)  # then there is nothing to resume
    assert list(planned(tree, *QUIET)) == [2, 3]


def test_other_weights_than_the_checkpoint_holds_cannot_be_accepted(tree):
    interrupt(Path("out/step1_sft"), sft(lora_dim=4))
    with pytest.raises(UserError, match=r"--lora_dim 0: out/step1_sft\S* holds .*--lora_dim 4;"):
        plan(tree, *QUIET, "--resume")
    assert plan(tree, *QUIET, "--restart").notes


CHANGED = r"out/step1_sft .* \(seed: 3 -> 4; max_steps: 0 -> 19\); --resume latest .* --restart "


def test_changed_settings_need_a_flag(tree):
    interrupt(Path("out/step1_sft"), sft())
    argv = (*QUIET, "--step1.seed", "4", "--step1.max-steps", "19", "--logging-steps", "5")
    with pytest.raises(UserError, match=CHANGED):
        plan(tree, *argv)
    accepted = planned(tree, *argv, "--step1.resume")
    assert (accepted[1]["resume"], accepted[1]["seed"]) == ("latest", 4)
    assert "resume" not in accepted[2]
    assert "with changed settings (seed: 3 -> 4; " in plan(tree, *argv, "--resume").notes[0]
    assert plan(tree, *argv, "--dry-run").commands
    restarted = planned(tree, *argv, "--restart")
    assert restarted[1]["overwrite_output_dir"] is True
    assert "resume" not in restarted[1]
    assert "overwrite_output_dir" not in restarted[2]


def test_a_step_does_not_resume_with_a_retrained_model(tree):
    """The reference model is loaded again and must be that of the interrupted run."""
    step3 = RLHFConfig(
        seed=3,
        actor_model_name_or_path="out/step1_sft",
        critic_model_name_or_path="out/step2_reward",
    )
    step1 = finish(Path("out/step1_sft"))
    finish(Path("out/step2_reward"))
    interrupt(Path("out/step3_rlhf"), step3)
    assert planned(tree, *QUIET)[3]["resume"] == "latest"
    finish(step1)  # later
    change = "actor_model_name_or_path: out/step1_sft -> out/step1_sft, changed since"
    with pytest.raises(UserError, match=change):
        plan(tree, *QUIET)
    change = "actor_model_name_or_path: out/step1_sft -> out/step1_sft, trained again"
    (step1 / "COMPLETE").unlink()  # this run would train it
    with pytest.raises(UserError, match=change):
        plan(tree, *QUIET)
    assert planned(tree, *QUIET, "--step3.overwrite-output-dir")[3]["overwrite_output_dir"] is True


def test_resume_from_a_named_checkpoint(tree):
    interrupt(Path("out/step1_sft"), sft(seed=9))
    argv = (*QUIET, "--step1.resume", "out/step1_sft/checkpoints/step_000012")
    assert planned(tree, *argv)[1]["resume"] == argv[-1]
    assert plan(tree, *argv).notes == [f"step 1 resumes from {argv[-1]}"]
