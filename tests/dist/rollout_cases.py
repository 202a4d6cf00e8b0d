"""The rollout form of a tiny actor under ZeRO, run the same way by the tests and by the worker.

A `Case` with its ``options`` gives a JSON-able dict, the same on every rank. An actor is one
DeepSpeed engine around a model of ``families``, trained on random ids.
"""

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from step_cases import Case
from tiny_models import causal_lm
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, CodeGenConfig, LlamaConfig, OPTConfig

import dschat.distributed as dist
from dschat.config import UserError
from dschat.hybrid.rollout_form import RolloutSettings, check_tensor_parallel, rollout_form
from dschat.inference import EngineConfig
from dschat.inference.protocol import Rollout, SamplingParams
from dschat.models.checkpoint import Checkpoint
from dschat.models.heads import LanguageModel
from dschat.models.lora import add_lora
from dschat.models.packing import pack
from dschat.runtime.deepspeed_engine import (
    ZeroSettings,
    initialize_training,
    sharded_loading,
    unwrap,
)
from dschat.runtime.optimizer_step import OptimizerStep

# One tiny model per family, and prompts of awkward lengths, are in the engine's tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "inference"))
from families import EOS, POSITIONS, PROMPTS, VOCAB, build, saved  # noqa: E402

SAMPLED = SamplingParams(max_new_tokens=10, n=2, seed=3)
SHORT = SamplingParams(max_new_tokens=6, n=2, seed=4)
GREEDY = SamplingParams(max_new_tokens=10, temperature=0.0)


