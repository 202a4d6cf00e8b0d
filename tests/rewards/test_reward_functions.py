"""All sources of a run: every pool gives the same scores, slow sources overlap, ranks fail
together.
"""

import asyncio
import gc
import json
import os
import re
import threading
import time

import pytest
import torch
from forked import run_ranks

import dschat.distributed as dist
from dschat.config import UserError
from dschat.rewards.samples import Samples
from dschat.rewards.scoring import RewardError, SourceScores
from dschat.user_code.calls import resolve

SCORES = '''
import asyncio
import os
import pathlib
import time

def number(answers):
    return [float(a[1:]) for a in answers]

def rank_in_group(prompts, answers):
    return [float(prompts[:i].count(p)) + prompts.count(p) for i, p in enumerate(prompts)]

def by_token(answer_ids):
    return [[float(i) for i in ids] for ids in answer_ids]

async def later(answers):
    await asyncio.sleep(0.01)
    return [None if a == "a1" else 1.0 for a in answers]

calls = 0

def process_id(answers):
    """Waits for a second process to be called as often, so that none can answer for both."""
    global calls
    calls += 1
    here, latest = pathlib.Path(__file__).parent, time.monotonic() + 30
    (here / f"call{calls}.{os.getpid()}").touch()
    while len(list(here.glob(f"call{calls}.*"))) < 2 and time.monotonic() < latest:
        time.sleep(0.01)
    return [float(os.getpid()) for _ in answers]
'''
NAMES = ("number:2", "rank_in_group", "by_token", "later")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "pooled.py"
    path.write_text(SCORES)
    return path


def plain(source: SourceScores) -> tuple:
    applies = source.applies.tolist()
    return source.name, source.weight, source.scores.tolist(), source.token_scores, applies


@pytest.mark.parametrize("pool", ["none", "thread", "process"])
def test_scores_are_the_same_wherever_they_are_computed(rewards, samples, file, pool):
    asked = rewards(reward_fn=[f"{file}:{n}" for n in NAMES], reward_pool=pool, reward_workers=2)
    assert asked.names == ["number", "rank_in_group", "by_token", "later"]
    pending = [asked.score(samples(9)), asked.score(samples(1))]  # two rounds at a time
    scores, few = (one.result() for one in pending)
    ids = [[float(j) for j in range(i % 3 + 1)] for i in range(9)]
    assert [plain(source) for source in scores] == [
        ("number", 2, [float(i) for i in range(9)], None, [True] * 9),
        # A prompt's answers stay in one part: the last prompt has one, the others two.
        ("rank_in_group", 1, [2, 3, 2, 3, 2, 3, 2, 3, 1], None, [True] * 9),
        ("by_token", 1, [sum(row) for row in ids], ids, [True] * 9),
        ("later", 1, [1, 0, *[1] * 7], None, [True, False, *[True] * 7]),
    ]
    assert [source.scores.tolist() for source in few] == [[0], [1], [0], [1]]


@pytest.mark.parametrize(
    ("groups", "count", "expected"),
    [
        ([5, 1, 6], 3, [(0, 5), (5, 12)]),  # cuts at 4 and 8 would split a prompt's answers
        ([2, 2, 2, 2], 2, [(0, 4), (4, 8)]),
        ([3, 3], 4, [(0, 3), (3, 6)]),
        ([1] * 5, 2, [(0, 2), (2, 5)]),
        ([7], 3, [(0, 7)]),
        ([2], 8, [(0, 2)]),
        ([], 2, []),
    ],
)
def test_parts_keep_the_answers_to_a_prompt_together(groups, count, expected):
    prompts = [number for number, size in enumerate(groups) for _ in range(size)]
    ids, texts = [[number] for number in prompts], [f"p{number}" for number in prompts]
    samples = Samples(texts, texts, ids, ids, ["stop"] * len(ids))
    cuts = samples.cuts(range(len(ids)), count)
    assert [(part[0], part[-1] + 1) for part in cuts] == expected


