"""The cases of `rollout.py` with two ranks: rollouts of an actor that DeepSpeed trains.

The sides share one process and alternate. Every rollout gets a new version of the weights, so it
includes a refresh.

The actor never trains here: a version is a number, and sides with the same weights must give the
same answers, which is checked. Wall times run from barrier to barrier, so the slowest rank counts;
other times are those of rank 0.
"""

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from report import clock, rounded, spread, take_turns
from rollout_sides import make_prompts
from rollout_workloads import MODELS, Case
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import dschat.distributed as dist
from dschat.distributed.memory import peak_bytes, restart_peak
from dschat.hybrid.rollout_form import EngineRollout, ModuleRollout, Refresh, RolloutSettings
from dschat.hybrid.weight_stream import Buckets, module_shards, weight_stream
from dschat.inference import EngineConfig, SamplingParams
from dschat.models.lora import add_lora
from dschat.models.training_engine import TrainingEngine
from dschat.runtime.deepspeed_engine import ZeroSettings, initialize_training, unwrap

LORA_RANK = 16
COUNTED_LENGTHS = (16, 64)  # new tokens of the rollouts whose collectives are counted


def measure(name: str, case: Case, dtype: torch.dtype, rounds: int) -> dict:
    """Collective. The fields of the JSON line of case ``name``, the same on every rank."""
    line = {"zero3": zero3, "lora": lora, "tp2": tp2}[name](case, dtype, rounds)
    answer_tokens = dist.world_size() * case.samples * sum(case.lengths())
    return {"answer_tokens": answer_tokens, "rounds": rounds} | line


# -- an actor and its rollouts ---------------------------------------------------------------------


def make_actor(case: Case, dtype: torch.dtype, stage: int, lora_rank: int = 0) -> nn.Module:
    """Collective. The case's model under DeepSpeed; the same random weights for every ``stage``.

    With ``lora_rank`` only adapters train, and none of them is zero.
    """
    return unwrap(make_engine(case, ZeroSettings(stage, dtype), lora_rank))


def make_engine(
    case: Case, zero: ZeroSettings, lora_rank: int = 0, wrap: Callable = lambda module: module
) -> TrainingEngine:
    """Collective. The engine of `make_actor`, of the module that ``wrap`` returns."""
    torch.manual_seed(0)
    with dist.device():
        module = AutoModelForCausalLM.from_config(MODELS[case.model](), dtype=zero.dtype)
    if lora_rank:
        module = add_lora(module, lora_rank, 0.0, ["all-linear"], True, "--actor_lora_modules")
        for name, parameter in module.named_parameters():
            if ".lora_B." in name:
                nn.init.normal_(parameter, std=0.01)
    return initialize_training(wrap(module), zero, 1e-5, 0.0, [0.9, 0.95], "constant", 0, 1)


@dataclass
class Round:
    """One rollout with its refresh, on this rank."""

    wall_s: float
    refresh: Refresh
    decode_tokens_per_s: float  # of this rank's tensor-parallel group
    token_ids: list[list[int]]

    def __str__(self) -> str:
        return f"{self.wall_s:.4g} s, {self.refresh.seconds:.4g} of them refresh"


