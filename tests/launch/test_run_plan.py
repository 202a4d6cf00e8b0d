"""train.py from the outside: what it would run, what it runs, and how it ends.

The steps here are stubs in a copy of the tree: scripts that note their flags and mark themselves
COMPLETE.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dschat.checkpoint import compatibility
from dschat.checkpoint.manifest import manifest_bytes
from dschat.config import CommonConfig, RLHFConfig, SFTConfig, UserError
from dschat.distributed import stop_signals
from dschat.launch import recipe, run_plan, watchdog

ROOT = Path(__file__).resolve().parents[2]

STUB = """
import json, os, pathlib, signal, subprocess, sys, time

name = pathlib.Path(__file__).parent.name
out = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
out.mkdir(parents=True, exist_ok=True)
if os.environ.get("FAIL") == name:
    sys.stderr.write(f"error: {name} says why\\n")
    sys.exit(3)
if os.environ.get("VANISH") == name:
    sys.exit(0)
if os.environ.get("HANG") == name:
    if os.environ.get("STUBBORN"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    (out / "pids.tmp").write_text(json.dumps([os.getpid(), child.pid]))
    (out / "pids.tmp").rename(out / "pids")
    time.sleep(120)
if os.environ.get("LOOP") == name:
    import dschat.distributed as dist
    from dschat.distributed import entrypoint, stop_signals
    from dschat.checkpoint.manifest import manifest_bytes

    def main():
        if dist.world_size() > 1:
            dist.init()
        with stop_signals.handle_stop_signals(out) as stop:
            (out / f"in_loop{dist.rank()}").write_text(str(os.getpid()))
            for step in range(1, 1000):
                if os.environ.get("KILL") == str(dist.rank()) and step == 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(float(os.environ.get("STEP_S", 0.1)))
                if stop.agreed():
                    folder = out / "checkpoints" / f"step_{step:06d}"
                    folder.mkdir(parents=True, exist_ok=True)
                    text = manifest_bytes(step, dist.world_size(), {}, {})
                    (folder / "manifest.json").write_bytes(text)
                    raise stop_signals.TrainingStopped(step, folder)

    entrypoint.run(main)
import dschat.distributed as dist

seen = {k: os.environ.get(k) for k in ("OMP_NUM_THREADS", "PATH", "RANK", "WORLD_SIZE")}
seen["numbers"] = (dist.rank(), dist.world_size(), dist.local_rank())
note = {"argv": sys.argv[1:], "environment": seen}
(out / f"seen{dist.rank()}.json").write_text(json.dumps(note))
(out / "config.json").write_text("{}")
(out / "COMPLETE").write_text("")
"""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A copy of train.py and the recipes, with stub steps; also the working directory."""
    root = tmp_path / "tree"
    shutil.copytree(ROOT / "training" / "recipes", root / "training" / "recipes")
    shutil.copy(ROOT / "train.py", root)
    (root / "training/recipes/quiet.yaml").write_text(
        "model: {actor_model: hub/actor, reward_model: hub/reward}\ncommon: {seed: 3}\n"
    )
    for step in recipe.STEPS.values():
        (root / step.name).mkdir()
        (root / step.name / "main.py").write_text(STUB)
    monkeypatch.chdir(root)
    monkeypatch.setattr(run_plan, "_num_gpus", lambda: 0)
    return root


def environment(**variables: str) -> dict[str, str]:
    ours = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    # A test before may have joined a group of its own, which says so in the environment.
    inherited = {k: v for k, v in os.environ.items() if k != "LOCAL_RANK"}
    return inherited | ours | variables


def train(*argv: str, **variables: str) -> subprocess.CompletedProcess:
    """``python train.py`` in the copied tree, as a user calls it."""
    return subprocess.run(
        [sys.executable, "train.py", *argv],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment(**variables),
    )


def plan(tree: Path, *argv: str) -> run_plan.RunPlan:
    return run_plan.plan(*recipe.parse_args(argv), tree)


def planned(tree: Path, *argv: str) -> dict[int, dict[str, object]]:
    """The fields that each planned step would be given, read back from its command."""
    fields = {}
    for step, command in plan(tree, *argv).commands:
        flags = command[[part.endswith("main.py") for part in command].index(True) + 1 :]
        fields[step.number] = run_plan.parser.given(step.config_class, flags)
    return fields


def finish(folder: Path, architecture: str = "OPTForCausalLM") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (folder / "COMPLETE").write_text("")
    return folder


# What it would run


def test_dry_run_prints_runnable_commands_and_nothing_else(tree):
    before = sorted(tree.rglob("*"))
    done = train("--recipe", "quiet", "--dry-run", "--step3.kl-coef", "0.05", "--output-dir", "a b")
    python = shlex.quote(sys.executable)
    assert done.stdout.splitlines() == [
        f"{python} step1_sft/main.py --seed 3 --model_name_or_path hub/actor "
        "--output_dir 'a b/step1_sft'",
        f"{python} step2_reward/main.py --seed 3 --model_name_or_path hub/reward "
        "--output_dir 'a b/step2_reward'",
        f"{python} step3_rlhf/main.py --seed 3 --kl_coef 0.05 "
        "--actor_model_name_or_path 'a b/step1_sft' "
        "--critic_model_name_or_path 'a b/step2_reward' --output_dir 'a b/step3_rlhf'",
    ]
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(tree.rglob("*")) == before


def test_no_flags_is_the_demo(tree):
    fields = planned(tree)
    assert fields[1]["model_name_or_path"] == "builtin/tiny"
    assert fields[2]["model_name_or_path"] == "output/demo/step1_sft"  # the recipe's {step1}
    assert fields[3]["output_dir"] == "output/demo/step3_rlhf"
    assert plan(tree).summary


def test_design_example_with_many_processes(tree, monkeypatch):
    monkeypatch.setattr(run_plan, "_num_gpus", lambda: 64)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    argv = "--step 3 --actor-model facebook/opt-66b --reward-model facebook/opt-350m --num-gpus 64"
    made = plan(tree, *argv.split())
    assert [step.number for step, _ in made.commands] == [1, 2, 3]
    assert len(made.notes) == 2
    assert made.output_dir == Path("output/opt-66b")
    for _, command in made.commands:
        assert command[:3] == [sys.executable, "-m", "deepspeed.launcher.runner"]
        assert command[command.index("--num_gpus") + 1] == "64"
    assert not made.summary


def test_flags_reach_the_steps_that_have_them(tree):
    fields = planned(
        tree, "--recipe=quiet", "--data-path", "x", "y", "--lora-alpha=8", "--kl_ctl", "0.2",
        "--step2.seed", "9", "--max_seq_len", "64", "--no-whiten-advantages",
    )  # fmt: skip
    assert [fields[n]["data_path"] for n in (1, 2, 3)] == [["x", "y"]] * 3
    assert [fields[n]["lora_alpha"] for n in (1, 2, 3)] == [8.0] * 3
    assert [fields[n]["seed"] for n in (1, 2, 3)] == [3, 9, 3]
    assert [fields[n].get("max_seq_len") for n in (1, 2, 3)] == [64, 64, None]
    assert [fields[n].get("kl_coef") for n in (1, 2, 3)] == [None, None, 0.2]
    assert fields[3]["whiten_advantages"] is False


def test_recipe_file_placeholder_and_launch(tree):
    Path("mine.yaml").write_text(
        "model: {actor_model: hub/a}\nstep2: {model_name_or_path: '{step1}'}\n"
        "step3: {learning: 1}\n"
    )
    with pytest.raises(UserError, match=r"mine\.yaml: step3: unknown key learning"):
        plan(tree, "--recipe", "mine.yaml")
    Path("mine.yaml").write_text(
        "model: {actor_model: hub/a}\nstep2: {model_name_or_path: '{step1}'}\n"
        "launch: {num_gpus: 2}\n"
    )
    made = plan(tree, "--recipe", "mine.yaml", "--step", "2")
    assert [step.number for step, _ in made.commands] == [1, 2]
    assert (
        planned(tree, "--recipe", "mine.yaml")[2]["model_name_or_path"] == "output/mine/step1_sft"
    )
    assert "deepspeed.launcher.runner" in made.commands[0][1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("comon: {}", "unknown key comon; did you mean common?"),
        ("model: {actor: x}", "model: unknown key actor"),
        ("common: {leraning_rate: 1}", "common: unknown key leraning_rate; did you mean"),
        ("step1: {kl_coef: 1}", "step1: unknown key kl_coef"),
        ("step1: {output_dir: x}", "step1: unknown key output_dir"),
        ("step1: [1]", "step1 must be a mapping"),
        ("step1: {seed: x}", "step1: --seed 'x' is not a whole number"),
        ("launch: {num_gpus: two}", "launch: --num_gpus 'two' is not a whole number"),
        ("launch: {hostfile: x}", "launch: unknown key hostfile"),
    ],
)
def test_recipe_mistakes(tree, text, message):
    Path("mine.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        plan(tree, "--recipe", "mine.yaml")
    assert str(error.value).startswith("mine.yaml: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--leraning-rate 1", "unknown flag --leraning-rate; did you mean --learning_rate?"),
        ("--step3.kl_cof 1", "unknown flag --step3.kl_cof; did you mean --step3.kl_coef?"),
        ("--step1.kl_coef 1", "unknown flag --step1.kl_coef"),
        ("--step4.seed 1", "unknown flag --step4.seed"),
        ("--actor-modle x", "unknown flag --actor-modle; did you mean --actor_model?"),
        ("--config x.yaml", "unknown flag --config"),
        ("--step 1 --kl_coef 1", "--kl_coef is a flag of step 3; add the step to --step"),
        ("--step 4", "--step 4 does not exist"),
        ("--step one", "--step 'one' is not a whole number"),
        ("--num-gpus 0", "--num_gpus 0 must be at least 1"),
        ("3", "unexpected argument '3'"),
        ("--recipe nope", "--recipe nope: no such recipe; name a .yaml file or one of "),
        ("--reward-model hub/r", "--actor_model is missing"),
        ("--actor-model hub/a", "--reward_model is missing"),
        ("--actor-model ./nope", "--actor_model ./nope: no such folder"),
        ("--step 2 --model_name_or_path /no/such", "--model_name_or_path /no/such: no such folder"),
        ("--actor-model training --reward-model x", "--actor_model training: no config.json"),
        ("--data-path no.jsonl:0.5", "--data_path: no such data file: no.jsonl"),
        ("--eval-data-path ./no", "--eval_data_path: no such data file: ./no"),
        ("--unsupervised-dataset-name no.txt", "--unsupervised_dataset_name: no such data file"),
        ("--step3.actor_zero_stage 9", "--actor_zero_stage 9 does not exist"),
        ("--per_device_training_batch_size 7", "--per_device_training_batch_size x"),
    ],
)
def test_mistakes_are_found_before_anything_runs(tree, argv, message):
    with pytest.raises(UserError) as error:
        plan(tree, *argv.split())
    assert str(error.value).startswith(message)
    assert not Path("output").exists()


