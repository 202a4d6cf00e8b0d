"""Times each Triton kernel of decode steps against torch and inductor: case `kernels` of `gpu.py`.

A rollout's time does not tell which kernels are worth having. Each side's launches are captured as
one CUDA graph, as in a decode step, and the sides replay theirs in turns. Launches read different
copies of the weights, or of keys and values, twice as much as the L2 cache holds: a step reads all
layers before it reads one again. On a CPU, where tests run this, launches are called one by one.

A side whose results differ from torch's is not timed. Fields of a line:

- kernel, model, shape, bytes: what it computes, and the bytes that it must move.
- copies: of what the launches read in turn. difference: by side, the largest from torch's results,
  relative to the largest result.
- us: microseconds of a launch, median with spread. tb_per_s, share_of_copy: of bytes / us, against
  the measured bandwidth of a copy. fastest: the side with the smallest median.
"""

import gc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpu_floor import Rates
from gpu_operations import DecodeAttention, Launch, Operands, Operation, Product
from report import figures, note, rounded, spread, take_turns
from torch import Tensor

from dschat.config.errors import first_line
from dschat.inference.model.step_kernels import StepKernels
from dschat.inference.requests.cuda_graphs import Capture, CudaCapture
from dschat.inference.requests.stats import DeviceSpan

Fields = dict[str, Any]
SIDES = ("torch", "triton", "inductor")  # torch is first: its results are the reference
_LAUNCHES = 48  # of a graph, at least, so that its start counts little
_REPLAYS = 10
_MOST_COPIES = 512  # of tiny operands there would be tens of thousands


class Failed(RuntimeError):
    """Kernels that failed or whose results were wrong; the message names them."""


def about(operation: Operation) -> Fields:
    """The fields of an operation that need no device."""
    return {
        "kernel": operation.name,
        "model": operation.case.model,
        "shape": operation.shape,
        "bytes": operation.num_bytes,
    }


def count(operations: Iterable[Operation], cards: Mapping[str, Rates]) -> Iterator[Fields]:
    """The lines of ``--dry``: bytes, and the time to move them at a card's rate."""
    for operation in operations:
        floors = {
            f"floor_us_{card}": rounded(1e6 * operation.num_bytes / rates.copy_bytes_per_s)
            for card, rates in cards.items()
        }
        yield about(operation) | floors


def measure(
    operations: Iterable[Operation],
    device: torch.device,
    rounds: int,
    rates: Rates,
    sides: Sequence[str] = SIDES,
) -> Iterator[Fields]:
    """The fields of a line for each operation.

    Raises:
        Failed: after the last line, if torch or a kernel failed, or results differ.
    """
    # One for all, since a capture's stream has a workspace that is never freed.
    capture = CudaCapture(required=True) if device.type == "cuda" else None
    failed: list[str] = []
    for operation in operations:
        try:
            line = _line(operation, device, rounds, rates, sides, capture, failed)
        except Exception as error:  # out of memory, say: the other kernels are still measured
            note(f"{operation.label}: failed: {type(error).__name__}: {first_line(error)}")
            failed.append(operation.label)
        else:
            yield line
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if failed:
        raise Failed(", ".join(failed))


@torch.no_grad()
def _line(
    operation: Operation,
    device: torch.device,
    rounds: int,
    rates: Rates,
    sides: Sequence[str],
    capture: Capture | None,
    failed: list[str],
) -> Fields:
    copies = num_copies(operation, device)
    torch.manual_seed(0)
    operands = operation.operands(device, copies)
    runners, differences = _runners(operation, device, operands, sides, capture, failed)
    results = take_turns(operation.label, runners, rounds, figures)
    # without the warm-up
    us = {side: spread([r["us"] for r in measured]) for side, (_, *measured) in results.items()}
    bytes_per_s = {side: 1e6 * operation.num_bytes / x["median"] for side, x in us.items()}
    rate = rates.copy_bytes_per_s
    return about(operation) | {
        "copies": copies,
        "difference": differences,
        "us": us,
        "tb_per_s": {side: rounded(x / 1e12) for side, x in bytes_per_s.items()},
        "share_of_copy": {side: rounded(x / rate) for side, x in bytes_per_s.items()},
        "fastest": min(us, key=lambda side: us[side]["median"]),
        "rounds": rounds,
    }


