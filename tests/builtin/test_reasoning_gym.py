"""Tasks of reasoning-gym as data and as a reward: with a stand-in, and all of the real ones."""

import ast
import json
import os
import subprocess
import sys

import pytest

from dschat.builtin.reasoning_gym import Tasks, task_rows
from dschat.config import RLHFConfig, UserError
from dschat.config.data import require_reasoning_gym
from dschat.data.sources.splits import load_examples
from dschat.rewards.library import ReasoningGym

STAND_IN = """
from fractions import Fraction
from types import SimpleNamespace

class Digits:
    def __init__(self, size, seed, step=1):
        self.size, self.seed, self.step = size, seed, step

    def __iter__(self):
        return map(self.made, range(self.size))

    def made(self, i):
        k = str(self.seed + i * self.step)
        return {"question": f"Say {k}", "answer": k, "metadata": {"k": (k,), 1: Fraction(1, 2)}}

    def score_answer(self, answer, entry):
        if answer == "crash":
            raise ZeroDivisionError
        if answer == "exit":
            exit()
        if answer == "hang":
            while True: pass
        (right,) = entry["metadata"]["k"]
        assert isinstance(entry["metadata"]["k"], tuple)
        return float("nan") if answer == "nan" else 1.0 if answer == right else 0.25

factory = SimpleNamespace(DATASETS={"digits": Digits, "composite": None})
create_dataset = lambda task, **settings: Digits(**settings)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    package = tmp_path / "reasoning_gym"
    package.mkdir()
    source, name = STAND_IN.rsplit("factory = ", 1)
    (package / "factory.py").write_text("from reasoning_gym import DATASETS\n")
    start = f"{source}DATASETS = {{'digits': Digits, 'composite': None}}\n"
    (package / "__init__.py").write_text(start + name.partition("\n")[2])
    (tmp_path / "reasoning_gym-0.9.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: reasoning-gym\nVersion: 0.9\n"
    (tmp_path / "reasoning_gym-0.9.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    for module in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, module)


def test_rows_with_settings_and_their_scores(stand_in, monkeypatch):
    config = RLHFConfig(
        data_path=["reasoning_gym/digits:2"],
        reasoning_gym={"digits": {"size": 8, "seed": 5, "step": 10}},
        eval_fraction=0.25,
    )
    config.validate_data()
    train, held_out = load_examples(config, "rlhf")
    assert (len(train), len(held_out)) == (12, 2)
    rows = [json.loads(row["example"]) for row in [*train, *held_out]]
    asked = {row["prompt"][0]["content"] for row in rows}
    assert asked == {f"Say {5 + 10 * i}" for i in range(8)}
    first = rows[0]["columns"]
    assert set(first) == {"answer", "task", "settings", "entry"}
    right = first["answer"]
    answers = [right, f"I say <answer> {right}\n</answer>.", "x", "crash", "nan", "exit"]
    columns = {n: [first[n]] * len(answers) for n in ("task", "settings", "entry")}
    reward = ReasoningGym()
    assert reward(answers, **columns) == [1, 1, 0.25, 0, 0, 0]
    none = {name: [None] for name in columns}
    assert reward([right], **none) == [None]  # a row of another source
    monkeypatch.setattr("dschat.rewards.library._GYM_S", 0.2)
    assert reward(["hang", right], **{n: of[:2] for n, of in columns.items()}) == [0, 1]


def test_tasks_and_settings_that_do_not_exist(stand_in):
    with pytest.raises(UserError, match=r"--data_path: no task digit in .*0.9; it has: digits$"):
        task_rows("digit", {}, "--data_path")
    with pytest.raises(UserError, match="--data_path: reasoning_gym/composite mixes other tasks"):
        task_rows("composite", {}, "--data_path")
    with pytest.raises(UserError, match="reasoning_gym/digits raised TypeError: .*stp"):
        task_rows("digits", {"stp": 1}, "--data_path")
    with pytest.raises(UserError, match="--reasoning_gym: --data_path has no reasoning_gym/other"):
        require_reasoning_gym(["reasoning_gym/digits"], {"other": {}})
    with pytest.raises(UserError, match="--reasoning_gym: digits needs an object of settings"):
        require_reasoning_gym(["reasoning_gym/digits:2"], {"digits": 3})


def test_without_the_library_a_line_says_so(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs reasoning-gym; .*dschat\[reasoning-gym\]"):
        RLHFConfig(data_path=["reasoning_gym/chain_sum:2"]).validate_data()
    with pytest.raises(UserError, match=r"needs reasoning-gym; .*dschat\[reasoning-gym\]"):
        ReasoningGym()


ENTRIES = """
import random, sys
from dschat.builtin.reasoning_gym import Tasks
print(hash(repr([Tasks()(task, '{"size": 3, "seed": 0}') for task in sys.argv[1:]])))
"""


@pytest.mark.slow
def test_all_tasks_load_or_are_refused_and_know_their_answers():
    factory = pytest.importorskip("reasoning_gym.factory")
    names = sorted(factory.DATASETS)
    assert len(names) >= 106
    tasks, refused, unanswered = Tasks(), [], []
    for name in names:
        made = tasks(name, '{"size": 3, "seed": 0}')
        if isinstance(made, str):
            refused.append(name)
            continue
        for question, answer, _, settings, entry in made:
            assert question, name
            assert ast.literal_eval(entry)["question"] == question
            if answer is None:
                unanswered.append(name)
                continue
            assert tasks(name, settings, answer, entry) == 1, name
            assert 0 <= tasks(name, settings, "\\frac{1 (answer", entry) < 1, name
    assert refused == ["composite", "game_of_life_halting"]
    none = ["boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"]
    assert sorted(set(unanswered)) == none


@pytest.mark.slow
def test_processes_make_the_same_rows():
    pytest.importorskip("reasoning_gym")
    varying = ["isomorphic_strings", "list_functions", "ransom_note", "word_ladder"]
    for name in varying:
        one, other = (list(task_rows(name, {"size": 3}, "")) for _ in range(2))
        assert one == other, name
    command, env = [sys.executable, "-c", ENTRIES, *varying], {**os.environ, "PYTHONHASHSEED": "0"}
    done = {subprocess.run(command, env=env, capture_output=True).stdout for _ in range(2)}
    assert len(done) == 1
    assert done != {b""}
