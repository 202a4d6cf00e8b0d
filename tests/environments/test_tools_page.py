"""The environments and tools of docs/tools.md run as they stand there."""

import pytest
from documentation import PAGES, blocks
from tool_templates import HERMES, tokenizer_of

from dschat.environments.contract import Observation
from dschat.environments.sources import load_environment

NAMES = ("calculator", "Store", "AgentInstance", "step")


@pytest.fixture
def found(tmp_path, monkeypatch):
    """Name -> file.py:NAME."""
    monkeypatch.chdir(tmp_path)
    specs = {}
    for block in blocks(PAGES["tools.md"], "python"):
        name = next((n for n in NAMES if f"def {n}(" in block or f"class {n}" in block), None)
        if name not in (None, *specs):
            (tmp_path / f"{name}_page.py").write_text(block)
            specs[name] = f"{tmp_path}/{name}_page.py:{name}"
    assert set(specs) == set(NAMES)
    return specs


def test_the_tool(found):
    source = load_environment(None, [found["calculator"]])
    made = source.maker(tokenizer_of(HERMES))()
    made.reset("12*34=", 0, {})
    call = '{"name": "calculator", "arguments": {"expression": "12*34"}}'
    assert [r.text for r in made.step("", f"<tool_call>{call}</tool_call>").results] == ["408"]


def test_trls_environment(found):
    source = load_environment(found["Store"])
    assert [tool.name for tool in source.tools] == ["put"]
    made = source.maker(tokenizer_of(HERMES))()
    assert made.reset("p", 0, {"goal": "apple"}) == "Put one apple into the store."
    call = '{"name": "put", "arguments": {"item": "apple"}}'
    assert [r.text for r in made.step("", f"<tool_call>{call}</tool_call>").results] == ["1 items"]
    assert made.step("done", "done").done
    assert made.final_reward() == 1.0


@pytest.mark.parametrize("name", ["AgentInstance", "step"])
def test_openrlhfs_agents(found, name):
    made = load_environment(found[name]).maker(tokenizer_of(HERMES))()
    made.reset("1 + 1 = ", 0, {"reference": "2"})
    first, second = made.step("3"), made.step("2")
    assert (first.reward, first.done, first.is_raw) == (0.0, False, True)
    assert "No" in first.text
    assert second == Observation(second.text, 1.0, True, is_raw=True)
