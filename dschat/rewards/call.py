"""Calls reward functions, as the trainer does that they were written for, and validates what they
return: one value per sample, or a `Fault`.

Their input are `Samples`: prompts, answers and the columns of their rows. The parameters of a
function tell which trainer it was written for. TRL's functions need no adapter: `GIVEN`
has the names of their parameters, `Logs` the names that are about the run.

No torch here: worker processes import this module and should start fast.
"""

import asyncio
import functools
import inspect
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from dschat.config.data import look_up
from dschat.user_code.calls import Fault, Recipe, fault_of, rebuilt, shortened

# Parameter of a reward function -> attribute of `Samples`. TRL's names work too.
GIVEN = {
    "prompts": "prompts",
    "prompt_messages": "chats",
    "answers": "answers",
    "completions": "completions",
    "prompt_ids": "prompt_ids",
    "answer_ids": "answer_ids",
    "completion_ids": "answer_ids",
    "finish_reasons": "finish_reasons",
}
# Likewise, of the adapters below alone: names that no column has.
INNER = {"_prompts": "whole_prompts", "_queries": "queries"}
TRL = {"completions", "completion_ids"}  # a function that takes one of them was written for TRL


@dataclass
class Samples:
    """S answers of this rank. The samples of one prompt are adjacent."""

    prompts: list[str]  # (S,)
    answers: list[str]  # (S,)
    prompt_ids: list[list[int]]  # (S,) of token ids
    answer_ids: list[list[int]]  # (S,) of token ids, EOS included
    finish_reasons: list[str]  # (S,) "stop" or "length"
    columns: dict[str, list[Any]] = field(default_factory=dict)  # name -> (S,), from the data
    chats: list[Any] = field(default_factory=list)  # (S,) prompts, as messages where they are chats
    decode: Callable[[list[int]], str] | None = None  # of token ids, special ones too, if known

    def __post_init__(self) -> None:
        self.chats = self.chats or list(self.prompts)

    @property
    def completions(self) -> list[Any]:
        """The answers as TRL gives them: a list of one message where the prompt is a chat."""
        return [
            [{"role": "assistant", "content": answer}] if isinstance(chat, list) else answer
            for chat, answer in zip(self.chats, self.answers, strict=True)
        ]

    @property
    def whole_prompts(self) -> list[str]:
        """The prompts as the model read them: of chats, as their template renders them."""
        return [*map(self.decode, self.prompt_ids)] if self.decode else self.prompts

    @property
    def queries(self) -> list[str]:
        """Prompts and answers, as the model read and wrote them."""
        if self.decode is None:
            return [*map(str.__add__, self.prompts, self.answers)]
        pairs = zip(self.prompt_ids, self.answer_ids, strict=True)
        return [self.decode(prompt + answer) for prompt, answer in pairs]

    def __len__(self) -> int:
        return len(self.answers)

    @classmethod
    def joined(cls, parts: "Sequence[Samples]") -> "Samples":
        """The samples of all ``parts``, which have the same columns."""
        lists: dict[str, Any] = {
            name: [v for part in parts for v in getattr(part, name)] for name in _LISTS
        }
        first = parts[0] if parts else Samples(**lists)
        columns = {n: [v for part in parts for v in part.columns[n]] for n in first.columns}
        return replace(first, **lists, columns=columns)

    def arguments(self, sources: Mapping[str, str]) -> dict[str, list[Any]]:
        """Arguments of a call, of the column or name in `GIVEN` that each parameter gets."""
        known = GIVEN | INNER
        return {
            name: getattr(self, known[source]) if source in known else self._column(source)
            for name, source in sources.items()
        }

    def _column(self, path: str) -> list[Any]:
        """A column, or a path into the values of one, such as ``reward_model.ground_truth``."""
        if path in self.columns:
            return self.columns[path]
        name = path.partition(".")[0]
        return [look_up({name: value}, path) for value in self.columns[name]]

    def pick(self, rows: Sequence[int]) -> "Samples":
        """A copy of samples ``rows``."""
        columns = {name: [of[row] for row in rows] for name, of in self.columns.items()}
        picked: dict[str, Any] = {"columns": columns}
        for name in _LISTS:
            picked[name] = [copy(getattr(self, name)[row]) for row in rows]
        return replace(self, **picked)

    def cuts(self, rows: Sequence[int], count: int) -> list[Sequence[int]]:
        """``rows`` in at most ``count`` parts of similar size.

        The samples of a prompt stay in one part, for functions that compare them.
        """
        size, cuts, start = len(rows), list[Sequence[int]](), 0
        for part in range(1, count + 1):
            stop = max(start, size * part // count)
            while 0 < stop < size and self._are_alike(rows[stop - 1], rows[stop]):
                stop += 1
            if stop > start:
                cuts.append(rows[start:stop])
            start = stop
        return cuts

    def apart(self, rows: Sequence[int]) -> list[list[int]]:
        """``rows`` in lists without neighbours that have equal prompts and were not neighbours
        before: a function would take them for one prompt.
        """
        lists: list[list[int]] = []
        for before, row in zip([None, *rows], rows, strict=False):
            if before is None or (before != row - 1 and self._are_alike(before, row)):
                lists.append([])
            lists[-1].append(row)
        return lists

    def _are_alike(self, row: int, other: int) -> bool:
        return self.prompt_ids[row] == self.prompt_ids[other]


_LISTS = ("prompts", "answers", "prompt_ids", "answer_ids", "finish_reasons", "chats")
_VERL = {"data_source", "solution_str", "ground_truth"}
_VERL_BATCH = {f"{name}s" for name in _VERL}
_OPENRLHF = ["queries", "prompts", "labels"]

Column = Sequence[Any] | None
Calls = list[dict[str, Any]]  # the arguments of each call


def is_async(function: Callable[..., Any]) -> bool:
    """Whether it is declared with ``async def``."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 an instance may define an async one
    )


def adapted(
    function: Callable[..., Any], options: Mapping[str, Any] | None = None
) -> tuple[Callable[..., Any], str]:
    """``function``, or one that calls it as another trainer does; and that trainer's name, or "".

    ``options``: arguments of every call.
    """
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return function, ""
    calls: Callable[..., Calls]
    if set(names) >= _VERL:
        trainer, calls = "verl", _verl_calls
    elif set(names) >= _VERL_BATCH:
        trainer, calls = "verl", _verl_batch
    elif names[:3] == _OPENRLHF:
        trainer, calls = "OpenRLHF", _openrlhf_calls
    else:
        return function, "TRL" if TRL & {*names} else ""
    given = options or {}

    def values_of(results: list[Any]) -> Any:
        values = results if calls is _verl_calls else results[0]
        if trainer == "verl" and isinstance(values, list):
            return [value["score"] if isinstance(value, dict) else value for value in values]
        return values["rewards"] if isinstance(values, dict) else values

    def call(**arguments: Any) -> Any:
        return values_of([function(**each, **given) for each in calls(**arguments)])

    async def call_async(**arguments: Any) -> Any:
        waiting = [function(**each, **given) for each in calls(**arguments)]
        return values_of(await asyncio.gather(*waiting))

    made: Any = call_async if is_async(function) else call
    made.__signature__ = inspect.signature(calls)
    return made, trainer


def _verl_calls(
    answers: Sequence[str],
    reference: Column = None,
    reward_model: Column = None,
    data_source: Column = None,
    extra_info: Column = None,
) -> Calls:
    """A call for each answer; it returns a number, or a dict with ``score``.

    ``reward_model``: a column of verl's data, whose ``ground_truth`` is the reference.
    """
    calls = []
    for i, answer in enumerate(answers):
        truth = None if reference is None else reference[i]
        if reward_model is not None and isinstance(reward_model[i], dict):
            truth = reward_model[i].get("ground_truth", truth)
        source = data_source[i] if data_source else ""
        call = {"data_source": source, "solution_str": answer, "ground_truth": truth}
        calls.append(call | {"extra_info": extra_info[i] if extra_info else None})
    return calls


@functools.wraps(_verl_calls)
def _verl_batch(**columns: Any) -> Calls:
    """One call, for all answers."""
    calls = _verl_calls(**columns)
    return [{f"{name}s": [call[name] for call in calls] for name in (*_VERL, "extra_info")}]


def _openrlhf_calls(
    _prompts: Sequence[str],
    _queries: Sequence[str],
    label: Column = None,
    labels: Column = None,
    reference: Column = None,
) -> Calls:
    """One call; a query is prompt + answer. It returns one number per sample, or a dict with them
    as ``rewards``.
    """
    known = next((c for c in (labels, label, reference) if c is not None), [""] * len(_prompts))
    return [{"queries": list(_queries), "prompts": list(_prompts), "labels": list(known)}]


class Logs:
    """What TRL's functions get of a run, under TRL's names, and what this rank's calls have logged.

    Attributes:
        trainer_state: ``global_step``, the iterations done, and ``max_steps``.
        metrics: name -> values of ``log_metric``.
        extra: column -> values of ``log_extra``, in the order of the calls.
    """

    def __init__(self) -> None:
        self.trainer_state = SimpleNamespace(global_step=0, max_steps=0)
        self.clear()

    def arguments(self, accepted: Mapping[str, inspect.Parameter], can_log: bool) -> dict[str, Any]:
        """The arguments that a function with these parameters takes; one of TRL's takes all as
        ``**kwargs``. ``can_log``: it does not run in another process.
        """
        takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        takes_all = takes_any and bool(TRL & {*accepted})
        names = ("trainer_state", *(("log_metric", "log_extra") if can_log else ()))
        return {name: getattr(self, name) for name in names if takes_all or name in accepted}

    def clear(self) -> None:
        self.metrics = defaultdict[str, list[float]](list)
        self.extra = defaultdict[str, list[Any]](list)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name].append(float(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        self.extra[column].extend(values)


# Of a sample: one score, one per token, None where the function does not score it, or the fault. A
# call that failed as a whole is the same fault for all its samples.
Value = float | list[float] | Fault | None

LONGEST_CALL_S = 1800.0  # for functions with their own limits; collectives time out after an hour
_LARGEST = 3.4e38  # of fp32


class MissingColumn(Fault):
    """The samples lack a column that the function needs; retrying single samples cannot help."""


def call(function: Callable, kwargs: Mapping[str, Any], lengths: list[int]) -> list[Value]:
    """One value per sample, from one call; a fault in place of each invalid value.

    ``lengths``: number of tokens of each answer.

    Raises:
        Fault: the call failed as a whole.
    """
    try:
        return values_of(function(**kwargs), lengths)
    # NOTE BaseException: this is user code, and a thread would swallow SystemExit silently.
    # Ctrl-C reaches the main thread, which never runs this.
    except BaseException as error:
        raise fault_of(error) from None


async def call_async(
    function: Callable[..., Awaitable[Any]], kwargs: Mapping[str, Any], lengths: list[int]
) -> list[Value]:
    """`call` for a function declared with ``async def``."""
    try:
        return values_of(await function(**kwargs), lengths)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise fault_of(error) from None


def served(recipes: Sequence[tuple[Recipe, dict[str, Any]]]) -> Callable[..., list[Value]]:
    """What worker processes serve: calls of functions by number. ``recipes``: of each function,
    with the arguments of its constructor.
    """
    functions = [rebuilt_function(*recipe) for recipe in recipes]
    return lambda number, kwargs, lengths: call(functions[number], kwargs, lengths)


def rebuilt_function(recipe: Recipe, settings: dict[str, Any]) -> Callable[..., Any]:
    """The function of a recipe, or an instance of its class."""
    target = rebuilt(recipe)
    if isinstance(target, type):
        return adapted(target(**settings))[0]
    return adapted(target, settings)[0]


def values_of(result: Any, lengths: list[int]) -> list[Value]:
    """A function's result as one value per sample. Accepts lists, tuples, arrays and tensors.

    Raises:
        Fault: another type, or a length other than the number of samples.
    """
    if inspect.iscoroutine(result):
        result.close()
        raise Fault("returned a coroutine; declare the function with async def")
    values = _listed(result)
    if values is None:
        raise Fault(f"returned {_kind(result)}, not a list with one number per sample")
    if len(values) != len(lengths):
        raise Fault(f"returned {len(values)} values for {len(lengths)} samples")
    return [_value(value, length) for value, length in zip(values, lengths, strict=True)]


def _value(value: Any, length: int) -> Value:
    if value is None:
        return None
    tokens = _listed(value)
    try:
        if tokens is None:
            return _number(value)
        if len(tokens) != length:
            raise Fault(f"returned {len(tokens)} values for an answer of {length} tokens")
        return [_number(token, " for a token") for token in tokens]
    except Fault as fault:
        return fault


def _number(value: Any, of: str = "") -> float:
    """A finite float. Raises ``Fault``, whose message ``of`` ends, for anything else."""
    try:
        number = None if isinstance(value, (str, bytes)) else float(value)
    except OverflowError:
        raise Fault(f"returned a number that is too large{of}") from None
    except Exception:
        number = None
    if number is None:
        raise Fault(f"returned {_kind(value)}, not a number{of}")
    if not math.isfinite(number):
        raise Fault(f"returned {number}{of}")
    if abs(number) > _LARGEST:
        raise Fault(f"returned {number:g}, which is too large{of}")
    return number


def _listed(value: Any) -> list[Any] | None:
    """The elements of a sequence, array or tensor; None for a scalar or any other type."""
    if hasattr(value, "tolist"):  # NumPy arrays and scalars, torch tensors
        value = value.tolist()
    return list(value) if isinstance(value, (list, tuple)) else None


def _kind(value: Any) -> str:
    if isinstance(value, (str, bytes, bool, int, float)) or value is None:
        return f"{shortened(repr(value), 40)}"
    return f"a {type(value).__name__}"
