"""``dschat replay`` trains kept rollouts again, to the bit, or names what it lacks."""

import json
import math
import shutil
from functools import cache
from hashlib import blake2b

import forked
import pytest
import torch
from program_cases import trainer_of
from quick import slow
from safetensors import safe_open
from safetensors.torch import load_file
from step_rows import PROMPTS

from dschat.checkpoint.atomic_files import save_tensors
from dschat.config import UserError
from dschat.rlhf.kept_rollouts import KeptRollouts, _digest
from dschat.rlhf.replay import _check, replay

ITERATIONS, SAVED, KEPT = 5, 2, 4
COMMON = (
    "--actor_model_name_or_path builtin/tiny --reward_fn {}/score.py:score --dtype fp32 "
    "--data_path {}/sums.jsonl --report_to none "
    "--num_samples_per_prompt 2 --per_device_generation_batch_size 4 --ppo_epochs 2 "
    "--max_prompt_seq_len 8 --max_answer_seq_len 6 --actor_learning_rate 1e-3 --eval_steps 2 "
    f"--max_steps {ITERATIONS} --save_steps {SAVED} --save_total_limit 0 --keep_rollouts {KEPT}"
)
PPO = (
    "--advantage_estimator gae --enable_ema --kl_target 1 --actor_dropout 0.1 --critic_dropout 0.1 "
    "--per_device_training_batch_size 4 --unsupervised_dataset_name {}/text.txt"
)
GRPO = "--advantage_estimator grpo --per_device_training_batch_size 1 "
GRPO += "--kl_in_loss --kl_coef 0.1 --kl_target 1 "
ONE = [PPO, GRPO + "--gradient_accumulation_steps 4 --max_tokens_per_micro_batch 40"]
EXPERTS = "--actor_model_name_or_path {models}/qwen3_moe --moe_routing_replay "
EXPERTS += "--router_aux_loss_coef 0.01"
ZERO = [
    GRPO + "--gradient_accumulation_steps 2 --max_tokens_per_micro_batch auto --actor_zero_stage 3",
    PPO + " --actor_zero_stage 2 --critic_zero_stage 3",
    PPO + " --actor_zero_stage 3 --critic_zero_stage 2 --actor_lora_dim 4",
]
# It draws from the generator of training's dropout.
SCORE = """import torch

def score(answers):
    return [sum(map(ord, answer)) % 7 / 7 + float(torch.rand(())) for answer in answers]
"""
NOT_COMPARED = ("time/", "throughput/", "memory/", "moe/routing_agreement")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    sums = [(a, b) for a in range(1, 8) for b in range(1, 8)]
    rows = [{"prompt": f"{a}+{b}=", "reference": str(a + b)} for a, b in sums]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "score.py").write_text(SCORE)
    (folder / "text.txt").write_text("\n\n".join(f"{a} and {b} make {a + b}" for a, b in sums))
    return folder


@pytest.fixture(scope="module")
def ran(folder, models_folder):
    """``ran(flags, ranks)``: OUT of a run with these flags, in OUT/step3_rlhf."""

    @cache
    def run(flags, ranks=1):
        out = folder / blake2b(f"{flags} {ranks}".encode(), digest_size=4).hexdigest()
        words = f"{COMMON} {flags} --output_dir {out}/step3_rlhf".replace("{}", str(folder))
        words = words.replace("{models}", str(models_folder))
        command("rlhf", *words.split(), ranks=ranks, folder=out / "ranks")
        return out

    return run


def command(*words, ranks, folder):
    """What ``dschat`` with these words prints, on rank 0."""
    argv = ["-m", "dschat", *words]
    done = forked.run_ranks(argv, folder, 200) if ranks == 2 else [forked.run(*argv, limit_s=200)]
    assert not any(rank.code for rank in done), "\n".join(rank.stderr[-3000:] for rank in done)
    assert not any(rank.stdout for rank in done[1:])
    return done[0].stdout


def logged(file):
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if not k.startswith(NOT_COMPARED)} for row in rows]
    return {row["step"]: row for row in rows if "policy/grad_norm" in row}


