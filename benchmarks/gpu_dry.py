"""Counts what a decode step and a refresh of `gpu.py` do, on a fake CUDA device: `gpu.py --dry`.

No data and no timing, and neither a GPU nor torch's CUDA build: the engine runs on fake tensors
(tests/inference/fake_cuda.py). Bytes are counted at the operators, by the tensors that they get; a
count of weights that differs from the formula of `gpu_floor` is an error.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from gpu_cases import GpuCase, Side, sampling
from gpu_floor import weight_bytes
from report import ROOT
from rollout_workloads import MODELS, Case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig

from dschat.inference import InferenceEngine

DTYPE = torch.bfloat16
_GATHERS = {"embedding", "index", "index_select", "gather"}  # these read what they return


class Traffic(TorchDispatchMode):
    """Counts the bytes of watched tensors that operators read and write, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self._names: dict[int, str] = {}

    def watch(self, name: str, tensors: Iterable[Tensor]) -> None:
        self._names |= {_storage(tensor): name for tensor in tensors}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":
            return result
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        outputs = result if isinstance(result, (tuple, list)) else [result]
        made = {_storage(x) for x in outputs if isinstance(x, Tensor)}
        for argument in func._schema.arguments:
            values = given.get(argument.name)
            for x in values if isinstance(values, (tuple, list)) else [values]:
                name = self._names.get(_storage(x)) if isinstance(x, Tensor) else None
                if name is None:
                    continue
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self.written[name] += x.nbytes
                elif _storage(x) not in made:  # else a view of it
                    gathers = func.overloadpacket.__name__ in _GATHERS
                    self.read[name] += outputs[0].nbytes if gathers else x.nbytes
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def weights_of(engine: InferenceEngine) -> Iterator[Tensor]:
    """The engine's weights, without adapters."""
    yield from engine.weights.tensors.values()
    for linear in engine.weights.linears.values():
        for part in getattr(linear, "products", [linear]):
            yield part.weight if hasattr(part, "weight") else part.open()
            if part.bias is not None:
                yield part.bias


def count(name: str, case: GpuCase, side: Side) -> dict[str, Any]:
    """The fields of the line of ``case`` and ``side``.

    Raises:
        RuntimeError: the step's operators read other weights than `gpu_floor` says.
    """
    assert case.rollout is not None
    fakes = _fakes()
    config = MODELS[case.rollout.model]()
    with side.active(), fakes.fake_cuda() as watch, Traffic() as traffic:
        engine = _engine(fakes, watch, config, case.rollout, side)
        if case.lora_rank:
            engine.weights.load_adapters(_factors(fakes, config, case.lora_rank))
        traffic.watch("weights", weights_of(engine))
        traffic.watch("adapters", _adapters(engine))
        traffic.watch("keys and values", (rows for pair in engine.cache.layers for rows in pair))
        step, bytes_read = _decode_step(engine, watch, traffic, case.rollout, side)
        traffic.written.clear()
        _refresh(fakes, engine, config, side)
        refreshed = traffic.written["weights"]
    expected = weight_bytes(config, case.rollout.prompts, DTYPE)
    if abs(bytes_read["weights"] - expected) > expected / 100:  # a sink or a scale is read twice
        raise RuntimeError(
            f"{name}: a decode step reads {bytes_read['weights']} bytes of weights, the floor "
            f"counts {expected}"
        )
    waits = {wait: step[inside, wait] for inside in (True, False) for wait in fakes.WAITS}
    return {
        "operators_captured": _operators(fakes, step, True),
        "operators_around": _operators(fakes, step, False),
        "host_reads": waits[fakes.READ],
        "blocking_copies": waits[fakes.TO_DEVICE] + waits[fakes.TO_HOST],
        "step_weights_bytes": bytes_read["weights"],
        "step_adapters_bytes": bytes_read["adapters"],
        "step_kv_bytes": bytes_read["keys and values"],
        "refresh_bytes": refreshed,
    }


def _fakes() -> Any:
    """The module `fake_cuda` of the tests."""
    folder = str(ROOT / "tests" / "inference")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import fake_cuda

    return fake_cuda


def _engine(
    fakes: Any, watch: Any, config: PretrainedConfig, case: Case, side: Side
) -> InferenceEngine:
    return fakes.fake_engine(
        watch,
        config,
        DTYPE,
        borrowed="adjacent" if side.layout == "zero_copy" else "",
        max_num_seqs=case.slots,
        max_seq_len=case.prompt_tokens + case.new_tokens,
        cuda_graphs=None if side.graphs else False,
    )


def _decode_step(
    engine: InferenceEngine, watch: Any, traffic: Traffic, case: Case, side: Side
) -> tuple[Counter, Counter]:
    """What one token more costs: operators, and bytes read."""
    prompts = case.make_prompts()
    steps, reads = [], []
    for num_tokens in (3, 3, 4):  # the first rollout makes decoder and graphs
        watch.counts.clear()
        traffic.read.clear()
        engine.generate(prompts, sampling(case, side, num_tokens, seed=1))
        steps.append(Counter(watch.counts))
        reads.append(Counter(traffic.read))
    for counts in (steps, reads):
        counts[2].subtract(counts[1])
    return steps[2], reads[2]


def _refresh(fakes: Any, engine: InferenceEngine, config: PretrainedConfig, side: Side) -> None:
    """Load a version, as the rollout form does."""
    tensors = fakes.fake_weights(config, DTYPE, adjacent=True)
    if side.layout == "zero_copy":
        engine.weights.borrow(tensors)
    else:
        engine.weights.load(tensors.items())


def _factors(fakes: Any, config: PretrainedConfig, rank: int) -> Iterator[tuple]:
    """LoRA factors of all matrices but the head and the embeddings."""
    for name, weight in fakes.fake_weights(config, DTYPE).items():
        if weight.dim() == 2 and not any(x in name for x in ("embed", "head", "wte", "wpe")):
            a = torch.empty(rank, weight.shape[1], dtype=DTYPE, device=weight.device)
            b = torch.empty(weight.shape[0], rank, dtype=DTYPE, device=weight.device)
            yield name, a, b, 1.0


def _adapters(engine: InferenceEngine) -> Iterator[Tensor]:
    for linear in engine.weights.linears.values():
        if linear.side is not None:
            yield from (linear.side.a, linear.side.b)


def _operators(fakes: Any, step: Counter, captured: bool) -> int:
    return sum(
        n for (inside, name), n in step.items() if inside == captured and name not in fakes.WAITS
    )
