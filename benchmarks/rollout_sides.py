"""The sides of `rollout.py`, on one module: every `run` answers the prompts of the case once and
returns its seconds.
"""

from typing import Any

import torch
from report import clock
from rollout_workloads import MODELS, Case
from torch import nn
from transformers import AutoModelForCausalLM

from dschat.hybrid.rollout_form import RolloutSettings
from dschat.hybrid.vllm_rollout import VLLMRollout
from dschat.hybrid.weight_stream import weight_stream
from dschat.inference import EngineConfig, InferenceEngine, SamplingParams
from dschat.inference.generators.hf_generator import module_engine

PAD = 1


def make_module(case: Case, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The case's model with random weights and without EOS."""
    torch.manual_seed(0)
    with device:
        module = AutoModelForCausalLM.from_config(MODELS[case.model](), dtype=dtype)
    # NOTE: eos_token_id=None in a call of `generate` would mean the model's EOS.
    module.generation_config.eos_token_id = None
    return module.eval().requires_grad_(False)


class EngineSide:
    """dschat's engine, with the weights of ``module`` in its own decoder."""

    def __init__(self, case: Case, module: nn.Module, device: torch.device) -> None:
        self.case, self.device = case, device
        self.prompts, self.lengths = case.make_prompts(), case.lengths()
        sizes = EngineConfig(max_num_seqs=case.slots, max_seq_len=case.max_len)
        self.generator: Any = self.make(module, sizes)

    def make(self, module: nn.Module, sizes: EngineConfig) -> Any:
        engine = InferenceEngine(module.config, module.dtype, self.device, sizes)
        engine.weights.load(weight_stream(module, self.device))
        return engine

    def run(self, seed: int) -> float:
        case = self.case
        sampling = SamplingParams(
            case.new_tokens, case.temperature, n=case.samples, seed=seed, ignore_eos=True
        )
        self.generator.forget_prefixes()
        started = clock(self.device)
        rollout = self.generator.generate(self.prompts, sampling, max_new_tokens=self.lengths)
        seconds = clock(self.device) - started
        assert rollout.num_tokens == case.answer_tokens
        return seconds

    def facts(self) -> dict[str, Any]:
        """Statistics of the last call."""
        stats = self.generator.stats
        return {"prefill_tokens": stats.prefill_tokens, "decode_steps": stats.decode_steps}


class ModuleSide(EngineSide):
    """dschat's engine, with transformers' module as its decoder."""

    def make(self, module: nn.Module, sizes: EngineConfig) -> Any:
        return module_engine(module, sizes)

    def run(self, seed: int) -> float:
        with self.generator.weights.in_use():
            return super().run(seed)


class VLLMSide(EngineSide):
    """vLLM in this process, as ``--rollout_backend vllm`` runs it."""

    def make(self, module: nn.Module, sizes: EngineConfig) -> Any:
        return VLLMRollout(module, module.config, RolloutSettings(module.dtype, sizes)).enter(0)

    def facts(self) -> dict[str, Any]:
        return {}


class GenerateSide:
    """transformers' `generate` on batches of as many answers as the engine has slots, padded on the
    left; the longest answers first where their lengths are known.
    """

    def __init__(self, case: Case, module: nn.Module, device: torch.device) -> None:
        self.case, self.module, self.device = case, module, device
        rows = list(zip(case.lengths(), case.make_prompts(), strict=True))
        if not case.ragged:
            rows.sort(key=lambda row: -row[0])
        size = case.slots // case.samples
        self.batches = [self._batch(rows[i : i + size]) for i in range(0, len(rows), size)]

    def _batch(self, rows: list[tuple[int, list[int]]]) -> dict[str, Any]:
        """Arguments of `generate`, which runs until the longest answer ends."""
        width, new = max(len(ids) for _, ids in rows), max(length for length, _ in rows)
        ids = [[PAD] * (width - len(ids)) + ids for _, ids in rows]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for _, ids in rows]
        return {
            "inputs": torch.tensor(ids, device=self.device),
            "attention_mask": torch.tensor(mask, device=self.device),
            "max_new_tokens": new,
            "min_new_tokens": new,
        }

    @torch.no_grad()
    def run(self, seed: int) -> float:
        options: dict[str, Any] = {"do_sample": False}
        if temperature := self.case.temperature:
            options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        options |= {"num_return_sequences": self.case.samples, "pad_token_id": PAD}
        torch.manual_seed(seed)
        started = clock(self.device)
        for batch in self.batches:
            self.module.generate(**batch, **options)
        return clock(self.device) - started

    def facts(self) -> dict[str, Any]:
        """Statistics of every call."""
        computed = self.case.samples * sum(batch["inputs"].numel() for batch in self.batches)
        steps = sum(batch["max_new_tokens"] - 1 for batch in self.batches)
        return {"prefill_tokens": computed, "decode_steps": steps}


SIDES = {
    "engine": EngineSide,
    "module": ModuleSide,
    "vllm": VLLMSide,
    "generate": GenerateSide,
}