def stamps(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def assert_replayed(out, ranks, tmp_path):
    """Iterations 3 and 4, from the checkpoint after 2: what metrics.jsonl has, to the bit."""
    run, before = out / "step3_rlhf", stamps(out / "step3_rlhf")
    kept = sorted(path.name for path in (run / "rollouts").iterdir())
    numbers = range(ITERATIONS - KEPT + 1, ITERATIONS + 1)
    names = [f"iteration_{n:06d}.rank{rank}.safetensors" for n in numbers for rank in range(ranks)]
    assert kept == names
    words = ("replay", str(out), "--iteration", "4", "--out", str(tmp_path / "rows.jsonl"))
    printed = command(*words, ranks=ranks, folder=tmp_path / "ranks").splitlines()
    assert stamps(run) == before
    rows, expected = logged(tmp_path / "rows.jsonl"), logged(run / "metrics.jsonl")
    parts = rows[4].pop("mini_batches")
    assert rows == {n: expected[n] for n in (3, 4)}
    assert len(parts) > 2
    norms = [part["policy/grad_norm"] for part in parts]
    assert math.fsum(norms) / len(norms) == pytest.approx(rows[4]["policy/grad_norm"])
    assert len(set(norms)) == len(norms)
    assert printed[0] == f"from {run / 'checkpoints/step_000002'}"
    assert [line.split()[:2] for line in printed[1:3]] == [["replay", "3/4"], ["replay", "4/4"]]
    assert all(line.endswith("  as logged") for line in printed[1:3])
    assert len({line.index("grad_norm") for line in printed[1:3]}) == 1
    assert len(printed) == 3 + len(parts)


@pytest.mark.parametrize("flags", [*ONE, *slow([GRPO + EXPERTS])])
def test_one_process_to_the_bit(flags, ran, tmp_path):
    assert_replayed(ran(flags), 1, tmp_path)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("flags", ZERO)
def test_two_processes_to_the_bit(flags, ran, tmp_path):
    out = ran(flags, 2)
    assert_replayed(out, 2, tmp_path)
    with pytest.raises(UserError, match="trained by 2 processes, and this is 1; start 2: deepspe"):
        replay(str(out), 4)


@pytest.fixture
def copied(ran, tmp_path):
    """A copy of a run that a test may change."""
    return shutil.copytree(ran(PPO), tmp_path / "run") / "step3_rlhf"


def test_what_is_missing_is_named(copied):
    with pytest.raises(UserError, match=r"000009.rank0.* is missing; iterations 2 to 5 are kept:"):
        replay(str(copied), 9)
    with pytest.raises(UserError, match=r"no checkpoint before iteration 2 \(.*ckpoints has none"):
        replay(str(copied), 2)
    (copied / "rollouts/iteration_000003.rank0.safetensors").unlink()
    with pytest.raises(UserError, match="iteration_000003.rank0.safetensors is missing"):
        replay(str(copied), 4)
    shutil.rmtree(copied / "rollouts")
    with pytest.raises(UserError, match="is missing; none is kept"):
        replay(str(copied), 4)


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_rollout_is_named(damage, copied):
    path = copied / "rollouts/iteration_000003.rank0.safetensors"
    data = path.read_bytes()
    path.write_bytes(
        {"cut": data[:-9], "changed": data[:-9] + b"X" + data[-8:], "empty": b""}[damage]
    )
    with pytest.raises(UserError, match="iteration_000003.rank0.safetensors is damaged, or of ano"):
        replay(str(copied), 4)


def test_a_damaged_checkpoint_is_named(copied):
    (copied / "checkpoints/step_000002/values.json").write_text("{}")
    with pytest.raises(UserError, match="no checkpoint before iteration 4 .*step_000002/values.js"):
        replay(str(copied), 4)


def test_numbers_that_the_run_did_not_have_are_marked(copied, capsys):
    path = copied / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row |= {"val/grad_norm": -7.0} if row["step"] == 4 and "val/grad_norm" in row else {}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] != 3))
    replay(str(copied), 4)
    first, second = capsys.readouterr().out.splitlines()[1:3]
    assert first.endswith("  (not logged)")
    assert second.endswith("  NOT as logged: val/grad_norm -7.0")


