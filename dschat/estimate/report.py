"""A plan as text: a table for ``--plan``, a line for the log.

A ``StepPlan`` and advice come in; lines go out. It must not know how either was found.
"""

from collections.abc import Sequence

from dschat.estimate.advice import Advice
from dschat.estimate.device import GIB
from dschat.estimate.modes import StepPlan

_MIB = 2**20
_ORDER = (
    *("model weights", "actor weights", "critic weights", "reference weights", "reward weights"),
    *("gradients", "optimizer states", "moving average", "rollout copy", "KV cache"),
    *("activations", "logits", "buffers", "file being written", "libraries"),
)


def table(plan: StepPlan, title: str, advice: Sequence[Advice]) -> str:
    """The plan of one step: its models, every item in every mode, whether it fits."""
    unit, name = (GIB, "GiB") if plan.peak.total >= 4 * GIB else (_MIB, "MiB")
    items = [i for i in _ORDER if any(mode.items.get(i) for mode in plan.modes)]
    assert set(items) >= {i for mode in plan.modes for i, n in mode.items.items() if n}
    processes = (
        f"one of {plan.num_processes} processes" if plan.num_processes > 1 else "one process"
    )
    lines = [f"step {plan.number}, {title}: {processes}, on {plan.device.origin}"]
    lines += [f"  {line}" for line in plan.models]
    lines.append("")
    lines.append(_row(name, [mode.name for mode in plan.modes]))
    for item in items:
        lines.append(_row(item, [_shown(mode.items.get(item, 0), unit) for mode in plan.modes]))
    lines.append(_row("total", [_shown(mode.total, unit) for mode in plan.modes]))
    lines.append("")
    lines.append(f"  fullest: {_fullest(plan)}: {_verdict(plan)}")
    lines += _host(plan)
    lines += _advice_lines(plan, advice)
    return "\n".join(lines)


def line(plan: StepPlan, advice: Sequence[Advice]) -> str:
    """One line of the log."""
    text = f"plan: step {plan.number}: {_fullest(plan)}: {_verdict(plan)}"
    if advice:
        first = advice[0]
        text += f"; try {first.change.flags(plan.number)} (saves {_gib(first.saved)})"
    return text


def _fullest(plan: StepPlan) -> str:
    mode = plan.peak
    moment = f" ({mode.moment})" if mode.moment else ""
    return f"{mode.name}{moment}, {_gib(mode.total)} of {_gib(plan.device.memory)}"


def _verdict(plan: StepPlan) -> str:
    if not plan.fits:
        on_device = plan.peak.total > plan.device.memory
        return "DOES NOT FIT" if on_device else "fits, but HOST MEMORY DOES NOT DO"
    share = plan.peak.total / plan.device.memory
    return "fits" if share < 0.9 else "fits barely; memory that is cut in pieces may not do"


def _host(plan: StepPlan) -> list[str]:
    if not plan.host:
        return []
    room = plan.device.host_memory
    of = f" of {_gib(room)} for each process here" if room is not None else ""
    parts = ", ".join(f"{name} {_gib(value)}" for name, value in plan.host.items())
    return [f"  host memory: {_gib(plan.host_total)}{of}: {parts}"]


def _advice_lines(plan: StepPlan, advice: Sequence[Advice]) -> list[str]:
    if plan.fits:
        return []
    if not advice:
        return ["  no flag known here makes it smaller; take a smaller model or more devices"]
    lines = ["  change first, in this order:"]
    for number, entry in enumerate(advice, 1):
        left = entry.after
        then = "then it fits" if left.fits else f"{_gib(left.peak.total)} are left"
        lines.append(
            f"    {number}. {entry.change.flags(plan.number)}: saves {_gib(entry.saved)}, {then}"
        )
    return lines


def _row(name: str, cells: Sequence[str]) -> str:
    return f"  {name:<18}" + "".join(f"{cell:>12}" for cell in cells)


def _shown(num_bytes: int, unit: int) -> str:
    if not num_bytes:
        return "-"
    return f"{num_bytes / unit:.2f}" if unit == GIB else f"{num_bytes / unit:.0f}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3g} GiB"