class Side:
    """One way for an actor to generate. Every `run` has a new version of the weights."""

    def __init__(
        self,
        case: Case,
        module: nn.Module,
        stage: int,
        cuda_graphs: bool | None = None,
        in_module: bool = False,
        **settings: object,
    ) -> None:
        self.case, self.module = case, module
        config = module.get_base_model().config if hasattr(module, "peft_config") else module.config
        shared = RolloutSettings(
            dtype=config.dtype,
            engine=EngineConfig(
                max_num_seqs=case.slots,
                max_seq_len=case.prompt_tokens + case.new_tokens,
                cuda_graphs=cuda_graphs,
            ),
            sharded=stage == 3,
        )
        self.settings = replace(shared, **settings)
        form = partial(ModuleRollout, in_engine=True) if in_module else EngineRollout
        self.form = form(module, config, self.settings)
        all_ranks = replace(case, prompts=case.prompts * dist.world_size())
        first = dist.rank() * case.prompts
        self.indices = list(range(first, first + case.prompts))
        self.prompts = make_prompts(all_ranks, config.vocab_size)[self.indices].tolist()
        self.version = 0

    def refresh(self) -> None:
        """Collective. Load a new version of the weights."""
        self.version += 1
        self.engine = self.form.enter(self.version)

    def generate(self, seed: int, new_tokens: int | None = None) -> list[list[int]]:
        """Collective in the tensor-parallel group. This rank's answers."""
        sampling = self.sampling(seed, new_tokens or self.case.new_tokens)
        return self.engine.generate(self.prompts, sampling, self.indices).token_ids

    def sampling(self, seed: int, new_tokens: int) -> SamplingParams:
        """Parameters of answers that all have ``new_tokens``."""
        return SamplingParams(
            max_new_tokens=new_tokens,
            temperature=self.case.temperature,
            n=self.case.samples,
            seed=seed,
            ignore_eos=True,
        )

    def run(self, seed: int) -> Round:
        """Collective. A rollout with its refresh."""
        dist.barrier()
        started = clock(dist.device())
        self.refresh()
        token_ids = self.generate(seed)
        self.form.leave()
        dist.barrier()
        wall_s = clock(dist.device()) - started
        stats = self.engine.stats
        return Round(wall_s, self.form.last_refresh, stats.decode_tokens_per_s, token_ids)

    def facts(self, rounds: list[Round]) -> dict:
        """Statistics of the rounds after the warm-up, and of the first refresh, which allocates."""
        first, later = rounds[0].refresh, rounds[1:]
        tokens = dist.world_size() * sum(map(len, later[0].token_ids))
        groups = dist.world_size() // self.settings.tp_size
        return {
            "rollout_s": spread([r.wall_s for r in later]),
            "tokens_per_s": spread([tokens / r.wall_s for r in later]),
            "decode_tokens_per_s": spread([groups * r.decode_tokens_per_s for r in later]),
            "first_refresh_s": rounded(first.seconds),
            "first_refresh_bytes": first.num_bytes,
            "refresh_s": spread([r.refresh.seconds for r in later]),
            "refresh_bytes": later[-1].refresh.num_bytes,
            "refresh_collectives": later[-1].refresh.num_collectives,
            "rank_weight_bytes": self.engine.weights.nbytes,
            "rank_cache_bytes": self.engine.cache.pairs.nbytes,
        }


def compare(key: str, numerators: list[float], denominators: list[float]) -> dict:
    """The ratio of the medians, and the ratios within each round, without the warm-up."""
    pairs = list(zip(numerators[1:], denominators[1:], strict=True))
    medians = [statistics.median(values) for values in zip(*pairs, strict=True)]
    return {
        "ratio": {key: rounded(medians[0] / medians[1])},
        "ratio_paired": {key: spread([a / b for a, b in pairs])},
    }


def same_answers(a: list[Round], b: list[Round]) -> bool:
    """Collective. Whether both sides gave the same tokens, in all rounds, on all ranks."""
    differ = any(x.token_ids != y.token_ids for x, y in zip(a, b, strict=True))
    return not dist.max_int(int(differ))


# -- the cases -------------------------------------------------------------------------------------


def zero3(case: Case, dtype: torch.dtype, rounds: int) -> dict:
    """Collective. Wall time of a rollout under ZeRO-3, relative to ZeRO-0."""
    sides = {f"zero{stage}": Side(case, make_actor(case, dtype, stage), stage) for stage in (0, 3)}
    results = take_turns("zero3", sides, rounds, str)
    assert same_answers(results["zero0"], results["zero3"]), "same weights, different answers"
    walls = {side: [r.wall_s for r in results[side]] for side in sides}
    line = {side: runner.facts(results[side]) for side, runner in sides.items()}
    line |= compare("cost", walls["zero3"], walls["zero0"])
    line["collectives"] = [counted(sides["zero3"], length) for length in COUNTED_LENGTHS]
    return line | {"memory": refresh_memory(sides["zero3"])}


def lora(case: Case, dtype: torch.dtype, rounds: int) -> dict:
    """Collective. Separate adapters on a frozen base against merged ones, under ZeRO-3."""
    module = make_actor(case, dtype, stage=3, lora_rank=LORA_RANK)
    forms = {"side": "side", "merged": "merge"}
    sides = {
        side: Side(case, module, stage=3, lora=form, frozen_base=True)
        for side, form in forms.items()
    }
    results = take_turns("lora", sides, rounds, str)
    rates = {side: [r.decode_tokens_per_s for r in results[side]] for side in sides}
    line = {side: runner.facts(results[side]) for side, runner in sides.items()}
    line |= compare("decode", rates["side"], rates["merged"])
    sizes = {
        trained: sum(p.ds_numel for p in module.parameters() if p.requires_grad == trained)
        for trained in (True, False)
    }
    return line | {
        "lora_rank": LORA_RANK,
        "adapter_bytes": sizes[True] * dtype.itemsize,
        "base_bytes": sizes[False] * dtype.itemsize,
        "same_answers": same_answers(results["side"], results["merged"]),
    }


