"""Defines the cases of `gpu.py` and the sides that it compares: what can be turned on and off."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

from rollout_workloads import CASES as ROLLOUTS
from rollout_workloads import FAMILIES, MODELS, Case

from dschat.config.rollout import STEP_PARTS, VARIABLE
from dschat.inference import SamplingParams

# Engines of others, of gpu_others.py.
OTHERS = ("generate", "vllm")
_SWITCHES: dict[str, dict[str, object]] = {
    "graphs": {"on": True, "off": False},
    "kernels": {"all": STEP_PARTS, "none": ()},
    "layout": {"copy": "copy", "zero_copy": "zero_copy"},
    "decoder": {"table": "blocks", "module": "module"},
}
_STOP = 2  # a token that ends answers; a fake device draws 1


@dataclass(frozen=True)
class Side:
    """One way to generate.

    ``lag``: the engine looks for ends this many steps late, in answers with stop tokens that are
    forbidden up to their full length; None: without stop tokens, whose ends it knows.
    """

    graphs: bool = True
    kernels: tuple[str, ...] = ()  # of DSCHAT_CUDA_KERNELS
    layout: str = "copy"  # of the rollout's weights; or zero_copy
    decoder: str = "blocks"  # or module: transformers' own, with training's weights
    lag: int | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """A scope in which engines are made, and run, as this side says."""
        from dschat.inference.requests.captured_core import CapturedCore

        lag = CapturedCore.lag if self.lag is None else self.lag
        with (
            patch.dict(os.environ, {VARIABLE: ",".join(self.kernels)}),
            patch.object(CapturedCore, "lag", lag),
        ):
            yield


SIDES = {
    "A": Side(graphs=False),
    "B": Side(lag=0),
    "C": Side(lag=1),
    "D": Side(lag=1, kernels=("attention", "norm", "draw", "state")),
    "E": Side(lag=1, kernels=STEP_PARTS),
    "F": Side(lag=1, kernels=STEP_PARTS, layout="zero_copy"),
}


def parse_side(text: str) -> Side:
    """A side by its letter, or by switches: ``graphs=on,kernels=norm+draw,layout=copy,lag=2``.

    Raises:
        ValueError: an unknown switch or value.
    """
    if text in SIDES:
        return SIDES[text]
    changes: dict[str, object] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if value in _SWITCHES.get(name, ()):
            changes[name] = _SWITCHES[name][value]
        elif name == "kernels" and set(value.split("+")) <= set(STEP_PARTS):
            changes[name] = tuple(value.split("+"))
        elif name == "lag" and value.isdecimal():
            changes[name] = int(value)
        else:
            switches = ", ".join(f"{key}={'|'.join(known)}" for key, known in _SWITCHES.items())
            raise ValueError(
                f"{part or text!r} is neither a side ({', '.join(SIDES)}) nor {switches}, "
                f"kernels={'+'.join(STEP_PARTS)} or lag=STEPS"
            )
    return replace(Side(), **changes)


def sampling(case: Case, side: Side, new_tokens: int, seed: int) -> SamplingParams:
    """Parameters of answers that all have ``new_tokens``."""
    looks = side.lag is not None
    return SamplingParams(
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens if looks else 0,
        stop_token_ids=(_STOP,) if looks else (),
        temperature=case.temperature,
        seed=seed,
        ignore_eos=True,
    )


@dataclass(frozen=True)
class GpuCase:
    """One case; docs/lab/gpu.md has the figures that others have published."""

    rollout: Case | None = None
    stages: tuple[int, ...] = ()  # of ZeRO, each measured by itself; (): nothing trains
    trains: bool = False  # a whole iteration, too
    offload: bool = False  # the optimizer, to CPU memory
    in_turns: bool = True  # all sides stay loaded; else one runs after the other
    lora_rank: int = 0  # memory by phase, of an actor of which only adapters train
    iteration: str = ""  # measured by `iteration.py`: the name of its case
    kernels: tuple[Case, ...] = ()  # the operations of their decode steps, each by itself

    def tiny(self) -> "GpuCase":
        """The same with a tiny model and few tokens."""
        return replace(
            self,
            rollout=None if self.rollout is None else _tiny(self.rollout),
            lora_rank=min(self.lora_rank, 2),
            kernels=tuple(map(_tiny, self.kernels)),
        )


def _tiny(case: Case) -> Case:
    sizes = {"prompts": min(case.prompts, 4), "prompt_tokens": 6, "new_tokens": 4}
    tiny = f"{case.model.partition('-')[0]}-tiny"
    model = tiny if tiny in MODELS else "llama3-tiny"
    return replace(case, model=model, slots=sizes["prompts"], **sizes)


CASES = {
    "opt-1.3b": GpuCase(ROLLOUTS["opt-1.3b"], stages=(2, 3), trains=True),
    "gpt2": GpuCase(ROLLOUTS["gpt2"], stages=(2,)),
    "llama-7b": GpuCase(ROLLOUTS["llama-7b"], in_turns=False),
    **{
        name: GpuCase(Case(name, 32, 256, 256, 32, needs_gpu=True), stages=(2,))
        for name in FAMILIES
    },
    "refresh-7b": GpuCase(
        Case("llama-7b", 1, 16, 2, 1, needs_gpu=True),
        stages=(2, 3),
        offload=True,
        in_turns=False,
    ),
    "opt-13b-lora": GpuCase(Case("opt-13b", 16, 256, 256, 16, needs_gpu=True), lora_rank=64),
    "train-1b": GpuCase(iteration="train-1b"),
    "kernels": GpuCase(
        kernels=(
            *(ROLLOUTS[name] for name in ("opt-1.3b", "gpt2", "llama-7b")),
            Case("llama3-8b", 64, 512, 512, 64, needs_gpu=True),
        )
    ),
}