def test_worker_processes_are_reused(rewards, samples, file):
    asked = rewards(reward_fn=[f"{file}:process_id"], reward_pool="process", reward_workers=2)
    first, second = (set(asked.score(samples(8)).result()[0].scores.tolist()) for _ in "ab")
    assert len(first) == 2
    assert first == second
    assert float(os.getpid()) not in first


def test_a_rank_without_samples(rewards, samples, file):
    asked = rewards(reward_fn=[f"{file}:{n}" for n in NAMES], reward_pool="thread")
    for source in asked.score(samples(0)).result():
        assert source.scores.shape == (0,)
        assert source.token_scores is None


def test_no_sources(rewards, samples):
    asked = rewards()
    assert (asked.names, asked.overlaps) == ([], False)
    assert asked.score(samples(3)).result() == []


def constant(answers):
    return [1.0] * len(answers)


@pytest.mark.parametrize(
    ("is_async", "pool", "overlaps"),
    [(False, "none", False), (False, "thread", True), (True, "none", True)],
)
def test_slow_functions_leave_time_for_others(rewards, samples, is_async, pool, overlaps):
    """They wait for an event after `start`; without a pool they would wait forever."""
    later = threading.Event()

    def slow(answers):
        assert later.wait(50 if overlaps else 0) == overlaps
        return [1.0] * len(answers)

    async def slow_one(answers):
        while not later.is_set():
            await asyncio.sleep(0.01)
        return [1.0] * len(answers)

    # The constant runs in this thread, but the others start before it.
    asked = rewards([constant, slow_one if is_async else slow], reward_pool=pool)
    pending = asked.score(samples(16))
    later.set()
    for source in pending.result():
        assert source.scores.tolist() == [1] * 16
    assert asked.overlaps == overlaps


def test_a_pool_calls_as_often_at_a_time_as_it_has_workers(rewards, samples):
    together = threading.Barrier(4)

    def meets(answers):
        together.wait(50)
        return [1.0] * len(answers)

    asked = rewards([meets], reward_pool="thread", reward_workers=4)
    assert asked.score(samples(16)).result()[0].scores.tolist() == [1] * 16


def test_an_event_loop_is_reused_and_closed(rewards, samples):
    """An object bound to the loop in one call works in the next."""
    loops, threads = [], []

    async def remembers(answers):
        loops.append(asyncio.get_running_loop())
        threads.append(threading.current_thread())
        return [1.0] * len(answers)

    asked = rewards([remembers])
    for _ in range(2):
        asked.score(samples(2)).result()
    assert loops[0] is loops[1]
    asked.close()
    threads[0].join(60)
    assert loops[0].is_closed()


@pytest.mark.slow
def test_a_function_that_blocks_its_loop_delays_no_other(rewards, samples):
    async def innocent(answers):
        await asyncio.sleep(0.05)
        return [1.0] * len(answers)

    async def blocks(answers):
        time.sleep(3)
        return [1.0] * len(answers)

    asked = rewards([innocent, blocks], on_reward_error="skip", reward_timeout_s=1.0)
    scores = [source.scores.isnan().all() for source in asked.score(samples(1)).result()]
    assert scores == [False, True]


@pytest.mark.parametrize("pool", ["none", "thread"])
def test_functions_run_on_the_device_of_their_rank(rewards, samples, monkeypatch, pool):
    """CUDA's current device is per thread, and 0 in a new one."""
    device = threading.local()
    monkeypatch.setattr(dist, "device", lambda: torch.device("cuda", 3))
    monkeypatch.setattr(torch.cuda, "set_device", lambda to: setattr(device, "current", to))

    def here(answers):
        return [float(device.current.index)] * len(answers)

    async def later(answers):
        return here(answers)

    asked = rewards([here, later], reward_pool=pool)
    for source in asked.score(samples(2)).result():
        assert source.scores.tolist() == [3, 3]


HEAVY = """
import weakref

made = weakref.WeakSet()

class Heavy:
    def __init__(self, size: int = 1):
        made.add(self)

    def __call__(self, answers, difficulty):
        return [1.0] * len(answers)
"""


