"""`RewardPrograms`: every program that scores, started on samples and asked for the scores later.

A config and callables come in; scores by source go out, or a `RewardError` that is the same on
every rank. It must not know models, nor how scores become rewards.
"""

import functools
import json
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import dschat.distributed as dist
from dschat.config import UserError
from dschat.config.reward import RewardSourcesConfig
from dschat.rewards.attempt import Attempts, complaint
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

REWARD_MODEL = "reward_model"  # the name of that source, which no program can have
ENDPOINT = "http"
_NO_JSON = "let it return what JSON can say, for checkpoints, or rename it"


class RewardError(UserError):
    """A reward program failed. Every rank raises it, with the words of the first that met it."""


@dataclass
class SourceScores:
    """What one source says of this rank's samples."""

    name: str
    weight: float
    scores: Tensor  # (S,) fp32; NaN where the source failed, and that is let pass
    token_scores: list[list[float]] | None = None  # (S,) of (A,); `scores` is then their sum
    applies: Tensor | None = None  # (S,) bool, False where the source said None; it scores 0 there


@dataclass
class _Source:
    """A program, ready to be asked."""

    name: str
    label: str
    weight: float
    attempts: Attempts
    submit: Callable[..., "Future[list[Value | Fault]]"]
    cuts: Callable[[Samples], list[tuple[int, int]]]


@dataclass
class Pending:
    """Samples that are being scored: for each source its parts of them and their values."""

    samples: Samples
    calls: list[list[tuple[Samples, "Future[list[Value | Fault]]"]]]


