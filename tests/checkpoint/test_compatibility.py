"""The settings that a run must keep to resume from its checkpoints."""

import dataclasses
import json
from pathlib import Path

import pytest

from dschat.checkpoint import compatibility
from dschat.checkpoint.manifest import CheckpointInfo, manifest_bytes
from dschat.config import RewardConfig, RLHFConfig, SFTConfig, UserError

CONFIGS = (SFTConfig, RewardConfig, RLHFConfig)


def found(settings: dict) -> CheckpointInfo:
    return CheckpointInfo(Path("out/checkpoints/step_000012"), 12, 1, settings, {})


def test_what_flags_declare_is_known():
    """A misspelt word would count as a result's, or never."""
    for config_class in CONFIGS:
        flags = {f.name: f.metadata for f in dataclasses.fields(config_class)}
        for metadata in flags.values():
            assert metadata.get("affects", "result") in ("result", "speed", "log", "place")
            assert metadata.get("reads", "files") == "files"
            assert metadata.get("needs", "seed") in flags


@pytest.mark.parametrize("config_class", CONFIGS)
def test_equal_settings_are_equal(config_class):
    saved = compatibility.settings_of(config_class(seed=5))
    assert compatibility.changes(found(saved), config_class(seed=5)) == []
    other = config_class(seed=5, output_dir="elsewhere", save_steps=3, log_level="error")
    assert compatibility.changes(found(saved), other) == []
    assert {"output_dir", "resume", "overwrite_output_dir", "save_steps"}.isdisjoint(saved)


def test_changes_are_named_with_both_values():
    saved = compatibility.settings_of(SFTConfig(seed=5, dropout=0.5))
    changed = compatibility.changes(
        found(saved), SFTConfig(adam_betas=[0.9, 0.99], eval_fraction=0.1)
    )
    assert sorted(changed) == [
        ("adam_betas", [0.9, 0.95], [0.9, 0.99]),
        ("dropout", 0.5, None),
        ("eval_fraction", 0.05, 0.1),
        ("seed", 5, SFTConfig().seed),
    ]
    shown = compatibility.describe(sorted(changed))
    assert shown.startswith(
        "adam_betas: 0.9 0.95 -> 0.9 0.99; dropout: 0.5 -> none; eval_fraction: "
    )
    assert shown.endswith(f"; seed: 5 -> {SFTConfig().seed}")


def test_a_knob_that_came_later_changes_nothing_by_its_default():
    saved = compatibility.settings_of(SFTConfig())
    del saved["lr_scheduler_type"]
    saved["a_knob_that_went"] = 1
    gone = ("a_knob_that_went", 1, None)
    assert compatibility.changes(found(saved), SFTConfig()) == [gone]
    linear = SFTConfig(lr_scheduler_type="linear")
    assert compatibility.changes(found(saved), linear) == [
        ("lr_scheduler_type", "cosine", "linear"),
        gone,
    ]


@pytest.mark.parametrize(
    ("before", "now", "num_processes", "message"),
    [
        (SFTConfig(), SFTConfig(), 1, ""),
        (SFTConfig(), SFTConfig(), 2, "16 .* 32 .*--gradient_accumulation_steps"),
        (
            SFTConfig(gradient_accumulation_steps=2),
            SFTConfig(per_device_train_batch_size=SFTConfig().per_device_train_batch_size),
            2,
            "",
        ),
        (RLHFConfig(), RLHFConfig(), 2, "prompts an iteration .*--generation_batches"),
        (
            RLHFConfig(),
            RLHFConfig(
                per_device_generation_batch_size=RLHFConfig().rollout_prompts(1) // 2,
                per_device_training_batch_size=RLHFConfig().mini_batch_size(1) // 4,
            ),
            2,
            "sequences a step .*--per_device_training_batch_size",
        ),
    ],
)
def test_a_step_stays_as_large(before, now, num_processes, message):
    """Its place in the data counts steps."""
    of_one = found(compatibility.settings_of(before))
    assert compatibility.changes(of_one, now) == []
    if not message:
        compatibility.check_step_size(of_one, now, num_processes)
        return
    with pytest.raises(UserError, match=message):
        compatibility.check_step_size(of_one, now, num_processes)


LORA = {"actor_lora_dim": 4, "critic_lora_dim": 4}
GRPO = LORA | {"advantage_estimator": "grpo"}  # only the actor trains
UNDER_WAY = {"partial_rollout": True, "num_samples_per_prompt": 2, "max_answer_seq_len": 64}