@pytest.mark.parametrize(("pool", "kept"), [("none", 1), ("process", 0)])
def test_an_instance_is_released_if_processes_call_it(rewards, tmp_path, pool, kept):
    """The training process constructs one to check its arguments; each worker has its own."""
    path = tmp_path / f"heavy_{pool}.py"
    path.write_text(HEAVY)
    asked = rewards(reward_fn=[f"{path}:Heavy"], reward_args=["Heavy.size=3"], reward_pool=pool)
    gc.collect()
    assert len(resolve(f"{path}:made")) == kept
    asked.check_columns(["difficulty"])
    with pytest.raises(UserError, match="needs the column difficulty"):
        asked.check_columns(["level"])


MOVES = """
import os
os.chdir("theirs")
def f(answers):
    return [float(os.path.isdir("theirs"))] * len(answers)
def g(answers):
    return f(answers)
"""


@pytest.mark.parametrize("pool", ["thread", "process"])
def test_a_file_that_changes_the_directory_is_found_again(
    rewards, samples, pool, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "moves.py").write_text(MOVES)
    asked = rewards(["moves.py:f", "moves.py:g"], reward_pool=pool, reward_workers=1)
    assert os.getcwd() == str(tmp_path)
    for source in asked.score(samples(2)).result():
        assert source.scores.tolist() == [1, 1]
    assert os.getcwd() == str(tmp_path)


def test_columns_are_checked_before_anything_runs(rewards, file):
    asked = rewards(["exact_match:1"], reward_args=["exact_match.reference=@gold"])
    asked.check_columns(["gold", "more"])
    with pytest.raises(UserError, match="^reward_fns 'exact_match:1' needs the column gold") as e:
        asked.check_columns(["solution", "level"])
    assert "(it has: level, solution)" in str(e.value)


class Counts:
    """Scores with the number of calls so far."""

    def __init__(self):
        self.seen = {"calls": 0}

    def __call__(self, answers):
        self.seen["calls"] += 1
        return [float(self.seen["calls"])] * len(answers)

    def state_dict(self):
        return self.seen

    def load_state_dict(self, state):
        self.seen = {"calls": state["calls"]}


def test_a_functions_state_is_saved_and_restored(rewards, samples, monkeypatch):
    first, second = rewards([Counts(), constant]), rewards([Counts(), constant])
    for _ in range(3):
        first.score(samples(2)).result()
    state = first.state_dict()
    assert state == {"counts": [{"calls": 3}]}
    first.score(samples(2)).result()
    assert state == {"counts": [{"calls": 3}]}  # a copy
    second.load_state_dict(json.loads(json.dumps(state)))
    assert second.score(samples(2)).result()[0].scores.tolist() == [4, 4]
    second.load_state_dict({})  # from a checkpoint without this function: a fresh state
    assert second.state_dict() == {"counts": [{"calls": 4}]}
    of_ranks = {"counts": [{"calls": 7}, {"calls": 9}]}
    for rank, score in ((0, 8), (1, 10), (2, 8)):
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        second.load_state_dict(of_ranks)
        assert second.score(samples(1)).result()[0].scores.tolist() == [score]
    with pytest.raises(
        UserError, match=r"counts: load_state_dict\(\) raised KeyError: 'calls'; fix"
    ):
        second.load_state_dict({"counts": [{}]})


class Endless(Counts):
    waits = False

    def state_dict(self):
        while self.waits:
            time.sleep(0.01)
        return super().state_dict()

    def load_state_dict(self, state):
        self.waits = True
        self.state_dict()


def test_a_state_that_never_comes_is_one_line(rewards, samples, caplog):
    """The checkpoint has the last good state; then the run stops."""
    endless = Endless()
    asked = rewards([endless], reward_timeout_s=0.2)
    asked.score(samples(2)).result()
    assert asked.state_dict() == {"endless": [{"calls": 1}]}
    asked.score(samples(2)).result()
    endless.waits = True
    assert asked.state_dict() == {"endless": [{"calls": 1}]}
    words = (
        r"endless: state_dict\(\) did not return within 0.2 s; let it return JSON types, in time"
    )
    assert re.search(words, caplog.text)
    with pytest.raises(RewardError, match=words):
        asked.score(samples(2))
    endless.waits = False
    with pytest.raises(UserError, match=r"load_state_dict\(\) did not return within 0.2 s; fix it"):
        asked.load_state_dict({"endless": [{"calls": 1}]})
    endless.waits = False