def num_copies(operation: Operation, device: torch.device) -> int:
    """Copies of weights, or keys and values, that no cache holds; 1 of what a step just wrote."""
    if not operation.is_cold:
        return 1
    on_gpu = device.type == "cuda"
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else 0
    return min(max(-(-2 * cache_bytes // operation.num_bytes), 2), _MOST_COPIES)


def _runners(
    operation: Operation,
    device: torch.device,
    operands: list[Operands],
    sides: Sequence[str],
    capture: Capture | None,
    failed: list[str],
) -> tuple[dict[str, "Timed"], dict[str, float | None]]:
    """The sides that give torch's results, and how far each is from them (None: NaN).

    Raises whatever torch raises. Other sides that fail are left out, and added to ``failed``, but
    inductor, which need not be able to compile an operation.
    """
    runners: dict[str, Timed] = {}
    differences: dict[str, float | None] = {}
    expected: list[Tensor] = []
    pristine = tuple(x if x is None else x.clone() for x in operands[0])  # launches change them
    for side in sides:
        try:
            launch = _launch(operation, device, side, pristine)
            results = _results(operation, launch, pristine)
            if side == "torch":
                expected = results
            else:
                apart = operation.difference(results, expected)
                differences[side] = rounded(apart) if math.isfinite(apart) else None
                if not apart <= operation.limit:  # NaN is not
                    raise ValueError(f"differ by {apart:.3g}, more than {operation.limit:.3g}")
            runners[side] = Timed(launch, operands, device, capture)
        except Exception as error:  # Triton's, inductor's and CUDA's have no type in common
            if side == "torch":
                raise
            reason = f"{type(error).__name__}: {first_line(error)}"
            note(f"{operation.label}: {side} left out: {reason}")
            if side != "inductor":
                failed.append(f"{operation.label} ({side})")
    return runners, differences


def _launch(operation: Operation, device: torch.device, side: str, operands: Operands) -> Launch:
    kernels = StepKernels(device) if side == "triton" else None
    launch = operation.launch(operation.decoder(device), kernels)
    if side != "inductor":
        return launch
    _results(operation, launch, operands)  # what a step computes once is not to be compiled
    # NOTE: operations share code, and torch stops compiling code that it has compiled eight times.
    torch._dynamo.reset()
    torch._dynamo.config.error_on_recompile = True  # what is compared is what is timed
    # Default products are cuBLAS's; tuned ones may be Triton's, with what follows in place.
    mode = "max-autotune-no-cudagraphs" if isinstance(operation, Product) else "default"
    # Attention is compiled in pieces: torch cannot trace `HeadLayout`'s storage offset.
    whole = not isinstance(operation, DecodeAttention)
    return torch.compile(launch, mode=mode, fullgraph=whole, dynamic=False)


def _results(operation: Operation, launch: Launch, operands: Operands) -> list[Tensor]:
    """What a launch returns and changes, on operands of its own."""
    own = [x if x is None else x.clone() for x in operands]
    outputs = [x.clone() for x in launch(*own)]
    changed = [x for i in operation.changed if (x := own[i]) is not None]
    return outputs + changed


@dataclass
class Timed:
    """A side's launches, over all operands in turn."""

    launch: Launch
    operands: list[Operands]
    device: torch.device
    capture: Capture | None

    def __post_init__(self) -> None:
        copies = len(self.operands)
        self._replay, self._launches, self._replays = self._step, copies, 1
        if self.capture is None:
            self._step()  # as a capture does
        else:
            self._launches = copies * -(-_LAUNCHES // copies)
            self._replay, self._replays = self.capture(self._step), _REPLAYS

    def _step(self) -> None:
        for i in range(self._launches):
            self.launch(*self.operands[i % len(self.operands)])

    def run(self, number: int) -> dict[str, float]:
        """Microseconds of a launch."""
        span = DeviceSpan(self.device)
        for _ in range(self._replays):
            self._replay()
        seconds = span.stop().seconds()
        return {"us": 1e6 * seconds / (self._replays * self._launches)}
