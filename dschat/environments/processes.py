"""Runs environments in worker processes. A process keeps the environments of its episodes.

Each process has a thread here that waits for it, so an episode's steps run in order, and beside
decoding even where they compute in Python. A step that takes too long is stopped with its process:
the other episodes in it are lost with their environments, unless these are tools alone.

The processes import neither torch nor transformers: what the model wrote is parsed here.
"""

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dschat.environments.contract import Call, Environment, Observation, Tool, ToolEnvironment
from dschat.user_code.calls import Fault, Pool, Recipe, rebuilt
from dschat.user_code.processes import Worker

# Of the environment, of tools by name, and whether the model hears of tools that fail. A tool
# without one is a method of the environment.
Recipes = tuple[Recipe | None, Sequence[tuple[str, Recipe | None]], bool]
Parser = Callable[[str, str | None], list[Call]]


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
        self.worker = Worker(f"{__name__}:{Host.__name__}", (recipes,))
        self.pool, self.limit_s = Pool(1), limit_s
        self.numbers = itertools.count()  # of its environments
        self.finished: deque[int] = deque()  # numbers of environments that it need not keep


class RemoteEnvironment(Environment):
    """An `Environment` whose methods run in a process."""

    def __init__(self, lane: _Lane, recipes: Recipes, parse: Parser | None) -> None:
        target, _, tells_calls = recipes
        super().__init__(tells_calls=tells_calls)
        self.pool = lane.pool
        self.wants_special_tokens = parse is not None
        self.lane, self._number, self._parse = lane, next(lane.numbers), parse
        self._has_state = target is not None
        self._start = 0  # of the process that has it
        self._rewards_the_end = False
        self._is_lost = False  # with its process

    def __del__(self) -> None:
        self.lane.finished.append(self._number)

    def reset(self, prompt: str, seed: int, columns: Mapping[str, Any]) -> str:
        return self._call("reset", prompt, seed, dict(columns))

    def step(self, answer: str, marked: str = "", begun: str | None = None) -> Observation:
        self.calls = [] if self._parse is None else self._parse(marked, begun)
        return self._call("step", answer, self.calls)

    def final_reward(self) -> float:
        return self._call("final_reward")

    @property
    def rewards_the_end(self) -> bool:
        return self._rewards_the_end

    def told(self, fault: Fault) -> Observation | None:
        if self._is_lost and (self._has_state or not self.calls):
            return None
        return super().told(fault)

    def _call(self, method: str, *args: Any) -> Any:
        """Raises ``Fault``; the environment may be lost then."""
        worker = self.lane.worker
        worker.start()
        if method == "reset":
            self._start = worker.num_starts
        self._is_lost = True
        if self._has_state and worker.num_starts != self._start:
            raise Fault("was in a process that another episode ended")
        finished = [self.lane.finished.popleft() for _ in range(len(self.lane.finished))]
        result, self._rewards_the_end = worker.call(
            self._number, method, args, finished, limit_s=self.lane.limit_s
        )
        self._is_lost = False
        if isinstance(result, Fault):
            raise result
        return result


class Host:
    """What a process serves: the environments that it keeps, by number."""

    def __init__(self, recipes: Recipes) -> None:
        target, tools, self._tells = recipes
        self._target = target and rebuilt(target)
        self._tools = [
            Tool(name, {}, rebuilt(recipe) if recipe else None) for name, recipe in tools
        ]
        self.kept: dict[int, Environment] = {}

    def __call__(self, number: int, method: str, args: tuple, finished: list[int]) -> tuple:
        """The result or fault of an environment's method, and whether the episode's end is
        rewarded. ``finished``: environments to drop.
        """
        for old in finished:
            self.kept.pop(old, None)
        environment = self.kept.get(number)
        if environment is None:
            environment = self.kept[number] = self._made()
        try:
            result = getattr(environment, method)(*args)
        except Fault as fault:
            result = fault
        return result, environment.rewards_the_end

    def _made(self) -> Environment:
        if not self._tools:
            return Environment(self._target)
        made = ToolEnvironment(self._target, self._tools, lambda calls, _: calls, self._tells)
        if self._target is None:
            made.reset("", 0, {})  # in this process, perhaps after another one was killed
        return made