def test_states_and_errors_of_all_ranks_are_gathered(rewards, monkeypatch):
    asked = rewards([Counts()])
    theirs = ({"counts": {"calls": 5}}, "")
    monkeypatch.setattr(dist, "gather_objects", lambda mine: [mine, theirs])
    assert asked.state_dict() == {"counts": [{"calls": 0}, {"calls": 5}]}
    theirs = ({}, "counts: no")
    asked.state_dict()  # with the last good one, for a checkpoint; then the run stops
    with pytest.raises(RewardError, match="counts: no"):
        asked.score(Samples([], [], [], [], []))


class Unspeakable(Counts):
    def state_dict(self):
        return {"calls": {1, 2}}


class Network(torch.nn.Module):
    def forward(self, answers):
        return [0.0] * len(answers)


def test_a_state_that_cannot_be_saved_is_reported_at_the_start(rewards, caplog):
    with pytest.raises(UserError, match=r"unspeakable: state_dict\(\) raised TypeError: .* JSON"):
        rewards([Unspeakable()])
    caplog.clear()
    assert rewards([Network()]).state_dict() == {}  # frozen weights
    assert rewards([f"{__file__}:Counts"]).state_dict() == {"Counts": [{"calls": 0}]}
    assert not caplog.records
    asked = rewards([f"{__file__}:Counts"], reward_pool="process")
    assert asked.state_dict() == {}
    assert re.search("checkpoints do not hold the state of .*:Counts'", caplog.text)


RANK = """
import sys
import dschat.distributed as dist
from dschat.config import RLHFConfig
from dschat.rewards.reward_functions import RewardFunctions
from dschat.rewards.scoring import RewardError
from dschat.rewards.samples import Samples
from dschat.rewards.scoring import RunningScale, combine
import torch, logging
logging.basicConfig(format="%(message)s")

def fails(prompts):
    assert "p3" not in prompts, "three"
    return [float(prompt[1:]) for prompt in prompts]

dist.init(timeout_minutes=1)
mine = {0: ["p1", "p2"], 1: ["p3", "p4", "p5"]}[dist.rank()]
def samples(prompts):
    n = len(prompts)
    return Samples(prompts, [""] * n, [[1]] * n, [[1]] * n, ["stop"] * n)

rewards = RewardFunctions(RLHFConfig(), [fails])
for prompts in (mine if dist.rank() else [], []):  # one rank has no samples, then none has
    try:
        rewards.score(samples(prompts)).result()
        print("fine")
    except RewardError as error:
        print(error)
config = RLHFConfig(on_reward_error="skip")
rewards, scale = RewardFunctions(config, [fails]), RunningScale()
total, _ = combine(rewards.score(samples(mine)).result(), scale)
print(*(f"{x:.4f}" for x in total.tolist()))
print(scale.state_dict()["fails"])
dist.shutdown()
dist.exit_process(0)
"""


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_fail_together_and_scale_together(tmp_path):
    ranks = run_ranks(["-c", RANK], tmp_path / "ranks", 120)
    (first, said), (second, _) = ((rank.stdout, rank.stderr) for rank in ranks)
    where = "on 3 samples, the first on the prompt 'p3'"
    line = f"reward function fails raised AssertionError: three {where}; fix it, or pass"
    # Scores 1 and 2, 4 and 5: mean 3, variance 10 / 4; 3 has none.
    state = "[4.0, 3.0, 10.0]"
    of_rank = (["-1.2649", "-0.6325"], ["nan", "0.6325", "1.2649"])
    for out, scores in zip((first, second), of_rank, strict=True):
        error, fine, total, moments = out.splitlines()
        assert error.startswith(line)
        assert (fine, total.split(), moments) == ("fine", scores, state)
    line = line.replace(where, "on the prompt 'p3'").removesuffix(", or pass")
    assert f"1 of 5 samples have no score: {line}" in said
