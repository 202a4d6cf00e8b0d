"""Environments in worker processes: the same episodes, and what a process takes along."""

import gc
from pathlib import Path

import pytest
from episode_runs import assert_same, run
from families import engine

from dschat.builtin.arithmetic import RetryGame
from dschat.config import UserError
from dschat.environments.contract import Call
from dschat.environments.processes import EnvironmentProcesses, Host
from dschat.environments.sources import load_environment
from dschat.user_code.calls import Fault

FILE = Path(__file__).parents[1] / "process_games.py"


@pytest.fixture
def processes():
    """``processes(name, count, limit_s)`` makes environments of ``process_games``."""
    made = []

    def make(name, count=1):
        source = load_environment(f"{FILE}:{name}")
        made.append(source.processes(None, True, count, 60.0))
        return made[-1]

    yield make
    for one in made:
        one.close()


def begun(make, level=0):
    environment = make()
    assert environment.reset("p", 3, {"level": level}) == ""
    return environment


def test_episodes_are_those_in_threads(processes, module_of):
    made = engine(module_of("llama"), page_size=4)
    expected = run(made)
    assert max(episode.num_turns for episode in expected) > 1
    made.forget_prefixes()
    assert_same(run(made, make=processes("Replies", 2)), expected, atol=0)


def test_an_episode_stays_in_its_process(processes):
    environments = [begun(make, i) for i, make in enumerate([processes("Tells", 2)] * 4)]
    homes = []
    for turn in (1, 2):
        for level, environment in enumerate(environments):
            found = environment.step("go on")
            pid, home, *rest = found.text.split(" ", 3)
            assert pid == home
            assert rest == [str(level), f"{turn} []"]  # neither torch nor transformers
            assert (found.reward, found.done) == (0.5, False)
            homes.append(home)
    assert homes[:2] * 4 == homes
    assert len(set(homes)) == 2
    assert environments[0].step("end").done
    assert environments[0].rewards_the_end
    assert environments[0].final_reward() == 30.0


def test_a_fault_leaves_the_environment_as_it_is(processes):
    environment = begun(processes("Fails"))
    with pytest.raises(Fault, match="raised ValueError: no luck") as caught:
        environment.step("raise")
    assert environment.told(caught.value).text == "error: raised ValueError: no luck"
    assert environment.step("again").text == "again"


def stopped(environment, limit_s, *answer):
    """The fault of a step that takes its process with it. ``limit_s``: of this step alone."""
    environment.lane.limit_s = limit_s
    with pytest.raises(Fault) as caught:
        environment.step(*answer)
    environment.lane.limit_s = 60.0
    return caught


@pytest.mark.parametrize(
    ("answer", "limit_s", "words"),
    [
        ("die", 60.0, r"ended its process \(exit code 7\)"),
        ("hang", 0.3, "did not return within 0.3 s"),
    ],
)
def test_a_process_that_ends_takes_its_environments_along(answer, limit_s, words, processes):
    make = processes("Fails", 2)
    first, beside, second = (begun(make) for _ in range(3))
    caught = stopped(first, limit_s, answer)
    assert caught.match(words)
    assert first.told(caught.value) is None
    with pytest.raises(Fault, match="in a process that another episode ended") as caught:
        second.step("hello")
    assert second.told(caught.value) is None
    assert beside.step("hello").text == "hello"
    later = [begun(make) for _ in range(2)]
    assert [environment.step("hello").text for environment in later] == ["hello"] * 2


def test_tools_alone_survive_their_process():
    """The model hears that its call hung; the other episodes do not notice."""
    source = load_environment(None, [f"{FILE}:hangs"])
    calls = {"hang": [Call("hangs", {"text": "hang"})], "speak": [Call("hangs", {"text": "ja"})]}
    recipes = (None, [("hangs", source.tools[0].spec)], True)
    make = EnvironmentProcesses(recipes, lambda marked, _: calls.get(marked, []), 1, 60.0)
    first, second = begun(make), begun(make)
    caught = stopped(first, 0.3, "", "hang")
    assert first.tells_calls
    assert first.calls
    (told,) = first.told(caught.value).results
    assert (told.name, told.failed) == ("hangs", True)
    assert "did not return within 0.3 s" in told.text
    assert [e.step("", "speak").results[0].text for e in (second, first)] == ["ja", "ja"]
    assert first.step("no call", "").done
    make.close()


def test_finished_environments_are_dropped(processes):
    host = Host((f"{FILE}:Tells", [], True))
    for number in range(3):
        host(number, "reset", ("p", 3, {"level": 0}), [])
    host(2, "step", ("go on",), [0, 1])
    assert list(host.kept) == [2]
    make = processes("Tells")
    first, second = begun(make), begun(make)
    del first
    gc.collect()
    assert list(second.lane.finished) == [0]
    second.step("go on")
    assert not second.lane.finished


def test_objects_of_a_notebook_are_refused():
    game = type("Game", (RetryGame,), {"__module__": "__main__"})
    words = "^--environment: Game cannot run in another process .*pass --environment_pool thread$"
    with pytest.raises(UserError, match=words):
        load_environment(game).processes(None, True, 1, 1.0)
    imported = load_environment(RetryGame).processes(None, True, 1, 60.0)
    environment = imported()
    environment.reset("1+1=", 3, {"reference": "2"})
    assert environment.step("1,2").done
    imported.close()
