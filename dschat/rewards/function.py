"""Defines `RewardFunction`: a named, weighted function, its arguments, and its calls."""

import inspect
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from dschat.config import UserError
from dschat.config.reward import REFERENCE
from dschat.rewards.call import LONGEST_CALL_S, MissingColumn, Value
from dschat.rewards.conventions import TRL, is_async
from dschat.rewards.samples import GIVEN, INNER, Samples
from dschat.user_code.calls import Fault, Recipe, at_once, portable


@dataclass
class RewardFunction:
    """A reward function: its name, weight and fixed arguments; where its calls run, and how they
    are retried.
    """

    name: str  # in metrics and --reward_args; unique
    label: str  # in messages: the flag and its value, or the function's name
    weight: float
    function: Any  # None once other processes have their own
    spec: str = ""  # from which another process makes it; "" if it was given as an object
    # of the constructor of a class, or of every call
    settings: dict[str, Any] = field(default_factory=dict)
    accepted: dict[str, inspect.Parameter] = field(default_factory=dict)  # its parameters
    bound: dict[str, Any] = field(default_factory=dict)  # the same arguments for every call
    mapped: dict[str, str] = field(default_factory=dict)  # parameter -> column, from @COLUMN
    target: Any = None  # the function as it was written
    limit_per_answer_s: float = 0.0  # the function's own time limit; extends the call's if longer
    # Set by `RewardFunctions`.
    run: Callable[..., list[Value]] | None = None  # one call: (arguments, lengths, limit_s=)
    submit: Callable[..., "Future[list[Value]]"] = at_once  # starts calls
    num_parts: int = 1  # calls of a rollout that may run at the same time
    prepare: Callable[[], None] = lambda: None  # before a retried call, outside its time limit
    timeout_s: float = 60.0  # of a call
    retries: bool = False  # after a failed call, call again sample by sample

    @property
    def is_async(self) -> bool:
        return is_async(self.function)

    @property
    def overlaps(self) -> bool:
        """Whether it scores in the background after `score` returns."""
        return self.submit is not at_once

    def recipe(self) -> tuple[Recipe, dict[str, Any]]:
        """What a worker process makes it of.

        Raises:
            UserError: the function cannot be imported by name there.
        """
        found = portable(self.target, self.spec, self.label, "--reward_pool thread")
        return found, self.settings

    def sources(self, columns: Collection[str]) -> dict[str, str]:
        """The source of each argument, for samples with ``columns``: parameter -> column, or name
        in `GIVEN`.

        Raises:
            UserError: a column is missing.
        """
        chosen: dict[str, str] = {}
        for name, parameter in self.accepted.items():
            if parameter.kind is parameter.VAR_POSITIONAL or name in self.bound:
                continue
            if parameter.kind is parameter.VAR_KEYWORD:
                rest = [c for c in (*GIVEN, *columns) if c not in chosen and c not in self.bound]
                chosen |= {c: c for c in rest}
                continue
            candidates = list(REFERENCE) if name == "reference" else [name]
            if name in self.mapped:
                candidates = [self.mapped[name]]
            known = {*columns, *GIVEN, *INNER}
            source = next((c for c in candidates if {c, c.partition(".")[0]} & known), None)
            if source is not None:
                chosen[name] = source
            elif name in self.mapped or parameter.default is parameter.empty:
                available = ", ".join(sorted(columns)) or "none"
                raise UserError(
                    f"needs the column {' or '.join(candidates)}, which the data lacks "
                    f"(it has: {available}); give {name} a default, or name the column with "
                    f"--reward_args {self.name}.{name}=@COLUMN"
                )
        if TRL & {*self.accepted} and "prompts" in chosen:
            chosen["prompts"] = "prompt_messages"  # as TRL gives them
        return chosen

    def score(self, samples: Samples) -> "Future[list[Value]]":
        """Start to score ``samples``: one call, and what it takes to retry it."""
        return self.submit(self._values, samples)

    def _values(self, samples: Samples) -> list[Value]:
        try:
            return self.call(samples, self.timeout_s)
        except Fault as fault:
            if not self.retries or isinstance(fault, MissingColumn) or len(samples) == 1:
                return [fault] * len(samples)
            return self._one_by_one(samples, fault)

    def _one_by_one(self, samples: Samples, fault: Fault) -> list[Value]:
        """The values of calls with one sample each, all within the time limit of one call."""
        values: list[Value] = [fault] * len(samples)
        left_s = self.timeout_s
        for row in range(len(samples)):
            self.prepare()
            started = time.monotonic()
            try:
                (values[row],) = self.call(samples.pick([row]), left_s)
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

    def call(self, samples: Samples, limit_s: float) -> list[Value]:
        """One call of the function.

        Raises:
            Fault: it failed as a whole.
        """
        assert self.run is not None, "no RewardFunctions runs it"
        try:
            sources = self.sources(samples.columns)
        except UserError as error:
            raise MissingColumn(str(error)) from None
        # A copy: a function may change its arguments, and a retry needs the original ones.
        kwargs = self.bound | samples.pick(range(len(samples))).arguments(sources)
        own_limit_s = min(len(samples) * self.limit_per_answer_s, LONGEST_CALL_S)
        lengths = [len(ids) for ids in samples.answer_ids]
        return self.run(kwargs, lengths, limit_s=max(limit_s, own_limit_s))
