"""Which steps run, from which models and why: a table of what was asked for and what is there."""

import json
import shutil
from pathlib import Path

import pytest

from dschat.checkpoint.manifest import COMPLETE
from dschat.config import UserError
from dschat.launch.recipe import STEPS, StepRun
from dschat.launch.step_runs import ACTOR, BASE, CRITIC, REWARD, choose

SFT, SCORE, POLICY = FOLDERS = ("out/step1_sft", "out/step2_reward", "out/step3_rlhf")
BASES = {1: {BASE: "a"}, 2: {BASE: "r"}, 3: {}}
ALL_RUN = {1: "asked for", 2: "asked for", 3: "asked for"}


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def steps(fields, finished=(), trained=()):
    """The runs of ``fields``; on disk the steps that have ``finished``, and trained base models."""
    for folder in map(Path, ("a", "r", *FOLDERS)):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for n in finished:
        Path(FOLDERS[n - 1], COMPLETE).touch()
    if 1 in trained:
        Path("a", COMPLETE).touch()
    if 2 in trained:
        reward = {"architectures": ["LlamaForSequenceClassification"]}
        Path("r/config.json").write_text(json.dumps(reward))
    return [StepRun(STEPS[n], FOLDERS[n - 1], given) for n, given in fields.items()]


def again(*numbers):
    return {n: BASES[n] | {"overwrite_output_dir": n in numbers} for n in BASES}


CASES = {  # fields, --step, finished, trained -> reasons of what runs, is reused and is left out
    "a new run": (BASES, (), (), (), ALL_RUN, {}, {}),
    "one by one": (BASES, (2,), (), (), {2: "asked for"}, {}, {}),
    "without the last": ({**BASES, 3: {ACTOR: SFT}}, (2,), (1,), (1,), {2: "asked for"}, {}, {}),
    "from the second": (BASES, (), (1,), (), {2: "asked for", 3: "asked for"}, {1: "finished"}, {}),
    "the last alone": (BASES, (3,), (1,), (), {2: "needed", 3: "asked for"}, {1: "input"}, {}),
    "nothing left": (BASES, (), (1, 2, 3), (), {}, dict.fromkeys((1, 2, 3), "finished"), {}),
    "the last, done": (BASES, (3,), (1, 2, 3), (), {}, {1: "base", 2: "base", 3: "finished"}, {}),
    "the last, done, alone": (BASES, (3,), (3,), (), {}, {3: "finished"}, {}),
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
    made = choose(steps(fields, finished, trained), asked)
    assert [run.number for run in made] == [1, 2, 3]
    parts = [
        [run for run in made if run.trains],
        [run for run in made if run.is_reused],
        [run for run in made if run.reason == "trained already"],
    ]
    assert expected == [{run.number: run.reason for run in part} for part in parts]


def test_the_last_step_starts_from_the_others():
    def initial(fields, trained=(), asked=()):
        made = choose(steps(fields, trained=trained), asked)
        return {k: v for k, v in made[-1].fields.items() if k.endswith("name_or_path")}

    assert initial(BASES) == {ACTOR: SFT, CRITIC: SCORE}
    assert initial(BASES, trained=(1,)) == {ACTOR: "a", CRITIC: SCORE}
    assert initial(BASES, trained=(1, 2), asked=(1, 3)) == {ACTOR: SFT, CRITIC: "r"}
    assert initial({**BASES, 3: {REWARD: "y"}}) == {ACTOR: SFT, REWARD: "y"}
    by_function = {**BASES, 3: {"reward_fn": ["length"]}}
    assert initial(by_function) == {ACTOR: SFT, REWARD: SCORE}
    assert initial({1: {BASE: "a"}, 2: {"loss": "dpo"}}) == {BASE: SFT}
    assert BASES == {1: {BASE: "a"}, 2: {BASE: "r"}, 3: {}}  # nothing given is changed


def test_a_shared_base_is_that_of_step_2():
    """Which trains adapters of the actor's rank on it, unless its own fields say otherwise."""
    shared = {"share_base": True, "actor_lora_dim": 8}

    def reward(more=(), trained=(), **rlhf):
        fields = {1: {BASE: "a"}, 2: dict(more), 3: shared | rlhf}
        made = choose(steps(fields, trained=trained), ())
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
        choose(steps({**BASES, 2: {}}), ())
    with pytest.raises(UserError, match="^out/step3_rlhf is finished, but its initial model"):
        choose(steps(BASES, finished=(3,)), ())


@pytest.mark.parametrize(
    ("asked", "remedy"), [((), "dir trains"), ((1, 3), "dir, with 2 in --step, trains")]
)
def test_a_reward_model_does_not_outlive_the_model_that_it_started_from(asked, remedy):
    """The demo with --step1.overwrite_output_dir."""

    def made(*numbers):
        overwritten = again(*numbers)
        fields = {**overwritten, 2: overwritten[2] | {BASE: SFT}}
        return choose(steps(fields, finished=(1, 2)), asked)

    line = f"^out/step2_reward is finished, but .*; --step2.overwrite_output_{remedy} it again"
    with pytest.raises(UserError, match=line):
        made(1)
    if not asked:
        assert all(run.trains for run in made(1, 2))
    assert made(3)[1].is_reused


def test_notes():
    made = choose(steps(BASES, finished=(1,)), (3,))
    assert [run.note for run in made] == [
        "step 3 starts from out/step1_sft, finished earlier",
        "step 2 runs first: a later step needs its model, which is not in out",
        "",
    ]
    made = choose(steps(BASES, finished=(2,), trained=(1,)), ())
    assert [run.note for run in made] == [
        "step 3 starts from a, which is trained already",
        "step 2 is finished in out/step2_reward: skipped (--overwrite_output_dir runs it again)",
        "",
    ]
