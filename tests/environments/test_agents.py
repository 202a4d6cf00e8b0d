"""What an agent returns, how it fails, and commands, without a model."""

import sys
import time

import pytest

from dschat.config import UserError
from dschat.environments import agents
from dschat.environments.agents import Agent, load_agent
from dschat.user_code.calls import Fault

pytest.importorskip("uvicorn")


def run(agent, columns=(), limit_s=20.0):
    return agent.run("http://127.0.0.1:1/episode/k/v1", "k", "p", dict(columns), limit_s)


def command(code, *words):
    return Agent(None, [sys.executable, "-c", code, *words])


@pytest.mark.parametrize(
    ("value", "reward", "logged"),
    [
        (1, 1.0, None),
        (True, 1.0, None),
        (None, None, None),
        ({"reward": 0.5, "steps": 3, "note": "x"}, 0.5, {"steps": 3.0}),
        ({"steps": 3}, None, {"steps": 3.0}),
    ],
)
def test_what_a_function_returns_is_its_reward(value, reward, logged):
    pytest.importorskip("openai")

    async def agent(client, prompt, wanted):
        assert (prompt, wanted, client.api_key) == ("p", 7, "k")
        return value

    found = run(Agent(agent), {"wanted": 7, "other": 8})
    assert (found.reward, found.logged) == (reward, logged)


@pytest.mark.parametrize("value", ["good", float("nan"), [1.0], {"reward": "1"}])
def test_what_is_no_reward_is_a_fault(value):
    pytest.importorskip("openai")
    with pytest.raises(Fault, match="returned|reward"):
        run(Agent(lambda client, prompt: value))


def test_agents_in_python_end_at_their_time_limit():
    pytest.importorskip("openai")
    began = time.monotonic()

    async def waits(client, prompt):
        import asyncio

        await asyncio.sleep(30)

    def sleeps(client, prompt):
        time.sleep(1)

    for agent in (waits, sleeps):
        with pytest.raises(Fault, match="did not return within 0.2 s"):
            run(Agent(agent), limit_s=0.2)
    assert time.monotonic() - began < 20
    time.sleep(1)  # until its thread has left the scope of user code


def test_a_command_gets_its_row_and_its_last_line_is_the_reward():
    code = "import sys; row = sys.stdin.read(); print('x'); print(len(row) * 1.0)"
    assert run(command(code), {"a": "b"}).reward == len('{"a": "b", "prompt": "p"}')
    assert run(command("import sys; print(len(sys.argv[1]))", "{row}")).reward == 15
    assert run(command("print('done')")).reward is None
    assert run(command("pass")).reward is None


def test_a_command_that_fails_says_why():
    with pytest.raises(Fault, match="exited with code 1: ValueError: no"):
        run(command("raise ValueError('no')"))
    with pytest.raises(Fault, match="cannot start no-such-program"):
        run(Agent(None, ["no-such-program", "x"]))


def test_a_command_is_stopped_with_all_that_it_started(tmp_path):
    mark = tmp_path / "mark"
    late = f"import time; time.sleep(2); open({str(mark)!r}, 'w')"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {late!r}]);"
    with pytest.raises(Fault, match="did not return within 1 s"):
        run(command(code + "time.sleep(30)"), limit_s=1.0)
    time.sleep(2.5)
    assert not mark.exists()


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(agents, "find_spec", lambda name: None if name == "openai" else name)
    with pytest.raises(UserError, match=r"openai is missing: pip install 'dschat\[agents\]'"):
        load_agent(print)
    assert load_agent("node agent.js")._command == ["node", "agent.js"]
    monkeypatch.setattr(agents, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"fastapi is missing: pip install 'dschat\[serve\]'"):
        load_agent("node agent.js")
