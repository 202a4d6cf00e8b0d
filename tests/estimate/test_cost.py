"""Hours and dollars of a step, and the same batch on other numbers of nodes."""

from dataclasses import replace

import pytest
from estimates import estimated, rlhf_fields

from dschat.config import RewardConfig, RLHFConfig, SFTConfig, UserError
from dschat.estimate import PlanRequest
from dschat.estimate.devices import GIB
from dschat.estimate.hours import node_lines, on_nodes, same_batch, step_time, time_lines
from dschat.estimate.seconds import ENGINE, HF_LOOP, Phase, Rows
from dschat.launch.recipe import parse_args

NAME = "A100-80"


@pytest.fixture(scope="module")
def rlhf(tiny):
    """Eight devices: 64 prompts, two samples of each, two optimizer steps."""
    return rlhf_fields(tiny("llama")) | {"actor_zero_stage": 3, "critic_zero_stage": 3}


def plan(**cost):
    return PlanRequest({}, 8, 8, **cost)


def phases(fields, tokens=None, **knobs):
    done, _ = estimated(fields | knobs, num_processes=8, name=NAME)
    time = step_time(done, plan(tokens=tokens))
    return {phase.name: phase for phase in time.phases}, time


def test_an_iteration_is_made_of_its_phases(rlhf):
    plain, time = phases(rlhf)
    assert list(plain) == ["refresh", "prefill", "decode", "score", "train", "update"]
    assert time.rows == Rows(128, 24, 16, 2)
    assert time.fleet.shares == ENGINE
    assert time.total_s == pytest.approx(sum(p.total_s for p in plain.values()))
    twice, _ = phases(rlhf, ppo_epochs=2)
    for name in ("train", "update"):
        assert twice[name].total_s == pytest.approx(2 * plain[name].total_s)
    assert twice["score"] == plain["score"]
    assert twice["decode"] == plain["decode"]


def test_scoring_counts_the_models_that_read(rlhf):
    """Actor (an eighth), reference, critic and reward model, which are equal but for their heads:
    16 times 4 rows of 1 + 3 models; then the actor's all.
    """
    auto, _ = phases(rlhf)
    every, _ = phases(rlhf, old_logprobs="recompute")
    none, _ = phases(rlhf, old_logprobs="rollout")
    actor = every["score"].products_s - none["score"].products_s
    assert auto["score"].products_s - none["score"].products_s == pytest.approx(actor / 8)
    without, _ = phases(rlhf, old_logprobs="rollout", kl_coef=0.0)
    assert none["score"].products_s - without["score"].products_s == pytest.approx(actor)


def test_the_hugging_face_loop_is_slower(rlhf):
    engine, _ = phases(rlhf)
    loop, time = phases(rlhf, enable_hybrid_engine=False)
    assert time.fleet.shares == HF_LOOP
    assert loop["decode"].total_s > 2 * engine["decode"].total_s


def test_mean_lengths_replace_the_longest(rlhf):
    _, time = phases(rlhf, tokens=(10, 100))
    assert time.rows == Rows(128, 10, 16, 2)  # no answer is longer than the limit
    _, longest = phases(rlhf)
    assert time.total_s < longest.total_s


def test_steps_of_pairs_have_two_sequences(tiny):
    fields = {"model_name_or_path": tiny("llama"), "max_seq_len": 32}
    sft, _ = estimated(fields, number=1, name=NAME)
    pairs, _ = estimated(fields | {"loss": "dpo"}, number=2, name=NAME)
    one, two = (step_time(done, plan(examples=160)) for done in (sft, pairs))
    assert [p.name for p in one.phases] == ["train", "update"]
    assert [p.name for p in two.phases] == ["reference", "train", "update"]
    assert (one.rows.count, two.rows.count) == (16, 2 * RewardConfig().per_device_train_batch_size)
    assert one.num_steps == two.num_steps == 10  # 16 of 160 examples, or pairs, in each