def test_a_mistake_is_one_line_and_exit_code_2(tree):
    done = train("--recipe", "quiet", "--step3.ppo_epochs", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --ppo_epochs 0 must be at least 1\n"


# Which steps it would run


def test_missing_steps_run_first_and_finished_ones_are_reused(tree):
    argv = ("--step", "3", "--recipe", "quiet", "--output-dir", "out", "--max_seq_len", "64")
    finish(Path("out/step1_sft"))
    made = plan(tree, *argv)
    assert [step.number for step, _ in made.commands] == [2, 3]
    assert "out/step1_sft" in made.notes[0]
    assert "step 2 runs first" in made.notes[1]
    finish(Path("out/step2_reward"))
    assert list(planned(tree, *argv)) == [3]
    finish(Path("out/step3_rlhf"))
    assert list(planned(tree, *argv)) == []
    assert list(planned(tree, *argv, "--overwrite-output-dir")) == [3]


def test_finished_steps_are_skipped_unless_overwritten(tree):
    argv = ("--recipe", "quiet", "--output-dir", "out")
    finish(Path("out/step1_sft"))
    made = plan(tree, *argv)
    assert [step.number for step, _ in made.commands] == [2, 3]
    assert made.notes == [
        "step 1 is finished in out/step1_sft: skipped (--overwrite_output_dir runs it again)"
    ]
    assert list(planned(tree, *argv, "--overwrite_output_dir")) == [1, 2, 3]
    assert list(planned(tree, *argv, "--step", "1", "--step1.overwrite_output_dir")) == [1]


def test_a_folder_without_the_mark_is_not_finished(tree):
    finish(Path("out/step1_sft"))
    Path("out/step1_sft/COMPLETE").unlink()
    assert list(planned(tree, "--recipe", "quiet", "--output-dir", "out")) == [1, 2, 3]


def test_a_finished_last_step_is_not_left_behind_by_new_inputs(tree):
    finish(Path("out/step3_rlhf"))
    with pytest.raises(UserError, match="out/step3_rlhf is finished, but"):
        plan(tree, "--recipe", "quiet", "--output-dir", "out")


def trained_with(folder: Path, **settings: object) -> None:
    (finish(folder) / "training_config.yaml").write_text(json.dumps(settings))


def test_a_step_that_was_finished_with_other_settings_is_not_taken_in_silence(tree):
    argv = ("--recipe", "quiet", "--output-dir", "out")
    trained_with(Path("out/step1_sft"), model_name_or_path="hub/actor", seed=3, max_steps=7)
    other = r"out/step1_sft is finished, with other settings \({}\); --reuse .* --step1.over"
    with pytest.raises(UserError, match=other.format("max_steps: 7 -> 0")):
        plan(tree, *argv)
    assert list(planned(tree, *argv, "--step1.max_steps", "7")) == [2, 3]
    assert list(planned(tree, *argv, "--step1.overwrite_output_dir")) == [1, 2, 3]
    taken = plan(tree, *argv, "--reuse")
    assert [step.number for step, _ in taken.commands] == [2, 3]
    assert taken.notes[-1].endswith("from out/step1_sft with other settings (max_steps: 7 -> 0)")
    # A step that is not in --step: what the recipe and flags say of it, nothing that they leave
    # out, and no flag that step 3 takes.
    later = (*argv, "--step", "3")
    assert list(planned(tree, *later, "--data-path", "builtin/chat", "--seed", "5")) == [2, 3]
    for flags, change in (
        (("--actor-model", "hub/b"), "model_name_or_path: hub/actor -> hub/b"),
        (("--step1.seed", "5"), "seed: 3 -> 5"),
        (("--max_seq_len", "64"), "max_seq_len: 512 -> 64"),  # which step 3 does not have
    ):
        with pytest.raises(UserError, match=other.format(change)):
            plan(tree, *later, *flags)
    assert list(planned(tree, *later, "--actor-model", "hub/b", "--reuse")) == [2, 3]
    trained_with(Path("out/step3_rlhf"), seed=3, kl_coef=0.5)
    with pytest.raises(UserError, match="out/step3_rlhf is finished, with .*kl_coef: 0.5 -> 0.1"):
        plan(tree, *later, "--reward-model", "hub/reward", "--critic_model_name_or_path", "hub/c")


def test_trained_models_need_no_training_step(tree):
    actor = finish(Path("old/step1_sft"))
    reward = finish(Path("bought/reward"), "LlamaForSequenceClassification")
    (reward / "COMPLETE").unlink()  # any reward model will do, not only ours
    argv = ("--actor-model", str(actor), "--reward-model", str(reward))
    fields = planned(tree, *argv)
    assert list(fields) == [3]
    assert fields[3]["actor_model_name_or_path"] == "old/step1_sft"
    assert fields[3]["critic_model_name_or_path"] == "bought/reward"
    # Asked for by number, the steps do run, from these models.
    again = planned(tree, *argv, "--step", "1", "2", "3")
    assert again[1]["model_name_or_path"] == "old/step1_sft"
    assert again[3]["actor_model_name_or_path"] == "output/step1_sft/step1_sft"


def test_step_three_takes_models_as_they_are(tree):
    argv = ("--actor_model_name_or_path", "hub/sft", "--reward_model_name_or_path", "hub/rm")
    fields = planned(tree, *argv)
    assert list(fields) == [3]
    assert fields[3]["reward_model_name_or_path"] == "hub/rm"
    assert "critic_model_name_or_path" not in fields[3]  # step 3 fills one in by the other


# What an earlier run left unfinished


def cut_short(folder: Path, config: CommonConfig, step: int = 12, world_size: int = 1) -> Path:
    """A checkpoint of a run with these settings."""
    checkpoint = folder / "checkpoints" / f"step_{step:06d}"
    checkpoint.mkdir(parents=True)
    text = manifest_bytes(step, world_size, compatibility.settings_of(config), {})
    (checkpoint / "manifest.json").write_bytes(text)
    return checkpoint


def sft(**values: object) -> SFTConfig:
    """Step 1's configuration of the recipe quiet."""
    return SFTConfig(**{"model_name_or_path": "hub/actor", "seed": 3} | values)


QUIET = ("--recipe", "quiet", "--output-dir", "out")


def test_an_unfinished_step_goes_on(tree):
    step1 = Path("out/step1_sft")
    cut_short(step1, sft(), step=12)
    half = sft().per_device_train_batch_size // 2
    smaller = sft(per_device_train_batch_size=half)
    newest = cut_short(step1, smaller, step=24, world_size=2)
    cut_short(step1, sft(), step=36).joinpath("manifest.json").write_text("{")  # damaged
    fields = planned(tree, *QUIET, "--save-steps", "7", "--log-level", "error")
    assert [fields[n].get("resume") for n in (1, 2, 3)] == ["latest", None, None]
    assert "overwrite_output_dir" not in fields[1]
    note = f"step 1 resumes from {newest}, on 1 process, not 2"
    assert plan(tree, *QUIET).notes == [note]
    for name in ("config.json", "COMPLETE"):  # then there is nothing to resume
        (step1 / name).write_text("{}")
    assert list(planned(tree, *QUIET)) == [2, 3]


def test_other_weights_than_the_checkpoint_holds_cannot_be_accepted(tree):
    cut_short(Path("out/step1_sft"), sft(lora_dim=4))
    with pytest.raises(UserError, match=r"--lora_dim 0: out/step1_sft\S* holds .*--lora_dim 4;"):
        plan(tree, *QUIET, "--resume")
    assert plan(tree, *QUIET, "--restart").notes


CHANGED = r"out/step1_sft .* \(seed: 3 -> 4; max_steps: 0 -> 9\); --resume latest .* --restart "


def test_changed_settings_need_a_yes(tree):
    cut_short(Path("out/step1_sft"), sft())
    argv = (*QUIET, "--step1.seed", "4", "--step1.max-steps", "9", "--logging-steps", "5")
    with pytest.raises(UserError, match=CHANGED):
        plan(tree, *argv)
    accepted = planned(tree, *argv, "--step1.resume")
    assert (accepted[1]["resume"], accepted[1]["seed"]) == ("latest", 4)
    assert "resume" not in accepted[2]
    assert "with changed settings (seed: 3 -> 4; " in plan(tree, *argv, "--resume").notes[0]
    assert plan(tree, *argv, "--dry-run").commands  # asks nobody
    anew = planned(tree, *argv, "--restart")
    assert anew[1]["overwrite_output_dir"] is True
    assert "resume" not in anew[1]
    assert "overwrite_output_dir" not in anew[2]


def test_the_question_names_what_changed(tree):
    cut_short(Path("out/step1_sft"), sft())
    asked = []

    def plan_with(answer: bool) -> run_plan.RunPlan:
        parsed = recipe.parse_args([*QUIET, "--step1.seed", "4"])
        return run_plan.plan(*parsed, tree, lambda question: asked.append(question) or answer)

    assert "resumes from" in plan_with(True).notes[0]
    assert asked[0].splitlines()[1:] == ["  seed: 3 -> 4", "Resume?"]
    with pytest.raises(UserError, match="--restart starts step 1 over"):
        plan_with(False)


def test_a_step_does_not_go_on_from_another_model(tree):
    """The reference is loaded again: it must be the one that the checkpoint's run had."""
    step3 = RLHFConfig(
        seed=3,
        actor_model_name_or_path="out/step1_sft",
        critic_model_name_or_path="out/step2_reward",
    )
    checkpoint = cut_short(Path("out/step3_rlhf"), step3)
    step1, step2 = finish(Path("out/step1_sft")), finish(Path("out/step2_reward"))
    before = os.path.getmtime(checkpoint / "manifest.json") - 100
    for folder in (step1, step2):
        os.utime(folder / "COMPLETE", (before, before))
    assert planned(tree, *QUIET)[3]["resume"] == "latest"
    os.utime(step1 / "COMPLETE", (before + 200, before + 200))
    again = "actor_model_name_or_path: out/step1_sft -> out/step1_sft, trained again"
    with pytest.raises(UserError, match=again):
        plan(tree, *QUIET)
    (step1 / "COMPLETE").unlink()  # this run would train it
    with pytest.raises(UserError, match=again):
        plan(tree, *QUIET)
    assert planned(tree, *QUIET, "--step3.overwrite-output-dir")[3]["overwrite_output_dir"] is True


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--restart --resume", "--restart starts over and --resume resumes; leave one out"),
        ("--resume --overwrite-output-dir", "--resume continues a run and --overwrite_output"),
        (
            "--resume out/x",
            "--resume out/x is a checkpoint of one step; name the step: --step3.resume",
        ),
        ("--save-steps -1", "--save_steps -1 must not be negative"),
        ("--save-total-limit -1", "--save_total_limit -1 must not be negative"),
    ],
)
def test_mistakes_about_going_on(tree, argv, message):
    with pytest.raises(UserError) as error:
        plan(tree, *QUIET, *argv.split())
    assert str(error.value).startswith(message)


