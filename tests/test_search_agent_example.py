"""examples/search_agent.py: rows and facts that agree, rewards of the agent, a run that learns."""

import asyncio
import json
import math
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from python_process import ROOT

from examples import search_agent
from examples.search_agent import run, search, search_rows

PLACE, PERSON = "Norvik", "Ada Brandal"
FACT = f"The keeper of {PLACE} lighthouse is {PERSON}."


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The rows and facts of a tenth of the lighthouses, from which the agent reads."""
    monkeypatch.setattr(search_agent, "NUM_LIGHTHOUSES", {"train": 300, "eval": 12})
    monkeypatch.setattr(search_agent, "FOLDER", tmp_path)
    search_agent.main()
    return tmp_path


def test_every_question_has_one_fact_which_its_demonstration_finds(folder):
    rows = search_rows()
    assert {split: len(found) for split, found in rows.items()} == {"train": 1_200, "eval": 48}
    places, searches = {}, 0
    for split, of_split in rows.items():
        lines = (folder / f"{split}.jsonl").read_text().splitlines()
        assert list(map(json.loads, lines)) == of_split
        for row in of_split:
            ((asked,), turns) = row["prompt"], row["demonstration"]
            role, place = re.fullmatch(r"Who is the (\w+) of (\w+)\?", asked["content"]).groups()
            assert places.setdefault(place, split) == split
            fact = f"The {role} of {place} lighthouse is {row['answer']}."
            assert search(f"{role} {place}") == fact
            assert search(asked["content"]) == "0 facts found"
            if len(turns) > 1:
                searches += 1
                said, told, answer = (turn["content"] for turn in turns)
                assert (said, told) == (f"search: {role} {place}", fact)
                assert answer == row["answer"]
    assert 0.45 < searches / 1_248 < 0.55
    assert search_rows(1) != rows


def episode(*answers):
    """What the agent returns where the model answers so, and the messages of its last request."""
    left, seen = list(answers), []

    async def create(model, messages):
        seen[:] = list(messages)
        return SimpleNamespace(
            choices=[SimpleNamespace(message=SimpleNamespace(content=left.pop(0)))]
        )

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    asked = [{"role": "user", "content": f"Who is the keeper of {PLACE}?"}]
    return asyncio.run(run(client, asked, PERSON)), seen


@pytest.fixture
def one_lighthouse(tmp_path, monkeypatch):
    (tmp_path / "facts").mkdir()
    (tmp_path / "facts" / "a.txt").write_text(f"{FACT}\n{FACT.replace('keeper', 'cook')}")
    monkeypatch.setattr(search_agent, "FOLDER", tmp_path)


@pytest.mark.parametrize(
    ("answers", "reward", "searches"),
    [
        (["search: keeper Norvik", PERSON], 1.0, 1),
        (["search: norvik", "search: the keeper of norvik", f" {PERSON}. "], 1.0, 2),
        ([PERSON], 1.0, 0),
        (["search: keeper Norvik", "Ida Solvik"], 0.2, 1),
        (["search: keeper Norvik", FACT], 0.2, 1),  # copies what it was told
        (["search: Who is the keeper of Norvik?", PERSON[:3]], 0.0, 1),  # copies the question
        (["search: Norvik", "search: the", PERSON[:3]], 0.0, 2),
        (["search:", "search: keeper Norvik", f"search: {PERSON}"], 0.2, 2),  # one search too many
        ([FACT], 0.0, 0),
        ([f"{PERSON}, Ida Solvik"], 0.0, 0),
    ],
)
def test_rewards(answers, reward, searches, one_lighthouse):
    found, seen = episode(*answers)
    assert (found["reward"], found["searches"]) == (reward, searches)
    assert len(seen) == 1 + 2 * searches
    if answers[:1] == ["search: Norvik"]:
        assert seen[2]["content"] == "2 facts found"


@pytest.mark.slow
def test_the_tiny_model_learns_to_search(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    words = ["--recipe", "search", "--seed", "1", "--output_dir", "out", "--step1.max_steps", "300"]
    words += ["--step3.max_steps", "10", "--step3.logging_steps", "1"]
    for command in (["examples/search_agent.py"], [str(ROOT / "train.py"), *words]):
        subprocess.run([sys.executable, *command], cwd=tmp_path, check=True, timeout=900)
    lines = (tmp_path / "out/step3_rlhf/metrics.jsonl").read_text().splitlines()
    rows = list(map(json.loads, lines))
    rewards = [row["objective/scores"] for row in rows if "objective/scores" in row]
    assert len(rewards) == 10
    assert all(map(math.isfinite, rewards))
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
    before, after = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
    assert after > before + 0.1