def test_hours_and_dollars_by_hand(rlhf, monkeypatch):
    done, make = estimated(rlhf | {"max_steps": 90}, num_processes=8, name=NAME)
    time = step_time(done, plan())
    slow = replace(time, phases=[Phase("decode", memory_s=80.0)])
    monkeypatch.setattr("dschat.estimate.hours.step_time", lambda *_: slow)
    text = "\n".join(time_lines(done, plan(price=2.5), make))
    # 90 iterations of 80 s: 2 h on 8 devices at $2.50
    assert "90 steps: 2 h, 16 device hours, $40.00" in text
    assert "128 sequences of 40 tokens) on 8 x A100-80" in text
    assert "    decode            80  memory bandwidth" in text
    unknown = {"max_steps": 0, "num_train_epochs": 2}
    epochs = replace(done, config=replace(done.config, **unknown))
    monkeypatch.undo()
    assert step_time(epochs, plan()).num_steps is None
    assert "  1,000 steps: " in "\n".join(time_lines(epochs, plan(), make))
    # 1,000 prompts, 64 of them in an iteration, two epochs: 31.25
    assert step_time(epochs, plan(examples=1000)).num_steps == 32


def test_more_devices_share_the_batch():
    config = RLHFConfig(
        per_device_generation_batch_size=24,
        generation_batches=2,
        per_device_training_batch_size=4,
        gradient_accumulation_steps=12,
    )
    for count in (8, 16, 48):
        for other in same_batch(config, 8, count):
            assert other.rollout_samples(count) == config.rollout_samples(8)
            assert other.mini_batch_size(count) == config.mini_batch_size(8)
    rows = [c.per_device_training_batch_size for c in same_batch(config, 8, 16)]
    assert rows == [24, 8, 4, 2, 1]
    assert list(same_batch(config, 8, 40)) == []  # of 384 prompts
    sft = SFTConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert [c.per_device_train_batch_size for c in same_batch(sft, 8, 16)] == [4, 2, 1]


def planned(fields, gib=80.0, number=3):
    """The step on 8 devices, and a function that estimates another one."""
    return estimated(fields, number, 8, gib, NAME)


@pytest.mark.slow
def test_a_batch_that_fits_nowhere_says_so(rlhf):
    done, make = planned(rlhf, gib=0.01)
    *_, last = node_lines(done, plan(nodes=[1]), make)
    assert last.split() == ["1", "does", "not", "fit"]


def test_memory_bounds_the_micro_batch(tiny):
    fields = {"model_name_or_path": tiny("llama"), "max_seq_len": 64}
    fields |= {"per_device_train_batch_size": 32, "zero_stage": 3}
    done, make = planned(fields, number=1)
    assert on_nodes(done, 1, plan(), make).micro_batch == 32
    sixteen = SFTConfig(**fields | {"per_device_train_batch_size": 16})
    gib = 1.001 * make(sixteen).peak.total / GIB
    done, make = planned(fields, gib, number=1)
    assert on_nodes(done, 1, plan(), make).micro_batch == 16


def test_the_table_of_nodes(rlhf):
    done, make = planned(rlhf | {"max_steps": 1000})
    lines = list(node_lines(done, plan(price=1.0, nodes=[2, 1, 3]), make))
    assert lines[1].endswith("device hours      dollars longest phase")
    rows = [line.split() for line in lines[2:]]
    assert [row[:3] for row in rows[:2]] == [["1", "8", "8"], ["2", "16", "4"]]
    assert rows[0][4] == "1.00"
    assert " ".join(rows[2]) == "3 24 devices do not divide the batch"
    device_hours, dollars = float(rows[1][6]), float(rows[1][7])
    assert device_hours == pytest.approx(16 * float(rows[1][5]), rel=0.01)
    assert dollars == pytest.approx(device_hours, abs=0.01)
    time = on_nodes(done, 2, plan(), make)
    assert lines[3].split()[-1] == max(time.phases, key=lambda phase: phase.total_s).name
    assert list(node_lines(done, plan(), make)) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--plan_tokens 5", "--plan_tokens needs two numbers"),
        ("--plan_examples 0", "--plan_examples 0 must be at least 1"),
    ],
)
def test_wrong_flags_are_one_line(flags, message):
    """Others are in mistakes.txt."""
    with pytest.raises(UserError, match=f"^{message}"):
        parse_args(["--plan", *flags.split()])