def test_a_checkpoint_by_its_name(tree):
    cut_short(Path("out/step1_sft"), sft(seed=9))
    argv = (*QUIET, "--step1.resume", "out/step1_sft/checkpoints/step_000012")
    assert planned(tree, *argv)[1]["resume"] == argv[-1]
    assert plan(tree, *argv).notes == [f"step 1 resumes from {argv[-1]}"]


# Runs of two steps


def test_a_loss_of_the_policy_makes_step_three_needless(tree):
    argv = ("--recipe", "quiet", "--loss", "dpo", "--output-dir", "out")
    fields = planned(tree, *argv)
    assert list(fields) == [1, 2]
    # from the SFT model, not from the recipe's base of a reward model, into step 3's folder
    assert fields[2]["model_name_or_path"] == "out/step1_sft"
    assert fields[2]["output_dir"] == "out/step3_rlhf"
    made = plan(tree, *argv)
    assert made.notes == ["step 2 trains the policy itself (--loss dpo): no step 3"]
    assert [step.number for step in made.steps] == [1, 2]
    assert made.steps[1].title == "DPO"
    assert made.folder(made.steps[1]) == Path("out/step3_rlhf")
    assert list(planned(tree, *argv, "--step", "2")) == [1, 2]
    finish(Path("out/step1_sft"))
    assert list(planned(tree, *argv, "--step", "2")) == [2]
    finish(Path("out/step3_rlhf"))
    made = plan(tree, *argv)
    assert made.commands == []
    assert made.finished(made.steps[1])
    assert list(planned(tree, *argv, "--step2.overwrite_output_dir")) == [2]


