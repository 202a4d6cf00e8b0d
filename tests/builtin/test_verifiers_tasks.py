"""Environments of verifiers: trained on as a user does, and those that cannot be loaded."""

import pytest
from hub_runs import train

from dschat.builtin.verifiers_tasks import task_rows
from dschat.config import RLHFConfig, UserError
from dschat.rlhf.agents import agent_of

TASKSET = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def said(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") % 3)

class Config(vf.TasksetConfig):
    most: int = 4

class Sums(vf.Taskset[SumTask, Config]):
    def load(self):
        for i in range(self.config.most):
            first = f"What is {i} + 1?"
            yield SumTask(SumData(prompt=first, system_prompt="Say it.", answer=str(i + 1)))

class Player(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class Twice(vf.Env[Player]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn("Are you sure?")

__all__ = ["Sums", "Twice"]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    pytest.importorskip("verifiers")
    (tmp_path / "sums_v1.py").write_text(TASKSET)
    (tmp_path / "sums.toml").write_text('[env.taskset]\nid = "sums-v1"\nmost = 6\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_training_on_an_environment(folder):
    spec = "verifiers:sums.toml"
    for metrics in train(folder, "--environment", spec, "--data_path", spec):
        assert metrics["rollout/rows_per_episode"] == 1
        assert metrics["rollout/turns"] == 2
        assert metrics["rollout/environment_tokens"] > 3
        assert metrics["rollout/agent_failures"] == 0
        assert metrics["objective/scores"] == pytest.approx(metrics["rollout/said"] / 2)
        assert metrics["rollout/said"] > 0


def test_rows_are_the_tasks(folder):
    rows = list(task_rows("verifiers:sums-v1"))
    said = [("system", "Say it."), ("user", "What is 3 + 1?")]
    turns = [{"role": role, "content": text} for role, text in said]
    assert rows[3] == {"prompt": turns, "task": 3}
    assert len(rows) == 4


def test_what_cannot_be_loaded(folder, monkeypatch):
    with pytest.raises(UserError, match="verifiers:nothing cannot be loaded: .*not found"):
        list(task_rows("verifiers:nothing"))
    (folder / "bad.toml").write_text('[env.taskset]\nid = "sums-v1"\nmst = 6\n')
    with pytest.raises(UserError, match="verifiers:bad.toml cannot be loaded: .*mst"):
        list(task_rows("verifiers:bad.toml"))
    config = RLHFConfig(environment="verifiers:sums-v1", tools=["a.py:f"])
    with pytest.raises(UserError, match="--agent excludes --environment and --tools"):
        config.validate_rewards()


def test_without_the_library_a_line_says_so(monkeypatch):
    monkeypatch.setattr("dschat.builtin.verifiers_tasks.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^verifiers:x needs verifiers: .*dschat\[verifiers\]"):
        agent_of(RLHFConfig(environment="verifiers:x"))
