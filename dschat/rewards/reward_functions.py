"""Runs all reward functions and the endpoint: starts them on samples, collects the scores later.

A failure is a `RewardError` with the same message on every rank.
"""

import functools
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import dschat.distributed as dist
from dschat.config import UserError
from dschat.config.reward import RewardSourcesConfig
from dschat.rewards.call import Fault, MissingColumn, Values, raised, shortened
from dschat.rewards.endpoint import ENDPOINT, Endpoint
from dschat.rewards.loader import RewardFunction, load_reward_functions, portable
from dschat.rewards.processes import Processes
from dschat.rewards.samples import Samples
from dschat.rewards.sources import FunctionSource, Parts, RewardSource, Scattered
from dschat.rewards.threads import Loop, Pool, at_once, background, in_thread

logger = logging.getLogger("dschat")

REWARD_MODEL = "reward_model"  # reserved source name
_PROMPT_SHOWN = 80  # characters
_SKIP = ", or pass --on_reward_error skip"
# Rows of samples that are being scored, and the calls, by source.
Begun = tuple[list[int], dict[str, Parts]]
_NOT_JSON = "let it return JSON types, for checkpoints, or rename it"


class RewardError(UserError):
    """A reward function or the endpoint failed. Every rank raises the first rank's message."""


@dataclass
class SourceScores:
    """One source's scores of this rank's samples."""

    name: str
    weight: float
    scores: Tensor  # (S,) fp32; NaN where the source failed under on_reward_error=skip
    token_scores: list[list[float]] | None = None  # (S,) of (A,); `scores` is then their sum
    applies: Tensor | None = None  # (S,) bool, False where the source returned None (scores 0)


@dataclass
class Pending:
    """Samples being scored by all sources of a run."""

    samples: Samples
    calls: list[tuple[RewardSource, Parts | Scattered]]
    timeout_s: float
    skips: bool

    def result(self) -> list[SourceScores]:
        """Collective. Wait for the scores: one entry per source, in their order.

        Raises:
            RewardError: a source failed on any rank and ``on_reward_error`` is error.
        """
        values = [scoring.result() for _, scoring in self.calls]
        scores = [
            _scores(source, row, self.samples)
            for (source, _), row in zip(self.calls, values, strict=True)
        ]
        if not self.calls:
            return scores
        complaints = [_complaint(row, self.samples, self.timeout_s) for row in values]
        num_failed = [int(source.scores.isnan().sum()) for source in scores]
        ranks = dist.gather_objects((complaints, num_failed, len(self.samples)))
        for number, (source, _) in enumerate(self.calls):
            line = next((lines[number] for lines, _, _ in ranks if lines[number]), None)
            if line is None:
                continue
            if not self.skips:
                raise RewardError(f"{source.label} {line}")
            lost = sum(counts[number] for _, counts, _ in ranks)
            total = sum(size for _, _, size in ranks)
            line = line.removesuffix(_SKIP)
            logger.warning("%d of %d samples have no score: %s %s", lost, total, source.label, line)
        return scores


