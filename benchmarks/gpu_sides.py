"""Measures the rollouts of `gpu.py` on the device of this process, with its actor in training.

Times are CUDA events around the work of one round; on a CPU, where tests run this, the host's.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from gpu_cases import SIDES, GpuCase, Side, sampling
from gpu_floor import Rates, floor_ms, rollout_bytes
from gpu_others import Unavailable, make
from report import clock, figures, note, rounded, spread, take_turns
from rollout_sides import make_module
from rollout_workloads import MODELS, Case, runs_blocks
from torch import nn
from transformers import AutoModelForCausalLM

import dschat.distributed as dist
from dschat.data.micro_batches import MicroBatchSize
from dschat.hybrid.rollout_form import EngineRollout, ModuleRollout, RolloutSettings
from dschat.inference import EngineConfig, Rollout
from dschat.inference.requests.stats import DeviceSpan
from dschat.models.heads import LanguageModel
from dschat.models.long_rows import recompute_activations
from dschat.models.lora import add_lora
from dschat.models.training_engine import TrainingEngine, evaluating
from dschat.runtime.deepspeed_engine import ZeroSettings, initialize_training, unwrap
from dschat.supervised.loop import SFTTask, train_step

Fields = dict[str, Any]
MOST_GAP = 0.1  # nats; rounding in bf16 gives hundredths


class Rollouts:
    """A `Side` of a case: rollouts of ``module``, and optimizer steps of ``engine`` on them.

    Every rollout gets a new version of the weights, so it includes a refresh.
    """

    def __init__(
        self,
        side: Side,
        case: Case,
        module: nn.Module,
        stage: int,
        engine: TrainingEngine | None,
        **settings: Any,
    ) -> None:
        self.side, self.case, self.module, self.engine = side, case, module, engine
        config = module.get_base_model().config if hasattr(module, "peft_config") else module.config
        graphs = dist.device().type == "cuda" and side.graphs
        sizes = EngineConfig(max_num_seqs=case.slots, max_seq_len=case.max_len, cuda_graphs=graphs)
        in_module = side.decoder == "module" or not runs_blocks(case.model)
        form = partial(ModuleRollout, in_engine=True) if in_module else EngineRollout
        settings |= {"layout": side.layout, "sharded": stage == 3}
        with side.active():
            self.form = form(module, config, RolloutSettings(config.dtype, sizes, **settings))
        self.prompts, self.version = case.make_prompts(), 0

    def rollout(self, seed: int) -> Rollout:
        """Collective. Answers by a new version of the weights."""
        self.version += 1
        with self.side.active():
            self.generator = self.form.enter(self.version)
            asked = sampling(self.case, self.side, self.case.new_tokens, seed)
            rollout = self.generator.generate(self.prompts, asked)
            self.form.leave()
        return rollout

    def run(self, seed: int) -> dict[str, float]:
        """Milliseconds and bytes of a round: a refresh, a rollout, and the step that follows."""
        device = dist.device()
        before = _reset_peak(device)
        whole = DeviceSpan(device)
        span = DeviceSpan(device)
        rollout = self.rollout(seed)
        seconds = span.stop().seconds()
        stats, refresh = self.generator.stats, self.form.last_refresh
        measured = {
            "rollout_ms": 1e3 * seconds,
            "prefill_ms": 1e3 * stats.prefill_s,
            "step_ms": 1e3 * stats.decode_s / max(stats.decode_steps, 1),
            "tokens_per_s": rollout.num_tokens / seconds,
            "refresh_ms": 1e3 * refresh.seconds,
            "refresh_bytes": refresh.num_bytes,
        }
        if not seed:
            measured["logprob_gap"] = self._logprob_gap(rollout)
        if self.engine is not None:
            self.train(rollout)
            measured["iteration_ms"] = 1e3 * whole.stop().seconds()
        if device.type == "cuda":
            measured["resident_gib"] = before / 2**30
            measured["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        return measured

    @torch.no_grad()
    def _logprob_gap(self, rollout: Rollout) -> float:
        """Mean difference of the first answers' log-probs from the module's own, in nats.

        Raises:
            RuntimeError: it is larger than rounding can explain.
        """
        gaps = []
        for prompt, ids, logprobs in zip(
            self.prompts[:2], rollout.token_ids, rollout.logprobs, strict=False
        ):
            tokens = torch.tensor([prompt + list(ids)], device=dist.device())
            with evaluating(self.module):
                logits = self.module(input_ids=tokens).logits[0, len(prompt) - 1 : -1].float()
            expected = (logits / (self.case.temperature or 1)).log_softmax(-1)
            expected = expected.gather(1, tokens[0, len(prompt) :].unsqueeze(1)).squeeze(1)
            gaps.append((expected - torch.tensor(logprobs, device=expected.device)).abs())
        gap = torch.cat(gaps).mean().item()
        if not gap < MOST_GAP:
            raise RuntimeError(f"log-probs of the rollout and of the module differ by {gap:.3g}")
        return gap

    def train(self, rollout: Rollout) -> None:
        """One optimizer step on the answers: forward, backward, AdamW."""
        rows = [
            {
                "input_ids": prompt + list(answer),
                "loss_mask": [False] * len(prompt) + [True] * len(answer),
            }
            for prompt, answer in zip(self.prompts, rollout.token_ids, strict=True)
        ]
        train_step(self.engine, SFTTask(), rows, MicroBatchSize(len(rows)))


def _reset_peak(device: torch.device) -> int:
    """Bytes allocated now; the peak is counted from here."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def measure(
    name: str,
    case: GpuCase,
    sides: dict[str, Side],
    others: Sequence[str],
    rounds: int,
    rates: Rates,
) -> Iterator[Fields]:
    """Collective. The fields of a line for each ZeRO stage and side of a rollout case."""
    dist.init()
    for stage in case.stages or (0,):
        label = f"{name}, ZeRO-{stage}" if case.stages else name
        module, engine = _actor(case, stage)
        names = [*sides, *others]
        for group in [names] if case.in_turns else [[name] for name in names]:
            runners: dict[str, Any] = {}
            for one in group:
                try:
                    if one in sides:
                        trained = engine if case.trains else None
                        runners[one] = Rollouts(sides[one], case.rollout, module, stage, trained)
                    else:
                        runners[one] = make(one, case, module, stage)
                except Unavailable as reason:
                    note(f"{label}: {one} skipped, {reason}")
            results = take_turns(label, runners, rounds, figures)
            del runners
            _free()
            for one, (warm_up, *measured) in results.items():
                _check_refresh(name, sides.get(one), measured)
                about = {"zero_stage": stage if case.stages else None, "side": one}
                if one in sides:
                    about["logprob_gap"] = rounded(warm_up["logprob_gap"])
                yield about | _summary(case, measured, rates)
        del module, engine
        _free()