class RewardPrograms:
    """The functions and the endpoint of a run. `start` returns at once where ``overlaps``."""

    def __init__(self, config: RewardSourcesConfig, functions: Sequence[Program]) -> None:
        self._functions = list(functions)
        self._config = config
        self._closing: list[Callable[[], None]] = []
        self._stateful = self._that_have_state()
        self.state_dict()  # what cannot be saved is found now
        self._sources = [*self._function_sources(), *self._endpoint_sources()]
        self.weights = {source.name: source.weight for source in self._sources}
        self.names = list(self.weights)
        self.overlaps = any(source.submit is not at_once for source in self._sources)

    @classmethod
    def of(cls, config: RewardSourcesConfig, reward_fns: Sequence[Any] = ()) -> "RewardPrograms":
        """The programs of ``config``, and of Python: callables, specs, or pairs with a weight.

        Raises:
            UserError: one cannot be found, imported or made, or cannot run in ``reward_pool``.
        """
        if callable(reward_fns) or isinstance(reward_fns, str):
            raise UserError(f"reward_fns={reward_fns!r:.80} is one function; give a list: [...]")
        taken = {REWARD_MODEL, ENDPOINT}
        specs, args = config.reward_fn or [], config.reward_args or []
        return cls(config, load_programs(specs, reward_fns, args, taken))

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise `UserError` where a function needs a column that is not among the rows' own."""
        for program in self._functions:
            try:
                program.sources(columns)
            except UserError as error:
                raise UserError(f"{program.label} {error}") from None

    # -- scoring -----------------------------------------------------------------------------------

    def start(self, samples: Samples) -> Pending:
        """Begin to score; without a pool, functions are done when this returns."""
        calls = {}
        # What runs elsewhere first: what runs here holds up the rest.
        for source in sorted(self._sources, key=lambda source: source.submit is at_once):
            parts = [samples.part(*cut) for cut in source.cuts(samples)]
            calls[source.name] = [
                (part, source.submit(source.attempts.values, part)) for part in parts
            ]
        return Pending(samples, [calls[name] for name in self.names])

    def finish(self, pending: Pending) -> list[SourceScores]:
        """Collective. Wait for the scores of ``pending``, one entry a source, in their order.

        Raises:
            RewardError: a program failed on any rank, unless ``on_reward_error`` lets it pass.
        """
        found, complaints = [], []
        for source, parts in zip(self._sources, pending.calls, strict=True):
            values = [value for _, future in parts for value in future.result()]
            said = [complaint(f.result(), part, self._config.reward_timeout_s) for part, f in parts]
            complaints.append(next(filter(None, said), None))
            found.append(_scores(source, values, pending.samples))
        if self._sources:
            self._judge(complaints, [int(s.scores.isnan().sum()) for s in found], pending)
        return found

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, list[Any]]:
        """Collective where a function has a state. Its name -> that of each rank's, as JSON gives
        it back.

        Raises:
            RewardError: a function's ``state_dict()`` failed, or is nothing that JSON can say.
        """
        mine: dict[str, Any] = {}
        problem = ""
        for program in self._stateful:
            try:
                mine[program.name] = json.loads(json.dumps(program.function.state_dict()))
            except Exception as error:
                problem = problem or f"{program.label}: state_dict() {raised(error)}; {_NO_JSON}"
        everybody = dist.gather_objects((mine, problem)) if self._stateful else []
        for _, theirs in everybody:
            if theirs:
                raise RewardError(theirs)
        return {p.name: [states[p.name] for states, _ in everybody] for p in self._stateful}

    def load_state_dict(self, states: dict[str, list[Any]]) -> None:
        """Give each function what this rank's had; with other ranks, what that of some rank had."""
        for program in self._stateful:
            if program.name in states:
                of_ranks = states[program.name]
                try:
                    program.function.load_state_dict(of_ranks[dist.rank() % len(of_ranks)])
                except Exception as error:
                    raise UserError(
                        f"{program.label}: load_state_dict() {raised(error)}; fix it, or begin "
                        "anew with --overwrite_output_dir (train.py: --restart)"
                    ) from None

    def _that_have_state(self) -> list[Program]:
        """Objects with ``state_dict`` and ``load_state_dict``; those of torch are weights."""
        methods = ("state_dict", "load_state_dict")
        found = [
            p
            for p in self._functions
            if all(callable(getattr(p.function, name, None)) for name in methods)
            and not isinstance(p.function, torch.nn.Module)
        ]
        if self._config.reward_pool != "process":
            return found
        for program in found:
            if not program.is_async:
                logger.warning(
                    "%s has a state, which checkpoints do not hold: every process of --reward_pool "
                    "process has another",
                    program.label,
                )
        return [program for program in found if program.is_async]

    def close(self) -> None:
        """Let go of threads and processes."""
        for close in self._closing:
            close()
        self._closing = []

    def _judge(self, complaints: list[str | None], failed: list[int], pending: Pending) -> None:
        """Collective. End the run where a program failed on any rank, or say what it cost."""
        everybody = dist.gather_objects((complaints, failed, len(pending.samples)))
        for number, source in enumerate(self._sources):
            said = next((c[number] for c, _, _ in everybody if c[number]), None)
            if said is None:
                continue
            if self._config.on_reward_error == "error":
                raise RewardError(f"{source.label} {said}")
            lost = sum(counts[number] for _, counts, _ in everybody)
            total = sum(size for _, _, size in everybody)
            said = said.removesuffix(", or pass --on_reward_error skip")
            logger.warning("%d of %d samples have no score: %s %s", lost, total, source.label, said)

    # -- sources -----------------------------------------------------------------------------------

    def _function_sources(self) -> list[_Source]:
        config, pool = self._config, self._config.reward_pool
        waits = [program for program in self._functions if program.is_async]
        works = [program for program in self._functions if not program.is_async]
        sources = {}
        if waits:
            threads = self._kept(Pool(config.reward_workers))
            for p in waits:
                loop = self._kept(Loop(begin=use_own_device))
                ask = functools.partial(_ask, p, functools.partial(loop.call, p.function))
                sources[p.name] = self._source(p, ask, threads.submit, 1)
        submit, parts, ready = at_once, 1, Attempts.ready
        if works and pool != "none":
            submit, parts = self._kept(Pool(config.reward_workers)).submit, config.reward_workers
        if works and pool == "process":
            recipes = [portable(p) for p in works]
            for p in works:
                p.leave_to_others()
            processes = self._kept(Processes(recipes, config.reward_workers))
            ready = processes.ready
        for number, p in enumerate(works):
            if pool == "process":
                carry_out = functools.partial(processes.call, number)
            else:
                carry_out = functools.partial(in_thread, p.function, begin=use_own_device)
            ask = functools.partial(_ask, p, carry_out)
            sources[p.name] = self._source(p, ask, submit, parts, ready)
        return [sources[program.name] for program in self._functions]

    def _source(
        self,
        program: Program,
        ask: Callable,
        submit: Callable,
        num_parts: int,
        ready: Callable[[], None] = Attempts.ready,
    ) -> _Source:
        skips = self._config.on_reward_error == "skip"
        attempts = Attempts(ask, self._config.reward_timeout_s, True, skips, ready)
        cuts = functools.partial(Samples.cuts, count=num_parts)
        return _Source(program.name, program.label, program.weight, attempts, submit, cuts)

    def _endpoint_sources(self) -> list[_Source]:
        config = self._config
        if not config.reward_url:
            return []
        endpoint = Endpoint(config.reward_url, config.reward_retries)
        attempts = Attempts(endpoint, config.reward_timeout_s, False, False)
        threads, size = self._kept(Pool(config.reward_workers)), config.reward_url_batch_size

        def cuts(samples: Samples) -> list[tuple[int, int]]:
            starts = range(0, len(samples), size)
            return [(start, min(start + size, len(samples))) for start in starts]

        label = f"--reward_url {config.reward_url}"
        weight = config.reward_url_weight
        return [_Source(ENDPOINT, label, weight, attempts, threads.submit, cuts)]

    def _kept(self, resource: Any) -> Any:
        """``resource``, to be closed with the rest."""
        self._closing.append(resource.close)
        return resource


def use_own_device() -> None:
    """For a new thread: CUDA's current device belongs to a thread, and is 0 in each that begins."""
    device = dist.device()
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _ask(
    program: Program,
    carry_out: Callable[[dict[str, Any], list[int], float], list[Value | Fault]],
    samples: Samples,
    limit_s: float,
) -> list[Value | Fault]:
    """Call ``program`` on ``samples``, wherever ``carry_out`` calls it."""
    try:
        sources = program.sources(samples.columns)
    except UserError as error:
        raise MissingColumn(str(error)) from None
    # A copy: a function may change what it gets, and may be asked again.
    kwargs = program.bound | arguments(sources, samples.part(0, len(samples)))
    limit_s = max(limit_s, min(len(samples) * program.limit_per_answer_s, LONGEST_CALL_S))
    return carry_out(kwargs, [len(ids) for ids in samples.answer_ids], limit_s)


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
        else:  # one for the whole answer stands at its end
            scores.append(value or 0.0)
            tokens.append([0.0] * (len(ids) - 1) + [value or 0.0] if ids else [])
    return SourceScores(
        source.name,
        source.weight,
        torch.tensor(scores, dtype=torch.float32),
        tokens if by_token else None,
        torch.tensor([value is not None for value in values], dtype=torch.bool),
    )
