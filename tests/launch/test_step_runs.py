"""Which steps run, from which models and why: a table of what was asked for and what is there."""

from pathlib import Path

import pytest

from dschat.config import UserError
from dschat.launch.recipe import STEPS
from dschat.launch.step_runs import ACTOR, BASE, CRITIC, REWARD, step_runs

OUT = Path("out")
SFT, SCORE = "out/step1_sft", "out/step2_reward"
BASES = {1: {BASE: "a"}, 2: {BASE: "r"}, 3: {}}
PAIRS = {n: STEPS[n] for n in (1, 2)}
ALL_RUN = {1: "asked for", 2: "asked for", 3: "asked for"}


def again(*numbers):
    return {n: BASES[n] | {"overwrite_output_dir": n in numbers} for n in BASES}


CASES = {  # fields, --step, finished, trained -> reasons of what runs, is reused and is left out
    "a new run": (BASES, (), (), (), ALL_RUN, {}, {}),
    "one by one": (BASES, (2,), (), (), {2: "asked for"}, {}, {}),
    "from the second": (BASES, (), (1,), (), {2: "asked for", 3: "asked for"}, {1: "finished"}, {}),
    "the last alone": (BASES, (3,), (1,), (), {2: "needed", 3: "asked for"}, {1: "input"}, {}),
    "nothing left": (BASES, (), (1, 2, 3), (), {}, dict.fromkeys((1, 2, 3), "finished"), {}),
    "the last, done": (BASES, (3,), (1, 2, 3), (), {}, {1: "base", 2: "base", 3: "finished"}, {}),
    "again": (again(1, 2, 3), (), (1, 2, 3), (), ALL_RUN, {}, {}),
    "the last again": (
        *(again(3), (3,), (1, 2, 3), ()),
        *({3: "asked for"}, {1: "input", 2: "input"}, {}),
    ),
    "a trained actor": (
        *(BASES, (), (), (1,)),
        *({2: "asked for", 3: "asked for"}, {}, {1: "trained already"}),
    ),
    "both trained": (
        *(BASES, (), (), (1, 2)),
        *({3: "asked for"}, {}, {1: "trained already", 2: "trained already"}),
    ),
    "trained, but asked for": (BASES, (1, 2, 3), (), (1, 2), ALL_RUN, {}, {}),
    "named in the last": (
        *({**BASES, 3: {ACTOR: "x", CRITIC: "y"}}, (), (), ()),
        *({3: "asked for"}, {}, {}),
    ),
    "a reward model on step 1's": (
        *({**BASES, 2: {BASE: SFT}, 3: {ACTOR: "x"}}, (), (), ()),
        *({1: "needed", 2: "asked for", 3: "asked for"}, {}, {}),
    ),
    "a reward model on step 1's, done": (
        *({**BASES, 2: {BASE: SFT}, 3: {ACTOR: "x"}}, (), (1,), ()),
        *({2: "asked for", 3: "asked for"}, {1: "base"}, {}),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_status_and_reason(case):
    fields, asked, finished, trained, *expected = case
    made = step_runs(STEPS, fields, asked, finished, trained, OUT)
    assert [run.step.number for run in made] == sorted(run.step.number for run in made)
    assert expected == [
        {run.step.number: run.reason for run in made if run.status == status}
        for status in ("runs", "reused", "left out")
    ]


def test_the_last_step_starts_from_the_others():
    def initial(fields, trained=(), steps=STEPS):
        made = step_runs(steps, fields, (), (), trained, OUT)
        return {k: v for k, v in made[-1].fields.items() if k.endswith("name_or_path")}

    assert initial(BASES) == {ACTOR: SFT, CRITIC: SCORE}
    assert initial(BASES, trained=(1,)) == {ACTOR: "a", CRITIC: SCORE}
    assert initial({**BASES, 3: {REWARD: "y"}}) == {ACTOR: SFT, REWARD: "y"}
    by_function = {**BASES, 3: {"reward_fn": ["length"]}}
    assert initial(by_function) == {ACTOR: SFT, REWARD: SCORE}
    assert initial({1: {BASE: "a"}, 2: {"loss": "dpo"}}, steps=PAIRS) == {BASE: SFT}
    assert BASES == {1: {BASE: "a"}, 2: {BASE: "r"}, 3: {}}  # nothing given is changed


def test_a_shared_base_is_that_of_step_2():
    """Which trains adapters of the actor's rank on it, unless its own fields say otherwise."""
    shared = {"share_base": True, "actor_lora_dim": 8}

    def reward(more=(), trained=(), **rlhf):
        fields = {1: {BASE: "a"}, 2: dict(more), 3: shared | rlhf}
        made = step_runs(STEPS, fields, (), (), trained, OUT)
        return {run.number: (run.fields[BASE], run.fields["lora_dim"]) for run in made[:-1][-1:]}

    assert reward() == {2: (SFT, 8)}
    assert reward({"lora_dim": 2}) == {2: (SFT, 2)}
    assert reward(trained=(1,)) == {2: ("a", 8)}
    for wrong, line in (
        ({BASE: "r"}, "on the actor's weights, out/step1_sft, not adapters of r; leave"),
        ({"lora_dim": 0}, "out/step1_sft, not all weights of out/step1_sft; leave"),
        ({"only_optimize_lora": False}, "not all weights of out/step1_sft; leave"),
    ):
        with pytest.raises(UserError, match=f"^--share_base: step 2 must train .*{line}"):
            reward(wrong)


def test_what_cannot_run():
    with pytest.raises(UserError, match="^--reward_model is missing: .* step 2"):
        step_runs(STEPS, {**BASES, 2: {}}, (), (), (), OUT)
    with pytest.raises(UserError, match="^out/step3_rlhf is finished, but its initial model"):
        step_runs(STEPS, BASES, (), (3,), (), OUT)


@pytest.mark.parametrize(
    ("asked", "remedy"), [((), "dir trains"), ((1, 3), "dir, with 2 in --step, trains")]
)
def test_a_reward_model_does_not_outlive_the_model_that_it_started_from(asked, remedy):
    """The demo with --step1.overwrite_output_dir."""

    def made(*numbers):
        overwritten = again(*numbers)
        fields = {**overwritten, 2: overwritten[2] | {BASE: SFT}}
        return step_runs(STEPS, fields, asked, (1, 2), (), OUT)

    line = f"^out/step2_reward is finished, but .*; --step2.overwrite_output_{remedy} it again"
    with pytest.raises(UserError, match=line):
        made(1)
    if not asked:
        assert [run.status for run in made(1, 2)] == ["runs"] * 3
    assert made(3)[1].status == "reused"


def test_notes():
    made = step_runs(STEPS, BASES, (3,), {1}, (), OUT)
    assert [run.note(3, OUT) for run in made] == [
        "step 3 starts from out/step1_sft, finished earlier",
        "step 2 runs first: a later step needs its model, which is not in out",
        "",
    ]
    made = step_runs(STEPS, BASES, (), {2}, {1}, OUT)
    assert [run.note(3, OUT) for run in made] == [
        "step 3 starts from a, which is trained already",
        "step 2 is finished in out/step2_reward: skipped (--overwrite_output_dir runs it again)",
        "",
    ]
