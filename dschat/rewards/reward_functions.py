"""Runs all reward functions and the endpoint: starts them on samples, collects the scores later.

A failure is a `RewardError` with the same message on every rank.
"""

import functools
import json
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

import dschat.distributed as dist
from dschat.config import UserError
from dschat.config.reward import RewardSourcesConfig
from dschat.rewards.attempt import Attempts, Score, complaint
from dschat.rewards.call import (
    LONGEST_CALL_S,
    Fault,
    MissingColumn,
    Value,
    arguments,
    raised,
)
from dschat.rewards.endpoint import Endpoint
from dschat.rewards.loader import Program, load_programs, portable
from dschat.rewards.pool import Loop, Pool, Processes, at_once, in_thread
from dschat.rewards.samples import Samples

logger = logging.getLogger("dschat")

REWARD_MODEL = "reward_model"  # reserved source names
ENDPOINT = "http"
_NOT_JSON = "let it return JSON types, for checkpoints, or rename it"


class RewardError(UserError):
    """A reward function or the endpoint failed. Every rank raises the first rank's message."""


class _Stateful(Protocol):
    """A reward function with a state to checkpoint."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


@dataclass
class SourceScores:
    """One source's scores of this rank's samples."""

    name: str
    weight: float
    scores: Tensor  # (S,) fp32; NaN where the source failed under on_reward_error=skip
    token_scores: list[list[float]] | None = None  # (S,) of (A,); `scores` is then their sum
    applies: Tensor | None = None  # (S,) bool, False where the source returned None (scores 0)


@dataclass
class _Source:
    """A reward function or the endpoint, with its retry policy and where its calls run."""

    name: str
    label: str
    weight: float
    attempts: Attempts
    submit: Callable[..., "Future[list[Value | Fault]]"]
    cuts: Callable[[Samples], list[tuple[int, int]]]


@dataclass
class Pending:
    """Samples being scored: for each source, its parts of the samples and their futures."""

    samples: Samples
    calls: list[list[tuple[Samples, "Future[list[Value | Fault]]"]]]


class RewardPrograms:
    """The reward functions and the endpoint of a run.

    ``overlaps``: at least one source scores in the background after `start` returns.
    """

    def __init__(self, config: RewardSourcesConfig, functions: Sequence[Program]) -> None:
        self._functions = list(functions)
        self._config = config
        self._closing: list[Callable[[], None]] = []
        self._stateful = self._stateful_functions()
        self.state_dict()  # fail now if a state cannot be saved
        self._sources = [*self._function_sources(), *self._endpoint_sources()]
        self.weights = {source.name: source.weight for source in self._sources}
        self.names = list(self.weights)
        self.overlaps = any(source.submit is not at_once for source in self._sources)

    @classmethod
    def of(cls, config: RewardSourcesConfig, reward_fns: Sequence[Any] = ()) -> "RewardPrograms":
        """The sources of ``config``, plus ``reward_fns``: callables, specs, or pairs with a weight.

        Raises:
            UserError: one cannot be found, imported or constructed, or run in ``reward_pool``.
        """
        if callable(reward_fns) or isinstance(reward_fns, str):
            raise UserError(f"reward_fns={reward_fns!r:.80} is one function; give a list: [...]")
        taken = {REWARD_MODEL, ENDPOINT}
        specs, args = config.reward_fn or [], config.reward_args or []
        return cls(config, load_programs(specs, reward_fns, args, taken))

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise `UserError` if a function needs a column that is not in ``columns``."""
        for program in self._functions:
            try:
                program.sources(columns)
            except UserError as error:
                raise UserError(f"{program.label} {error}") from None

    # -- scoring -----------------------------------------------------------------------------------

    def start(self, samples: Samples) -> Pending:
        """Start scoring. With ``reward_pool`` none, functions run before this returns."""
        calls = {}
        # Background sources first: a source that runs in this thread blocks the loop.
        for source in sorted(self._sources, key=lambda source: source.submit is at_once):
            parts = [samples.part(*cut) for cut in source.cuts(samples)]
            calls[source.name] = [
                (part, source.submit(source.attempts.values, part)) for part in parts
            ]
        return Pending(samples, [calls[name] for name in self.names])

    def finish(self, pending: Pending) -> list[SourceScores]:
        """Collective. Wait for the scores of ``pending``: one entry per source, in their order.

        Raises:
            RewardError: a source failed on any rank and ``on_reward_error`` is error.
        """
        scores, complaints = [], []
        limit_s = self._config.reward_timeout_s
        for source, parts in zip(self._sources, pending.calls, strict=True):
            values = [value for _, future in parts for value in future.result()]
            lines = [complaint(future.result(), part, limit_s) for part, future in parts]
            complaints.append(next(filter(None, lines), None))
            scores.append(_scores(source, values, pending.samples))
        if self._sources:
            self._raise_or_warn(complaints, [int(s.scores.isnan().sum()) for s in scores], pending)
        return scores

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, list[Any]]:
        """Collective if a function has a state. Function name -> the states of all ranks, as JSON.

        Raises:
            RewardError: a function's ``state_dict()`` raised, or JSON cannot represent its result.
        """
        local: dict[str, Any] = {}
        problem = ""
        for program, function in self._stateful:
            try:
                local[program.name] = json.loads(json.dumps(function.state_dict()))
            except Exception as error:
                problem = problem or f"{program.label}: state_dict() {raised(error)}; {_NOT_JSON}"
        ranks = dist.gather_objects((local, problem)) if self._stateful else []
        for _, rank_problem in ranks:
            if rank_problem:
                raise RewardError(rank_problem)
        return {p.name: [states[p.name] for states, _ in ranks] for p, _ in self._stateful}

    def load_state_dict(self, states: dict[str, list[Any]]) -> None:
        """Restore each function's state of this rank; of rank modulo n after n ranks saved it."""
        for program, function in self._stateful:
            if program.name in states:
                of_ranks = states[program.name]
                try:
                    function.load_state_dict(of_ranks[dist.rank() % len(of_ranks)])
                except Exception as error:
                    raise UserError(
                        f"{program.label}: load_state_dict() {raised(error)}; fix it, or start "
                        "over with --overwrite_output_dir (train.py: --restart)"
                    ) from None

    def _stateful_functions(self) -> list[tuple[Program, _Stateful]]:
        """Functions whose state this process has."""
        stateful = [(p, p.function) for p in self._functions if _is_stateful(p.function)]
        if self._config.reward_pool != "process":
            return stateful
        for program, _ in stateful:
            if not program.is_async:
                logger.warning(
                    "checkpoints do not hold the state of %s: with --reward_pool process, every "
                    "process has its own",
                    program.label,
                )
        return [(program, function) for program, function in stateful if program.is_async]

    def close(self) -> None:
        """Stop threads and processes."""
        for close in self._closing:
            close()
        self._closing = []

    def _raise_or_warn(
        self, complaints: list[str | None], num_failed: list[int], pending: Pending
    ) -> None:
        """Collective. For a source that failed on any rank: raise, or log the lost samples."""
        ranks = dist.gather_objects((complaints, num_failed, len(pending.samples)))
        for number, source in enumerate(self._sources):
            line = next((lines[number] for lines, _, _ in ranks if lines[number]), None)
            if line is None:
                continue
            if self._config.on_reward_error == "error":
                raise RewardError(f"{source.label} {line}")
            lost = sum(counts[number] for _, counts, _ in ranks)
            total = sum(size for _, _, size in ranks)
            line = line.removesuffix(", or pass --on_reward_error skip")
            logger.warning("%d of %d samples have no score: %s %s", lost, total, source.label, line)

    # -- sources -----------------------------------------------------------------------------------

    def _function_sources(self) -> list[_Source]:
        config, pool = self._config, self._config.reward_pool
        coroutines = [program for program in self._functions if program.is_async]
        functions = [program for program in self._functions if not program.is_async]
        sources = {}
        if coroutines:
            threads = self._closed_later(Pool(config.reward_workers))
            for p in coroutines:
                loop = self._closed_later(Loop(begin=use_own_device))
                score = functools.partial(_score, p, functools.partial(loop.call, p.function))
                sources[p.name] = self._source(p, score, threads.submit, 1)
        submit, num_parts, prepare = at_once, 1, Attempts.prepare
        if functions and pool != "none":
            num_parts = config.reward_workers
            submit = self._closed_later(Pool(num_parts)).submit
        if functions and pool == "process":
            recipes = [portable(p) for p in functions]
            for p in functions:
                p.release()
            processes = self._closed_later(Processes(recipes, config.reward_workers))
            prepare = processes.prepare
        for number, p in enumerate(functions):
            if pool == "process":
                run = functools.partial(processes.call, number)
            else:
                run = functools.partial(in_thread, p.function, begin=use_own_device)
            score = functools.partial(_score, p, run)
            sources[p.name] = self._source(p, score, submit, num_parts, prepare)
        return [sources[program.name] for program in self._functions]

    def _source(
        self,
        program: Program,
        score: Score,
        submit: Callable,
        num_parts: int,
        prepare: Callable[[], None] = Attempts.prepare,
    ) -> _Source:
        skips = self._config.on_reward_error == "skip"
        attempts = Attempts(score, self._config.reward_timeout_s, True, skips, prepare)
        cuts = functools.partial(Samples.cuts, count=num_parts)
        return _Source(program.name, program.label, program.weight, attempts, submit, cuts)

    def _endpoint_sources(self) -> list[_Source]:
        config = self._config
        if not config.reward_url:
            return []
        endpoint = Endpoint(config.reward_url, config.reward_retries)
        attempts = Attempts(endpoint, config.reward_timeout_s, False, False)
        threads = self._closed_later(Pool(config.reward_workers))
        size = config.reward_url_batch_size

        def cuts(samples: Samples) -> list[tuple[int, int]]:
            starts = range(0, len(samples), size)
            return [(start, min(start + size, len(samples))) for start in starts]

        label = f"--reward_url {config.reward_url}"
        weight = config.reward_url_weight
        return [_Source(ENDPOINT, label, weight, attempts, threads.submit, cuts)]

    def _closed_later(self, resource: Any) -> Any:
        """Registers ``resource`` for `close` and returns it."""
        self._closing.append(resource.close)
        return resource