def test_the_policy_starts_from_what_is_trained(tree):
    actor = finish(Path("old/step1_sft"))
    fields = planned(tree, "--actor-model", str(actor), "--loss", "kto")
    assert list(fields) == [2]
    assert fields[2]["model_name_or_path"] == "old/step1_sft"
    fields = planned(tree, "--loss", "ipo", "--step2.model_name_or_path", "hub/sft")
    assert list(fields) == [2]
    assert fields[2]["model_name_or_path"] == "hub/sft"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--loss dpo --step 3", "--step 3 does not exist with --loss dpo"),
        ("--loss dpo --reward-model hub/r", "--reward_model hub/r is not used with --loss dpo"),
        ("--loss dop", "--loss 'dop'"),
        ("--beta 0.5", "--beta is not used by --loss pairwise"),
        ("--loss kto --streaming --max_steps 5", "--loss kto reads all pairs"),
    ],
)
def test_mistakes_of_a_policy_on_pairs(tree, argv, message):
    with pytest.raises(UserError) as error:
        plan(tree, "--recipe", "quiet", *argv.split())
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(("settings", "loss"), [("kl_coef: 0.1", "dpo"), ("loss: dpo", None)])
def test_one_roads_policy_is_not_the_others(tree, settings, loss):
    """Both leave it in step3_rlhf: which was it?"""
    folder = finish(Path("out/step3_rlhf"))
    finish(Path("out/step1_sft"))
    finish(Path("out/step2_reward"))
    (folder / "training_config.yaml").write_text(settings + "\n")
    argv = ["--recipe", "quiet", "--output-dir", "out", *(["--loss", loss] if loss else [])]
    with pytest.raises(UserError, match=r"--output_dir out has a policy that step \d trained"):
        plan(tree, *argv)
    last = 2 if loss else 3
    assert list(planned(tree, *argv, f"--step{last}.overwrite_output_dir")) == [last]


