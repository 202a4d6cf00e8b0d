"""docs/rewards.md: its functions and requests work, its tables are complete."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from dschat.config import RLHFConfig
from dschat.config.reward import REFERENCE
from dschat.rewards.call import GIVEN, Samples
from dschat.rewards.endpoint import body_of, rewards_of
from dschat.rewards.library import READY_MADE

PAGE = (Path(__file__).parents[2] / "docs/rewards.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def table(first: str) -> list[list[str]]:
    (text,) = re.findall(rf"^\| {first}.*\n\|---.*\n((?:\|.*\n)+)", PAGE, flags=re.MULTILINE)
    rows = [row.strip("| ").split(" | ") for row in text.splitlines()]
    return [[cell.strip() for cell in row] for row in rows]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_its_functions_score(rewards, samples, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    Path("my_rewards.py").write_text(code)
    words = " ".join(blocks("sh")[0].replace("\\\n", " ").split())
    flags = dict(re.findall(r"--(reward_\w+) (.*?)(?= --|$)", words))
    flags = {name: text.split() for name, text in flags.items()}
    given = samples(3, answer=["3.005", 7, "4.0"])
    given.answers = ["3", "x" * 80, "4"]
    asked = rewards(**flags)
    asked.check_columns(["answer"])
    scores = asked.score(given).result()
    assert [(s.name, s.weight, s.scores.tolist()) for s in scores] == [
        ("is_short", pytest.approx(0.1), [1, 0, 1]),
        ("near", 1, [1, 0, 1]),
    ]


def test_the_names_that_functions_may_declare():
    first = [names(row[0]) for row in table("argument")]
    assert {name for row in first for name in row} == {*GIVEN, "reference"}
    (reference,) = (row[1] for row in table("argument") if row[0] == "`reference`")
    assert tuple(names(reference)) == REFERENCE


def test_the_ready_made_functions_are_listed():
    listed = {names(row[0])[0]: set(names(row[-1])) for row in table("name")}
    of_judges = {name for row in table("judge's argument") for name in names(row[0])}
    judges = [name for name in listed if name.startswith("judge")]
    assert not any(listed[name] for name in judges)
    listed |= dict.fromkeys(judges, of_judges)
    assert listed == {name: {f.name for f in fields(made)} for name, made in READY_MADE.items()}


def test_the_defaults_of_a_judge():
    judge = READY_MADE["judge"](url="http://host/v1", model="m")
    for arguments, defaults, _ in table("judge's argument"):
        if re.search(r"\d|`", defaults):
            values = [str(getattr(judge, name)) for name in names(arguments)]
            assert [value.strip("`") for value in defaults.split(", ")] == [
                value.removesuffix(".0") for value in values
            ]


def test_the_pools_are_listed():
    config = RLHFConfig.__dataclass_fields__["reward_pool"].type
    assert [row[0].strip("`") for row in table("`--reward_pool`")] == list(config.__args__)


def test_a_request_and_its_reply():
    request, reply = (json.loads(block) for block in blocks("json"))
    columns = {"reference": request["reference"]}
    sample = Samples(["2+2="], ["4"], [[1]], [[2]], ["stop"], columns)
    assert json.loads(body_of(sample)) == request
    assert rewards_of(reply) == [1.0]
