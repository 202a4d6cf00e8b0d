"""What pages and the files at the root say of the code: layers, signals, flags, families."""

import ast
import csv
import re
from collections import Counter
from dataclasses import fields

import pytest
import yaml
from documentation import COMMANDS, CONFIGS, PAGES, ROOT, inline, tables, text_of

import dschat
from dschat.chat.load import ChatConfig
from dschat.distributed import stop_signals
from dschat.launch import recipe


def contract(name: str, key: str) -> list[str]:
    """A list of the import contract ``name`` in pyproject.toml."""
    found = text_of("pyproject.toml").partition(f'name = "{name}"')[2].partition("[[")[0]
    return ast.literal_eval(re.search(rf"\n{key} = (\[.*?\])", found, re.DOTALL)[1])


def test_packages_are_in_the_layers_of_the_contract():
    order = contract("Packages import lower layers only", "layers")[:0:-1]  # without __main__
    packages = {name: n for n, layer in enumerate(order) for name in layer.split(" | ")}
    rows = tables(PAGES["architecture.md"], "layer", "package", "content")
    listed = {row[1].strip("`"): int(row[0]) for row in rows}
    assert listed.keys() == packages.keys()
    ranks = [(listed[name], packages[name]) for name in listed]
    assert all((a[0] < b[0]) <= (a[1] < b[1]) for a in ranks for b in ranks)


@pytest.mark.parametrize("page", [PAGES["architecture.md"], text_of("CONTRIBUTING.md")])
def test_packages_that_import_deepspeed(page):
    (named,) = re.findall(r"Only (.*) import deepspeed", page)
    forbidden = contract("Only runtime and checkpoint import DeepSpeed", "source_modules")
    packages = {row[1].strip("`") for row in tables(PAGES["architecture.md"], "content")}
    assert packages - {m.removeprefix("dschat.") for m in forbidden} == set(inline(named))


@pytest.mark.parametrize("name", ["architecture.md", "multi-node.md", "resuming.md"])
def test_signals_are_those_that_stop_a_run(name):
    page = PAGES[name].replace("Ctrl-C", "SIGINT")
    named = set(re.findall(r"\bSIG[A-Z]+[12]?\b", page)) - {"SIGKILL"}
    assert named == {signal.name for signal in stop_signals.SIGNALS}


def test_names_in_agents_md_exist():
    named = {code for code in inline(text_of("AGENTS.md")) if re.fullmatch(r"[A-Za-z_]\w+", code)}
    code = "".join(path.read_text() for path in (ROOT / "dschat").rglob("*.py"))
    assert len(named) > 10
    assert {name for name in named if not re.search(rf"\b{name}\b", code)} == set()


def test_files_for_others_can_be_read():
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert (citation["version"], citation["cff-version"]) == (dschat.__version__, "1.2.0")
    forms = [yaml.safe_load(path.read_text()) for path in ROOT.glob(".github/*/*.yml")]
    questions = [item for form in forms for item in form.get("body", [])]
    assert len(questions) > 4
    assert all({"type", "attributes"} <= item.keys() for item in questions)


def test_every_flag_is_on_a_page():
    pages = "".join([*PAGES.values(), text_of("README.md")])
    named = {name.replace("-", "_") for name in re.findall(r"--(?:step\d\.)?([\w-]*\w)", pages)}
    named |= {name.removeprefix("no_") for name in named}
    configs = [*CONFIGS.values(), *COMMANDS.values(), recipe.TrainConfig, ChatConfig]
    flags = {field.name for config in configs for field in fields(config)}
    assert flags - named == {"run", "runs"}  # of dschat replay and report, without a name


def test_families_are_counted():
    with (ROOT / "docs" / "families.csv").open(newline="") as file:
        cells = [row["rollout"] for row in csv.DictReader(file)]
    kinds = ["refused" if "refused" in c else c.partition(" ")[2] or "not loaded" for c in cells]
    listed = tables(PAGES["families.md"], "families", "who generates", "such as")
    assert {row[0]: int(row[1]) for row in listed} == Counter(kinds)