def under_way(**changed):
    """Answers under way keep their number and length."""
    return RLHFConfig(**UNDER_WAY | changed)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (SFTConfig(lora_dim=4), SFTConfig(lora_dim=4), ""),
        (SFTConfig(lora_dim=4), SFTConfig(lora_dim=8), "--lora_dim 8.*--lora_dim 4;.*--restart"),
        (SFTConfig(lora_dim=4), SFTConfig(), "--lora_dim 0.*--lora_dim 4"),
        (SFTConfig(), SFTConfig(lora_dim=4), "--lora_dim 4.*--lora_dim 0"),
        (
            SFTConfig(lora_dim=4),
            SFTConfig(lora_dim=4, only_optimize_lora=False),
            "--only_optimize_lora false.*--only_optimize_lora true",
        ),
        (SFTConfig(), SFTConfig(only_optimize_lora=False, lora_modules=["x"]), ""),
        (RLHFConfig(), RLHFConfig(**LORA), "--actor_lora_dim 4"),
        (RLHFConfig(actor_lora_dim=4), RLHFConfig(**LORA), "--critic_lora_dim 4"),
        (
            RLHFConfig(actor_lora_dim=4, advantage_estimator="reinforce"),
            RLHFConfig(**LORA, advantage_estimator="reinforce"),
            "",
        ),
        (RLHFConfig(advantage_estimator="rloo"), RLHFConfig(advantage_estimator="reinforce"), ""),
        (
            RLHFConfig(advantage_estimator="rloo"),
            RLHFConfig(),
            "^--advantage_estimator gae: .*--advantage_estimator rloo",
        ),
        (
            RLHFConfig(),
            RLHFConfig(advantage_estimator="rloo"),
            "^--advantage_estimator rloo: .*--advantage_estimator gae",
        ),
        (RLHFConfig(), RLHFConfig(enable_ema=True), "^--enable_ema true: .*--enable_ema false"),
        (RLHFConfig(enable_ema=True), RLHFConfig(enable_ema=True), ""),
        (RLHFConfig(enable_ema=True), RLHFConfig(), ""),
        # adapters on one base do not fit a merged reward model
        (
            RLHFConfig(**LORA),
            RLHFConfig(**LORA, share_base=True),
            "^--share_base true: .* --share_base false; resume with",
        ),
        (RLHFConfig(**GRPO), RLHFConfig(**GRPO, share_base=True), ""),
        (
            under_way(),
            under_way(num_samples_per_prompt=4),
            "^--num_samples_per_prompt 4: .*_per_prompt 2; resume",
        ),
        (
            under_way(),
            under_way(max_answer_seq_len=32),
            "^--max_answer_seq_len 32: .*--max_answer_seq_len 64; resume",
        ),
        (under_way(), under_way(max_answer_seq_len=128), ""),
        (under_way(), under_way(num_samples_per_prompt=4, partial_rollout=False), ""),
    ],
)
def test_another_state_is_refused(before, now, message, tmp_path):
    folder = tmp_path / "checkpoints/step_000012"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(
        manifest_bytes(12, 1, compatibility.settings_of(before), {})
    )
    for name in ("latest", str(folder)):
        config = dataclasses.replace(now, output_dir=str(tmp_path), resume=name)
        if message:
            with pytest.raises(UserError, match=message):
                compatibility.check_start(config, 1)
        else:
            compatibility.check_start(config, 1)


def test_a_run_is_not_begun_over_an_unfinished_one(tmp_path):
    config = SFTConfig(output_dir=str(tmp_path))
    compatibility.check_start(config, 1)
    (tmp_path / "checkpoints" / "step_000012").mkdir(parents=True)
    with pytest.raises(UserError, match="checkpoints/step_000012; resume it with --resume"):
        compatibility.check_start(config, 1)
    compatibility.check_start(dataclasses.replace(config, resume="latest"), 1)
    compatibility.check_start(dataclasses.replace(config, overwrite_output_dir=True), 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("actor_deepspeed_config", "user.py"),
        ("chat_template", "user.py"),
        ("data_path", ["user.py:2", "builtin/chat"]),
        ("environment", "user.py:Game"),
        ("reward_fn", ["user.py:score"]),
        ("tools", ["user.py:look,ask"]),
    ],
)
def test_an_edited_file_is_another_setting(name, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("user.py").write_text("as it was")
    given = RLHFConfig(**{name: value})
    # through JSON, as a manifest keeps it
    saved = found(json.loads(json.dumps(compatibility.settings_of(given))))
    assert compatibility.changes(saved, given) == []
    Path("user.py").write_text("edited")
    shown = value if isinstance(value, str) else " ".join(value)
    changed = compatibility.describe(compatibility.changes(saved, given))
    assert changed == f"{name}: {shown} -> {shown}, changed since"
    # another file is named once, and checkpoints from before this was recorded say nothing
    other = RLHFConfig(**{name: ["other"] if isinstance(value, list) else "other"})
    assert [name for name, _, _ in compatibility.changes(saved, other)] == [name]
    del saved.settings["contents"]
    assert compatibility.changes(saved, given) == []


def checkpoint_in(folder, step=12):
    path = folder / f"checkpoints/step_{step:06d}"
    path.mkdir(parents=True)
    text = manifest_bytes(step, 1, compatibility.settings_of(SFTConfig()), {})
    (path / "manifest.json").write_bytes(text)
    return path


def test_a_run_that_ends_before_its_checkpoint_is_refused(tmp_path):
    checkpoint_in(tmp_path)
    given = {"output_dir": str(tmp_path), "resume": "latest"}
    for enough in (0, 12):
        compatibility.check_start(SFTConfig(max_steps=enough, **given), 1)
    with pytest.raises(UserError, match="taken 12 steps, and this one ends after 11; raise --max"):
        compatibility.check_start(SFTConfig(max_steps=11, **given), 1)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path):
    path = checkpoint_in(tmp_path)
    path.rename(path.with_name("step_000020"))
    config = SFTConfig(output_dir=str(tmp_path), resume="latest")
    with pytest.raises(UserError, match="step_000020 holds the checkpoint of step 12; name it"):
        compatibility.check_start(config, 1)
    moved = path.with_name("step_000020").rename(tmp_path / "kept")  # any other name will do
    compatibility.check_start(dataclasses.replace(config, resume=str(moved)), 1)
