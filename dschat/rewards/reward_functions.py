"""Holds the reward functions of a run: where their calls run, and their state."""

import functools
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any

import torch

import dschat.distributed as dist
from dschat.config import UserError
from dschat.config.reward import RewardSourcesConfig
from dschat.rewards.call import Value, call, call_async, served
from dschat.rewards.conventions import Logs
from dschat.rewards.function import RewardFunction
from dschat.rewards.loader import load_reward_functions
from dschat.rewards.samples import Samples
from dschat.rewards.scoring import RewardError, Scoring
from dschat.user_code.calls import Fault, Loop, Pool, at_once, background, called, within
from dschat.user_code.processes import Workers
from dschat.user_code.surroundings import restored

logger = logging.getLogger("dschat")

REWARD_MODEL = "reward_model"  # reserved source name
_NOT_JSON = "let it return JSON types, in time, for checkpoints, or rename it"


class RewardFunctions:
    """The reward functions of a run.

    ``overlaps``: at least one scores in the background.
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
        self._place()
        self.weights = {reward.name: reward.weight for reward in self._functions}
        self.names = list(self.weights)
        self.overlaps = any(reward.overlaps for reward in self._functions)

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
        return Scoring(self._functions, self._config, prompts, num_certain)

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

    # -- calls -------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Say of each function where its calls run."""
        config, pool = self._config, self._config.reward_pool
        plain = [reward for reward in self._functions if not reward.is_async]
        num_parts = 1 if pool == "none" else config.reward_workers
        submit = at_once
        if pool == "thread" and plain:
            submit = self._closed_later(Pool(num_parts)).submit
        if pool == "process" and plain:
            recipes = [reward.recipe() for reward in plain]
            spec = f"{served.__module__}:{served.__name__}"
            workers = self._closed_later(Workers(spec, (recipes,), num_parts))
        for reward in self._functions:
            function = _on_own_device(reward.function)
            reward.timeout_s = config.reward_timeout_s
            reward.retries = config.on_reward_error == "skip"
            if reward.is_async:
                reward.submit, loop = background, self._closed_later(Loop())
                run = functools.partial(_in_loop, loop, function)
            elif pool == "process":
                reward.submit, reward.num_parts = background, num_parts
                reward.prepare = workers.prepare
                run = functools.partial(workers.call, plain.index(reward))
                if reward.spec:  # a function that they unpickle is kept
                    reward.function = reward.target = None
            else:
                reward.submit, reward.num_parts = submit, num_parts
                run = functools.partial(_in_thread, function)
            reward.run = restored(reward.label)(run)

    def _closed_later(self, resource: Any) -> Any:
        """Registers ``resource`` for `close` and returns it."""
        self._resources.callback(resource.close)
        return resource


def _state_of(function: Any) -> Any:
    """A copy, as JSON has it."""
    return json.loads(json.dumps(function.state_dict()))


def _is_stateful(function: object) -> bool:
    """Whether it has ``state_dict`` and ``load_state_dict``, and is not a module of torch."""
    methods = ("state_dict", "load_state_dict")
    has_both = all(callable(getattr(function, name, None)) for name in methods)
    return has_both and not isinstance(function, torch.nn.Module)


def _in_thread(function: Callable, *args: Any, limit_s: float) -> list[Value]:
    return within(limit_s, call, function, *args)


def _in_loop(loop: Loop, function: Callable, *args: Any, limit_s: float) -> list[Value]:
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