def test_programs_that_score_make_step_two_needless(tree):
    argv = ("--actor-model", "hub/actor", "--output-dir", "out", "--reward_fn", "length")
    fields = planned(tree, *argv)
    assert list(fields) == [1, 3]
    assert fields[3]["reward_fn"] == ["length"]
    assert fields[3]["actor_model_name_or_path"] == "out/step1_sft"
    assert not {"critic_model_name_or_path", "reward_model_name_or_path"} & set(fields[3])
    assert "no step 2" in plan(tree, *argv).notes[0]
    assert list(planned(tree, *argv, "--step", "3")) == [1, 3]
    finish(Path("out/step1_sft"))
    assert list(planned(tree, *argv, "--step", "3")) == [3]


def test_a_reward_model_beside_programs(tree):
    """It is trained where it is named, and named to step 3 so that it scores."""
    argv = ("--recipe", "quiet", "--output-dir", "out", "--reward_url", "http://here:1")
    fields = planned(tree, *argv)
    assert list(fields) == [1, 2, 3]
    assert fields[3]["reward_model_name_or_path"] == "out/step2_reward"
    assert "critic_model_name_or_path" not in fields[3]  # step 3 starts it from the reward model
    assert "--step 1 3 leaves it out" in plan(tree, *argv).notes[0]
    assert list(planned(tree, *argv, "--step", "1", "3")) == [1, 3]
    assert list(planned(tree, *argv, "--step", "3", "--reward-model", "hub/r")) == [1, 2, 3]
    taken = planned(tree, *argv, "--reward_model_name_or_path", "hub/rm")
    assert list(taken) == [1, 3]
    assert taken[3]["reward_model_name_or_path"] == "hub/rm"


