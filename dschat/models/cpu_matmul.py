"""Chooses the library of a CPU's matrix products by timing the candidates on this machine.

torch's own fp32 products use MKL on every x86 processor. On an AMD EPYC oneDNN's are 1.3 to 3 times
as fast; on an Intel machine MKL's packed product was faster than either. DSCHAT_CPU_MATMUL sets the
library for all products instead.

NOTE: libraries round differently. A choice is therefore made once per machine: the first process
writes it to the user's cache folder, and all other ranks and later runs read it. So a seeded run
gives the same results when it is repeated or resumed.
"""

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, get_args

import torch

from dschat.config import UserError
from dschat.distributed.machine import processor, writable_cache

logger = logging.getLogger("dschat")

Backend = Literal["mkl", "onednn", "panels", "plain"]  # plain: torch's own product; panels: ours
Shape = tuple[int, int]  # of a weight: (out, in)
Product = Callable[[], object]

VARIABLE = "DSCHAT_CPU_MATMUL"
_ROUNDS = 7
_MARGIN = 0.9  # of the default's time; slower ones count as a tie

_chosen: dict[str, Backend] = {}  # in this process, by `_key`


def choose(
    use: str,
    shapes: Iterable[Shape],
    dtype: torch.dtype,
    makers: Mapping[Backend, Callable[[Shape], Product]],
    clock: Callable[[], float] = time.perf_counter,
    narrow: int = 0,
) -> dict[Shape, Backend]:
    """The fastest backend for every shape. Takes up to 0.1 s per shape, once per machine.

    Args:
        use: what the products are for; choices of different uses are independent.
        makers: the candidates, the default first. A maker allocates the operands of a shape and
            returns the product to time.
        clock: returns seconds.
        narrow: weights with a side of at most this are not timed; theirs is the default.

    Raises:
        UserError: DSCHAT_CPU_MATMUL names no backend.
    """
    forced, default = _forced(), next(iter(makers))
    if forced is not None or len(makers) == 1:
        only: Backend = default if forced is None or forced not in makers else forced
        return dict.fromkeys(shapes, only)
    before, choices = len(_chosen), {}
    for shape in sorted(set(shapes)):
        if min(shape) <= narrow:
            choices[shape] = default
            continue
        key = _key(use, shape, dtype, makers)
        if key not in _chosen:
            path = writable_cache() / "matmul" / key
            known = _read(path)
            if known is None:
                timed = fastest({name: make(shape) for name, make in makers.items()}, clock)
                known = _recorded(path, timed)
            _chosen[key] = known
        choices[shape] = _chosen[key]
    if len(_chosen) > before:
        summary = ", ".join(f"{k} -> {n} {name}" for (n, k), name in choices.items())
        logger.debug("fastest CPU products for %s: %s (%s sets one)", use, summary, VARIABLE)
    return choices


def fastest(products: Mapping[Backend, Product], clock: Callable[[], float]) -> Backend:
    """The backend whose product takes the least time; the first one wins ties.

    Candidates are called in turn, after a warm-up in which oneDNN compiles its kernel and memory is
    touched for the first time. The minimum counts: noise only adds time.
    """
    best = dict.fromkeys(products, float("inf"))
    for number in range(-2, _ROUNDS):
        for name, product in products.items():
            started = clock()
            product()
            if number >= 0:
                best[name] = min(best[name], clock() - started)
    default = next(iter(products))
    limit = _MARGIN * best[default]
    return min((n for n in best if n == default or best[n] < limit), key=best.__getitem__)


def _forced() -> Backend | None:
    value = os.environ.get(VARIABLE, "auto")
    known = get_args(Backend)
    if value not in ("auto", *known):
        names = ", ".join(known)
        raise UserError(f"{VARIABLE}={value} in the environment is unknown; use auto, {names}")
    return next((name for name in known if name == value), None)


def _key(use: str, shape: Shape, dtype: torch.dtype, makers: Iterable[Backend]) -> str:
    """File name of a choice, with all that it depends on."""
    machine = "\0".join([processor(), torch.__version__, *makers])
    threads = torch.get_num_threads()
    name = f"{use}-{shape[1]}-{shape[0]}-{str(dtype).removeprefix('torch.')}-{threads}threads"
    return f"{name}-{hashlib.sha256(machine.encode()).hexdigest()[:12]}"


def _recorded(path: Path, choice: Backend) -> Backend:
    """Write ``choice``; of ranks that do so at the same time the first one wins."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            written = Path(folder) / path.name
            written.write_text(choice)
            os.link(written, path)
    except FileExistsError:
        return _read(path) or choice
    except OSError as error:  # a full disk: the choice holds for this process
        logger.debug("%s cannot be written: %s", path, error)
    return choice


def _read(path: Path) -> Backend | None:
    try:
        text = path.read_text()
    except OSError:
        return None
    return next((name for name in get_args(Backend) if name == text), None)
