"""Holds the reward functions of a run: where their calls run, and their state."""

import functools
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

import dschat.distributed as dist
from dschat.config import UserError
from dschat.config.reward import RewardSourcesConfig
from dschat.rewards.call import (
    LONGEST_CALL_S,
    Functions,
    Logs,
    MissingColumn,
    Samples,
    Values,
    call,
    call_async,
)
from dschat.rewards.loader import RewardFunction, load_reward_functions
from dschat.rewards.scoring import RewardError, RewardSource, Scoring
from dschat.user_code.calls import Fault, Loop, Pool, at_once, background, called, within
from dschat.user_code.processes import Workers
from dschat.user_code.surroundings import restored

logger = logging.getLogger("dschat")

REWARD_MODEL = "reward_model"  # reserved source name
_NOT_JSON = "let it return JSON types, in time, for checkpoints, or rename it"


class RewardFunctions:
    """The reward functions of a run.

    ``overlaps``: at least one source scores in the background.
    """

    def __init__(self, config: RewardSourcesConfig, reward_fns: Sequence[Any] = ()) -> None:
        """The sources of ``config``, plus ``reward_fns``: callables, specs, pairs with a weight.

        Raises:
            UserError: one cannot be found, imported or constructed, or run in ``reward_pool``.
        """
        if not isinstance(reward_fns, (list, tuple)):
            reward_fns = [reward_fns]
        specs, args = config.reward_fn or [], config.reward_args or []
        self._functions = load_reward_functions(specs, reward_fns, args, {REWARD_MODEL})
        self._config = config
        self._resources = ExitStack()  # threads and processes
        self._stateful = self._stateful_functions()
        self._states: dict[str, Any] = {}  # the last good ones of this rank
        self.logs = Logs()
        for reward in self._functions:
            can_log = reward.is_async or config.reward_pool != "process"
            reward.bound = self.logs.arguments(reward.accepted, can_log) | reward.bound
        self.state_dict()
        self._raise_problem()  # now if a state cannot be saved
        self.sources = self._make_sources()
        self.weights = {source.name: source.weight for source in self.sources}
        self.names = list(self.weights)
        self.overlaps = any(source.overlaps for source in self.sources)

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise `UserError` if a function needs a column that is not in ``columns``."""
        for reward in self._functions:
            try:
                reward.sources(columns)
            except UserError as error:
                raise UserError(f"{reward.label} {error}") from None

    def scoring(self, prompts: Sequence[Sequence[int]] = (), num_certain: int = 0) -> Scoring:
        """Scores the answers of a rollout to ``prompts`` (their ids); see `Scoring`.

        Raises:
            RewardError: on all ranks, where the last `state_dict` lacks a state.
        """
        self._raise_problem()
        self.logs.clear()
        return Scoring(self.sources, self._config, prompts, num_certain)

    def score(self, samples: Samples) -> Scoring:
        """Start scoring samples of any number of prompts, all at once; raises as `scoring` does.
        With ``reward_pool`` none, functions run before this returns.
        """
        scoring = self.scoring()
        scoring.add(0, samples)
        scoring.start()
        return scoring

    def logged(self) -> dict[str, float]:
        """Collective where a function may log. The mean of each metric over the calls of all
        ranks.
        """
        values = defaultdict[str, list[float]](list)
        can_log = any("log_metric" in reward.bound for reward in self._functions)
        for metrics in dist.gather_objects(self.logs.metrics) if can_log else ():
            for name, of_rank in metrics.items():
                values[name] += of_rank
        return {name: sum(of) / len(of) for name, of in values.items()}

    def close(self) -> None:
        """Stop threads and processes."""
        self._resources.close()

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, list[Any]]:
        """Collective if a function has a state. Function name -> the states of all ranks, as JSON.

        Where a function's ``state_dict()`` raises, or JSON cannot represent its result, its last
        good state: a checkpoint can be saved with that. The next `score` raises the error.
        """
        problem = ""
        for reward in self._stateful:
            try:
                self._states[reward.name] = self._in_time(_state_of, reward.function)
            except Fault as fault:
                problem = problem or f"{reward.label}: state_dict() {fault}; {_NOT_JSON}"
        ranks = dist.gather_objects((self._states, problem)) if self._stateful else []
        self._problem = next((p for _, p in ranks if p), "")
        if self._problem:
            logger.warning("a checkpoint has an earlier state: %s", self._problem)
        return {p.name: [states.get(p.name) for states, _ in ranks] for p in self._stateful}

    def _in_time(self, job: Callable[..., Any], *args: Any) -> Any:
        return within(self._config.reward_timeout_s, called, job, *args)

    def _raise_problem(self) -> None:
        if self._problem:
            raise RewardError(self._problem)

    def load_state_dict(self, states: dict[str, list[Any]]) -> None:
        """Restore each function's state of this rank; of rank modulo n after n ranks saved it."""
        for reward in self._stateful:
            if reward.name in states:
                of_ranks = states[reward.name]
                try:
                    state = of_ranks[dist.rank() % len(of_ranks)]
                    self._in_time(reward.function.load_state_dict, state)
                except Fault as fault:
                    raise UserError(
                        f"{reward.label}: load_state_dict() {fault}; fix it, or start "
                        "over with --overwrite_output_dir (train.py: --restart)"
                    ) from None

    def _stateful_functions(self) -> list[RewardFunction]:
        """Functions whose state this process has."""
        stateful = [reward for reward in self._functions if _is_stateful(reward.function)]
        if self._config.reward_pool != "process":
            return stateful
        for reward in stateful:
            if not reward.is_async:
                logger.warning(
                    "checkpoints do not hold the state of %s: with --reward_pool process, every "
                    "process has its own",
                    reward.label,
                )
        return [reward for reward in stateful if reward.is_async]

    # -- sources -----------------------------------------------------------------------------------

    def _make_sources(self) -> list[RewardSource]:
        config, pool = self._config, self._config.reward_pool
        plain = [reward for reward in self._functions if not reward.is_async]
        num_parts = 1 if pool == "none" else config.reward_workers
        submit = at_once
        if pool == "thread" and plain:
            submit = self._closed_later(Pool(num_parts)).submit
        if pool == "process" and plain:
            recipes = [reward.recipe() for reward in plain]
            served = f"{Functions.__module__}:{Functions.__name__}", (recipes,)
            workers = self._closed_later(Workers(*served, num_parts))
        retries = config.on_reward_error == "skip"
        sources: list[RewardSource] = []
        for reward in self._functions:
            function = _on_own_device(reward.function)
            place: tuple[Any, ...] = submit, num_parts
            run: Callable[..., Values] = functools.partial(_in_thread, function)
            if reward.is_async:
                run = functools.partial(_in_loop, self._closed_later(Loop()), function)
                place = background, 1
            elif pool == "process":
                run = functools.partial(workers.call, plain.index(reward))
                place = background, num_parts, workers.prepare
                if reward.spec:  # a function that they unpickle is kept
                    reward.function = reward.target = None
            run = restored(reward.label)(run)
            sources.append(FunctionSource(reward, run, config.reward_timeout_s, retries, *place))
        return sources

    def _closed_later(self, resource: Any) -> Any:
        """Registers ``resource`` for `close` and returns it."""
        self._resources.callback(resource.close)
        return resource


