"""Hours and dollars of a step."""

from dataclasses import replace

import pytest
from estimates import estimated, rlhf_fields

from dschat.config import RewardConfig, UserError
from dschat.estimate import PlanRequest
from dschat.estimate.hours import step_time, time_lines
from dschat.estimate.seconds import ENGINE, HF_LOOP, Rows
from dschat.launch.recipe import parse_args

NAME = "A100-80"


@pytest.fixture(scope="module")
def rlhf(tiny):
    """Eight devices: 64 prompts, two samples of each, two optimizer steps."""
    return rlhf_fields(tiny("llama")) | {"actor_zero_stage": 3, "critic_zero_stage": 3}


def plan(**cost):
    return PlanRequest({}, 8, 8, **cost)


def phases(fields, tokens=None, **knobs):
    done = estimated(fields | knobs, num_processes=8, name=NAME)
    time = step_time(done, plan(tokens=tokens))
    return time.seconds, time


def test_an_iteration_is_made_of_its_phases(rlhf):
    plain, time = phases(rlhf)
    assert list(plain) == ["refresh", "prefill", "decode", "score", "train", "update"]
    assert time.rows == Rows(128, 24, 16, 2)
    assert time.fleet.shares == ENGINE
    assert time.total_s == pytest.approx(sum(plain.values()))
    twice, _ = phases(rlhf, ppo_epochs=2)
    for name in ("train", "update"):
        assert twice[name] == pytest.approx(2 * plain[name])
    assert twice["score"] == plain["score"]
    assert twice["decode"] == plain["decode"]


def test_scoring_counts_the_models_that_read(rlhf):
    """Actor (an eighth), reference, critic and reward model, which are equal but for their heads:
    16 times 4 rows of 1 + 3 models; then the actor's all. Without sharded weights to gather.
    """
    whole = rlhf | {"actor_zero_stage": 2, "critic_zero_stage": 2}
    auto, _ = phases(whole)
    every, _ = phases(whole, old_logprobs="recompute")
    none, _ = phases(whole, old_logprobs="rollout")
    actor = every["score"] - none["score"]
    assert auto["score"] - none["score"] == pytest.approx(actor / 8)
    without, _ = phases(whole, old_logprobs="rollout", kl_coef=0.0)
    assert none["score"] - without["score"] == pytest.approx(actor)


def test_the_hugging_face_loop_is_slower(rlhf):
    engine, _ = phases(rlhf)
    loop, time = phases(rlhf, enable_hybrid_engine=False)
    assert time.fleet.shares == HF_LOOP
    assert loop["decode"] > 2 * engine["decode"]


def test_mean_lengths_replace_the_longest(rlhf):
    _, time = phases(rlhf, tokens=(10, 100))
    assert time.rows == Rows(128, 10, 16, 2)  # no answer is longer than the limit
    _, longest = phases(rlhf)
    assert time.total_s < longest.total_s


def test_steps_of_pairs_have_two_sequences(tiny):
    fields = {"model_name_or_path": tiny("llama"), "max_seq_len": 32}
    sft = estimated(fields, number=1, name=NAME)
    pairs = estimated(fields | {"loss": "dpo"}, number=2, name=NAME)
    one, two = (step_time(done, plan(examples=160)) for done in (sft, pairs))
    assert list(one.seconds) == ["train", "update"]
    assert list(two.seconds) == ["reference", "train", "update"]
    assert (one.rows.count, two.rows.count) == (16, 2 * RewardConfig().per_device_train_batch_size)
    assert one.num_steps == two.num_steps == 10  # 16 of 160 examples, or pairs, in each


def test_hours_and_dollars_by_hand(rlhf, monkeypatch):
    done = estimated(rlhf | {"max_steps": 90}, num_processes=8, name=NAME)
    time = step_time(done, plan())
    slow = replace(time, seconds={"decode": 80.0})
    monkeypatch.setattr("dschat.estimate.hours.step_time", lambda *_: slow)
    text = "\n".join(time_lines(done, plan(price=2.5)))
    # 90 iterations of 80 s: 2 h on 8 devices at $2.50
    assert "90 steps: 2 h, 16 device hours, $40.00" in text
    assert "128 sequences of 40 tokens) on 8 x A100-80" in text
    assert "    decode            80\n    total " in text
    unknown = {"max_steps": 0, "num_train_epochs": 2}
    epochs = replace(done, config=replace(done.config, **unknown))
    monkeypatch.undo()
    assert step_time(epochs, plan()).num_steps is None
    assert "  1,000 steps: " in "\n".join(time_lines(epochs, plan()))
    # 1,000 prompts, 64 of them in an iteration, two epochs: 31.25
    assert step_time(epochs, plan(examples=1000)).num_steps == 32


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