def large_model(name: str) -> torch.nn.Module:
    """Wide enough that matrices are nearly all of it; a vocabulary that two ranks cannot halve."""
    ids = {"vocab_size": 1001, "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": EOS}
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": POSITIONS}
    configs = {
        "large_opt": lambda: OPTConfig(**ids, **sizes, num_hidden_layers=2, ffn_dim=512),
        "large_llama": lambda: LlamaConfig(
            **ids, **sizes, num_hidden_layers=8, intermediate_size=512, num_key_value_heads=2
        ),
        "codegen": lambda: CodeGenConfig(
            **ids | {"vocab_size": VOCAB},
            n_embd=32,
            n_layer=2,
            n_head=4,
            rotary_dim=4,
            n_positions=POSITIONS,
        ),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(configs[name](), dtype=torch.float32).eval()


def settings_of(**changes: Any) -> RolloutSettings:
    """``changes``: fields of `RolloutSettings` or of its `EngineConfig`."""
    names = changes.keys() & {field.name for field in fields(EngineConfig)}
    sizes = {"stop_ids": (EOS,), "max_num_seqs": 8, "max_seq_len": POSITIONS}
    sizes |= {name: changes.pop(name) for name in names}
    required = {"dtype": torch.float32, "engine": EngineConfig(**sizes)}
    return RolloutSettings(**required | changes)


class Actor:
    """A model in its training form, and the optimizer steps it has taken."""

    def __init__(
        self, module: torch.nn.Module, zero: int, lora: bool = False, offload: str = ""
    ) -> None:
        self.config = module.config
        self._lora, self._zero = lora, zero
        if lora:
            module = add_lora(module, 4, 0, ["all-linear"], True, "--actor_lora_modules")
        settings = ZeroSettings(
            zero,
            torch.float32,
            offload_optimizer=bool(offload),
            offload_parameters=offload == "parameters",
        )
        learning_rate = 2e-2 if lora else 3e-3
        self.engine = initialize_training(
            LanguageModel(module), settings, learning_rate, 0.0, [0.9, 0.95], "constant", 0, 1000
        )
        self.engine.eval()  # dropout stays off
        self.version = 0

    @property
    def module(self) -> torch.nn.Module:
        return unwrap(self.engine)

    def step(self) -> None:
        """Collective. One optimizer step on random ids, others on every rank and every time."""
        generator = torch.Generator().manual_seed(1000 * self.version + dist.rank())
        ids = torch.randint(VOCAB, (4, 12), generator=generator)
        step = OptimizerStep(self.engine, 1, 44.0 * dist.world_size())
        logprobs, _ = self.engine(pack(ids, [range(11)] * 4).to(dist.device()))
        step.backward(-logprobs.sum())
        assert step.finish()
        self.version += 1

    def form(self, enabled: bool = True, **changes: Any):
        """Collective. A rollout form; ``changes`` are of its settings or of its engine's."""
        settings = {"frozen_base": self._lora, "sharded": self._zero == 3}
        return rollout_form(self.module, self.config, settings_of(**settings | changes), enabled)

    def num_bytes(self) -> tuple[int, int]:
        """Bytes of all parameters and saved buffers, and of the adapters among them."""
        sizes = {
            name: 4 * getattr(p, "ds_numel", p.numel())
            for name, p in [*self.module.named_parameters(), *saved(self.module)]
        }
        return sum(sizes.values()), sum(n for name, n in sizes.items() if ".lora_" in name)

    @torch.no_grad()
    def gap(self, prompts: list[list[int]], rollout: Rollout) -> float:
        """Collective. Largest difference, on any rank, between a rollout's log-probs and the
        training form's own, of one forward. Every rank needs an answer.
        """
        n = len(rollout) // len(prompts)
        rows = [prompts[i // n] + ids for i, ids in enumerate(rollout.token_ids)]
        prompt_lengths = [len(prompts[i // n]) for i in range(len(rows))]
        reads = [range(p - 1, len(row) - 1) for p, row in zip(prompt_lengths, rows, strict=True)]
        ours, _ = self.engine(pack(rows, reads, prompt_lengths))
        generator = torch.tensor([value for row in rollout.logprobs for value in row])
        return max(dist.gather_objects((ours - generator).abs().max().item()))


class Collectives(TorchDispatchMode):
    """Counts every call into c10d inside the scope."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            self.calls.append(func.__name__)
        return func(*args, **(kwargs or {}))


class LiveBytes(TorchDispatchMode):
    """Bytes of tensors made inside the scope and still alive; ``peak`` is the most there were.

    Weights packed for a kernel are opaque and not counted: they are what a refresh is for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._old: set[StorageWeakRef] = set()  # of tensors from outside, seen as arguments
        self._new: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for storage in self._storages((args, kwargs or {})):
            reference = StorageWeakRef(storage)
            if reference not in self._new:
                self._old.add(reference)
        output = func(*args, **(kwargs or {}))
        for storage in self._storages(output):
            reference = StorageWeakRef(storage)
            if reference not in self._old:
                self._new[reference] = storage.nbytes()
        self.peak = max(self.peak, self.live())
        return output

    def live(self) -> int:
        self._new = {made: size for made, size in self._new.items() if not made.expired()}
        return sum(self._new.values())

    @staticmethod
    def _storages(tree: Any) -> list[torch.UntypedStorage]:
        tensors = [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
        return [t.untyped_storage() for t in tensors if t.layout == torch.strided]


def entered(form: Any, version: int) -> tuple[Any, dict[str, Any]]:
    """Collective. The generator, and what the refresh reported and really did."""
    with Collectives() as wire:
        generator = form.enter(version)
    refresh = form.last_refresh
    return generator, {
        "bytes": refresh.num_bytes,
        "collectives": refresh.num_collectives,
        "calls": len(wire.calls),
        "seconds": refresh.seconds,
    }


def _form_options(case: Case) -> dict[str, Any]:
    """The settings of the form among a case's options."""
    form = dict(case.options)
    form.pop("offload", None)
    lora = form.pop("lora", "off")
    return form | ({"lora": lora} if lora != "off" else {})


def _actor(case: Case, module: torch.nn.Module | None = None) -> Actor:
    options = dict(case.options)
    lora = options.get("lora", "off") != "off"
    return Actor(module or build(case.model), case.zero, lora, options.get("offload", ""))


# -- the runs --------------------------------------------------------------------------------------


def run_parity(case: Case, models: Path, out: Path) -> dict[str, Any]:
    """A rollout of version 0, one of version 3, and entering again without a step."""
    actor = _actor(case)
    form = actor.form(**_form_options(case), max_num_seqs=16)
    mine = list(range(dist.rank(), len(PROMPTS), dist.world_size()))
    prompts = [PROMPTS[i] for i in mine]
    generator, first = entered(form, actor.version)
    old = generator.generate(prompts, SHORT, mine)
    form.leave()
    for _ in range(3):
        actor.step()
    generator, later = entered(form, actor.version)
    new = generator.generate(prompts, SHORT, mine)
    form.leave()
    _, again = entered(form, actor.version)
    model_bytes, adapter_bytes = actor.num_bytes()
    return {
        "gap": actor.gap(prompts, new),
        "moved": actor.gap(prompts, old),  # what stale weights would show
        "refreshes": [first, later, again],
        "model_bytes": model_bytes,
        "adapter_bytes": adapter_bytes,
    }


def run_answers(case: Case, models: Path, out: Path) -> dict[str, Any]:
    """Answers to ``PROMPTS``, of which each rank has its `Case.shares` (default: all)."""
    actor = _actor(case)
    form = actor.form(**_form_options(case))
    shares = case.shares or (len(PROMPTS),)
    first = sum(shares[: dist.rank()])
    mine = list(range(first, first + shares[dist.rank()]))
    generator, _ = entered(form, actor.version)
    answers, calls = [], []
    for sampling in (SAMPLED, GREEDY, SAMPLED):
        with Collectives() as wire:
            rollout = generator.generate([PROMPTS[i] for i in mine], sampling, mine)
        answers.append([rollout.token_ids, rollout.finish_reasons])
        calls.append(wire.calls)
    form.leave()
    return {"ranks": dist.gather_objects(answers), "wire": dist.gather_objects(calls)}


def run_bytes(case: Case, models: Path, out: Path) -> dict[str, Any]:
    """What each rank holds at TP 1 and at TP 2, and the greedy answers."""
    actor = Actor(large_model(case.model), case.zero)
    prompts = [[(7 * i + j) % 1001 for j in range(i + 1)] for i in range(4)]
    result = {}
    for tp_size in (1, 2):
        form = actor.form(tp_size=tp_size, max_num_seqs=4)
        generator, _ = entered(form, actor.version)
        rollout = generator.generate(prompts, GREEDY)
        held = {
            "answers": rollout.token_ids,
            "weights": generator.weights.nbytes,
            "cache": generator.cache.pairs.nbytes,
            "pages": [generator.cache.num_pages, generator.cache.page_size],
        }
        result[str(tp_size)] = dist.gather_objects(held)
    result["model_bytes"] = actor.num_bytes()[0]
    return result


def run_buckets(case: Case, models: Path, out: Path) -> dict[str, Any]:
    """Collectives of refreshes and of rollouts, and the extra memory, with the layers of a bucket
    that the case names.
    """
    actor = Actor(large_model(case.model), case.zero)
    every = list(actor.module.named_parameters())
    layer = sum(4 * p.ds_numel for name, p in every if ".layers.0." in name)
    with LiveBytes() as memory:
        form = actor.form(**_form_options(case))
        form.enter(0)
        before = memory.peak = memory.live()
        form.enter(1)
        peak = max(dist.gather_objects(memory.peak - before))
    rollouts = []
    for version, max_new_tokens in ((2, 1), (3, 12)):
        with Collectives() as wire:
            generator, refresh = entered(form, version)
            generator.generate([[5]], SamplingParams(max_new_tokens, ignore_eos=True))
            form.leave()
        rollouts.append(refresh | {"rollout": len(wire.calls)})
    result = {"model_bytes": actor.num_bytes()[0], "layer_bytes": layer}
    return result | {"peak": peak, "rollouts": rollouts}


def run_refusals(case: Case, models: Path, out: Path) -> dict[str, Any]:
    """The errors of settings that two ranks refuse."""

    def message(module: torch.nn.Module, **changes: Any) -> str:
        settings = settings_of(**changes)
        try:
            check_tensor_parallel(module.config, settings.tp_size)  # as `find_checkpoints` does
            rollout_form(module, module.config, settings, True)
        except UserError as error:
            return str(error)
        return ""

    return {
        "world": message(build("llama"), tp_size=3),
        "heads": message(causal_lm("llama"), tp_size=2),
        "zero_copy": message(build("llama"), tp_size=2, layout="zero_copy"),
        "partitions": message(Actor(build("llama"), 3).module, sharded=True, layout="zero_copy"),
        "family": message(large_model("codegen"), tp_size=2),
        "states": message(causal_lm("nemotron_h"), tp_size=2),
        "nan": _loading_a_nan(out),
    }


def _loading_a_nan(out: Path) -> str:
    """Collective. Every rank's error for a NaN in the shard of the last one."""
    module = build("llama")
    module.model.layers[1].mlp.up_proj.weight.data[-1, -1] = float("nan")
    if dist.is_main_process():
        module.save_pretrained(out)
    dist.barrier()
    said = ""
    try:
        with sharded_loading(ZeroSettings(3, torch.float32)):
            Checkpoint(out, "--actor_model_name_or_path").language_model(torch.float32)
    except UserError as error:
        said = str(error)
    (same,) = set(dist.gather_objects(said))
    return same


RUNNERS = {
    "parity": run_parity,
    "answers": run_answers,
    "bytes": run_bytes,
    "buckets": run_buckets,
    "refusals": run_refusals,
}