def _is_stateful(function: object) -> TypeGuard[_Stateful]:
    """Whether it has ``state_dict`` and ``load_state_dict``, and is not a module of torch."""
    methods = ("state_dict", "load_state_dict")
    has_both = all(callable(getattr(function, name, None)) for name in methods)
    return has_both and not isinstance(function, torch.nn.Module)


def use_own_device() -> None:
    """Set this rank's CUDA device in a new thread, where the current device is 0."""
    device = dist.device()
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _score(
    program: Program,
    run: Callable[[dict[str, Any], list[int], float], list[Value | Fault]],
    samples: Samples,
    limit_s: float,
) -> list[Value | Fault]:
    """Call ``program`` on ``samples``, in the thread or process of ``run``."""
    try:
        sources = program.sources(samples.columns)
    except UserError as error:
        raise MissingColumn(str(error)) from None
    # A copy: a function may change its arguments, and a retry needs the original ones.
    kwargs = program.bound | arguments(sources, samples.part(0, len(samples)))
    limit_s = max(limit_s, min(len(samples) * program.limit_per_answer_s, LONGEST_CALL_S))
    return run(kwargs, [len(ids) for ids in samples.answer_ids], limit_s)


def _scores(source: _Source, values: list[Value | Fault], samples: Samples) -> SourceScores:
    """Values as tensors; NaN for a fault, 0 for None."""
    by_token = any(isinstance(value, list) for value in values)
    scores, tokens = [], []
    for value, ids in zip(values, samples.answer_ids, strict=True):
        if isinstance(value, Fault):
            value = float("nan")
        if isinstance(value, list):
            scores.append(sum(value))
            tokens.append(value)
        else:  # one score for the whole answer goes to its last token
            scores.append(value or 0.0)
            tokens.append([0.0] * (len(ids) - 1) + [value or 0.0] if ids else [])
    return SourceScores(
        source.name,
        source.weight,
        torch.tensor(scores, dtype=torch.float32),
        tokens if by_token else None,
        torch.tensor([value is not None for value in values], dtype=torch.bool),
    )