def test_where_the_run_stopped_the_replay_stops(copied, capsys):
    """After the mini-batches before it."""
    path = copied / "rollouts/iteration_000004.rank0.safetensors"
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["facts"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    facts["settings"]["max_bad_steps"] = 1
    tensors["advantages"][-1] = math.nan
    del facts["digest"]
    facts["digest"] = _digest(tensors, facts)
    save_tensors(tensors, path, facts=json.dumps(facts))
    with pytest.raises(FloatingPointError, match="1 steps of the actor in a row were skipped"):
        replay(str(copied), 4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("  as logged")
    assert [line.split()[0] for line in lines[2:]] == ["mini-batch"] * len(lines[2:])
    assert len(lines) < 6


# -- keeping them


@pytest.fixture
def trainer(models_folder):
    trainer = trainer_of(models_folder)
    trainer.e = trainer.generate_experience(PROMPTS[:4])
    return trainer


def kept(folder):
    return sorted(path.name for path in (folder / "rollouts").iterdir())


def test_the_last_ones_are_kept_and_repeated_ones_dropped(trainer, tmp_path):
    rollouts = KeptRollouts(tmp_path, 2)
    for trainer.iteration in range(4):
        rollouts.keep(trainer, trainer.e)
    assert kept(tmp_path) == [f"iteration_00000{n}.rank0.safetensors" for n in (3, 4)]
    (tmp_path / "rollouts/.iteration_000003.rank1.safetensors").touch()  # of a kill
    (tmp_path / "rollouts/mine.txt").touch()
    trainer.iteration = 3
    KeptRollouts(tmp_path).begin(trainer)
    assert kept(tmp_path) == ["iteration_000003.rank0.safetensors", "mine.txt"]
    trainer.iteration = 0
    KeptRollouts(tmp_path).begin(trainer)
    assert kept(tmp_path) == ["mine.txt"]


def test_what_is_read_is_what_was_kept(trainer, tmp_path):
    e, rollouts = trainer.e, KeptRollouts(tmp_path, 1)
    e.experts = [torch.full((int(n), 2, 3), i, dtype=torch.int16) for i, n in enumerate(e.lengths)]
    e.returns = e.advantages  # some estimators give both the same memory
    rollouts.keep(trainer, e)
    read, _, facts = rollouts.read(1)
    for name, value in vars(e).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(read, name), value), name
        elif isinstance(value, (int, str)):
            assert getattr(read, name) == value
    assert all(map(torch.equal, read.experts, e.experts))
    assert facts["metrics"] == trainer.metrics
    file = load_file(tmp_path / "rollouts/iteration_000001.rank0.safetensors")
    assert torch.equal(file["advantages"], e.advantages)  # by another program
    trainer.iteration = 1
    rollouts.keep(trainer, e.pick([]))  # of a rank without answers
    assert rollouts.read(2)[0].num_sequences == 0


def test_settings_that_changed_between_rollouts_are_named(trainer, tmp_path):
    rollouts = KeptRollouts(tmp_path, 9)
    for trainer.iteration, trainer.args.cliprange in enumerate((0.2, 0.2, 0.1)):
        trainer.args.logging_steps += 1  # changes no number
        rollouts.keep(trainer, trainer.e)
    assert _check(rollouts, [2, 1])["settings"]["cliprange"] == 0.2
    with pytest.raises(UserError, match=r"changed after iteration 2 \(cliprange: 0.2 -> 0.1\)"):
        _check(rollouts, [3, 2, 1])


def test_a_full_disk_ends_keeping_not_training(trainer, tmp_path, caplog):
    (tmp_path / "rollouts").touch()  # in the folder's place
    rollouts = KeptRollouts(tmp_path, 2)
    for _ in range(2):
        rollouts.keep(trainer, trainer.e)
    assert caplog.text.count("no more rollouts are kept") == 1
