"""Tools of functions and methods: found, described and called; what fails is told to the model."""

import asyncio
import re

import pytest
import torch
from tool_templates import HERMES, search, tokenizer_of

from dschat.config import UserError
from dschat.environments.contract import Observation, load_tools, result_text
from dschat.environments.sources import load_environment
from dschat.user_code.calls import Fault


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: A number.
        b: Another one.
    """
    return a + b


class Store:
    """An environment of tools, as TRL has them."""

    def reset(self, goal, **kwargs):
        self.items, self.goal = [], goal
        return f" Put {goal} into the store."

    def put(self, item: str) -> str:
        """Puts an item into the store.

        Args:
            item: Its name.
        """
        self.items.append(item)
        return f"{len(self.items)} items"

    async def count(self) -> int:
        """Counts the items."""
        await asyncio.sleep(0)
        return len(self.items)

    def get_reward(self):
        return float(self.goal in self.items)

    def _hidden(self):
        raise AssertionError


def environment_of(target=None, tools=(), tells=True, columns=None):
    source = load_environment(target, tools)
    made = source.maker(tokenizer_of(HERMES), tells)()
    made.reset("p", 0, columns or {})
    return made


def step(made, *calls):
    """What calls as JSON lead to."""
    answer = "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    return made.step("text", answer)


def texts(observation):
    return [(r.name, r.text, r.failed) for r in observation.results]


def test_functions():
    made = environment_of(tools=[add, search])
    first = '{"name": "search", "arguments": {"query": "x", "limit": 2}}'
    second = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
    got = step(made, first, second)
    assert texts(got) == [("search", '["x", "x"]', False), ("add", "3", False)]
    assert not got.done
    assert made.step("the answer", "the answer") == Observation(done=True)
    assert not load_environment(None, [add]).rewards


def test_methods_of_an_environment():
    source = load_environment(Store, [add])
    assert [tool.name for tool in source.tools] == ["count", "put", "add"]
    assert source.rewards
    made, other = (environment_of(Store, [add], columns={"goal": "a"}) for _ in range(2))
    assert made.reset("p", 0, {"goal": "a"}) == " Put a into the store."
    assert texts(step(made, '{"name": "put", "arguments": {"item": "a"}}')) == [
        ("put", "1 items", False)
    ]
    assert texts(step(made, '{"name": "count"}')) == [("count", "1", False)]
    assert texts(step(other, '{"name": "count"}')) == [("count", "0", False)]
    assert (made.final_reward(), other.final_reward()) == (1.0, 0.0)


def test_a_step_gets_answers_without_calls():
    class Checks:
        def step(self, answer):
            return "wrong", 0.5, answer == "3"

    made = environment_of(Checks, [add])
    assert texts(step(made, '{"name": "add", "arguments": {"a": 1, "b": 2}}'))
    assert made.step("2", "2") == Observation("wrong", 0.5, False)
    assert made.step("3", "3").done


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("{", "the tool call is not JSON"),
        ('{"name": "ad"}', "there is no tool 'ad'; did you mean add"),
        ('{"name": "add", "arguments": {"a": 1}}', "missing a required argument: 'b'"),
        ('{"name": "add", "arguments": {"a": 1, "b": 2, "c": 3}}', "unexpected keyword .* 'c'"),
        ('{"name": "add", "arguments": {"a": 1, "b": "x"}}', "add raised TypeError: "),
        ('{"name": "put"}', "there is no tool 'put'"),
    ],
)
def test_a_call_that_fails_is_told(call, said):
    ((_, text, failed),) = texts(step(environment_of(tools=[add]), call))
    assert failed
    assert text.startswith("error: ")
    assert "\n" not in text
    assert len(text) < 300
    assert re.search(said, text)


def bad_tool(result):
    def tool() -> str:
        """Returns."""
        if isinstance(result, BaseException):
            raise result
        return result

    return tool


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (b"x" * 10**6, "returned bytes"),
        (float("nan"), "returned float nan, which is neither text nor JSON"),
        ([float("inf")], "which is neither text nor JSON"),
        (object(), "returned object"),
        (torch.zeros(2), "returned Tensor"),
        ({1: {2, 3}}, "returned dict"),
        (ValueError("no\nluck"), "raised ValueError: no luck"),
        (SystemExit(3), "called sys.exit(3)"),
        (KeyboardInterrupt(), "raised KeyboardInterrupt"),
    ],
)
def test_a_tool_that_fails(result, said):
    ((_, text, failed),) = texts(step(environment_of(tools=[bad_tool(result)]), '{"name": "tool"}'))
    assert failed
    assert said in text
    assert len(text) < 300
    with pytest.raises(Fault, match="the tool tool "):
        step(environment_of(tools=[bad_tool(result)], tells=False), '{"name": "tool"}')


@pytest.mark.parametrize(
    ("result", "text"),
    [("a\ud800", "a?"), (None, "null"), (3, "3"), ({"ä": [1.5, True]}, '{"ä": [1.5, true]}')],
)
def test_results_as_text(result, text):
    assert result_text(result) == text


def test_coroutines_run_together():
    started = []

    async def wait(number: int) -> int:
        """Waits for the other.

        Args:
            number: Its number.
        """
        started.append(number)
        while len(started) < 2:
            await asyncio.sleep(0)
        return number

    made = environment_of(tools=[wait])
    got = step(made, *[f'{{"name": "wait", "arguments": {{"number": {n}}}}}' for n in (1, 2)])
    assert [r.text for r in got.results] == ["1", "2"]


def test_a_hung_tool_is_told_and_a_hung_environment_ends():
    fault = Fault("took over 1 s", timed_out=True)
    made = environment_of(tools=[add])
    step(made, '{"name": "add", "arguments": {"a": 1, "b": 2}}')
    assert made.tells_calls
    assert made.calls
    assert texts(made.told(fault)) == [("add", "error: took over 1 s", True)]
    made = environment_of(Store, columns={"goal": "a"})
    step(made, '{"name": "count"}')
    assert made.told(fault) is None


def undescribed(a):
    return a


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        (["nowhere"], "--tools nowhere: name it as file.py:NAME"),
        (["json:loads_"], "--tools json:loads_: not found"),
        (["json:JSONDecoder,loads"], "--tools json:JSONDecoder cannot be described"),
        ([undescribed], "--tools cannot be described to the model: "),
        ([add, add], "--tools: two tools are called add; rename one"),
        ([3], "--tools is not a function"),
    ],
)
def test_what_are_no_tools(tools, said):
    with pytest.raises(UserError, match=said):
        load_tools(tools)


def put():
    """Puts."""


def test_a_function_called_like_a_method():
    with pytest.raises(UserError, match="two tools are called put"):
        load_environment(Store, [put])
