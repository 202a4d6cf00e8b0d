"""docs/rewards.md: its functions and requests work, its tables are complete."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from documentation import PAGES, blocks, inline, tables

from dschat.config import RLHFConfig
from dschat.config.reward import REFERENCE
from dschat.rewards.library import READY_MADE
from dschat.rewards.samples import GIVEN, Samples

PAGE = PAGES["rewards.md"]
OF_JUDGES = tables(PAGE, "judge's argument", "default", "meaning")


def test_its_functions_score(rewards, samples, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(PAGE, "python")
    Path("my_rewards.py").write_text(code)
    words = " ".join(blocks(PAGE, "sh")[0].replace("\\\n", " ").split())
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
    described = dict(tables(PAGE, "argument", "for each sample"))
    assert {name for cell in described for name in inline(cell)} == {*GIVEN, "reference"}
    assert tuple(inline(described["`reference`"])) == REFERENCE


def test_the_ready_made_functions_are_listed():
    rows = tables(PAGE, "name", "score", "arguments")
    listed = {inline(row[0])[0]: set(inline(row[-1])) for row in rows}
    of_judges = {name for row in OF_JUDGES for name in inline(row[0])}
    judges = [name for name in listed if name.startswith("judge")]
    assert not any(listed[name] for name in judges)
    listed |= dict.fromkeys(judges, of_judges)
    assert listed == {name: {f.name for f in fields(made)} for name, made in READY_MADE.items()}


def test_the_defaults_of_a_judge():
    judge = READY_MADE["judge"](url="http://host/v1", model="m")
    for arguments, defaults, _ in OF_JUDGES:
        if re.search(r"\d|`", defaults):
            values = [str(getattr(judge, name)) for name in inline(arguments)]
            assert [value.strip("`") for value in defaults.split(", ")] == [
                value.removesuffix(".0") for value in values
            ]


def test_the_pools_are_listed():
    pools = RLHFConfig.__dataclass_fields__["reward_pool"].type.__args__
    assert [row[0].strip("`") for row in tables(PAGE, "functions run", "use for")] == list(pools)


def test_a_request_and_its_reply(servers, rewards):
    request, reply = map(json.loads, blocks(PAGE, "json"))
    columns = {"reference": request["reference"]}
    sample = Samples(["2+2="], ["4"], [[1]], [[2]], ["stop"], columns)
    server = servers()
    server.reply = lambda *_: reply
    asked = rewards(reward_fn=["http"], reward_args=[f"http.url={server.url}"])
    assert asked.score(sample).result()[0].scores.tolist() == [1.0]
    assert server.requests == [request]


def test_the_defaults_of_the_endpoint():
    http = READY_MADE["http"](url="http://host/score")
    assert f"`http.timeout_s` ({http.timeout_s:g})" in " ".join(PAGE.split())
    assert f"`http.retries` ({http.retries})" in " ".join(PAGE.split())