# How many processes


def test_gpus_visible_here(tree, monkeypatch):
    monkeypatch.setattr(run_plan, "_num_gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (_, command) = plan(tree, "--recipe", "quiet").commands[0]
    assert command[command.index("--num_gpus") + 1] == "4"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,6,7")
    (_, command) = plan(tree, "--recipe", "quiet", "--num-gpus", "2").commands[0]
    assert command[command.index("--include") + 1] == "localhost:2,3"
    assert plan(tree, "--recipe", "quiet", "--num-gpus", "1").commands[0][1][1].endswith("main.py")
    with pytest.raises(UserError, match="--num_gpus 8: this machine has 4"):
        plan(tree, "--recipe", "quiet", "--num-gpus", "8")


def test_several_machines(tree, monkeypatch):
    monkeypatch.setattr(run_plan, "_num_gpus", lambda: 4)
    argv = ("--recipe", "quiet", "--num-nodes", "2", "--node-rank", "1", "--master-addr", "a")
    made = plan(tree, *argv)
    assert made.cluster.num_processes == 8
    ports = [word for _, command in made.commands for word in command if "master_port" in word]
    assert ports == [f"--master_port={29500 + n}" for n in range(3)]
    with pytest.raises(UserError, match="--inference_tp_size 3 does not divide the 8 processes"):
        plan(tree, *argv, "--inference_tp_size", "3")
    with pytest.raises(UserError, match="--num_nodes 2 needs --hostfile"):
        plan(tree, "--recipe", "quiet", "--num-nodes", "2")


def test_only_the_first_machine_looks_for_the_mark(tree):
    """Another one's view of a shared disk may lag behind, and it would leave the first alone."""
    argv = ("--recipe", "demo", "--num-nodes", "2", "--master-addr", "a", "--output-dir", "out")
    first, second = (plan(tree, *argv, "--node-rank", str(n)) for n in (0, 1))
    (step, command), *_ = first.commands
    assert not first.finished(step)
    assert second.finished(step)
    assert (first.summary, second.summary) == (True, False)
    # Both would run the same steps, each with its own number.
    assert [c for _, c in second.commands] == [
        [word.replace("--node_rank=0", "--node_rank=1") for word in c] for _, c in first.commands
    ]


def test_threads_are_shared_out_on_a_cpu(tree, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    made = plan(tree, "--recipe", "quiet", "--num-gpus", "3")
    assert made.environment["OMP_NUM_THREADS"] == "2"
    assert made.environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert plan(tree, "--recipe", "quiet").environment["OMP_NUM_THREADS"] == "5"


# How it runs and ends


def test_runs_the_steps_in_order_and_says_how_to_talk(tree):
    done = train("--recipe", "quiet", "--output-dir", "out", OMP_NUM_THREADS="1")
    assert (done.returncode, done.stderr) == (0, "")
    seen = json.loads(Path("out/step3_rlhf/seen0.json").read_text())
    assert seen["argv"][-2:] == ["--output_dir", "out/step3_rlhf"]
    assert done.stdout.endswith("chat with it: python chat.py --path out/step3_rlhf/actor\n")
    order = [done.stdout.index(f"== step {n}:") for n in (1, 2, 3)]
    assert order == sorted(order)


def test_a_failing_step_ends_the_run_with_its_message_and_code(tree):
    done = train("--recipe", "quiet", "--output-dir", "out", FAIL="step2_reward")
    assert done.returncode == 3
    assert done.stderr == "error: step2_reward says why\n"
    assert Path("out/step1_sft/COMPLETE").exists()
    assert not Path("out/step3_rlhf").exists()


def test_a_step_that_ends_without_finishing_is_a_failure(tree):
    done = train("--recipe", "quiet", "--output-dir", "out", VANISH="step1_sft")
    assert done.returncode == 1
    assert "step 1 exited without finishing" in done.stdout
    assert not Path("out/step2_reward").exists()


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def interrupted(
    argv: list[str], signals: list[int], **variables: str
) -> tuple[int, str, list[int]]:
    """train.py's exit code after ``signals``, what it said on standard error, and the processes
    that its first step had started.
    """
    run = subprocess.Popen(
        [sys.executable, "train.py", "--recipe", "quiet", "--output-dir", "out", *argv],
        env=environment(HANG="step1_sft", **variables),
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = Path("out/step1_sft/pids")
    assert wait_for(pids.exists, 60)
    started = json.loads(pids.read_text())
    assert all(alive(pid) for pid in started)
    for signum in signals:
        run.send_signal(signum)  # to train.py alone: passing it on is its own work
        time.sleep(0.5)
    _, said = run.communicate(timeout=60)
    return run.returncode, said, started


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("signals", "code", "variables"),
    [
        ([signal.SIGINT], 130, {}),
        ([signal.SIGTERM], 143, {}),
        ([signal.SIGINT, signal.SIGINT], 130, {"STUBBORN": "1"}),
    ],
    ids=["ctrl-c", "sigterm", "ctrl-c twice, ignored"],
)
def test_interruption_leaves_no_orphan(tree, signals, code, variables):
    returned, said, started = interrupted([], signals, **variables)
    assert (returned, said) == (code, "interrupted\n" if code == 130 else "terminated\n")
    assert wait_for(lambda: not any(alive(pid) for pid in started), 60)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_slurms_signal_while_a_model_loads_puts_the_job_back_into_the_queue(tree):
    returned, said, started = interrupted([], [signal.SIGUSR1])
    line = "stopped in step 1; the same command resumes from there\n"
    assert (returned, said) == (stop_signals.EXIT_CODE, line)
    assert wait_for(lambda: not any(alive(pid) for pid in started), 60)


def in_loop(*argv: str, ranks: int = 1, **variables: str) -> tuple[subprocess.Popen, list[int]]:
    """train.py, and the processes of its first step once they are in their loop."""
    run = subprocess.Popen(
        [sys.executable, "train.py", "--recipe", "quiet", "--output-dir", "out", *argv],
        env=environment(LOOP="step1_sft", **variables),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    files = [Path(f"out/step1_sft/in_loop{rank}") for rank in range(ranks)]
    assert wait_for(lambda: all(f.exists() and f.read_text() for f in files), 60), run.poll()
    return run, [int(file.read_text()) for file in files]


def check_stopped(run: subprocess.Popen, pids: list[int]) -> str:
    """Returns what it wrote to standard output."""
    out, said = run.communicate(timeout=60)
    assert run.returncode == 75, said
    notice, line = said.splitlines()
    assert notice == "stopping after this step; a second signal ends it at once"
    (folder,) = Path("out/step1_sft/checkpoints").iterdir()
    assert line == (f"stopped in step 1, saved in {folder}; the same command resumes from there")
    assert wait_for(lambda: not any(alive(pid) for pid in pids), 60)
    assert not Path("out/step2_reward").exists()
    assert not Path("out/step1_sft/.ranks").exists()
    return out


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_stops_training_in_peace(tree, signum):
    run, pids = in_loop()
    run.send_signal(signum)
    check_stopped(run, pids)


def test_training_stops_in_peace_without_a_summary_that_cannot_be_written(tree):
    """Half a row of metrics, as a full disk leaves it."""
    folder = Path("out/step1_sft")
    folder.mkdir(parents=True)
    recipe_file = tree / "training/recipes/quiet.yaml"
    recipe_file.write_text(recipe_file.read_text() + "summary: true\n")
    (folder / "metrics.jsonl").write_text('{"step": 1, "lo')
    run, pids = in_loop()
    run.send_signal(signal.SIGTERM)
    assert "could not write summary.json: " in check_stopped(run, pids)


def test_a_second_signal_ends_training_at_once(tree):
    run, pids = in_loop(STEP_S="600")
    run.send_signal(signal.SIGTERM)
    assert run.stderr.readline().startswith("stopping after this step")
    time.sleep(0.5)
    run.send_signal(signal.SIGTERM)
    said = run.communicate(timeout=60)[1]
    assert (run.returncode, said.splitlines()[-1]) == (143, "terminated")
    assert wait_for(lambda: not any(alive(pid) for pid in pids), 60)
    assert not Path("out/step1_sft/checkpoints").exists()


@pytest.mark.slow
def test_a_rank_that_was_asked_by_others_stops_the_run_too(tree):
    """SLURM may signal the processes in place of train.py."""
    run, pids = in_loop()
    os.kill(pids[0], signal.SIGUSR1)
    said = run.communicate(timeout=60)[1]
    assert run.returncode == 75
    assert said.startswith("stopped in step 1, saved in out/step1_sft/checkpoints/step_")
    assert not Path("out/step2_reward").exists()


@pytest.mark.slow
def test_who_begins_anew_is_told_what_to_leave_out(tree):
    run, _ = in_loop("--overwrite-output-dir", "--restart")
    run.send_signal(signal.SIGINT)
    said = run.communicate(timeout=60)[1]
    anew = "the same command without --restart and --overwrite_output_dir resumes from there\n"
    assert said.endswith(anew)


AGAIN = ("--recipe", "quiet", "--output-dir", "out", "--resume", "latest")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.dist])], ids="{} ranks".format
)
def test_a_killed_train_py_takes_its_step_along(tree, ranks, capfd):
    """Launchers too, saved; the same command, planned at once, waits for that."""
    run, pids = in_loop("--num-gpus", str(ranks), ranks=ranks, STEP_S="0.5")
    group = os.getpgid(pids[0])
    run.kill()
    run.wait()
    note = plan(tree, *AGAIN, "--num-gpus", str(ranks)).notes[0]
    assert not watchdog.lives(group)
    assert not any(alive(pid) for pid in pids)
    (folder,) = Path("out/step1_sft/checkpoints").iterdir()
    assert note.startswith(f"step 1 resumes from {folder}")
    assert not Path("out/step1_sft/.ranks").exists()
    line = "waiting: processes of a killed train.py still write to out/step1_sft\n"
    assert capfd.readouterr().err == line


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_train_py_that_is_killed_while_a_model_loads(tree):
    """Nobody can stop in peace there, and no checkpoint will tell of it."""
    run = subprocess.Popen(
        [sys.executable, "train.py", "--recipe", "quiet", "--output-dir", "out"],
        env=environment(HANG="step1_sft"),
    )
    pids = Path("out/step1_sft/pids")
    assert wait_for(pids.exists, 60)
    run.kill()
    run.wait()
    plan(tree, *AGAIN)
    assert not any(alive(pid) for pid in json.loads(pids.read_text()))


