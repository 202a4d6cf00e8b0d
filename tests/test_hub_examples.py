"""examples/environments: games of the hubs' packages, played by hand and trained on."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest
from hub_runs import ROOT, train

FOLDER = ROOT / "examples" / "environments"


def trained(folder, name, *rows):
    """The metrics of training with an environment, in episodes of three turns."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = "--data_path", "rows.jsonl", "--environment", FOLDER / name, "--max_turns", "3"
    found = train(folder, *flags)
    for metrics in found:
        assert 1 < metrics["rollout/turns"] <= 3
        assert metrics["rollout/environment_tokens"] > 5
    return found


def test_gymnasium(tmp_path):
    pytest.importorskip("gymnasium")
    from examples.environments.gymnasium_text import GymText

    made = GymText()
    assert "\nx  C  C" in made.reset("CliffWalking-v1", 1)
    assert made.step("I do not know") == ("Say a move: up, right, down, left", 0.0, False)
    walked = [made.step(f"Left? {move}!")[1:] for move in ("up", *["right"] * 11, "down")]
    assert walked == [(-1, False)] * 12 + [(-1, True)]
    assert "[S]FFF" in made.reset("FrozenLake-v1", 1)
    games = [{"prompt": "Walk.", "game": "FrozenLake-v1", "start": i} for i in range(4)]
    trained(tmp_path, "gymnasium_text.py:GymText", *games)


def test_textarena(tmp_path):
    pytest.importorskip("textarena")
    from examples.environments.textarena_game import Game

    game, low, high, done = Game(), 1, 20, False
    assert "between 1 and 20" in game.reset("GuessTheNumber-v0", 3)
    while not done:
        guess = (low + high) // 2
        said, reward, done = game.step(f"[{guess}]")
        if not done:
            assert (said.count("target"), reward) == (1, 0)
            low, high = (guess + 1, high) if "higher" in said else (low, guess - 1)
    assert reward == 1
    games = [{"prompt": "Play.", "game": "GuessTheNumber-v0", "start": i} for i in range(4)]
    trained(tmp_path, "textarena_game.py:Game", *games)


@pytest.fixture
def echo(tmp_path):
    """The address of the server that OpenEnv begins a new environment with."""
    pytest.importorskip("openenv")
    command = Path(sys.executable).with_name("openenv")
    subprocess.run([command, "init", "echo_env"], cwd=tmp_path, check=True, capture_output=True)
    app = tmp_path / "echo_env" / "server" / "app.py"
    app.write_text(app.read_text().replace("max_concurrent_envs=1", "max_concurrent_envs=64"))
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "server.app:app", "--port", str(port)],
        cwd=tmp_path / "echo_env",
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urlopen(f"{address}/health").close()
                break
            except OSError:
                time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        server.wait()


def test_openenv(tmp_path, echo):
    from examples.environments.openenv_client import OpenEnv

    one, other = OpenEnv(), OpenEnv()
    assert one.reset(echo) == other.reset(echo) == "\nEcho Env environment ready!"
    assert one.step("hello") == ("hello", 0.5, False)
    assert other.step("you") == ("you", pytest.approx(0.3), False)
    rows = [{"prompt": f"Talk of {i}.", "url": echo} for i in range(4)]
    for metrics in trained(tmp_path, "openenv_client.py:OpenEnv", *rows):
        assert metrics["objective/scores"] > 1  # a tenth for each character