def tp2(case: Case, dtype: torch.dtype, rounds: int) -> dict:
    """Collective. Two ranks with tensor parallelism against two without.

    A group of either size has ``case.slots``: the caches hold the same number of sequences.
    """
    module = make_actor(case, dtype, stage=3)
    sides = {f"tp{size}": Side(case, module, stage=3, tp_size=size) for size in (1, 2)}
    results = take_turns("tp2", sides, rounds, str)
    rates = {side: [1 / r.wall_s for r in results[side]] for side in sides}
    line = {side: runner.facts(results[side]) for side, runner in sides.items()}
    line |= compare("tokens", rates["tp2"], rates["tp1"])
    for key in ("rank_weight_bytes", "rank_cache_bytes"):
        line["ratio"][key] = rounded(line["tp2"][key] / line["tp1"][key])
    return line | {"same_answers": same_answers(results["tp1"], results["tp2"])}


# -- counting collectives and memory ---------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Context that counts calls of torch.distributed's collectives, and the bytes of every bucket
    of gathered weights (all ranks' shards).
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.bucket_bytes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_calls += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self._original = all_gather_shards = dist.all_gather_shards

        def counting(sizes, parts, device):
            num_bytes = sum(sizes) * parts[0].element_size() * dist.world_size()
            self.bucket_bytes.append(num_bytes)
            return all_gather_shards(sizes, parts, device)

        dist.all_gather_shards = counting
        return super().__enter__()

    def __exit__(self, *error):
        dist.all_gather_shards = self._original
        return super().__exit__(*error)


def counted(side: Side, new_tokens: int) -> dict:
    """Collective. The collectives of a refresh and of a rollout of ``new_tokens``.

    Raises:
        AssertionError: a refresh made more or fewer collectives than one per bucket.
    """
    with Collectives() as refresh:
        side.refresh()
    with Collectives() as rollout:
        side.generate(seed=0, new_tokens=new_tokens)
    num_buckets = side.form.last_refresh.num_collectives
    assert refresh.num_calls == len(refresh.bucket_bytes) == num_buckets
    assert sum(refresh.bucket_bytes) >= side.form.last_refresh.num_bytes  # with ZeRO's padding
    return {
        "new_tokens": new_tokens,
        "refresh": refresh.num_calls,
        "generate": rollout.num_calls,
        "bucket_bytes": refresh.bucket_bytes,
    }


def refresh_memory(side: Side) -> dict:
    """Collective. Peak of extra memory of a refresh, the maximum over ranks.

    And that of the weight stream alone, with nothing stored. The difference belongs to the rollout
    form: on a CPU it holds a weight unpacked and packed, next to the packed previous version.
    """
    with Collectives() as refresh:
        side.refresh()
    layers = side.settings.layers_per_bucket

    def walk() -> None:
        for _ in weight_stream(side.module, dist.device(), None, Buckets(max_layers=layers)):
            pass

    largest_bucket = max(refresh.bucket_bytes)
    peak = peak_extra_bytes(side.refresh)
    stream_peak = peak_extra_bytes(walk)
    shards = module_shards(side.module)
    on_gpu = dist.device().type == "cuda"
    return {
        "method": "torch's allocator" if on_gpu else "VmHWM - VmRSS, reset before",
        "refresh_peak_extra_bytes": peak,
        "stream_peak_extra_bytes": stream_peak,
        "largest_bucket_bytes": largest_bucket,
        "largest_tensor_bytes": max(s.numel * s.tensor.element_size() for s in shards),
        "refresh_peak_per_bucket": rounded(peak / largest_bucket),
        "stream_peak_per_bucket": rounded(stream_peak / largest_bucket),
    }


def peak_extra_bytes(action: Callable[[], None]) -> int:
    """Collective. Peak increase of a process's memory during ``action``, the maximum over ranks.

    On CUDA torch's allocations; else resident memory by the kernel's high-water mark, which
    includes other allocators (MKL's, gloo's).
    """
    device = dist.device()
    gc.collect()
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        action()
        return dist.max_int(torch.cuda.max_memory_allocated(device) - before)
    before = restart_peak(device)
    action()
    return dist.max_int(peak_bytes(device) - before)