class RewardFunctions:
    """The reward functions and the endpoint of a run.

    ``overlaps``: at least one source scores in the background after `score` returns.
    ``takes_parts``: at least one does so in `score_part`. ``num_workers``: calls at a time.
    """

    def __init__(self, config: RewardSourcesConfig, functions: Sequence[RewardFunction]) -> None:
        self._functions = list(functions)
        self._config = config
        self._closing: list[Callable[[], None]] = []
        self._stateful = self._stateful_functions()
        self._states: dict[str, Any] = {}  # the last good ones of this rank
        self._problem = ""
        self.state_dict()
        self._raise_problem()  # now if a state cannot be saved
        self._sources = self._make_sources()
        self.weights = {source.name: source.weight for source in self._sources}
        self.names = list(self.weights)
        self.overlaps = any(source.overlaps for source in self._sources)
        self.takes_parts = any(source.takes_parts for source in self._sources)
        self.num_workers = config.reward_workers

    @classmethod
    def of(cls, config: RewardSourcesConfig, reward_fns: Sequence[Any] = ()) -> "RewardFunctions":
        """The sources of ``config``, plus ``reward_fns``: callables, specs, or pairs with a weight.

        Raises:
            UserError: one cannot be found, imported or constructed, or run in ``reward_pool``.
        """
        if callable(reward_fns) or isinstance(reward_fns, str):
            raise UserError(f"reward_fns={reward_fns!r:.80} is one function; give a list: [...]")
        taken = {REWARD_MODEL, ENDPOINT}
        specs, args = config.reward_fn or [], config.reward_args or []
        return cls(config, load_reward_functions(specs, reward_fns, args, taken))

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise `UserError` if a function needs a column that is not in ``columns``."""
        for reward in self._functions:
            try:
                reward.sources(columns)
            except UserError as error:
                raise UserError(f"{reward.label} {error}") from None

    def score(self, samples: Samples, timeout_s: float, begun: Sequence[Begun] = ()) -> Pending:
        """Start scoring. With ``reward_pool`` none, functions run before this returns.

        ``begun``: what `score_part` has begun, with its rows of ``samples``.

        Raises:
            RewardError: on all ranks, where the last `state_dict` lacks a state.
        """
        self._raise_problem()
        # Background sources first: a source that runs in this thread blocks the loop.
        started: dict[str, Parts | Scattered] = {}
        for source in sorted(self._sources, key=lambda source: not source.overlaps):
            if begun and source.takes_parts:
                calls = [(rows, parts[source.name]) for rows, parts in begun]
                done = {row for rows, _ in begun for row in rows}
                rest = [row for row in range(len(samples)) if row not in done]
                for rows in samples.apart(rest):
                    calls.append((rows, source.score(samples.pick(rows), timeout_s)))
                started[source.name] = Scattered(calls)
            else:
                started[source.name] = source.score(samples, timeout_s)
        of_sources = [(source, started[source.name]) for source in self._sources]
        return Pending(samples, of_sources, timeout_s, self._config.on_reward_error == "skip")

    def score_part(self, samples: Samples, timeout_s: float) -> dict[str, Parts]:
        """Start scoring whole prompts of a rollout, by the sources that take them; by name."""
        chosen = [source for source in self._sources if source.takes_parts]
        return {source.name: source.score_part(samples, timeout_s) for source in chosen}

    def close(self) -> None:
        """Stop threads and processes."""
        for close in self._closing:
            close()
        self._closing = []

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, list[Any]]:
        """Collective if a function has a state. Function name -> the states of all ranks, as JSON.

        Where a function's ``state_dict()`` raises, or JSON cannot represent its result, its last
        good state: a checkpoint can be saved with that. The next `score` raises the error.
        """
        problem = ""
        for reward in self._stateful:
            try:
                self._states[reward.name] = json.loads(json.dumps(reward.function.state_dict()))
            except Exception as error:
                problem = problem or f"{reward.label}: state_dict() {raised(error)}; {_NOT_JSON}"
        ranks = dist.gather_objects((self._states, problem)) if self._stateful else []
        self._problem = next((p for _, p in ranks if p), "")
        if self._problem:
            logger.warning("a checkpoint has an earlier state: %s", self._problem)
        return {p.name: [states.get(p.name) for states, _ in ranks] for p in self._stateful}

    def _raise_problem(self) -> None:
        if self._problem:
            raise RewardError(self._problem)

    def load_state_dict(self, states: dict[str, list[Any]]) -> None:
        """Restore each function's state of this rank; of rank modulo n after n ranks saved it."""
        for reward in self._stateful:
            if reward.name in states:
                of_ranks = states[reward.name]
                try:
                    reward.function.load_state_dict(of_ranks[dist.rank() % len(of_ranks)])
                except Exception as error:
                    raise UserError(
                        f"{reward.label}: load_state_dict() {raised(error)}; fix it, or start "
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
        source = functools.partial(FunctionSource, retries=config.on_reward_error == "skip")
        plain = [reward for reward in self._functions if not reward.is_async]
        num_parts = 1 if pool == "none" else config.reward_workers
        submit = at_once
        if pool == "thread" and plain:
            submit = self._closed_later(Pool(num_parts)).submit
        if pool == "process" and plain:
            processes = self._closed_later(Processes([portable(p) for p in plain], num_parts))
        sources: list[RewardSource] = []
        for reward in self._functions:
            if reward.is_async:
                loop = self._closed_later(Loop())
                run = functools.partial(loop.call, _on_own_device(reward.function))
                sources.append(source(reward, run, background))
            elif pool == "process":
                run = functools.partial(processes.call, plain.index(reward))
                sources.append(
                    source(reward, run, background, num_parts, prepare=processes.prepare)
                )
                if reward.recipe[0] == "spec":  # a function that they unpickle is kept
                    reward.function = None
            else:
                run = functools.partial(in_thread, _on_own_device(reward.function))
                sources.append(source(reward, run, submit, num_parts))
        if config.reward_url:
            sources.append(self._closed_later(Endpoint(config)))
        return sources

    def _closed_later(self, resource: Any) -> Any:
        """Registers ``resource`` for `close` and returns it."""
        self._closing.append(resource.close)
        return resource


def _is_stateful(function: object) -> bool:
    """Whether it has ``state_dict`` and ``load_state_dict``, and is not a module of torch."""
    methods = ("state_dict", "load_state_dict")
    has_both = all(callable(getattr(function, name, None)) for name in methods)
    return has_both and not isinstance(function, torch.nn.Module)


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


def _complaint(values: Values, samples: Samples, timeout_s: float) -> str | None:
    """One line for the faults in ``values``, with a prompt and the remedy; None without faults.

    The fault of one sample takes precedence over that of a call with several.
    """
    faults = [(row, value) for row, value in enumerate(values) if isinstance(value, Fault)]
    if not faults:
        return None
    sizes = Counter(fault for _, fault in faults)
    row, fault = next(((r, f) for r, f in faults if sizes[f] == 1), faults[0])
    if isinstance(fault, MissingColumn):
        return fault.problem
    several = f"{sizes[fault]} samples, the first on " if sizes[fault] > 1 else ""
    prompt = shortened(" ".join(samples.prompts[row].split()), _PROMPT_SHOWN)
    remedy = f"raise --reward_timeout_s {timeout_s:g} or fix it" if fault.timed_out else "fix it"
    return f"{fault.problem} on {several}the prompt {prompt!r}; {remedy}{_SKIP}"


def _scores(source: RewardSource, values: Values, samples: Samples) -> SourceScores:
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
