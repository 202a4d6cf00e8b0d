"""Runs environments in worker processes. A process keeps the environments of its episodes.

Each process has a thread here that waits for it, so an episode's steps run in order, and beside
decoding even where they compute in Python. A step that takes too long is stopped with its process:
the other episodes in it are lost with their environments, unless these are tools alone.

The processes import neither torch nor transformers: what the model wrote is parsed here.
"""

import itertools
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dschat.environments.contract import Call, Environment, EnvironmentFault, Observation
from dschat.environments.tool_environment import ToolEnvironment, failed
from dschat.environments.tools import Tool
from dschat.rewards.call import Fault
from dschat.rewards.loader import pickled, resolve
from dschat.rewards.processes import Worker
from dschat.rewards.threads import Pool

# Where a process finds a class or function: its spec, or a pickle of its name. None: nowhere.
Recipe = str | bytes | None
# Of the environment, of tools by name, and whether the model hears of tools that fail.
Recipes = tuple[Recipe, Sequence[tuple[str, Recipe]], bool]
Parser = Callable[[str], list[Call]]


def portable(target: Any, spec: str, label: str) -> Recipe:
    """``spec`` or a pickle of ``target``.

    Raises:
        UserError: another process cannot import it.
    """
    if spec or target is None:
        return spec or None
    name = getattr(target, "__name__", repr(target))
    return pickled(target, f"{label}: {name}", "--environment_pool thread")


class EnvironmentProcesses:
    """Makes environments, which ``count`` processes take in turn. A process starts when its first
    episode begins.

    Args:
        parse: the calls in an answer; None without tools.
        limit_s: of each call of an environment.
    """

    def __init__(self, recipes: Recipes, parse: Parser | None, count: int, limit_s: float) -> None:
        self._lanes = [_Lane(recipes, limit_s) for _ in range(count)]
        self._next = itertools.cycle(self._lanes)
        self._recipes, self._parse = recipes, parse

    def __call__(self) -> Environment:
        return RemoteEnvironment(next(self._next), self._recipes, self._parse)

    def close(self) -> None:
        """Kill the processes."""
        for lane in self._lanes:
            lane.pool.close()
            lane.worker.stop()

    __del__ = close


class _Lane:
    """A process and the thread that waits for it."""

    def __init__(self, recipes: Recipes, limit_s: float) -> None:
        self.worker, self.pool, self.limit_s = Worker(recipes, Host), Pool(1), limit_s
        self.numbers = itertools.count()  # of its environments
        self.finished: deque[int] = deque()  # the numbers of those that it need not keep


class RemoteEnvironment(Environment):
    """An `Environment` whose methods run in a process."""

    def __init__(self, lane: _Lane, recipes: Recipes, parse: Parser | None) -> None:
        super().__init__()
        self.pool = lane.pool
        self.wants_special_tokens = parse is not None
        self._lane, self._number, self._parse = lane, next(lane.numbers), parse
        target, _, self._tells_calls = recipes
        self._has_state = target is not None
        self._start = 0  # of the process that has it
        self._calls: list[Call] = []
        self._rewards_the_end = False
        self._told: Observation | None = None

    def __del__(self) -> None:
        self._lane.finished.append(self._number)

    def reset(self, prompt: str, seed: int, columns: Mapping[str, Any]) -> str:
        self._begin()
        return self._call("reset", prompt, seed, dict(columns))

    def step(self, answer: str, marked: str = "") -> Observation:
        self._calls = [] if self._parse is None else self._parse(marked)
        return self._call("step", answer, self._calls)

    def final_reward(self) -> float:
        return self._call("final_reward")

    @property
    def rewards_the_end(self) -> bool:
        return self._rewards_the_end

    @property
    def tells(self) -> bool:  # type: ignore[override]
        return self._tells_calls and bool(self._calls)

    def told(self, fault: EnvironmentFault) -> Observation | None:
        if not fault.hung:
            return self._told
        return None if self._has_state or not self._calls else failed(self._calls, fault)

    def _begin(self) -> None:
        """Have the process run."""
        try:
            self._lane.worker.start()
        except Fault as fault:
            raise EnvironmentFault(fault.problem) from None
        self._start = self._lane.worker.num_starts

    def _call(self, method: str, *args: Any) -> Any:
        """Raises ``EnvironmentFault``, ``hung`` where the environment is lost with its process."""
        before = self._start
        self._begin()
        if self._has_state and self._start != before:
            raise EnvironmentFault("was in a process that another episode ended", hung=True)
        finished = [self._lane.finished.popleft() for _ in range(len(self._lane.finished))]
        try:
            result, self._told, self._rewards_the_end = self._lane.worker.request(
                self._number, method, args, finished, limit_s=self._lane.limit_s
            )
        except Fault as fault:
            raise EnvironmentFault(fault.problem, hung=True) from None
        if isinstance(result, EnvironmentFault):
            raise result
        return result


class Host:
    """What a process serves: the environments that it keeps, by number."""

    def __init__(self, recipes: Recipes) -> None:
        target, tools, self._tells = recipes
        self._target = _imported(target)
        self._tools = [Tool(name, {}, _imported(recipe)) for name, recipe in tools]
        self._kept: dict[int, Environment] = {}

    def __call__(self, number: int, method: str, args: tuple, finished: list[int]) -> tuple:
        """The result or fault of an environment's method, what the model hears of the fault, and
        whether the episode's end is rewarded. ``finished``: environments to drop.
        """
        for old in finished:
            self._kept.pop(old, None)
        environment = self._kept.get(number)
        if environment is None:
            environment = self._kept[number] = self._made()
        try:
            return getattr(environment, method)(*args), None, environment.rewards_the_end
        except EnvironmentFault as fault:
            return fault, environment.told(fault), environment.rewards_the_end

    def _made(self) -> Environment:
        if not self._tools:
            return Environment(self._target)
        made = ToolEnvironment(self._target, self._tools, _as_given, self._tells)
        if self._target is None:
            made.reset("", 0, {})  # in this process, perhaps after another one was killed
        return made


def _as_given(calls: list[Call]) -> list[Call]:
    return calls


def _imported(recipe: Recipe) -> Any:
    if isinstance(recipe, bytes):
        return pickle.loads(recipe)
    return recipe if recipe is None else resolve(recipe)