def memory(case: GpuCase) -> Fields:
    """Collective. The fields of the line of a case with adapters under ZeRO-2, whose layers are
    recomputed: GiB and seconds by phase.
    """
    dist.init()
    assert case.rollout is not None
    device, side = dist.device(), SIDES["F"]
    line: Fields = {"side": "F", "zero_stage": 2, "phases": {}}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        started = clock(device)
        _reset_peak(device)
        yield
        found = {"seconds": rounded(clock(device) - started)}
        if device.type == "cuda":
            kinds = "memory_allocated", "max_memory_allocated", "memory_reserved"
            found |= {kind: rounded(getattr(torch.cuda, kind)(device) / 2**30) for kind in kinds}
        line["phases"][name] = found

    def recomputing(module: nn.Module) -> LanguageModel:
        recompute_activations(module)
        return LanguageModel(module)

    zero = ZeroSettings(2, torch.bfloat16 if device.type == "cuda" else torch.float32)
    with phase("load"):
        engine = make_engine(case.rollout, zero, recomputing, case.lora_rank)
    with phase("allocate the cache"):
        made = Rollouts(side, case.rollout, unwrap(engine), 2, engine, frozen_base=True)
    for number in range(2):
        with phase(f"rollout {number}"):
            rollout = made.rollout(number)
        with phase(f"step {number}"):
            made.train(rollout)
    return line


def make_engine(
    case: Case, zero: ZeroSettings, wrap: Callable[[nn.Module], nn.Module], lora_rank: int = 0
) -> TrainingEngine:
    """Collective. The case's model under DeepSpeed, with random weights; with ``lora_rank`` only
    adapters train.
    """
    torch.manual_seed(0)
    with dist.device():
        module = AutoModelForCausalLM.from_config(MODELS[case.model](), dtype=zero.dtype)
    if lora_rank:
        module = add_lora(module, lora_rank, 0.0, ["all-linear"], True, "--actor_lora_modules")
    return initialize_training(wrap(module), zero, 1e-5, 0.0, [0.9, 0.95], "constant", 0, 1)


def _actor(case: GpuCase, stage: int) -> tuple[nn.Module, TrainingEngine | None]:
    assert case.rollout is not None
    dtype = torch.bfloat16 if dist.device().type == "cuda" else torch.float32
    if not case.stages:
        return make_module(case.rollout, dist.device(), dtype), None
    zero = ZeroSettings(stage, dtype, offload_optimizer=case.offload)
    engine = make_engine(case.rollout, zero, LanguageModel)
    return unwrap(engine), engine


def _summary(case: GpuCase, rounds: list[dict[str, float]], rates: Rates) -> Fields:
    """Medians and spread, the floor, and the share of it: 1 is the floor itself."""
    assert case.rollout is not None
    line: Fields = {key: spread([r[key] for r in rounds]) for key in rounds[0]}
    dtype = torch.bfloat16
    config = MODELS[case.rollout.model]()
    floor = floor_ms(config, case.rollout, dtype, rates)
    line["floor_ms"] = {key: rounded(value) for key, value in floor.items()}
    line |= rollout_bytes(config, case.rollout, dtype)
    line["share_of_floor"] = {
        key: rounded(floor[key] / line[f"{key}_ms"]["median"])
        for key in ("rollout", "step")
        if f"{key}_ms" in line and line[f"{key}_ms"]["median"] > 0
    }
    return line | {"rounds": len(rounds)}


def _check_refresh(name: str, side: Side | None, rounds: list[dict[str, float]]) -> None:
    """Raise RuntimeError if a rollout that reads training's weights in place moved any."""
    if side is not None and side.layout == "zero_copy":
        moved = max(r["refresh_bytes"] for r in rounds)
        if moved:
            raise RuntimeError(f"{name}: a refresh with layout zero_copy moved {moved} bytes")


def _free() -> None:
    gc.collect()
    if dist.device().type == "cuda":
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # pinned memory of an optimizer that is gone
