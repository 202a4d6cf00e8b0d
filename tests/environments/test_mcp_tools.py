"""Tools of MCP servers: real ones, in processes of their own."""

import json
import os
import sys
import time

import pytest
from hub_runs import train
from tool_templates import HERMES, tokenizer_of

from dschat.config import UserError
from dschat.environments.contract import load_tools
from dschat.environments.sources import load_environment

mcp = pytest.importorskip("mcp")

SERVER = """
import os, pathlib, sys, time
from mcp.server import MCPServer

server = MCPServer("numbers")
pathlib.Path("pid").write_text(str(os.getpid()))

@server.tool()
def add(a: int, b: int) -> int:
    "Adds."
    return a + b

@server.tool()
def split(text: str) -> list[str]:
    if not text:
        raise ValueError("no text")
    return text.split()

@server.tool()
def hang() -> str:
    time.sleep(60)

@server.tool()
def die() -> str:
    print("out of memory", file=sys.stderr, flush=True)
    os._exit(3)

server.run()
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.py").write_text(SERVER)
    return f"mcp:{sys.executable} server.py {time.time()}"  # one of its own for each test


def local(a: int) -> int:
    """Its own.

    Args:
        a: A number.
    """
    return a


def made_of(*tools, limit_s=60.0):
    source = load_environment(None, tools, limit_s)
    made = source.maker(tokenizer_of(HERMES))()
    made.reset("p", 0, {})
    return made


def said(made, *calls):
    answer = "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    return [(r.text, r.failed) for r in made.step("text", answer).results]


def test_a_servers_tools_beside_others(command):
    source = load_environment(None, [local, command])
    assert [tool.name for tool in source.tools] == ["local", "add", "split", "hang", "die"]
    schema = source.schemas[1]
    assert schema["function"]["description"] == "Adds."
    assert schema["function"]["parameters"]["required"] == ["a", "b"]
    made = made_of(local, command)
    calls = (
        '{"name": "add", "arguments": {"a": 1, "b": 2}}',
        '{"name": "local", "arguments": {"a": 5}}',
        '{"name": "split", "arguments": {"text": "one two"}}',
        '{"name": "split", "arguments": {"text": ""}}',
        '{"name": "add", "arguments": {"a": 1}}',
    )
    *good, raised, refused = said(made, *calls)
    assert good == [("3", False), ("5", False), ("one\ntwo", False)]
    assert raised == ("error: split failed: Error executing tool split: no text", True)
    assert "Field required" in refused[0]
    assert refused[1]


def test_a_call_takes_at_most_the_time_limit(command):
    made = made_of(command, limit_s=0.2)
    assert said(made, '{"name": "hang"}') == [
        ("error: hang failed: Request 'tools/call' timed out", True)
    ]


def test_a_server_that_ends(command):
    made = made_of(command)
    for _ in range(2):
        with pytest.raises(UserError, match=r"server.py \S+ has ended: out of memory$"):
            said(made, '{"name": "die"}')


def test_a_server_of_a_run_stops_with_it(command, tmp_path):
    rows = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = "--data_path", "rows.jsonl", "--reward_fn", "length", "--reward_args", "length.target=5"
    for metrics in train(tmp_path, *data, "--tools", command):
        assert metrics["rollout/failed_tool_calls"] == 0
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("raise ImportError('no such thing')", "cannot be used: ImportError: no such thing"),
        ("print('hello')", "cannot be used: raised MCPError: Connection closed"),
        ("from mcp.server import MCPServer; MCPServer('none').run()", "has no tools"),
    ],
)
def test_servers_that_cannot_be_used(command, tmp_path, code, problem):
    (tmp_path / "server.py").write_text(code)
    with pytest.raises(UserError, match=rf"^--tools mcp:\S+ server.py \S+ {problem}$"):
        load_tools([command])


def test_commands_that_cannot_be_used(command, monkeypatch):
    with pytest.raises(UserError, match="mcp:/no/such cannot be used: .*No such file"):
        load_tools(["mcp:/no/such"])
    with pytest.raises(UserError, match="mcp:python 'x cannot be used: raised ValueError"):
        load_tools(["mcp:python 'x"])
    with pytest.raises(UserError, match="two tools are called add"):
        load_tools([command, f"{command} 2"])
    with pytest.raises(UserError, match="server.py .* needs --environment_pool thread"):
        load_environment(None, [command]).processes(tokenizer_of(HERMES), True, 1, 1.0)
    monkeypatch.setattr("dschat.environments.mcp_tools.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"mcp is missing: pip install 'dschat\[mcp\]'"):
        load_tools(["mcp:python other.py"])