def test_a_folder_that_is_written_already(tree):
    run, pids = in_loop()
    name = f"{socket.gethostname()}@{run.pid}"
    with pytest.raises(UserError, match=rf"out/step1_sft is .* another train.py \({name}\)"):
        plan(tree, *AGAIN)
    children = psutil.Process(run.pid).children()
    for process in [*(child for child in children if child.pid not in pids), run]:
        process.kill()  # the watchdog first
    run.wait()
    try:
        with pytest.raises(UserError, match=rf"train.py was killed \(process {pids[0]}\); stop"):
            plan(tree, *AGAIN)
    finally:
        os.kill(pids[0], signal.SIGKILL)
    assert wait_for(lambda: not alive(pids[0]), 60)
    assert plan(tree, *AGAIN).commands


@pytest.mark.slow
@pytest.mark.dist
def test_a_signal_stops_all_ranks_together(tree):
    run, pids = in_loop("--num-gpus", "2", ranks=2)
    run.send_signal(signal.SIGTERM)
    check_stopped(run, pids)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_takes_the_others_with_it(tree, rank):
    run, pids = in_loop("--num-gpus", "2", ranks=2, KILL=str(rank))
    assert wait_for(lambda: not alive(pids[rank]), 30)
    assert wait_for(lambda: not alive(pids[1 - rank]), 30)
    said = run.communicate(timeout=60)[1]
    assert run.returncode not in (0, 75)
    assert f"error: process {rank} of 2 (pid {pids[rank]} on " in said
    assert "Traceback" not in said
    assert not Path("out/step1_sft/checkpoints").exists()