@dataclass
class FunctionSource:
    """A reward function: where its calls run, and how they are retried."""

    reward: RewardFunction
    run: Callable[..., Values]  # (arguments, lengths, limit_s=)
    timeout_s: float  # of a call
    retries: bool = False  # after a failed call, call again sample by sample
    submit: Callable[..., "Future[Values]"] = at_once  # starts such calls
    num_parts: int = 1
    prepare: Callable[[], None] = lambda: None  # before each of these, outside its time limit

    def __post_init__(self) -> None:
        reward = self.reward
        self.name, self.label, self.weight = reward.name, reward.label, reward.weight
        self.overlaps = self.submit is not at_once
        self.takes_parts = self.num_parts > 1

    def score(self, samples: Samples, in_one_call: bool = False) -> "list[Future[Values]]":
        cuts = samples.cuts(1 if in_one_call else self.num_parts)
        return [self.submit(self._values, samples.part(*cut)) for cut in cuts]

    def _values(self, samples: Samples) -> Values:
        try:
            return self.call(samples, self.timeout_s)
        except Fault as fault:
            if not self.retries or isinstance(fault, MissingColumn) or len(samples) == 1:
                return [fault] * len(samples)
            return self._one_by_one(samples, fault)

    def _one_by_one(self, samples: Samples, fault: Fault) -> Values:
        """The values of calls with one sample each, all within the time limit of one call."""
        values: Values = [fault] * len(samples)
        left_s = self.timeout_s
        for row in range(len(samples)):
            self.prepare()
            started = time.monotonic()
            try:
                (values[row],) = self.call(samples.part(row, row + 1), left_s)
            except Fault as retried:
                if retried.timed_out and left_s < self.timeout_s / 2:
                    break  # too little time left to tell whether this sample hangs
                if retried.timed_out and fault.timed_out:
                    retried = Fault(fault.problem, timed_out=True)  # it names the whole limit
                values[row] = retried
            left_s -= time.monotonic() - started
            if left_s <= 0:
                break
        return values

    def call(self, samples: Samples, limit_s: float) -> Values:
        """One call of the function.

        Raises:
            Fault: it failed as a whole.
        """
        try:
            sources = self.reward.sources(samples.columns)
        except UserError as error:
            raise MissingColumn(str(error)) from None
        # A copy: a function may change its arguments, and a retry needs the original ones.
        kwargs = self.reward.bound | samples.part(0, len(samples)).arguments(sources)
        own_limit_s = min(len(samples) * self.reward.limit_per_answer_s, LONGEST_CALL_S)
        lengths = [len(ids) for ids in samples.answer_ids]
        return self.run(kwargs, lengths, limit_s=max(limit_s, own_limit_s))


def _state_of(function: Any) -> Any:
    """A copy, as JSON has it."""
    return json.loads(json.dumps(function.state_dict()))


def _is_stateful(function: object) -> bool:
    """Whether it has ``state_dict`` and ``load_state_dict``, and is not a module of torch."""
    methods = ("state_dict", "load_state_dict")
    has_both = all(callable(getattr(function, name, None)) for name in methods)
    return has_both and not isinstance(function, torch.nn.Module)


def _in_thread(function: Callable, *args: Any, limit_s: float) -> Values:
    return within(limit_s, call, function, *args)


def _in_loop(loop: Loop, function: Callable, *args: Any, limit_s: float) -> Values:
    return loop.run(call_async(function, *args), limit_s)


def _on_own_device(function: Callable) -> Callable:
    """``function``, called with this rank's CUDA device as the current one: in a new thread it is
    device 0.
    """

    def on_own_device(**kwargs: Any) -> Any:
        device = dist.device()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return function(**kwargs)

    return on_own_device
