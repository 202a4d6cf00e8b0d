"""What docs/architecture.md and the files at the root say of the code is true."""

import ast
import re

import pytest
import yaml
from documentation import PAGES, ROOT, inline, tables, text_of

import dschat
from dschat.distributed import stop_signals


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