@pytest.mark.dist
def test_two_processes_under_the_launcher(tree):
    """DeepSpeed's launcher starts both, and a rank's exit code comes through it."""
    argv = ("--recipe", "quiet", "--output-dir", "out", "--num-gpus", "2")
    done = train(*argv, FAIL="step2_reward")
    assert done.returncode == 3
    assert "error: step2_reward says why" in done.stderr
    seen = [json.loads(Path(f"out/step1_sft/seen{r}.json").read_text()) for r in (0, 1)]
    assert [s["environment"]["RANK"] for s in seen] == ["0", "1"]
    assert {s["environment"]["WORLD_SIZE"] for s in seen} == {"2"}
    assert seen[1]["argv"][0] == "--local_rank=1"


SRUN = """#!/bin/bash
# Two machines of two tasks, all here
while [ "${1#--}" != "$1" ]; do case $1 in *=*) shift;; *) shift 2;; esac; done
for rank in 0 1 2 3; do
    SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=$rank \\
        SLURM_LOCALID=$((rank % 2)) SLURM_STEP_NODELIST=gpu[1-2] "$@" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "${code:-0}"
"""


def test_srun_starts_the_steps(tree):
    """One train.py, as a batch script runs it; every task of a step knows who it is."""
    (tree / "bin").mkdir()
    (tree / "bin" / "srun").write_text(SRUN)
    (tree / "bin" / "srun").chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    path = os.pathsep.join([str(tree / "bin"), os.environ["PATH"]])
    argv = ("--recipe", "quiet", "--output-dir", "out", "--launcher", "slurm")
    argv += ("--num-nodes", "2", "--num-gpus", "2")
    done = train(*argv, PATH=path, FAIL="step2_reward", **job)
    assert done.returncode == 3
    assert "error: step2_reward says why" in done.stderr
    seen = [json.loads(Path(f"out/step1_sft/seen{r}.json").read_text()) for r in range(4)]
    numbers = [s["environment"]["numbers"] for s in seen]
    assert numbers == [[0, 4, 0], [1, 4, 1], [2, 4, 0], [3, 4, 1]]


def test_train_py_is_not_a_task_itself(tree, monkeypatch):
    """srun python train.py: every task would start all processes."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(UserError, match="4 processes run train.py"):
        plan(tree, "--recipe", "quiet")
    by_hand = ("--num-nodes", "4", "--node-rank", "2", "--master-addr", "gpu1")
    assert plan(tree, "--recipe", "quiet", *by_hand).cluster.num_processes == 4


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_ctrl_c_under_the_launcher_leaves_no_orphan(tree):
    returned, said, started = interrupted(["--num-gpus", "2"], [signal.SIGINT])
    assert (returned, said.splitlines()[-1]) == (130, "interrupted")
    assert wait_for(lambda: not any(alive(pid) for pid in started), 60)


def test_a_name_too_long_for_a_disk_is_no_folder(tree):
    """pathlib's ``exists`` raises there."""
    name = "1" * 400
    assert not run_plan._is_finished_sft(Path(name))
    planned = plan(tree, "--recipe", "quiet", "--actor-model", name, "--step", "1")
    assert [step.number for step, _ in planned.commands] == [1]
